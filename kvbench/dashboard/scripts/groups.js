// Grouped rows: means over seeds, or a heading for each value of a setting.

const IGNORED_SETTINGS = /^(runs_dir|task|device|shard|work|logger|hydra|published|against)\b|\._target_$/;
const MAX_VALUES = 24; // a setting with more values is not offered

/** Return a run's settings as text by path, such as method.window. */
function listSettings(run) {
  if (!run.settings) {
    run.settings = new Map();
    for (const [key, number] of Object.entries(run.config)) flatten(shared(number), key, run.settings);
  }
  return run.settings;
}

function flatten(value, path, into) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, inner] of Object.entries(value)) flatten(inner, `${path}.${key}`, into);
  } else into.set(path, typeof value === "string" ? value : JSON.stringify(value));
}

/** Return the settings that differ between runs other than references. */
function findVarying(runs) {
  const values = new Map();
  for (const run of runs) {
    if (run.method === "full") continue;
    for (const [path, text] of listSettings(run)) {
      if (path === "seed" || IGNORED_SETTINGS.test(path)) continue;
      if (!values.has(path)) values.set(path, new Set());
      values.get(path).add(text);
    }
  }
  return [...values].filter(([, texts]) => texts.size > 1 && texts.size <= MAX_VALUES).map(([path]) => path);
}

/** Update the select of groupings. */
function fillGroups(runs) {
  const varying = findVarying(runs);
  const seeds = new Set(runs.map((run) => listSettings(run).get("seed"))).size > 1;
  fillSelect(byId("group"), [
    ["", "nothing"],
    ...(seeds ? [["mean", "mean over seeds"]] : []),
    ...varying.map((path) => [path, path]),
  ]);
}

/** Return the heading of a run's value of a setting. */
function nameGroup(run, path) {
  return `${path} = ${listSettings(run).get(path) ?? "not set"}`;
}

/** Merge runs that differ only in seed into one row: the mean of each number, ± the deviation. */
function mergeSeeds(runs) {
  const groups = groupBy(runs, (run) => {
    const rest = [...listSettings(run)].filter(([path]) => path !== "seed" && !IGNORED_SETTINGS.test(path));
    return JSON.stringify([run.label, run.model, run.prompts, run.budget, run.unit, run.n, rest]);
  });
  return [...groups.values()].map((merged) =>
    merged.length === 1 ? merged[0] : { ...merged[0], merged, metrics: averageMetrics(merged) },
  );
}

function averageMetrics(runs) {
  const metrics = {};
  for (const name of Object.keys(runs[0].metrics)) {
    const values = runs.map((run) => findMetric(run, name)?.value).filter((value) => value !== undefined);
    if (!values.length) continue;
    const value = d3.mean(values);
    const half = values.length > 1 ? d3.deviation(values) : null;
    const { digits, unit, better } = readMetric(runs[0], name);
    metrics[name] = { status: "ok", digits, unit, better, value };
    metrics[name].ci95 = half === null ? null : [value - half, value + half];
  }
  return metrics;
}

/** Show the runs behind a mean over seeds. */
function openMerged(run, title, show) {
  openDrawer(
    `${title}, ${run.label}`,
    makeFacts(
      `Mean of ${run.merged.length} seeds, ± their standard deviation`,
      run.merged.map((one) => [`seed ${listSettings(one).get("seed")}`, show(one)]),
    ),
    makeFacts(
      "Run folders",
      run.merged.map((one) => [`seed ${listSettings(one).get("seed")}`, one.folder, true]),
    ),
  );
}
