// Texts that were read: each token shaded by its divergence from the full cache, and the worst places of two runs.

const WORST_PLACES = 12;
const CONTEXT = 60; // characters before a token
const PLACE_DIGITS = 3;
const DARKEST = 65; // % of colour, so that letters stay legible

/** Return a text that a run read, with KL by position; null if the page does not have it. */
function findReading(run, index) {
  const own = run?.samples.reading?.[run.samples.index.indexOf(index)] ?? null;
  if (!own) return null;
  own.numbers ??= unpackFloats(own.kl);
  const full = shared(own.full);
  return {
    given: shared(own.given),
    words: shared(own.words),
    kl: own.numbers,
    unit: own.unit,
    full,
    likeliest: (position) => own.others[position] ?? full[position],
  };
}

/** Return a token with its line breaks as signs. */
function writeToken(word) {
  return word.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function makeToken(word) {
  return make("code", {}, writeToken(word));
}

/** Return the text of a run; the shade of a token grows as 1 - exp(-KL). */
function makeShaded(reading) {
  const tokens = reading.words.map((word, position) => {
    const kl = reading.kl[position];
    const [full, own] = [reading.full[position], reading.likeliest(position)].map(writeToken);
    const about = `token ${position + 1}, KL ${format(kl, PLACE_DIGITS)}; full cache: ${full}; method: ${own}`;
    return make("span", { title: about, style: `--shade: ${Math.round(DARKEST * (1 - Math.exp(-kl)))}%` }, word);
  });
  return make("pre", { class: reading.unit === "tokens" ? "shaded" : "shaded cells", tabindex: "0" }, make("span", { class: "dim" }, reading.given), ...tokens);
}

/** Return the comparison of a text under two runs; the full cache, which diverges nowhere, has no column. */
function makeReadings(run, other, index) {
  const own = findReading(run, index);
  if (!own) return make("p", { class: "empty" }, "This text is not in the page; it is in the run's folder.");
  const others = other && other.method !== "full" ? [other].filter((one) => findReading(one, index)) : [];
  const sides = [run, ...others].map((one) => ({ label: one.label, one, reading: findReading(one, index) }));
  const columns = sides.toReversed().map(({ label, one, reading }) =>
    make("div", {}, make("h3", {}, label, make("span", { class: "dim" }, formatBudget(one))), makeShaded(reading)),
  );
  const box = make("div", { class: `texts${others.length ? "" : " alone"}` }, ...columns);
  const isText = own.unit === "tokens";
  const note = `${isText ? "Dim: the end of what is given. " : ""}The shade of a token grows as 1 − exp(−KL), KL(full || method) in nats.`;
  const places = isText && run.method !== "full" ? makePlaces(sides, box) : null;
  return make("div", {}, box, make("p", { class: "note" }, note), places);
}

/** Mark a token in the texts of a box. */
function showToken(box, position) {
  for (const one of box.querySelectorAll(".found")) one.classList.remove("found");
  for (const text of box.querySelectorAll("pre")) {
    const token = text.children[position + 1]; // the first child is what is given
    text.scrollTop = token.offsetTop - text.clientHeight / 3;
    token.classList.add("found");
  }
}

/** Return the table of the tokens with the largest KL of the first run, with the values of both. */
function makePlaces(sides, box) {
  const [{ label, reading: own }] = sides;
  const worst = d3
    .sort(d3.range(own.kl.length), (position) => -own.kl[position])
    .slice(0, WORST_PLACES)
    .filter((position) => own.kl[position] > 0);
  const cell = (tag, words, ...inside) => make(tag, { class: words ? "words" : null }, ...inside);
  const row = (tag, token, text, kl, full, likeliest) =>
    make(
      "tr",
      {},
      cell(tag, false, token),
      cell(tag, true, ...text),
      ...sides.map((side) => cell(tag, false, kl(side))),
      cell(tag, true, full),
      ...sides.map((side) => cell(tag, true, likeliest(side))),
    );
  const rows = worst.map((position) => {
    const before = (own.given + own.words.slice(0, position).join("")).slice(-CONTEXT);
    const open = () => showToken(box, position);
    return row(
      "td",
      make("button", { class: "num", type: "button", title: "Show it in the text", onclick: open }, String(position + 1)),
      [make("span", { class: "context" }, writeToken(before), make("mark", {}, writeToken(own.words[position])))],
      ({ reading }) => format(reading.kl[position], PLACE_DIGITS),
      makeToken(own.full[position]),
      ({ reading }) => makeToken(reading.likeliest(position)),
    );
  });
  const name = (side) => side.label;
  const head = row("th", "token", ["text before, and the token"], (side) => `KL, ${side.label}`, "full cache", name);
  return make(
    "div",
    { class: "places" },
    make("h3", {}, `Tokens with the largest KL under ${label}, and what each cache finds likeliest`),
    make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))),
  );
}
