// The page's data: runs, metrics, and values that runs share by number.

const DOC = JSON.parse(byId("document").textContent);
const RUNS = DOC.runs.map((run, number) => ({ ...run, number }));
const METRICS = Object.keys(DOC.metrics);
const ARROWS = { higher: "↑", lower: "↓" };
const MIB = 2 ** 20;

/** Return a shared value. */
function shared(number) {
  return DOC.shared[number];
}

/** Return a metric of a run with all its fields; undefined if it was not requested. */
function readMetric(run, name) {
  const own = run.metrics[name];
  if (own && !own.status) run.metrics[name] = { ...DOC.metrics[name], ...shared(own.how), ...own };
  return run.metrics[name];
}

/** Return a metric of a run; null if it has no value. */
function findMetric(run, name) {
  const metric = readMetric(run, name);
  return metric && metric.value !== null ? metric : null;
}

/** Return the ends of a metric's 95 % interval; null without one, or if an end is not finite. */
function findInterval(metric) {
  const ends = metric?.ci95;
  return ends && ends[0] !== null && ends[1] !== null ? ends : null;
}

/** Return a number with a fixed number of decimals. */
function format(value, digits) {
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** Return a metric's name with an arrow towards better values. */
function nameMetric(name) {
  return DOC.metrics[name] ? `${name} ${ARROWS[DOC.metrics[name].better]}` : name;
}

/** Return a run's budget as a percentage of the full cache's tokens, or of its bytes in 16 bits. */
function formatBudget(run) {
  return `${Number((100 * run.budget).toPrecision(3))} %${run.unit === "bytes" ? " bytes" : ""}`;
}

/** Return the name of a run in lists: method, budget and folder. */
function nameRun(run) {
  return `${run.label}, ${formatBudget(run)}, ${run.folder.split("/").at(-1).split("-").at(-1)}`;
}

/** Return the relative address of a file of a run. */
function addressOf(run, ...parts) {
  const root = !DOC.root || DOC.root === "." ? [] : DOC.root.split("/");
  return [...root, ...run.folder.split("/"), ...parts].map(encodeURIComponent).join("/");
}

/** Return a link to a file of a run, or its text in a bundle, which has no files. */
function linkTo(run, text, ...parts) {
  if (DOC.bundle) return make("span", {}, text);
  return make("a", { href: addressOf(run, ...parts), target: "_blank", rel: "noopener" }, text);
}

/** Return the options of a select of runs, grouped by model and prompts. */
function listRuns(runs) {
  const groups = groupBy(runs, (run) => `${run.model}, ${run.prompts}`);
  return [...groups].map(([group, own]) => ({
    group,
    options: own.map((run) => [run.number, nameRun(run)]),
  }));
}
