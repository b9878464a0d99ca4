// Elements of the page. Texts of runs are inserted as text nodes only; no script parses a string as HTML.

/** Return the element with an id. */
function byId(id) {
  return document.getElementById(id);
}

/** Return a new element; attributes with `on` are listeners, null attributes and children are left out. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set the options of a select, [value, label] or {group, options}; keep its value, at first the address's. */
function fillSelect(select, options, fallback) {
  const before = select.options.length ? select.value : takeAskedValue(select.id);
  const option = ([value, label]) => make("option", { value }, label);
  const values = options.flatMap((one) => (one.group ? one.options : [one])).map(([value]) => String(value));
  select.replaceChildren(
    ...options.map((one) =>
      one.group ? make("optgroup", { label: one.group }, ...one.options.map(option)) : option(one),
    ),
  );
  select.dataset.fallback = String(fallback ?? values[0] ?? "");
  select.value = values.includes(before) ? before : select.dataset.fallback;
}

/** Return the value of a colour variable of the style sheet. */
function styleColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
