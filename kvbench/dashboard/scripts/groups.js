// Grouped rows: one row for the runs that differ only in seeds, and a heading for each value of a setting.

// sinks, protect, windows and sampling act through settings of the method and the model.
const IGNORED_SETTINGS =
  /^(runs_dir|task|device|shard|work|logger|published|against|sinks|protect|windows|sampling)\b|\._target_$/;
const MAX_VALUES = 24; // a setting with more values is not offered

/** Return the settings that a run used as text by path, such as method.window. */
function listSettings(run) {
  if (!run.settings) {
    run.settings = new Map();
    const unused = { storage: !hasFewBits(run), calibrate: !run.calibrated };
    for (const [key, number] of Object.entries(run.config)) {
      if (!unused[key]) flatten(shared(number), key, run.settings);
    }
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

/** Update the select of rows: a mean over seeds, or each seed. */
function fillSeeds() {
  byId("seedsOf").hidden = !hasSeveralSeeds();
  fillSelect(byId("seeds"), [["", "mean"], ["each", "each"]]);
}

/** Update the select of groupings. */
function fillGroups(runs) {
  const varying = findVarying(runs);
  fillSelect(byId("group"), [["", "nothing"], ...varying.map((path) => [path, path])]);
}

/** Return the heading of a run's value of a setting. */
function nameGroup(run, path) {
  return `${path} = ${listSettings(run).get(path) ?? "not set"}`;
}

/** Return the runs behind a row. */
function listMembers(row) {
  return row.merged ?? [row];
}

/** Return the seeds of a run's noise and calibration as text. */
function nameSeed(run) {
  return `seed ${run.seeds[0]}${run.seeds[1] ? `, calibration ${run.seeds[1]}` : ""}`;
}

/** Return one row for the runs that differ only in seeds, if all of them pass the filters; other runs as they are. */
function mergeSeeds(runs) {
  const shown = new Set(runs.map((run) => run.number));
  const rows = new Map(runs.map((run) => [run.number, run]));
  for (const mean of DOC.means) {
    if (!mean.runs.every((number) => shown.has(number))) continue;
    const merged = mean.runs.map((number) => RUNS[number]);
    const { metrics, memory, latency } = mean;
    for (const { number } of merged) rows.delete(number);
    rows.set(merged[0].number, { ...merged[0], merged, metrics, memory, latency });
  }
  return [...rows.values()];
}

/** Return whether some runs of the page differ only in seeds. */
function hasSeveralSeeds() {
  return DOC.means.length > 0;
}

/** Return the seeds of a row as text: their number, or a single run's. */
function nameSeeds(row) {
  return row.merged ? `${row.merged.length} seeds` : nameSeed(row);
}

/** Return a sentence about rows of runs made in a checkout with changes that are not committed; empty without any. */
function explainChanges(rows) {
  const runs = rows.flatMap(listMembers);
  const changes = runs.map((run) => run.changes).filter(Boolean);
  if (!changes.length) return "";
  const names = [...new Set(changes)].map((hash) => hash.slice(0, 12));
  const listed = names.slice(0, 3).join(", ") + (names.length > 3 ? `, ${names.length - 3} more` : "");
  return ` ${changes.length} of ${runs.length} runs: checkout with uncommitted changes (${listed}).`;
}

/** Return the number of samples as text: prompts, and seeds of noise and calibrations where these change samples. */
function countSamples(row) {
  if (row.equal) return String(row.n);
  const [noises, calibrations] = [0, 1].map((kind) => new Set(listMembers(row).map((run) => run.seeds[kind])).size);
  const seeds = noises * calibrations > 1 ? [noises, ...(calibrations > 1 ? [calibrations] : [])] : [];
  return [row.n, ...seeds].join(" × ");
}

/** Return the numbers of samples of rows. */
function listCounts(rows) {
  return [...new Set(rows.map(countSamples))].join(", ");
}
