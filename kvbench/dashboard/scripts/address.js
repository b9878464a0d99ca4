// The address of the page holds the whole view: a link shows what its sender saw.

const KEPT = ["model", "prompts", "budget", "samples", "search", "quality", "against", "group", "differ"];
KEPT.push("details", "ours", "theirs", "worst", "judged", "phrase", "paper", "kept", "panels");
const OF_RUNS = new Set(["differ", "ours", "theirs", "kept"]); // selects of runs, which a link names by folder
const asked = new URLSearchParams(location.hash.split("?")[1] ?? "");
let written = null;

/** What the address asked for under a name when the page was opened; asked once, null afterwards. */
function takeAsked(name) {
  const value = asked.get(name);
  asked.delete(name);
  return value;
}

/** The value of a control that the address asked for; selects of runs hold numbers, addresses folders. */
function takeAskedValue(id) {
  const value = takeAsked(id);
  if (value === null || !OF_RUNS.has(id)) return value;
  const run = RUNS.find((one) => one.folder === value);
  return run ? String(run.number) : value;
}

/** Put what the address asks for into fields, methods, columns and order, before anything is drawn. */
function readAddress() {
  for (const id of ["search", "phrase"]) byId(id).value = takeAsked(id) ?? "";
  byId("details").checked = takeAsked("details") === "1";
  byId("panels").value = takeAsked("panels") ?? byId("panels").value;
  for (const label of takeAsked("off")?.split("~") ?? []) board.off.add(label);
  for (const part of takeAsked("columns")?.split("~") ?? []) toggled.set(part.slice(1), part[0] === "+");
  const [key, way] = takeAsked("sort")?.split("~") ?? [];
  if (key) board.sort = { key, descending: way === "down" };
  const chosen = takeAsked("run");
  board.chosen = RUNS.find((run) => run.folder === chosen)?.number ?? null;
}

/** The address of what is shown now. */
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

/** Write the address anew if the view has changed; browsers allow this a few times a second. */
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
  // A link pasted into an open page is a view of its own.
  addEventListener("hashchange", () => {
    if (location.hash.startsWith("#/")) location.reload();
  });
}
