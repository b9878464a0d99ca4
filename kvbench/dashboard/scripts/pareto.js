// Quality against memory: a point per run with its interval, and the front of those that no other run beats.

/** The points of some runs that have both numbers, by ascending cost. */
function listPoints(runs, name, axis) {
  const points = [];
  for (const run of runs) {
    const metric = findMetric(run, name);
    const x = COSTS[axis].value(run);
    if (!metric || !Number.isFinite(x)) continue;
    const [low, high] = findInterval(metric) ?? [null, null];
    points.push({ run, x, y: metric.value, low, high, ...styleOf(run.label) });
  }
  return points.sort((a, b) => a.x - b.x);
}

/** The points that no other beats: none is at least as good at no higher cost. */
function findFront(points, better) {
  const sign = better === "higher" ? 1 : -1;
  const front = [];
  const ordered = [...points].sort((a, b) => a.x - b.x || sign * (b.y - a.y));
  for (const point of ordered) {
    if (!front.length || sign * (point.y - front.at(-1).y) > 0) front.push(point);
  }
  return front;
}

const MOST_SPREAD = 150; // points beyond which they stay where they are: side by side they would only blur

/** Set points that would lie on each other side by side: `shift` is in pixels. */
function spreadPoints(points, near) {
  if (points.length > MOST_SPREAD) {
    for (const point of points) point.shift = 0;
    return;
  }
  const clusters = [];
  for (const point of points) {
    if (clusters.length && near(clusters.at(-1)[0].x, point.x)) clusters.at(-1).push(point);
    else clusters.push([point]);
  }
  for (const cluster of clusters) {
    const step = Math.min(10, 60 / cluster.length);
    for (const [i, point] of cluster.sort((a, b) => a.run.label.localeCompare(b.run.label)).entries()) {
      point.shift = step * (i - (cluster.length - 1) / 2);
    }
  }
}

/** Draw the plot into `box`; `visit(run, how)` is told what is pointed at (hover) and chosen (click). */
function drawPareto(box, runs, name, axis, visit) {
  const points = name ? listPoints(runs, name, axis) : [];
  if (!points.length) {
    box.replaceChildren(make("p", { class: "empty" }, "No run shown here has both numbers."));
    return;
  }
  const { better, unit } = DOC.metrics[name];
  const front = findFront(points, better);
  const width = Math.max(280, box.clientWidth || 800);
  const narrow = width < 560;
  const [least, most] = [points[0].x, points.at(-1).x];
  const log = least > 0 && most / least > 4;
  spreadPoints(
    points,
    (a, b) => (log ? Math.log(b / a) / Math.log(most / least) : (b - a) / (most - least || 1)) < 0.012,
  );
  const groups = [...groupBy(points, (point) => point.shift)].map(([dx, own]) => ({
    dx,
    own,
    certain: own.filter((point) => point.low !== null),
  }));
  const line = [...front, { x: most, y: front.at(-1).y }];
  const plot = Plot.plot({
    width,
    height: narrow ? 300 : 400,
    marginLeft: 52,
    marginRight: narrow ? 16 : 90,
    marginBottom: 40,
    marginTop: 26,
    x: {
      type: log ? "log" : "linear",
      label: AXES[axis],
      nice: !log,
      grid: false,
      tickFormat: (value) => String(Number(value.toPrecision(3))),
      ticks: narrow ? 4 : 8,
      insetLeft: 40,
      insetRight: 40,
    },
    y: {
      label: `${name}${unit ? `, ${unit}` : ""} (${better} is better)`,
      grid: true,
      nice: true,
      ticks: 6,
      labelArrow: better === "higher" ? "up" : "down",
    },
    color: { type: "identity" },
    marks: [
      Plot.line(line, {
        x: "x",
        y: "y",
        curve: "step-after",
        stroke: "currentColor",
        strokeOpacity: 0.35,
        strokeDasharray: "2 3",
      }),
      ...groups.map(({ dx, certain }, i) =>
        Plot.ruleX(certain, {
          dx,
          x: "x",
          y1: "low",
          y2: "high",
          stroke: "colour",
          strokeWidth: 1.5,
          strokeOpacity: 0.55,
          className: `bars-${i}`,
        }),
      ),
      ...groups.map(({ dx, own }, i) =>
        Plot.dot(own, {
          dx,
          x: "x",
          y: "y",
          fill: "colour",
          stroke: "var(--card)",
          strokeWidth: 1,
          symbol: "sign",
          r: 5.5,
          className: `dots-${i}`,
        }),
      ),
      ...(narrow
        ? []
        : front.map((point, i) =>
            Plot.text([point], {
              x: "x",
              y: (one) => one.high ?? one.y,
              text: [point.run.label],
              dx: point.shift,
              dy: -9,
              fill: "colour",
              stroke: "var(--card)",
              strokeWidth: 3,
              className: `names-${i}`,
            }),
          )),
      ...groups.map(({ dx, own }, i) =>
        Plot.dot(own, {
          dx,
          x: "x",
          y: "y",
          r: 12,
          fill: "transparent",
          symbol: "circle",
          className: `hits-${i}`,
        }),
      ),
    ],
  });
  for (const [i, point] of front.entries()) tie(plot, `.names-${i} text`, [point], "mark");
  for (const [i, { own, certain }] of groups.entries()) {
    tie(plot, `.bars-${i} line`, certain, "mark");
    tie(plot, `.dots-${i} path`, own, "mark");
    for (const [j, hit] of tie(plot, `.hits-${i} path, .hits-${i} circle`, own, "hit").entries())
      listen(hit, own[j], name, axis, visit);
  }
  box.replaceChildren(plot);
  hideOverlaps([...plot.querySelectorAll("text.mark")]);
}

/** Hide names that would lie on others; the best of each pair stays. */
function hideOverlaps(names) {
  const shown = [];
  for (const name of names.reverse()) {
    const box = name.getBoundingClientRect();
    const free = shown.every(
      (other) =>
        box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom,
    );
    if (free) shown.push(box);
    else name.remove();
  }
}

/** Let a point be pointed at, reached by keyboard, and chosen. */
function listen(hit, { run, x, y, low, high }, name, axis, visit) {
  const ends = low === null ? "" : `, interval ${low} to ${high}`;
  hit.setAttribute("tabindex", "0");
  hit.setAttribute("role", "button");
  hit.setAttribute(
    "aria-label",
    `${run.label}, ${formatBudget(run)}: ${name} ${y}${ends}; ${AXES[axis]} ${x}`,
  );
  for (const on of ["pointerenter", "focus"]) hit.addEventListener(on, () => visit(run, "hover"));
  for (const off of ["pointerleave", "blur"]) hit.addEventListener(off, () => visit(null, "hover"));
  hit.addEventListener("click", () => visit(run, "choose"));
  hit.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      visit(run, "choose");
    }
  });
}

/** Give elements of a plot, in the order of their points, a class and the number of their run; return them. */
function tie(plot, selector, points, name) {
  const found = [...plot.querySelectorAll(selector)];
  for (const [index, element] of found.entries()) {
    element.setAttribute("class", name);
    element.dataset.run = points[index].run.number;
  }
  return found;
}
