// The table of runs with its filters, tied to the plot: what is pointed at or chosen in one is so in the other.

const SHOWN = 100; // rows before "show more": a thousand rows of buttons take a second to lay out
const board = {
  off: new Set(),
  sort: { key: null, descending: true },
  limit: SHOWN,
  hover: null,
  chosen: null,
};

/** Metrics to show of some runs: those with a value, parts and variants only if asked for. */
function chooseMetrics(runs) {
  const details = byId("details").checked;
  return METRICS.filter(
    (name) => (details || !DOC.metrics[name].detail) && runs.some((run) => findMetric(run, name)),
  );
}

function chooseColumns(runs) {
  const several = (key) => new Set(runs.map((run) => run[key])).size > 1;
  const text = (key, title) => ({
    key,
    title,
    words: true,
    cell: (run) => run[key],
    value: (run) => run[key],
  });
  const costs = Object.keys(COSTS).filter(
    (key) => COSTS[key].shown && runs.some((run) => Number.isFinite(COSTS[key].value(run))),
  );
  return [
    {
      key: "label",
      title: "method",
      words: true,
      cell: (run) =>
        makeNumber(run.label, () => link(run, "choose"), {
          sign: makeSwatch(run.label),
          title: "Keep this run in sight",
        }),
      value: (run) => run.label,
    },
    { ...makeCostColumn("budget"), cell: makeBudget },
    ...(several("model") ? [text("model", "model")] : []),
    ...(several("prompts") ? [text("prompts", "prompts")] : []),
    ...chooseMetrics(runs).map((name) => makeMetricColumn(name, findBest(runs, name))),
    ...costs.map(makeCostColumn),
  ];
}

function makeBudget(run) {
  return makeNumber(formatBudget(run), () => openCost(run, "budget"));
}

function makeMetricColumn(name, best) {
  const { better, unit } = DOC.metrics[name];
  return {
    key: name,
    title: nameMetric(name),
    better,
    about: `${name}${unit ? `, ${unit}` : ""}: ${better} is better`,
    value: (run) => findMetric(run, name)?.value,
    cell: (run) => {
      const metric = findMetric(run, name);
      if (!metric) return makeAbsent(run, name);
      const ends = findInterval(metric);
      const half = ends ? `±${format((ends[1] - ends[0]) / 2, metric.digits)}` : "";
      return makeNumber(format(metric.value, metric.digits), () => openMetric(run, name), {
        more: half,
        best: best.has(run.number),
      });
    },
  };
}

function makeAbsent(run, name) {
  const own = readMetric(run, name);
  return own && own.status !== "ok" ? makeNumber(own.status, () => openMetric(run, name)) : makeNothing();
}

function makeCostColumn(key) {
  const { title, better = "lower", about, value } = COSTS[key];
  return {
    key,
    title,
    better,
    about,
    value,
    cell: (run) =>
      Number.isFinite(value(run))
        ? makeNumber(formatCost(run, key), () => openCost(run, key))
        : makeNothing(),
  };
}

/** The runs that are best at a metric among those of their model, prompts and budget, where there is a choice. */
function findBest(runs, name) {
  const sign = DOC.metrics[name].better === "higher" ? 1 : -1;
  const own = runs.filter((run) => findMetric(run, name));
  const groups = groupBy(own, (run) =>
    JSON.stringify([run.model, run.prompts, run.n, formatBudget(run)]),
  );
  const best = new Set();
  for (const group of groups.values()) {
    const top = Math.max(...group.map((run) => sign * findMetric(run, name).value));
    const those = group.filter((run) => sign * findMetric(run, name).value === top);
    if (those.length < group.length) for (const run of those) best.add(run.number);
  }
  return best;
}

/** Runs in the order of a column; those without a value come last either way. */
function sortRuns(runs, column, descending) {
  const sign = descending ? -1 : 1;
  const lacks = (value) => value === undefined || value === null;
  return [...runs].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y);
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

/** Draw filters, plot and table again. */
function drawBoard() {
  fillFilters();
  const runs = filterRuns();
  const columns = chooseColumns(runs);
  const quality = chooseMetrics(runs).filter((name) => runs.some((run) => findMetric(run, name)));
  fillSelect(
    byId("quality"),
    quality.map((name) => [name, nameMetric(name)]),
  );
  const named = columns.find((column) => column.key === board.sort.key);
  const first = columns.find((column) => column.key === quality[0]) ?? columns[0];
  if (!named) board.sort = { key: first.key, descending: first.better === "higher" };
  const sorted = sortRuns(runs, named ?? first, board.sort.descending);
  drawTable(byId("runs"), columns, sorted.slice(0, board.limit), board.sort, turnSort, (run) => ({
    "data-run": run.number,
    onpointerenter: () => link(run, "hover"),
    onpointerleave: () => link(null, "hover"),
    onfocusin: () => link(run, "hover"),
    onfocusout: () => link(null, "hover"),
    onclick: () => link(run, "choose"),
  }));
  byId("runs").style.setProperty(
    "--lead",
    `${Math.floor(byId("runs").rows[0].cells[0].getBoundingClientRect().width)}px`,
  );
  byId("count").textContent =
    runs.length === RUNS.length ? `${runs.length}` : `${runs.length} of ${RUNS.length}`;
  byId("more").hidden = sorted.length <= board.limit;
  byId("more").textContent = `Show ${Math.min(SHOWN, sorted.length - board.limit)} more of ${sorted.length}`;
  drawPareto(byId("pareto"), runs, byId("quality").value, byId("against").value, link);
  mark();
}

function turnSort(column) {
  const best = column.better ? column.better === "higher" : false;
  board.sort = { key: column.key, descending: board.sort.key === column.key ? !board.sort.descending : best };
  drawBoard();
}

/** Tie plot and table: a run is pointed at, or chosen (chosen again: released). */
function link(run, how) {
  if (how === "hover") board.hover = run?.number ?? null;
  else board.chosen = run === null || board.chosen === run.number ? null : run.number;
  mark();
  if (how === "choose" && board.chosen !== null)
    byId("runs").querySelector(`tr[data-run="${board.chosen}"]`)?.scrollIntoView({ block: "nearest" });
}

/** Show in plot and table what is pointed at and chosen. */
function mark() {
  const on = [board.hover, board.chosen].filter((number) => number !== null);
  for (const row of byId("runs").querySelectorAll("tbody tr")) {
    row.classList.toggle("hover", Number(row.dataset.run) === board.hover);
    row.classList.toggle("chosen", Number(row.dataset.run) === board.chosen);
  }
  byId("pareto").classList.toggle("linked", on.length > 0);
  for (const element of byId("pareto").querySelectorAll(".mark"))
    element.classList.toggle("on", on.includes(Number(element.dataset.run)));
  readOut(on[0]);
}

function readOut(number) {
  const run = RUNS[number];
  if (!run) {
    byId("reading").textContent =
      "Dotted: no run shown is at least as good with less. Bars are 95 % intervals.";
    return;
  }
  const name = byId("quality").value;
  const metric = findMetric(run, name);
  const ends = findInterval(metric);
  const value = metric
    ? `${name} ${format(metric.value, metric.digits)} ${metric.unit}`.trim()
    : `${name}: no value`;
  const interval = ends ? ` [${format(ends[0], metric.digits)}, ${format(ends[1], metric.digits)}]` : "";
  byId("reading").replaceChildren(
    make("b", {}, `${run.label}, ${formatBudget(run)}`),
    `: ${value}${interval}, ${formatCost(run, "peak_mib")} MiB at the peak `,
    `(${formatCost(run, "peak_share")} % of the full cache), n = ${run.n}`,
  );
}

function startBoard() {
  fillSelect(byId("against"), Object.entries(AXES));
  walkThrough(byId("runs"));
  for (const id of ["model", "prompts", "budget", "quality", "against", "details"])
    byId(id).addEventListener("change", drawBoard);
  let typing;
  byId("search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(drawBoard, RUNS.length > SHOWN ? 200 : 0);
  });
  byId("more").addEventListener("click", () => {
    board.limit += SHOWN;
    drawBoard();
  });
  byId("reset").addEventListener("click", () => {
    board.off.clear();
    board.chosen = null;
    for (const id of ["model", "prompts", "budget", "search"]) byId(id).value = "";
    drawBoard();
  });
  let width = 0;
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now && now !== width) {
      width = now;
      drawBoard();
    }
  }).observe(byId("pareto"));
  redraws.push(drawBoard);
}
