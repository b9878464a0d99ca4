// The document inside the page: runs, metrics, and the values that runs share by number.

const DOC = JSON.parse(byId("document").textContent);
const RUNS = DOC.runs.map((run, number) => ({ ...run, number }));
const METRICS = Object.keys(DOC.metrics);
const ARROWS = { higher: "↑", lower: "↓" };
const MIB = 2 ** 20;

/** A value that runs share. */
function shared(number) {
  return DOC.shared[number];
}

/** A metric of a run with what its number means and how it was found; undefined if it was not asked for. */
function readMetric(run, name) {
  const own = run.metrics[name];
  if (own && !own.status) run.metrics[name] = { ...DOC.metrics[name], ...shared(own.how), ...own };
  return run.metrics[name];
}

/** A metric of a run; null if the run has no value of it. */
function findMetric(run, name) {
  const metric = readMetric(run, name);
  return metric && metric.value !== null ? metric : null;
}

/** Both ends of a metric's 95 % interval; null if one of them is not finite or there is none. */
function findInterval(metric) {
  const ends = metric?.ci95;
  return ends && ends[0] !== null && ends[1] !== null ? ends : null;
}

/** A number with so many digits after the point. */
function format(value, digits) {
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** A metric's name with an arrow in the direction that is better. */
function nameMetric(name) {
  return DOC.metrics[name] ? `${name} ${ARROWS[DOC.metrics[name].better]}` : name;
}

/** A run's budget as per cent of the full cache: of its tokens, or of its bytes in 16 bits. */
function formatBudget(run) {
  return `${Number((100 * run.budget).toPrecision(3))} %${run.unit === "bytes" ? " bytes" : ""}`;
}

/** What names a run in a list: method, budget and folder. */
function nameRun(run) {
  return `${run.label}, ${formatBudget(run)}, ${run.folder.split("/").at(-1).split("-").at(-1)}`;
}

/** The relative address of a file of a run. */
function addressOf(run, ...parts) {
  const root = !DOC.root || DOC.root === "." ? [] : DOC.root.split("/");
  return [...root, ...run.folder.split("/"), ...parts].map(encodeURIComponent).join("/");
}

/** Options of a select that lists runs, those of one model and its prompts together. */
function listRuns(runs) {
  const groups = groupBy(runs, (run) => `${run.model}, ${run.prompts}`);
  return [...groups].map(([group, own]) => ({
    group,
    options: own.map((run) => [run.number, nameRun(run)]),
  }));
}
