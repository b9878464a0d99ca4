// Views and start of the page.

const DRAWS = {
  leaderboard: drawBoard,
  comparison: drawComparison,
  retention: drawRetention,
  published: drawPublished,
};

/** Show a view, draw it and update the address. */
function showView(name) {
  if (byId(name).hidden) scrollTo(0, 0);
  for (const view of VIEWS) byId(view).hidden = view !== name;
  for (const tab of document.querySelectorAll("[data-view]")) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === name));
    tab.setAttribute("tabindex", tab.dataset.view === name ? "0" : "-1");
  }
  DRAWS[name]();
  writeAddress();
}

/** Return the view of the address; the slash keeps the browser from scrolling to an element of that name. */
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
  // A click outside a menu closes it.
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
  startDrift();
  startComparison();
  startRetention();
  startPublished();
  byId("unfailed").addEventListener("change", drawProgress);
  drawProgress();
  applyTheme();
  showView(readView() ?? VIEWS[0]);
}

start();
