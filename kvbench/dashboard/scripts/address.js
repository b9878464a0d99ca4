// The address of the page: it stores the whole view, so that a link shows it again.

const KEPT = ["model", "sweep", "prompts", "budget", "samples", "search", "quality", "against", "group", "seeds", "differ"];
KEPT.push("details", "unfailed", "ours", "theirs", "worst", "judged", "phrase", "paper", "kept", "panels");
if (byId("ranked")) KEPT.push("ranked");
const OF_RUNS = new Set(["ours", "theirs", "kept"]); // selects of runs; a link contains their folders
const requested = new URLSearchParams(location.hash.split("?")[1] ?? "");
let written = null;

/** Return and remove a value of the address that the page was opened with; null afterwards. */
function takeAsked(name) {
  const value = requested.get(name);
  requested.delete(name);
  return value;
}

/** Return a control's value from the address; folders become the numbers that selects of runs use. */
function takeAskedValue(id) {
  const value = takeAsked(id);
  if (value === null || !OF_RUNS.has(id)) return value;
  const run = RUNS.find((one) => one.folder === value);
  return run ? String(run.number) : value;
}

/** Apply the address to fields, methods, columns and order, before anything is drawn. */
function readAddress() {
  for (const id of ["search", "phrase"]) byId(id).value = takeAsked(id) ?? "";
  for (const id of ["details", "unfailed"]) byId(id).checked = takeAsked(id) === "1";
  byId("panels").value = takeAsked("panels") ?? byId("panels").value;
  for (const label of takeAsked("off")?.split("~") ?? []) board.off.add(label);
  for (const part of takeAsked("columns")?.split("~") ?? []) toggled.set(part.slice(1), part[0] === "+");
  const [key, way] = takeAsked("sort")?.split("~") ?? [];
  if (key) board.sort = { key, descending: way === "down" };
  const chosen = takeAsked("run");
  board.chosen = RUNS.find((run) => run.folder === chosen)?.number ?? null;
}

/** Return the address of the current view. */
function describeView() {
  const parameters = new URLSearchParams();
  const put = (name, value) => value && parameters.set(name, value);
  for (const id of KEPT) {
    const control = byId(id);
    if (control.type === "checkbox") put(id, control.checked ? "1" : "");
    else if (control.tagName !== "SELECT") put(id, control.value);
    else if (control.options.length && control.value !== (control.dataset.fallback ?? control.options[0].value))
      put(id, OF_RUNS.has(id) ? (RUNS[control.value]?.folder ?? control.value) : control.value);
  }
  put("off", [...board.off].join("~"));
  put("columns", [...toggled].map(([key, on]) => (on ? "+" : "-") + key).join("~"));
  if (board.sorted) put("sort", `${board.sort.key}~${board.sort.descending ? "down" : "up"}`);
  put("run", RUNS[board.chosen]?.folder);
  if (pair.place && !byId("comparison").hidden) put("sample", String(pair.order[pair.place]));
  const view = VIEWS.find((name) => !byId(name).hidden);
  return `#/${view}${parameters.size ? `?${parameters}` : ""}`;
}

/** Update the address if the view has changed; browsers allow a few updates a second. */
function writeAddress() {
  const now = describeView();
  if (now === written) return;
  written = now;
  history.replaceState(null, "", now);
}

function startAddress() {
  let waiting;
  const renew = () => {
    clearTimeout(waiting);
    waiting = setTimeout(writeAddress, 300);
  };
  for (const event of ["change", "input", "click", "keyup"]) document.addEventListener(event, renew);
  // A link pasted into an open page opens its own view.
  addEventListener("hashchange", () => {
    if (location.hash.startsWith("#/")) location.reload();
  });
}
