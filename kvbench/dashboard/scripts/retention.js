// Retention maps: the share of each source that each head kept, by source or by layer.

const STEPS = 65535;
const LEAST = 0.001; // share from which colours differ, as the template's scale
let maps = [];

/** Return a run's shares by layer, head and source. */
function unpack(retention) {
  const bytes = Uint8Array.from(atob(retention.kept), (letter) => letter.charCodeAt(0));
  const shares = new Uint16Array(bytes.buffer);
  const [, heads, sources] = retention.shape;
  return (layer, head, source) => shares[(layer * heads + head) * sources + source] / STEPS;
}

/** Return the maps of a run: title, size, and the share for each column and row. */
function listMaps(retention, panels) {
  const share = unpack(retention);
  const [layers, heads, sources] = retention.shape;
  if (panels === "layer") {
    return d3.range(layers).map((layer) => ({
      title: `layer ${layer}`,
      columns: heads,
      rows: sources,
      at: (head, source) => share(layer, head, source),
      tell: (head, source) => `layer ${layer}, KV head ${head}, source ${retention.sources[source]}`,
    }));
  }
  return d3.range(sources).map((source) => ({
    title: retention.sources[source],
    tokens: retention.tokens[source],
    columns: heads,
    rows: layers,
    at: (head, layer) => share(layer, head, source),
    tell: (head, layer) =>
      `layer ${layer}, KV head ${head}, source ${retention.sources[source]} of ${retention.tokens[source]} tokens`,
  }));
}

function drawRetention() {
  const able = RUNS.filter((run) => run.retention);
  fillSelect(
    byId("kept"),
    listRuns(able),
    (able.find((run) => run.number === board.chosen) ?? able.find((run) => run.method !== "full") ?? able[0])
      ?.number,
  );
  const run = RUNS[byId("kept").value];
  byId("maps").replaceChildren();
  byId("cell").textContent = run?.retention.kept
    ? "Point at a cell, or use the arrow keys in a map, to read it."
    : "";
  byId("keptTitle").textContent = run ? `${run.label}, ${formatBudget(run)}` : "Retention";
  if (!run?.retention.kept) {
    maps = [];
    byId("maps").append(
      make("p", { class: "empty" }, run ? run.retention.reason : "No run here has a retention.json."),
    );
    byId("keptNote").textContent = "";
    return;
  }
  const { shape, segment, prompts } = run.retention;
  maps = listMaps(run.retention, byId("panels").value);
  const axes =
    byId("panels").value === "layer"
      ? "columns are KV heads, rows sources"
      : "columns are KV heads, rows layers from the top";
  byId("keptNote").textContent =
    `Share of each source's tokens that a head still holds when segment ${segment} runs, ` +
    `a mean over ${prompts} prompts; ${shape[0]} layers, ${shape[1]} KV heads; ${axes}. All digits: `;
  byId("keptNote").append(linkTo(run, "retention.json", "retention.json"));
  byId("maps").append(...maps.map(makeMap));
  paintMaps();
}

function makeMap(map) {
  const mean = d3.mean(d3.cross(d3.range(map.columns), d3.range(map.rows), map.at));
  const canvas = make("canvas", {
    tabindex: "0",
    role: "img",
    "aria-label": `${map.title}: ${format(100 * mean, 1)} % kept on average; arrow keys read cells`,
  });
  const place = { column: 0, row: 0 };
  const tell = (column, row) => {
    if (column < 0 || row < 0 || column >= map.columns || row >= map.rows) return;
    Object.assign(place, { column, row });
    byId("cell").replaceChildren(
      make("b", {}, `${format(100 * map.at(column, row), 1)} %`),
      ` kept: ${map.tell(column, row)}`,
    );
    paint(canvas, map, place);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    tell(
      Math.floor(((event.clientX - box.left) / box.width) * map.columns),
      Math.floor(((event.clientY - box.top) / box.height) * map.rows),
    );
  });
  canvas.addEventListener("pointerleave", () => paint(canvas, map, null));
  canvas.addEventListener("blur", () => paint(canvas, map, null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    tell(place.column + step[0], place.row + step[1]);
  });
  canvas.style.aspectRatio = `${map.columns} / ${map.rows}`;
  map.canvas = canvas;
  const tokens = map.tokens === undefined ? "" : ` of ${map.tokens}`;
  return make(
    "figure",
    {},
    make("figcaption", {}, map.title, make("span", { class: "dim" }, `${format(100 * mean, 0)} %${tokens}`)),
    canvas,
  );
}

function paintMaps() {
  for (const map of maps) paint(map.canvas, map, null);
}

/** Return the place of a share among the colours, on a logarithmic scale: methods differ where shares are small. */
function findShade(share) {
  return share <= LEAST ? 0 : 1 - Math.log(share) / Math.log(LEAST);
}

/** Draw a map at screen resolution; the cell at `place`, if any, gets a frame. */
function paint(canvas, map, place) {
  if (!canvas.clientWidth) return;
  const ramp = d3.interpolateRgbBasis(
    styleColour("--map")
      .split(",")
      .map((colour) => colour.trim()),
  );
  [canvas.width, canvas.height] = [canvas.clientWidth, canvas.clientHeight].map((size) =>
    Math.round(size * devicePixelRatio),
  );
  const pen = canvas.getContext("2d");
  const [x, y] = [
    (column) => Math.round((column * canvas.width) / map.columns),
    (row) => Math.round((row * canvas.height) / map.rows),
  ];
  const gap = Math.min(x(1), y(1)) > 5 ? 1 : 0;
  for (let row = 0; row < map.rows; row += 1) {
    for (let column = 0; column < map.columns; column += 1) {
      pen.fillStyle = ramp(findShade(map.at(column, row)));
      pen.fillRect(x(column), y(row), x(column + 1) - x(column) - gap, y(row + 1) - y(row) - gap);
    }
  }
  if (!place) return;
  const { column, row } = place;
  pen.strokeStyle = styleColour("--bad");
  pen.lineWidth = 2 * devicePixelRatio;
  pen.strokeRect(x(column), y(row), x(column + 1) - x(column) - gap, y(row + 1) - y(row) - gap);
}

/** Show the retention of a run. */
function visitRetention(run) {
  showView("retention");
  byId("kept").value = run.number;
  drawRetention();
}

function startRetention() {
  for (const id of ["kept", "panels"]) byId(id).addEventListener("change", drawRetention);
  new ResizeObserver(paintMaps).observe(byId("maps"));
  redraws.push(paintMaps);
}
