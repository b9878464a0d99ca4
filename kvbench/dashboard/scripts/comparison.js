// Comparison of two runs by sample, worst first: images under a slider, texts side by side.

const JUDGED = ["exact_answer", "accuracy"]; // metrics that are 1 for a right text and 0 for a wrong one
const JUDGEMENTS = {
  "": "all",
  right: "right",
  wrong: "wrong",
  lost: "wrong here, right in the other run",
  won: "right here, wrong in the other run",
};
const MAX_SHOWN = 120; // characters of a text that was read, in place of a prompt
const pair = { place: 0, order: [] };

/** Return the runs with the same samples as a run, its reference first. */
function findPartners(run) {
  const alike = RUNS.filter(
    (other) =>
      other.number !== run.number &&
      other.number !== run.reference &&
      other.samples.index.length &&
      areSameSamples(run, other),
  );
  return [...(run.reference === null ? [] : [RUNS[run.reference]]), ...alike];
}

function chosenRuns() {
  return [RUNS[byId("ours").value], RUNS[byId("theirs").value]];
}

/** Update the selects: the run, the runs to compare it with, and the order of samples. */
function drawComparison() {
  const able = RUNS.filter((run) => run.samples.index.length);
  const first =
    able.find((run) => run.number === board.chosen) ?? able.find((run) => run.reference !== null) ?? able[0];
  fillSelect(byId("ours"), listRuns(able), first?.number);
  const run = RUNS[byId("ours").value];
  if (!run) {
    byId("view").replaceChildren(make("p", { class: "empty" }, "No finished run has samples yet."));
    return;
  }
  const partners = findPartners(run);
  fillSelect(byId("theirs"), [
    ...partners.map((other) => [
      other.number,
      `${other.number === run.reference ? "reference: " : ""}${nameRun(other)}`,
    ]),
    ...(partners.length ? [{ group: "grid", options: Object.entries(GRIDS) }] : []),
  ]);
  fillSelect(byId("worst"), [
    ...Object.keys(run.samples.values).map((name) => [name, nameMetric(name)]),
    ["", "number"],
  ]);
  fillSelect(byId("judged"), Object.entries(JUDGEMENTS));
  byId("left").hidden = !DOC.bundle;
  byId("left").textContent = DOC.bundle ? explainBundle(run) : "";
  byId("judged").parentElement.hidden = !JUDGED.some((name) => run.samples.values[name]);
  orderSamples();
}

/** Return whether a sample of a run is right (1), wrong (0) or not judged (undefined). */
function findJudgement(run, index) {
  const place = run?.samples.index.indexOf(index) ?? -1;
  return JUDGED.map((name) => run?.samples.values[name]?.[place]).find((value) => value === 0 || value === 1);
}

/** Return whether a sample passes the filters: a phrase in its text or prompt, and a right or wrong answer. */
function passesFilters(run, other, place) {
  const index = run.samples.index[place];
  const [own, theirs] = [findJudgement(run, index), findJudgement(other, index)];
  const fits = {
    "": true,
    right: own === 1,
    wrong: own === 0,
    lost: own === 0 && theirs === 1,
    won: own === 1 && theirs === 0,
  }[byId("judged").value];
  const phrase = byId("phrase").value.trim().toLowerCase();
  if (!fits || !phrase) return Boolean(fits);
  const words = [shared(run.samples.prompt[place]), findText(run, index), other && findText(other, index)];
  return words.some((text) => text?.toLowerCase().includes(phrase));
}

/** Sort a run's samples, worst first; samples without a value come last. */
function orderSamples() {
  const [run, other] = chosenRuns();
  const name = byId("worst").value;
  const values = run.samples.values[name];
  const places = run.samples.index.map((_, place) => place).filter((place) => passesFilters(run, other, place));
  const sign = DOC.metrics[name]?.better === "lower" ? -1 : 1;
  const rate = (place) => ((values?.[place] ?? null) === null ? Infinity : sign * values[place]);
  pair.order = values ? places.sort((a, b) => (rate(a) === rate(b) ? 0 : rate(a) - rate(b))) : places;
  drawOrder(run, name, values);
  const sample = Number(takeAsked("sample") ?? -1);
  showSample(Math.max(0, pair.order.indexOf(sample)));
}

function drawOrder(run, name, values) {
  const images = run.samples.kind === "images";
  byId("order").classList.toggle("bare", !images);
  byId("order").replaceChildren(
    ...pair.order.map((place, rank) => {
      const value = values?.[place] ?? null;
      return make(
        "li",
        {},
        make(
          "button",
          { type: "button", onclick: () => showSample(rank) },
          make("span", { class: "rank" }, String(rank + 1)),
          images
            ? make("img", {
                src: imageOf(run, run.samples.index[place]),
                alt: "",
                loading: "lazy",
                width: 44,
                height: 44,
              })
            : null,
          make("span", {}, nameSample(run, place)),
          make("span", {}, value === null ? "" : format(value, DOC.metrics[name].digits)),
        ),
      );
    }),
  );
}

/** Return the prompt of a sample, or the beginning of a text that was read. */
function nameSample(run, place) {
  const name = shared(run.samples.prompt[place]) ?? `sample ${run.samples.index[place]}`;
  const cut = run.samples.kind === "readings" && name.length > MAX_SHOWN;
  return cut ? `${name.slice(0, MAX_SHOWN).trim()} …` : name;
}

/** Return the address of a run's image, in a bundle its content. */
function imageOf(run, index) {
  if (DOC.bundle) return DOC.bundle.pictures[run.samples.picture?.[run.samples.index.indexOf(index)]] ?? "data:,";
  return addressOf(run, "images", ...splitSample(index, ".png"));
}

/** Show a sample by its rank. */
function showSample(rank) {
  const [run, other] = chosenRuns();
  if (!run) return;
  if (!pair.order.length) {
    for (const id of ["place", "prompt", "values"]) byId(id).replaceChildren();
    byId("view").replaceChildren(make("p", { class: "empty" }, "No sample passes the filters."));
    return;
  }
  pair.place = Math.max(0, Math.min(rank, pair.order.length - 1));
  const place = pair.order[pair.place];
  const index = run.samples.index[place];
  byId("place").textContent = `${pair.place + 1} of ${pair.order.length}`;
  byId("place").append(make("span", { class: "dim" }, `  sample ${index} of ${run.n}`));
  byId("prompt").textContent = nameSample(run, place);
  byId("previous").disabled = pair.place === 0;
  byId("next").disabled = pair.place === pair.order.length - 1;
  byId("view").replaceChildren(makeStage(run, other, index));
  for (const text of byId("view").querySelectorAll("pre"))
    text.scrollTop = (text.querySelector("mark")?.offsetTop ?? 0) - text.clientHeight / 3;
  byId("values").replaceChildren(...listValues(run, other, index));
  for (const [i, item] of [...byId("order").children].entries())
    item.firstChild.setAttribute("aria-current", String(i === pair.place));
  const current = byId("order").children[pair.place];
  if (current && byId("order").clientHeight)
    byId("order").scrollTop = current.offsetTop - byId("order").offsetTop - byId("order").clientHeight / 2;
}

function makeStage(run, other, index) {
  if (byId("theirs").value in GRIDS) return makeGrid(run, byId("theirs").value, index);
  const stages = { images: makeSlider, readings: makeReadings };
  return (stages[run.samples.kind] ?? makeTexts)(run, other, index);
}

function makeSlider(run, other, index) {
  const box = make("div", { class: "slide" });
  const image = (which, slot) =>
    make("img", {
      slot,
      src: imageOf(which, index),
      alt: `${which.label}, sample ${index}`,
      onload: (event) => event.target.classList.toggle("small", event.target.naturalWidth < 200),
      onerror: () => box.classList.add("lost"),
    });
  if (!other) {
    box.append(image(run, null));
    return box;
  }
  box.append(
    make("span", { class: "left" }, other.label),
    make("span", { class: "right" }, run.label),
    make(
      "img-comparison-slider",
      { "aria-label": `${other.label} left, ${run.label} right` },
      image(other, "first"),
      image(run, "second"),
      make("span", { slot: "handle", class: "handle", "aria-hidden": "true" }, "‹ ›"),
    ),
  );
  return box;
}

function makeTexts(run, other, index) {
  const own = findText(run, index);
  const theirs = other ? findText(other, index) : null;
  const [left, right] =
    own !== null && theirs !== null
      ? splitTexts(theirs, own)
      : [[[theirs ?? "", false]], [[own ?? "", false]]];
  const answer = shared(run.samples.answer?.[run.samples.index.indexOf(index)]);
  const column = (which, text, pieces) =>
    make(
      "div",
      {},
      make("h3", {}, which.label, ...judge(which, index)),
      text === null
        ? make(
            "p",
            { class: "note" },
            "This text is not in the page; its file is ",
            linkTo(which, "here", "texts", ...splitSample(index, ".txt")),
            ".",
          )
        : make(
            "pre",
            { tabindex: "0" },
            ...pieces.map(([piece, differs]) => (differs ? make("mark", {}, piece) : piece)),
          ),
    );
  return make(
    "div",
    {},
    make("div", { class: "texts" }, other ? column(other, theirs, left) : null, column(run, own, right)),
    answer ? make("p", { class: "note" }, `Right answer: ${answer}`) : null,
  );
}

/** Split two texts into pieces [text, differs]: what both begin with, the words that differ, what both end with. */
function splitTexts(theirs, ours) {
  const words = [theirs, ours].map((text) => text.match(/\S+\s*|\s+/g) ?? []);
  const [a, b] = words;
  const least = Math.min(a.length, b.length);
  let start = 0;
  while (start < least && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < least - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  return words.map((one) =>
    [one.slice(0, start), one.slice(start, one.length - end), one.slice(one.length - end)].map((part, place) => [
      part.join(""),
      place === 1 && part.length > 0,
    ]),
  );
}

function findText(run, index) {
  const place = run.samples.index.indexOf(index);
  return place < 0 || !run.samples.text ? null : shared(run.samples.text[place]);
}

function judge(run, index) {
  const found = findJudgement(run, index);
  return found === undefined
    ? []
    : [make("span", { class: `badge ${found ? "right" : "wrong"}` }, found ? "right" : "wrong")];
}

/** Show the values of a sample by metric, of the run and of the run compared with it. */
function listValues(run, other, index) {
  const [own, beside] = [run, other].map((which) => which?.samples.index.indexOf(index) ?? -1);
  return Object.keys(run.samples.values).map((name) => {
    const show = (which, place) => {
      const value = which?.samples.values[name]?.[place] ?? null;
      return value === null ? null : format(value, DOC.metrics[name].digits);
    };
    const theirs = show(other, beside);
    return make(
      "div",
      {},
      make("dt", {}, nameMetric(name)),
      make(
        "dd",
        {},
        show(run, own) ?? "–",
        ...(theirs ? [make("span", { class: "dim" }, " beside "), theirs] : []),
      ),
    );
  });
}

/** Return what a bundle leaves out of a run. */
function explainBundle(run) {
  const size = run.samples.kind === "images" ? `, at most ${DOC.bundle.side} pixels wide or high` : "";
  return `This file holds ${run.samples.index.length} of ${run.n} samples of the run, the worst ones${size}. All samples in full size are in the run's folder.`;
}

/** Show a run's samples. */
function visitComparison(run) {
  showView("comparison");
  byId("ours").value = run.number;
  drawComparison();
}

function isFiltered() {
  return Boolean(byId("judged").value || byId("phrase").value);
}

function startComparison() {
  byId("ours").addEventListener("change", drawComparison);
  byId("theirs").addEventListener("change", () => (isFiltered() ? orderSamples() : showSample(pair.place)));
  for (const id of ["worst", "judged"]) byId(id).addEventListener("change", orderSamples);
  byId("phrase").addEventListener("input", orderSamples);
  byId("previous").addEventListener("click", () => showSample(pair.place - 1));
  byId("next").addEventListener("click", () => showSample(pair.place + 1));
}
