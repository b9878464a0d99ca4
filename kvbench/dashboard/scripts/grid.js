// Grid of one prompt under many methods: images or texts, by budget.

const GRIDS = { budget: "all methods at its budget", all: "all methods and budgets" };

/** Return the runs of the grid: the reference, then filtered runs of the same prompts by budget and name. */
function listGrid(run, which) {
  const runs = [run, ...findPartners(run)].filter(
    (other) =>
      other.method === "full" ||
      other.number === run.number ||
      (!board.off.has(other.label) && (which === "all" || formatBudget(other) === formatBudget(run))),
  );
  return d3.sort(
    runs,
    (one) => one.method !== "full",
    (one) => one.budget,
    (one) => one.label,
  );
}

/** Return the grid of a sample; a click on a cell compares its run with the chosen one. */
function makeGrid(run, which, index) {
  const images = run.samples.kind === "images";
  return make(
    "div",
    { class: images ? "grid" : "grid texts" },
    ...listGrid(run, which).map((other) =>
      make(
        "figure",
        { class: other.number === run.number ? "chosen" : null },
        images ? makeCell(run, other, index) : makeGridText(other, index),
        make(
          "figcaption",
          {},
          makeSwatch(other.label),
          `${other.label} `,
          make("span", { class: "dim" }, other.method === "full" ? "" : formatBudget(other)),
          ...describeCell(other, index),
        ),
      ),
    ),
  );
}

function makeCell(run, other, index) {
  return make(
    "button",
    {
      type: "button",
      title: other.number === run.number ? null : `Compare with ${nameRun(other)}`,
      onclick: () => other.number !== run.number && compareWith(other),
    },
    make("img", {
      src: imageOf(other, index),
      alt: `${other.label}, ${formatBudget(other)}, sample ${index}`,
      loading: "lazy",
      onload: (event) => event.target.classList.toggle("small", event.target.naturalWidth < 200),
    }),
  );
}

function makeGridText(other, index) {
  const reading = findReading(other, index);
  if (reading) return makeShaded(reading);
  const text = findText(other, index);
  return text === null
    ? make("p", { class: "note" }, linkTo(other, "its file", "texts", ...splitSample(index, ".txt")))
    : make("pre", { tabindex: "0" }, text);
}

/** Return the value of the metric that orders samples, and whether the answer is right. */
function describeCell(run, index) {
  const name = byId("worst").value;
  const column = name ? readColumn(run, name) : null;
  const place = run.samples.index.indexOf(index);
  const value = column ? column[index] : (run.samples.values[name]?.[place] ?? NaN);
  return [
    Number.isFinite(value)
      ? make("span", { class: "value" }, `${name} ${format(value, DOC.metrics[name].digits)}`)
      : null,
    ...judge(run, index),
  ];
}

function compareWith(other) {
  byId("theirs").value = other.number;
  showSample(pair.place);
}
