// Filters of the leaderboard.

/** Return the runs that pass the filters. */
function filterRuns() {
  const [model, prompts, budget, samples] = ["model", "prompts", "budget", "samples"].map((id) => byId(id).value);
  const sweep = DOC.sweepRuns[byId("sweep").value];
  const inSweep = sweep && new Set(sweep);
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  return RUNS.filter((run) => {
    const fits =
      (!model || run.model === model) &&
      (!inSweep || inSweep.has(run.number)) &&
      (!prompts || run.prompts === prompts) &&
      (!budget || formatBudget(run) === budget || run.method === "full") &&
      (!samples || String(run.n) === samples);
    return fits && !board.off.has(run.label) && words.every((word) => describeForSearch(run).includes(word));
  });
}

function describeForSearch(run) {
  if (!run.words) {
    const method = JSON.stringify(shared(run.config.method) ?? "");
    const words = [run.folder, run.label, run.model, run.prompts, formatBudget(run), method];
    run.words = words.join(" ").toLowerCase();
  }
  return run.words;
}

function fillFilters() {
  const sweeps = Object.keys(DOC.sweepRuns);
  byId("sweep").parentElement.hidden = !sweeps.length;
  fillSelect(byId("sweep"), [["", "all"], ...sweeps.map((name) => [name, name])], "");
  const choices = (key, runs) => [...new Set(runs.map((run) => run[key]))].sort();
  fillSelect(
    byId("model"),
    [["", "all"], ...choices("model", RUNS).map((name) => [name, name])],
    d3.mode(RUNS, (run) => run.model),
  );
  const own = RUNS.filter((run) => !byId("model").value || run.model === byId("model").value);
  fillSelect(byId("prompts"), [["", "all"], ...choices("prompts", own).map((name) => [name, name])], "");
  const budgets = own.filter((run) => run.method !== "full").sort((a, b) => a.budget - b.budget);
  fillSelect(
    byId("budget"),
    [["", "all"], ...[...new Set(budgets.map(formatBudget))].map((text) => [text, text])],
    "",
  );
  const counts = d3.sort(new Set(own.map((run) => run.n)), d3.descending);
  const common = choices("prompts", own).length > 1 ? "" : d3.mode(own, (run) => run.n); // other sets have other numbers
  fillSelect(byId("samples"), [["", "all"], ...counts.map((n) => [String(n), String(n)])], common);
  const chips = choices("label", own).map((label) =>
    make(
      "button",
      {
        type: "button",
        "aria-pressed": String(!board.off.has(label)),
        "data-label": label,
        onclick: () => toggleMethod(label),
      },
      makeSwatch(label),
      label,
    ),
  );
  byId("methods").replaceChildren(...chips);
}

function toggleMethod(label) {
  if (!board.off.delete(label)) board.off.add(label);
  drawBoard();
  byId("methods")
    .querySelector(`[data-label="${CSS.escape(label)}"]`)
    ?.focus();
}
