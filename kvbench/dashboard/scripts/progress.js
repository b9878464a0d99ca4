// Runs that have no results: at work, failed, or damaged.

function drawProgress() {
  const { unfinished, damaged } = DOC;
  const box = byId("progress");
  box.hidden = !unfinished.length && !damaged.length;
  if (box.hidden) return;
  const failed = unfinished.filter((run) => run.status.startsWith("failed"));
  const counts = [[unfinished.length - failed.length, "not finished"], [failed.length, "failed"], [damaged.length, "damaged"]];
  box.querySelector("summary").textContent = counts.filter(([count]) => count).map(([count, what]) => `${count} ${what}`).join(", ");
  box.querySelector("ul").replaceChildren(...unfinished.map(describeUnfinished), ...damaged.map(describeDamaged));
  box.open = unfinished.length + damaged.length <= 12;
}

function describeUnfinished(run) {
  const bad = run.status.startsWith("failed");
  const count = run.total === null ? `${run.done} samples` : `${run.done} of ${run.total} samples`;
  const since = run.changed ? `, last change ${tellSpan(run.changed)} before this page was made` : "";
  return make(
    "li", {}, make("span", {}, run.folder),
    run.total === null ? make("span", {}) : make("progress", { max: run.total, value: run.done, "aria-label": run.folder }),
    make("span", { class: bad ? "bad" : "dim" }, `${count}; ${run.status}${bad ? "" : since}`),
  );
}

function describeDamaged(run) {
  return make("li", {}, make("span", {}, run.folder), make("span", {}), make("span", { class: "bad" }, run.reason));
}

/** How long before the page was made a moment was. */
function tellSpan(moment) {
  const seconds = Math.max(0, (Date.parse(DOC.made) - Date.parse(moment)) / 1000);
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
