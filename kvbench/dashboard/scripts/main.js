// The page itself: its views, and how it starts.

const DRAWS = {
  leaderboard: drawBoard,
  comparison: drawComparison,
  retention: drawRetention,
  published: drawPublished,
};

/** Show a view, which is drawn when it is first or again looked at; the address follows. */
function showView(name) {
  if (byId(name).hidden) scrollTo(0, 0);
  for (const view of VIEWS) byId(view).hidden = view !== name;
  // A menu closes by a click beside it.
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]"))
      if (!menu.contains(event.target)) menu.open = false;
  });
  for (const tab of document.querySelectorAll("[data-view]")) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === name));
    tab.setAttribute("tabindex", tab.dataset.view === name ? "0" : "-1");
  }
  DRAWS[name]();
  writeAddress();
}

/** The view that the address names; a slash keeps the browser from scrolling to an element of that name. */
function readView() {
  return VIEWS.find((view) => location.hash.split("?")[0] === `#/${view}`) ?? null;
}

function start() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close();
    });
  }
  // A menu closes by a click beside it.
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]"))
      if (!menu.contains(event.target)) menu.open = false;
  });
  for (const tab of document.querySelectorAll("[data-view]"))
    tab.addEventListener("click", () => showView(tab.dataset.view));
  byId("tabs").addEventListener("keydown", walkTabs);
  byId("theme").addEventListener("click", turnTheme);
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("made").textContent = `${DOC.made.replace("T", " ").slice(0, 16)} UTC`;
  document.addEventListener("keydown", pressKey);
  systemDark.addEventListener("change", applyTheme);
  readAddress();
  startAddress();
  startBoard();
  startComparison();
  startRetention();
  startPublished();
  drawProgress();
  applyTheme();
  showView(readView() ?? VIEWS[0]);
}

start();
