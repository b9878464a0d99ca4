// The table of runs with its filters; hovered and chosen runs are shared with the plot.

const SHOWN = 100; // rows before "show more": a thousand rows of buttons take a second to lay out
const board = {
  off: new Set(),
  sort: { key: null, descending: true },
  sorted: false, // whether the user chose the order
  limit: SHOWN,
  hover: null,
  chosen: null,
  rows: new Map(), // shown rows by number; a mean over seeds has the number of its first run
};

/** Return the metrics to show: those with a value; parts and variants only on request. */
function chooseMetrics(runs) {
  const details = byId("details").checked;
  return METRICS.filter(
    (name) => (details || !DOC.metrics[name].detail) && runs.some((run) => findMetric(run, name)),
  );
}

/** Return the best runs at a metric, in shown digits, among two or more of the same conditions, seeds and budget. */
function findBest(runs, name) {
  const { better, digits } = DOC.metrics[name];
  const value = (run) => (better === "higher" ? 1 : -1) * findMetric(run, name).value.toFixed(digits);
  const own = runs.filter((run) => findMetric(run, name));
  const groups = d3.group(own, (run) =>
    JSON.stringify([run.conditions, formatBudget(run), listMembers(run).map(({ seeds }) => seeds[0])]),
  );
  const best = new Set();
  for (const group of groups.values()) {
    const top = Math.max(...group.map(value));
    const those = group.filter((run) => value(run) === top);
    if (those.length < group.length) for (const run of those) best.add(run.number);
  }
  return best;
}

/** Return runs sorted by a column; runs without a value always come last. */
function sortRuns(runs, column, descending) {
  const sign = descending ? -1 : 1;
  const lacks = (value) => value === undefined || value === null;
  return [...runs].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y);
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

/** Redraw filters, plot and table. */
function drawBoard() {
  fillFilters();
  const runs = filterRuns();
  fillSeeds();
  fillGroups(runs);
  fillBases(runs);
  const group = byId("group").value;
  const rows = byId("seeds").value === "each" ? runs : mergeSeeds(runs);
  board.rows = new Map(rows.map((row) => [row.number, row]));
  const columns = listColumns(rows);
  const { shown, folded } = divideColumns(columns, rows);
  const quality = chooseMetrics(runs);
  fillSelect(
    byId("quality"),
    quality.map((name) => [name, nameMetric(name)]),
  );
  fillSelect(byId("against"), Object.entries(AXES), chooseShare(rows));
  const sorted = sortBoard(rows, columns, quality[0], group);
  drawRows(sorted, shown, group);
  drawFolded(folded, rows);
  drawColumnMenu(columns, shown);
  byId("count").textContent =
    runs.length === RUNS.length ? `${runs.length}` : `${runs.length} of ${RUNS.length}`;
  byId("more").hidden = sorted.length <= board.limit;
  byId("more").textContent = `Show ${Math.min(SHOWN, sorted.length - board.limit)} more of ${sorted.length}`;
  byId("meaning").textContent = explainNumbers(rows);
  drawPareto(byId("pareto"), rows, byId("quality").value, byId("against").value, link);
  drawDrift(runs);
  mark();
}

/** Return rows sorted by group and the chosen column, at first the first metric. */
function sortBoard(rows, columns, quality, group) {
  const named = columns.find((column) => column.key === board.sort.key);
  const first = columns.find((column) => column.key === quality) ?? columns[0];
  if (!named) board.sort = { key: first.key, descending: first.better === "higher" };
  const sorted = sortRuns(rows, named ?? first, board.sort.descending);
  if (!group) return sorted;
  const numeric = new Intl.Collator("en", { numeric: true });
  return sorted.sort((a, b) => numeric.compare(nameGroup(a, group), nameGroup(b, group)));
}

function drawRows(sorted, columns, group) {
  const table = byId("runs");
  drawTable(table, columns, sorted.slice(0, board.limit), board.sort, turnSort, (run) => ({
    "data-run": run.number,
    onpointerenter: () => link(run, "hover"),
    onpointerleave: () => link(null, "hover"),
    onfocusin: () => link(run, "hover"),
    onfocusout: () => link(null, "hover"),
    onclick: () => link(run, "choose"),
  }));
  if (group) {
    let last = null;
    for (const [i, row] of [...table.tBodies[0].rows].entries()) {
      const name = nameGroup(sorted[i], group);
      const heading = make("th", { scope: "rowgroup", colspan: columns.length, class: "words" }, name);
      if (name !== last) row.before(make("tr", { class: "heading" }, heading));
      last = name;
    }
  }
  const lead = Math.floor(table.rows[0].cells[0].getBoundingClientRect().width);
  table.style.setProperty("--lead", `${lead}px`);
}

/** Update the select of methods to compare with. */
function fillBases(runs) {
  const able = runs.filter((run) => Object.keys(run.samples.columns ?? {}).length);
  const labels = [...new Set(able.map((run) => run.label))].sort();
  fillSelect(byId("differ"), [["", "nothing"], ...labels.map((label) => [label, label])]);
}

function explainNumbers(rows) {
  const means = rows.some((row) => row.merged);
  const over = means ? ", over prompts and seeds for means over seeds" : "";
  const base = byId("differ").value;
  const some = (field) => rows.some((row) => Object.keys(row.metrics).some((name) => readMetric(row, name)[field]));
  const failed = some("failed") ? ` ${DOC.failed}.` : "";
  if (base)
    return `Differences to ${base} at the same model, prompts, seed and budget, with 95 % intervals of the paired differences${over}. Bold: better, and the interval excludes 0.${failed}`;
  const mark = some("prompts_only") ? ` †: over prompts alone (over seeds too it is wider than the metric's range).` : "";
  return `Click a row for its folder and its command. Brackets have a 95 % interval${over}, ± half of it.${mark} Bold: best of its model, prompts, n, seeds and budget, regardless of intervals.${failed}${explainChanges(rows)}`;
}

function turnSort(column) {
  const best = column.better ? column.better === "higher" : false;
  board.sort = { key: column.key, descending: board.sort.key === column.key ? !board.sort.descending : best };
  board.sorted = true;
  drawBoard();
}

/** Mark a run as hovered or chosen in plot and table; choosing it again releases it. */
function link(run, how) {
  if (how === "hover") board.hover = run?.number ?? null;
  else board.chosen = run === null || board.chosen === run.number ? null : run.number;
  mark();
  if (how === "choose" && board.chosen !== null)
    byId("runs").querySelector(`tr[data-run="${board.chosen}"]`)?.scrollIntoView({ block: "nearest" });
}

/** Show hovered and chosen runs in plot and table. */
function mark() {
  const on = [board.hover, board.chosen].filter((number) => number !== null);
  for (const row of byId("runs").querySelectorAll("tbody tr")) {
    row.classList.toggle("hover", Number(row.dataset.run) === board.hover);
    row.classList.toggle("chosen", Number(row.dataset.run) === board.chosen);
  }
  for (const plot of [byId("pareto"), byId("courses")]) {
    plot.classList.toggle("linked", on.length > 0);
    for (const element of plot.querySelectorAll(".mark"))
      element.classList.toggle("on", on.includes(Number(element.dataset.run)));
  }
  readOut(on[0]);
  showChosen(board.rows.get(board.chosen) ?? RUNS[board.chosen]);
}

function readOut(number) {
  const run = board.rows.get(number) ?? RUNS[number];
  if (!run) {
    const rows = [...board.rows.values()];
    byId("reading").textContent =
      "Dotted: the Pareto front of each model, prompt set and n: no shown row is at least as good at lower cost. Bars: " +
      `95 % intervals${rows.some((row) => row.merged) ? ", over prompts and seeds for means over seeds" : ""}. n = ${listCounts(rows)}.`;
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
    `: ${value}${interval}, ${formatCost(run, "peak_share")} % of the full cache's tokens `,
    `(${formatCost(run, "sequence_mib")} MiB a sequence), n = ${countSamples(run)}`,
  );
}

function startBoard() {
  for (const id of ["model", "sweep", "prompts", "budget", "samples", "quality", "against", "group", "seeds", "differ", "details"])
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
    toggled.clear();
    board.sort.key = null;
    board.sorted = false;
    for (const id of ["model", "sweep", "prompts", "budget", "samples", "search", "group", "seeds", "differ"]) byId(id).value = "";
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
