// Published tables compared with measured numbers.

function drawPublished() {
  fillSelect(
    byId("paper"),
    DOC.published.map((table) => [table.name, `${table.source}: ${table.title}`]),
  );
  const table = DOC.published.find((one) => one.name === byId("paper").value);
  byId("beside").replaceChildren();
  if (!table) {
    byId("paperTitle").textContent = "Published beside measured";
    byId("paperNote").textContent = "No finished run belongs to a row of a published table.";
    return;
  }
  byId("paperTitle").textContent = `${table.source}: ${table.title}`;
  byId("paperNote").textContent = describeTable(table);
  byId("beside").append(makeHeads(table), make("tbody", {}, ...table.rows.map((row) => makeRow(table, row))));
}

/** Return a note about models and data of published and measured numbers. */
function describeTable(table) {
  const runs = table.rows.map((row) => RUNS[row.run]);
  const [models, prompts] = ["model", "prompts"].map((key) => [...new Set(runs.map((run) => run[key]))]);
  const same = models.every((model) => table.labels.some((label) => label.split(" ")[0] === model));
  const caution = same
    ? ""
    : " The models differ: what can be compared is the order of methods, not the numbers.";
  const measured = `${models.join(", ")} on ${prompts.join(", ")}, n = ${listCounts(runs)}`;
  return `Published: ${table.labels.join(", ")} on ${table.data}. Measured: ${measured}.${caution}${explainChanges(runs)}`;
}

function makeHeads(table) {
  const top = [];
  const below = [];
  for (const [name, measured] of Object.entries(table.metrics)) {
    const own = name in table.rows[0].costs ? [name] : measured;
    const titles = [...table.labels, ...own.map((one) => (one === name ? "measured" : `measured, ${one}`))];
    top.push(make("th", { class: "group first", colspan: titles.length }, nameMetric(name)));
    below.push(...titles.map((title, i) => make("th", { class: i ? null : "first" }, title)));
  }
  const also = table.also.map((name) => make("th", { rowspan: 2 }, nameMetric(name), ", measured"));
  const keys = [...listOwn(table), "method", "budget", ...table.keys].map((key) =>
    make("th", { class: "words", rowspan: 2 }, key.replace(/^(latency|method)\./, "")),
  );
  return make("thead", {}, make("tr", {}, ...keys, ...top, ...also), make("tr", {}, ...below));
}

/** Return the columns of model and n, where runs differ. */
function listOwn(table) {
  return ["model", "n"].filter((key) => new Set(table.rows.map((row) => RUNS[row.run][key])).size > 1);
}

function makeRow(table, row) {
  const run = RUNS[row.run];
  const words = [
    ...listOwn(table).map((key) => run[key]),
    make("span", {}, makeSwatch(run.label), run.label),
    formatBudget(run),
    ...row.settings,
  ];
  const cells = Object.entries(table.metrics).flatMap(([name, measured]) => [
    ...table.printed[row.where][name].map((text, i) =>
      make("td", { class: i ? null : "first" }, text ?? makeNothing()),
    ),
    ...(name in row.costs
      ? [makeMeasuredCost(row.costs[name])]
      : measured.map((own) => makeMeasured(table, row, name, own))
    ).map((cell) => make("td", {}, cell)),
  ]);
  const also = table.also.map((name) => make("td", {}, makeMeasured(table, row, name, name)));
  return make("tr", {}, ...words.map((word) => make("td", { class: "words" }, word)), ...cells, ...also);
}

/** Return a published cost with the digits of the project's own tables. */
function makeMeasuredCost(value) {
  if (value === null) return makeNothing();
  return value >= 1000 ? format(value, 0) : String(Number(value.toPrecision(4)));
}

/** Return a measured number, with its difference to the published one of the same model. */
function makeMeasured(table, row, name, own) {
  const run = RUNS[row.run];
  const metric = findMetric(run, own);
  if (!metric) return makeAbsent(run, own);
  const place = table.labels.findIndex((label) => label.split(" ")[0] === run.model);
  const printed = place < 0 || own !== name ? NaN : Number(table.printed[row.where][name]?.[place] ?? NaN);
  const off = metric.value - printed;
  const more = Number.isFinite(off) ? `${off < 0 ? "" : "+"}${format(off, metric.digits)}` : "";
  return makeNumber(format(metric.value, metric.digits), {
    more,
    title: more && "difference to the printed number",
  });
}

function startPublished() {
  byId("paper").addEventListener("change", drawPublished);
}
