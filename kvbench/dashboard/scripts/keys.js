// Keyboard shortcuts, which are disabled in fields.

const VIEWS = ["leaderboard", "comparison", "retention", "published"];

function pressKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest("input, select, textarea");
  if (event.key === "Escape") {
    link(null, "choose");
    field?.blur();
    return;
  }
  if (field) return;
  const inside = event.target.closest("img-comparison-slider, canvas, pre, nav");
  const arrow = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const step = { k: -1, j: 1 }[event.key] ?? (inside ? undefined : arrow);
  if (step && !byId("comparison").hidden) {
    event.preventDefault();
    showSample(pair.place + step);
  } else if (VIEWS[Number(event.key) - 1]) showView(VIEWS[Number(event.key) - 1]);
  else if (event.key === "/") {
    event.preventDefault();
    showView("leaderboard");
    byId("search").focus();
  } else if (event.key === "t") turnTheme();
  else if (event.key === "?") byId("keys").showModal();
}

/** Move between tabs with arrow keys. */
function walkTabs(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const place = VIEWS.indexOf(event.target.dataset.view) + step;
  const view = VIEWS.at(place % VIEWS.length);
  showView(view);
  document.querySelector(`[data-view="${view}"]`).focus();
}
