// Columns of the leaderboard: shown columns, and columns folded into a line because all rows are equal.

const toggled = new Map(); // columns switched by the user: key to whether it is shown

/** Return all columns of some rows: method, budget, n, memory and time, metrics, which are first on a phone, other costs. */
function listColumns(rows) {
  const several = (key) => new Set(rows.map((run) => run[key])).size > 1;
  const known = (key) => rows.some((run) => Number.isFinite(costOf(run, key)));
  const costs = Object.keys(COSTS).filter((key) => key !== "budget" && key !== "n" && known(key));
  const isShown = (key) => COSTS[key].shown || key === chooseShare(rows);
  const first = ["n", ...costs.filter(isShown)].map(makeCostColumn);
  const metrics = chooseMetrics(rows).map((name) => makeMetricColumn(name, rows));
  return [
    makeMethodColumn(rows),
    { ...makeCostColumn("budget"), cell: formatBudget },
    ...["model", "prompts", "dataset"].filter(several).map(makeTextColumn),
    ...(rows.some((run) => run.dataset) ? [VERIFIED] : []),
    ...(isNarrow() ? [...metrics, ...first] : [...first, ...metrics]),
    ...costs.filter((key) => !isShown(key)).map((key) => ({ ...makeCostColumn(key), off: true })),
  ];
}

/** Divide columns into those of the table and those folded into a line, whose cells are all equal. */
function divideColumns(columns, rows) {
  const shown = [];
  const folded = [];
  for (const column of columns) {
    const wanted = toggled.get(column.key);
    if (!(wanted ?? !column.off)) continue;
    if (wanted === undefined && column.text && rows.length > 2 && isConstant(column, rows)) folded.push(column);
    else shown.push(column);
  }
  return { shown, folded };
}

/** Return whether all rows of a column are equal; rows without a value, such as the reference's, are ignored. */
function isConstant(column, rows) {
  const texts = rows.map(column.text).filter((text) => text !== null);
  return texts.length > 2 && new Set(texts).size === 1;
}

/** Draw the line of folded columns. */
function drawFolded(folded, rows) {
  byId("same").hidden = !folded.length;
  byId("same").replaceChildren(
    "Same in all rows: ",
    ...folded.flatMap((column, i) => {
      const run = rows.find((one) => column.text(one) !== null);
      return [i ? ", " : "", `${column.title} `, make("b", {}, column.text(run))];
    }),
    ".",
  );
}

/** Draw the menu that switches columns on and off; method and budget are always shown. */
function drawColumnMenu(columns, shown) {
  const on = new Set(shown.map((column) => column.key));
  byId("columns").replaceChildren(
    ...columns.slice(2).map((column) =>
      make(
        "label",
        { class: "check", title: column.about },
        make("input", {
          type: "checkbox",
          checked: on.has(column.key),
          "data-column": column.key,
          onchange: (event) => {
            toggled.set(column.key, event.target.checked);
            drawBoard();
          },
        }),
        ` ${column.title}`,
      ),
    ),
  );
}

function makeMethodColumn(rows) {
  const count = (keys) => new Set(rows.map((run) => JSON.stringify(keys.map((key) => run[key])))).size;
  const mixed = count(["model", "prompts", "n"]) > count(["model", "prompts"]);
  const describe = (run) => [mixed && `n ${run.n}`, hasSeveralSeeds() && nameSeeds(run)].filter(Boolean).join(", ");
  return {
    key: "label",
    title: "method",
    words: true,
    cell: (run) =>
      make(
        "button",
        { class: "num", type: "button", title: "Select this run" }, // its row listens
        makeSwatch(run.label),
        run.label,
        make("small", {}, describe(run)),
      ),
    value: (run) => run.label,
  };
}

/** Return whether the page is as narrow as a phone, as in the styles. */
function isNarrow() {
  return matchMedia("(max-width: 700px)").matches;
}

function makeTextColumn(key) {
  return { key, title: key, words: true, cell: (run) => run[key] ?? "–", value: (run) => run[key] ?? "" };
}

/** Return what a verifier states of exactly the files of a run's dataset. */
function describeVerdict(run) {
  const { status, by, finished, chosen, finding } = run.verified;
  return [status, chosen && `${chosen} of ${run.n} samples`, by && `by ${by}`, finished, finding].filter(Boolean).join(", ");
}

const VERIFIED = {
  key: "verified",
  title: "verified",
  words: true,
  about: "What kvbench verify said of exactly the files of the dataset; a statement of its verifier",
  value: (run) => run.verified?.status ?? "",
  cell: (run) => {
    if (!run.verified) return run.dataset ? make("span", { class: "dim" }, "no") : "–";
    const look = { verified: "good", differs: "bad" }[run.verified.status] ?? "dim";
    return make("span", { class: look, title: describeVerdict(run) }, run.verified.status);
  },
};

function makeMetricColumn(name, rows) {
  const { better, unit, digits } = DOC.metrics[name];
  const best = findBest(rows, name);
  const lopsided = rows.some((run) => isLopsided(findMetric(run, name)));
  const base = byId("differ").value;
  const value = (run) => findMetric(run, name)?.value;
  const text = (run) => (findMetric(run, name) ? format(value(run), digits) : null);
  const common = { key: name, title: nameMetric(name), better, value, text };
  if (base)
    return {
      ...common,
      about: `${name}${unit ? `, ${unit}` : ""}: difference to ${base}; ${better} is better`,
      value: (run) => (run.label === base ? 0 : findDifference(run, base, name)?.value),
      text: null,
      cell: (run) => makeDifference(run, base, name),
    };
  return {
    ...common,
    about: `${name}${unit ? `, ${unit}` : ""}: ${better} is better`,
    cell: (run) => {
      const metric = findMetric(run, name);
      if (!metric) return makeAbsent(run, name);
      const ends = findInterval(metric);
      const half = ends && `±${format((ends[1] - ends[0]) / 2, digits)}`;
      const reach = ends && `${lopsided ? formatEnds(ends, digits) : half}${metric.prompts_only ? "†" : ""}`;
      return makeNumber(text(run), {
        more: [reach, formatFull(metric, "full cache ")].filter(Boolean).join(", "),
        best: best.has(run.number),
      });
    },
  };
}

/** Return an accuracy's value under the full cache, with ‡ if the full cache itself fails; null for another metric. */
function formatFull({ full, digits, failed }, before = "") {
  return full === undefined ? null : `${before}${format(full, digits)}${failed ? "‡" : ""}`;
}

/** Return whether an interval's halves differ by a tenth or more: its column then has ends, as in report/tables.py. */
function isLopsided(metric) {
  const [low, high] = findInterval(metric) ?? [0, 0];
  return high > low && Math.abs(high + low - 2 * metric.value) >= (0.1 * (high - low)) / 2;
}

function makeAbsent(run, name) {
  const own = readMetric(run, name);
  return own?.status ? make("span", { title: own.reason }, own.status) : makeNothing();
}

function makeCostColumn(key) {
  const { title, better = "lower", about } = COSTS[key];
  const value = (run) => costOf(run, key);
  const known = (run) => Number.isFinite(value(run));
  return {
    key,
    title,
    better,
    about,
    value,
    text: key === "budget" || key === "n" ? null : (run) => (known(run) ? formatCost(run, key) : null),
    cell: (run) => (known(run) ? formatCost(run, key) : makeNothing()),
  };
}
