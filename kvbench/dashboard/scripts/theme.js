// Light, dark, or as the system has it; and the colour and sign of every method, the same in all views.

const THEMES = ["auto", "light", "dark"];
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b5559a", "#b97b00", "#3f9fd8"];
const DARK = ["#4aa3df", "#ff8a4c", "#2fc79b", "#e79acb", "#f0b429", "#9bd8ff"];
const SIGNS = ["circle", "square", "triangle", "diamond", "star", "cross", "wye"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const redraws = [];
let theme = readTheme();

function readTheme() {
  try {
    return THEMES.includes(localStorage.getItem("kvbench-theme"))
      ? localStorage.getItem("kvbench-theme")
      : "auto";
  } catch {
    return "auto"; // some browsers keep nothing for files
  }
}

/** Whether the page is dark now. */
function isDark() {
  return theme === "dark" || (theme === "auto" && systemDark.matches);
}

/** Put the theme into force; everything that draws with colours of its own draws again. */
function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  byId("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
  for (const redraw of redraws) redraw();
}

/** Go to the next theme. */
function turnTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("kvbench-theme", theme);
  } catch {
    // it holds until the page is closed
  }
  applyTheme();
}

const LABELS = [...new Set(RUNS.map((run) => run.label))].sort();
const COMPRESSED = LABELS.filter((label) => label !== "full");

/** Colour and sign of a method's label; the full cache is drawn in ink. */
function styleOf(label) {
  const place = COMPRESSED.indexOf(label);
  if (place < 0) return { colour: styleColour("--ink"), sign: "circle" };
  const colours = isDark() ? DARK : LIGHT;
  // One sign more than colours: 42 pairs.
  return { colour: colours[place % colours.length], sign: SIGNS[place % SIGNS.length] };
}

/** A small picture of a method's sign in its colour. */
function makeSwatch(label) {
  const { colour, sign } = styleOf(label);
  const kinds = {
    circle: d3.symbolCircle,
    square: d3.symbolSquare,
    triangle: d3.symbolTriangle,
    diamond: d3.symbolDiamond,
    star: d3.symbolStar,
    wye: d3.symbolWye,
    cross: d3.symbolCross,
  };
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({
    class: "swatch",
    width: 11,
    height: 11,
    viewBox: "-6 -6 12 12",
    "aria-hidden": "true",
  })) {
    svg.setAttribute(name, value);
  }
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", d3.symbol(kinds[sign], 64)());
  path.setAttribute("fill", colour);
  svg.append(path);
  return svg;
}
