// Divergence from the full cache over the position in a text: a line with a band per run, and quantiles of KL.

const COURSES = { kl: "KL(full || method), nats ↓", same_top1: "same likeliest token ↑" };
const LINES = { solid: "", dashed: "6 3", dotted: "2 3", "dash-dotted": "8 3 2 3" }; // of budgets, in turns
const QUANTILE_DIGITS = 3;

/** Draw the card of the shown runs that read texts; without any it is hidden. */
function drawDrift(runs) {
  const able = runs.filter((run) => run.drift);
  byId("drift").hidden = !able.length;
  if (!able.length) return;
  const groups = d3.group(able, (run) => `${run.conditions}, ${shared(run.drift.edges).at(-1)} tokens`);
  fillSelect(byId("driftOf"), [...groups.keys()].map((name) => [name, name]));
  fillSelect(byId("course"), Object.entries(COURSES));
  const own = d3.sort(groups.get(byId("driftOf").value), (run) => run.budget, (run) => run.label);
  const budgets = [...new Set(own.map(formatBudget))];
  drawCourses(byId("courses"), own, budgets, byId("course").value);
  drawTail(own);
  const dashes = budgets.map((budget, i) => `${Object.keys(LINES)[i % 4]} ${budget}`);
  const { unit } = own[0].drift;
  byId("driftNote").textContent =
    `Means over samples ${unit === "tokens" ? "in bins of equal numbers of tokens" : `of each ${unit}`}, ` +
    "with 95 % bands by sample. The table has quantiles of KL over all scored tokens, in nats." +
    (budgets.length > 1 ? ` Budgets: ${dashes.join(", ")}.` : "");
}

/** Return the points of a run: the middle of each bin, the mean and the ends of its band. */
function listCourse(run, course) {
  const edges = shared(run.drift.edges);
  const tokens = run.drift.unit === "tokens";
  const name = (i) => (tokens ? `tokens ${edges[i] + 1} to ${edges[i + 1]}` : `${run.drift.unit} ${i + 1}`);
  const ends = (low, high) => (low === null ? "" : ` [${format(low, 3)}, ${format(high, 3)}]`);
  return run.drift[course].map(([y, low, high], i) => ({
    x: tokens ? (edges[i] + edges[i + 1]) / 2 : i + 1,
    y,
    low,
    high,
    title: `${run.label}, ${formatBudget(run)}\n${name(i)}: ${format(y, 3)}${ends(low, high)}`,
  }));
}

function drawCourses(box, runs, budgets, course) {
  const width = Math.max(280, box.clientWidth || 800);
  const narrow = width < 560;
  const { unit, kl } = runs[0].drift;
  const lines = runs.map((run) => ({ run, points: listCourse(run, course), ...styleOf(run.label) }));
  const plot = Plot.plot({
    width,
    height: narrow ? 260 : 340,
    marginLeft: 52,
    marginRight: narrow ? 16 : 110,
    marginBottom: 40,
    marginTop: 26,
    x: {
      grid: false,
      ...(unit === "tokens"
        ? { label: "scored tokens so far" }
        : { label: `${unit} of the image`, ticks: d3.ticks(1, kl.length, 8).filter(Number.isInteger), tickFormat: "d" }),
    },
    y: { label: COURSES[course], grid: true, nice: true, ticks: 6, zero: course === "kl", labelArrow: "none" },
    marks: [
      ...lines.flatMap(({ run, points, colour, sign }, i) => {
        const place = { x: "x", className: `run-${i}` };
        const known = points.filter(({ low }) => low !== null);
        const strokeDasharray = Object.values(LINES)[budgets.indexOf(formatBudget(run)) % 4];
        return [
          Plot.areaY(known, { ...place, y1: "low", y2: "high", fill: colour, fillOpacity: 0.1 }),
          Plot.line(points, { ...place, y: "y", stroke: colour, strokeWidth: 1.8, strokeDasharray }),
          Plot.dot(points, { ...place, y: "y", fill: colour, r: 3, symbol: sign }),
          narrow
            ? null
            : Plot.text(points.slice(-1), { ...place, y: "y", text: [run.label], fill: colour, stroke: "var(--card)" }),
        ];
      }),
      Plot.tip(lines.flatMap(({ points }) => points), Plot.pointer({ x: "x", y: "y", title: "title", fill: "var(--card)" })),
    ],
  });
  for (const [i, { run }] of lines.entries()) {
    for (const element of plot.querySelectorAll(`.run-${i} > *`)) {
      element.setAttribute("class", "mark");
      element.dataset.run = run.number;
    }
  }
  box.replaceChildren(plot);
  placeNames([...plot.querySelectorAll("text.mark")], []);
}

/** Draw the quantiles of KL over the scored tokens of all texts. */
function drawTail(runs) {
  const names = Object.keys(runs[0].drift.tail);
  const heads = ["method", "budget", ...names.map((name) => `KL ${name}`)];
  const cell = (tag, i, ...inside) => make(tag, { class: i < 2 ? "words" : null }, ...inside);
  const rows = runs.map((run) =>
    make(
      "tr",
      {
        "data-run": run.number,
        onpointerenter: () => link(run, "hover"),
        onpointerleave: () => link(null, "hover"),
        onclick: () => visitComparison(run),
      },
      cell("td", 0, makeSwatch(run.label), run.label),
      cell("td", 1, formatBudget(run)),
      ...names.map((name) => cell("td", 2, format(run.drift.tail[name], QUANTILE_DIGITS))),
    ),
  );
  const head = heads.map((title, i) => cell("th", i, title));
  byId("tail").replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

function startDrift() {
  for (const id of ["course", "driftOf"]) byId(id).addEventListener("change", drawBoard);
}
