// The page's data: runs, metrics, and values that runs share by number.

const DOC = JSON.parse(byId("document").textContent);
const RUNS = DOC.runs.map((run, number) => ({ ...run, number }));
// Anyone may name a metric of a dataset: without a prototype, `constructor` is a name like others.
for (const one of [DOC, ...RUNS, ...DOC.means, ...RUNS.map((run) => run.samples)])
  for (const key of ["metrics", "values", "columns"]) if (one[key]) Object.setPrototypeOf(one[key], null);
for (const mean of DOC.means) if (mean.equal) for (const number of mean.runs) RUNS[number].equal = true; // seeds change no sample
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
  if (own && !own.better) run.metrics[name] = { ...DOC.metrics[name], ...own };
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

/** Return the name of a run in lists: method, budget, folder and dataset. */
function nameRun(run) {
  return [run.label, formatBudget(run), run.folder.split(/[/-]/).at(-1), run.dataset].filter(Boolean).join(", ");
}

/** Return the relative address of a file of a run; samples of a dataset's run are in a folder of their own. */
function addressOf(run, ...parts) {
  const root = !DOC.root || DOC.root === "." ? [] : DOC.root.split("/");
  const own = parts[0] === run.samples.kind && run.samples.folder;
  const inside = own ? [...own.split("/"), ...parts.slice(1)] : [...run.folder.split("/"), ...parts];
  return [...root, ...inside].map(encodeURIComponent).join("/");
}

/** Return the parts of the path of a sample's file, as `name_sample` of kvbench.core.files: 500 per folder. */
function splitSample(index, suffix) {
  const number = (value) => String(value).padStart(6, "0");
  return [...(index < 500 ? [] : [number(index - (index % 500))]), number(index) + suffix];
}

/** Return a link to a file of a run, or its text in a bundle, which has no files. */
function linkTo(run, text, ...parts) {
  if (DOC.bundle) return make("span", {}, text);
  return make("a", { href: addressOf(run, ...parts), target: "_blank", rel: "noopener" }, text);
}

/** Return the options of a select of runs, grouped by model and prompts. */
function listRuns(runs) {
  const groups = d3.group(runs, (run) => `${run.model}, ${run.prompts}`);
  return [...groups].map(([group, own]) => ({
    group,
    options: own.map((run) => [run.number, nameRun(run)]),
  }));
}
