// Progress: incomplete sweeps, unfinished, failed and damaged runs, runs of an earlier version.

function drawProgress() {
  const { sweeps, unfinished, damaged, earlier } = DOC;
  const hidden = byId("unfailed").checked;
  const items = [
    ...sweeps.flatMap(describeSweep),
    ...unfinished.map(describeUnfinished),
    ...damaged.map((run) => describeState(run.folder, run.reason, "bad")),
    ...earlier.map((folder) => describeState(folder, "of an earlier version", "dim")),
  ].filter((item) => !hidden || !item.querySelector(".bad"));
  const box = byId("progress");
  const failed = unfinished.filter((run) => run.status.startsWith("failed"));
  const counts = [
    [sweeps.length, "incomplete sweeps"],
    [unfinished.length - failed.length, "unfinished runs"],
    [failed.length, "failed runs"],
    [damaged.length, "damaged runs or datasets"],
    [earlier.length, "runs of an earlier version"],
  ];
  box.hidden = !counts.some(([count]) => count);
  box.querySelector("summary").textContent = counts
    .filter(([count]) => count)
    .map(([count, what]) => `${what}: ${count}`)
    .join(", ");
  box.querySelector("ul").replaceChildren(...items);
  box.open ||= items.length <= 12;
}

function makeBar(value, max, label) {
  return max === null ? make("span", {}) : make("progress", { max, value, "aria-label": label });
}

function describeSweep(sweep) {
  const open = sweep.jobs - sweep.finished - sweep.started - sweep.failed.length;
  const counts = [
    [sweep.started, "running or killed"],
    [sweep.failed.length, "failed"],
    [open, "pending"],
  ];
  const told = [
    `${sweep.finished} of ${sweep.jobs} jobs finished`,
    ...counts.filter(([count]) => count).map(([count, what]) => `${count} ${what}`),
  ];
  return [
    make(
      "li",
      {},
      make("span", {}, sweep.folder),
      makeBar(sweep.finished, sweep.jobs, sweep.folder),
      make("span", { class: "dim" }, told.join(", ")),
    ),
    ...sweep.failed.map(([job, error]) =>
      make("li", {}, make("span", {}, job), make("span", {}), make("span", { class: "bad" }, error)),
    ),
  ];
}

function describeUnfinished(run) {
  const bad = run.status.startsWith("failed");
  const count = run.total === null ? `${run.done} samples` : `${run.done} of ${run.total} samples`;
  const since = run.changed ? `, last change ${tellSpan(run.changed)} before this page was made` : "";
  return make(
    "li",
    {},
    make("span", {}, run.folder),
    makeBar(run.done, run.total, run.folder),
    make("span", { class: bad ? "bad" : "dim" }, `${count}; ${run.status}${bad ? "" : since}`),
  );
}

function describeState(folder, state, look) {
  return make("li", {}, make("span", {}, folder), make("span", {}), make("span", { class: look }, state));
}

/** Return the time between a moment and the making of the page. */
function tellSpan(moment) {
  const seconds = Math.max(0, (Date.parse(DOC.made) - Date.parse(moment)) / 1000);
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
