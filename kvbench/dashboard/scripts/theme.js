// Light, dark or system theme, and the colour and symbol of each method in all views.

const THEMES = ["auto", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const redraws = [];
let theme = readTheme();

function readTheme() {
  try {
    return THEMES.includes(localStorage.getItem("kvbench-theme"))
      ? localStorage.getItem("kvbench-theme")
      : "auto";
  } catch {
    return "auto"; // some browsers have no storage for files
  }
}

/** Return whether the page is dark. */
function isDark() {
  return theme === "dark" || (theme === "auto" && systemDark.matches);
}

/** Apply the theme; views with their own colours are redrawn. */
function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  byId("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
  for (const redraw of redraws) redraw();
}

/** Switch to the next theme. */
function turnTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("kvbench-theme", theme);
  } catch {
    // without storage the theme lasts until the page is closed
  }
  applyTheme();
}

/** Return a symbol for d3 and Plot from the corners of a polygon in a square of side 2. */
function drawPolygon(corners) {
  return {
    draw(context, size) {
      const scale = Math.sqrt(size) / 1.8;
      for (const [i, [x, y]] of corners.entries()) context[i ? "lineTo" : "moveTo"](x * scale, y * scale);
      context.closePath();
    },
  };
}

const ARM = 0.36;
const TURNED_CROSS = [
  [0, -ARM], [1 - ARM, -1], [1, ARM - 1], [ARM, 0], [1, 1 - ARM], [1 - ARM, 1],
  [0, ARM], [ARM - 1, 1], [-1, 1 - ARM], [-ARM, 0], [-1, ARM - 1], [ARM - 1, -1],
]; // prettier-ignore
const SYMBOLS = {
  o: d3.symbolCircle,
  s: d3.symbolSquare,
  D: drawPolygon([[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]]),
  "^": drawPolygon([[0, -1.1], [1.1, 0.9], [-1.1, 0.9]]),
  v: drawPolygon([[0, 1.1], [1.1, -0.9], [-1.1, -0.9]]),
  P: d3.symbolCross,
  X: drawPolygon(TURNED_CROSS),
};

/** Return the colour and symbol of a method's label, as in the figures of task=report. */
function styleOf(label) {
  const { colour, marker } = DOC.styles[label];
  return { colour: DOC.palette[isDark() ? "dark" : "light"][colour], sign: SYMBOLS[marker] };
}

/** Return an icon of a method's symbol in its colour. */
function makeSwatch(label) {
  const { colour, sign } = styleOf(label);
  const svg = d3.create("svg").attr("class", "swatch").attr("aria-hidden", "true");
  svg.attr("width", 11).attr("height", 11).attr("viewBox", "-6 -6 12 12");
  svg.append("path").attr("d", d3.symbol(sign, 64)).attr("fill", colour);
  return svg.node();
}
