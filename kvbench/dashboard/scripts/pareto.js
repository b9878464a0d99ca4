// Plot of quality against memory: a point and interval per run, and the Pareto front.

/** Return the points of runs that have both numbers, by ascending cost. */
function listPoints(runs, name, axis) {
  const points = [];
  for (const run of runs) {
    const metric = findMetric(run, name);
    const x = costOf(run, axis);
    if (!metric || !Number.isFinite(x)) continue;
    const [low, high] = findInterval(metric) ?? [null, null];
    points.push({ run, x, y: metric.value, low, high, ...styleOf(run.label) });
  }
  return points.sort((a, b) => a.x - b.x);
}

/** Return the front of points of equal conditions: no other is at least as good at no higher cost. */
function findFront(points, better) {
  const sign = better === "higher" ? 1 : -1;
  const front = [];
  const ordered = [...points].sort((a, b) => a.x - b.x || sign * (b.y - a.y));
  for (const point of ordered) {
    if (!front.length || sign * (point.y - front.at(-1).y) > 0) front.push(point);
  }
  return front;
}

/** Return the ends of the x axis; a range below a tenth is widened, as rounding would look like a difference. */
function findRange(points) {
  const [low, high] = [points[0].x, points.at(-1).x];
  if (high - low >= 0.1 * Math.abs(high)) return [low, high];
  const centre = (low + high) / 2;
  return [0.95 * centre, 1.05 * centre];
}

/** Draw the plot into `box`; `visit(run, how)` is called on hover and click. */
function drawPareto(box, runs, name, axis, visit) {
  const points = name ? listPoints(runs, name, axis) : [];
  if (!points.length) {
    box.replaceChildren(make("p", { class: "empty" }, "No shown run has both numbers."));
    return;
  }
  const { better, unit } = DOC.metrics[name];
  const fronts = [...d3.group(points, ({ run }) => run.conditions).values()].map((own) => findFront(own, better));
  const front = fronts.flat();
  const width = Math.max(280, box.clientWidth || 800);
  const narrow = width < 560;
  const [low, high] = findRange(points);
  const log = low > 0 && high / low > 4;
  const certain = points.filter((point) => point.low !== null);
  const plot = Plot.plot({
    width,
    height: narrow ? 300 : 400,
    marginLeft: 52,
    marginRight: narrow ? 16 : 90,
    marginBottom: 40,
    marginTop: 26,
    x: {
      type: log ? "log" : "linear",
      domain: [low, high],
      label: AXES[axis],
      grid: false,
      ...chooseTicks(low, high, log, narrow ? 4 : 8),
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
      ...fronts.map((own) =>
        Plot.line([...own, { x: high, y: own.at(-1).y }], {
          x: "x",
          y: "y",
          curve: "step-after",
          stroke: "currentColor",
          strokeOpacity: 0.35,
          strokeDasharray: "2 3",
        }),
      ),
      Plot.ruleX(certain, {
        x: "x",
        y1: "low",
        y2: "high",
        stroke: "colour",
        strokeWidth: 1.5,
        strokeOpacity: 0.55,
        className: "bars",
      }),
      Plot.dot(points, {
        x: "x",
        y: "y",
        fill: "colour",
        fillOpacity: 0.85,
        stroke: "var(--card)",
        strokeWidth: 1,
        symbol: "sign",
        r: 5.5,
        className: "dots",
      }),
      ...(narrow
        ? []
        : front.map((point, i) =>
            Plot.text([point], {
              x: "x",
              y: "y",
              text: [point.run.label],
              fill: "colour",
              stroke: "var(--card)",
              strokeWidth: 3,
              className: `names-${i}`,
            }),
          )),
      Plot.dot(points, { x: "x", y: "y", r: 8, fill: "transparent", symbol: "circle", className: "hits" }),
    ],
  });
  for (const [i, point] of front.entries()) tie(plot, `.names-${i} text`, [point], "mark");
  tie(plot, ".bars line", certain, "mark");
  tie(plot, ".dots path", points, "mark");
  for (const [i, hit] of tie(plot, ".hits path, .hits circle", points, "hit").entries())
    listen(hit, points[i], name, axis, visit);
  box.replaceChildren(plot);
  placeNames([...plot.querySelectorAll("text.mark")], [...plot.querySelectorAll("path.mark, line.mark")]);
}

/** Return ticks of the x axis: round numbers inside its range with distinct labels. */
function chooseTicks(low, high, log, count) {
  const scale = log ? d3.scaleLog([low, high], [0, 1]) : d3.scaleLinear([low, high], [0, 1]);
  let ticks = scale.ticks(count);
  if (log && ticks.length > count) {
    const leading = (value) => Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9));
    ticks = [
      [1, 2, 5],
      [1, 3],
      [1],
    ].reduce(
      (kept, digits) =>
        kept.length > count ? ticks.filter((value) => digits.includes(leading(value))) : kept,
      ticks,
    );
  }
  const write = (value, digits) => String(Number(value.toPrecision(digits)));
  let digits = 3;
  while (digits < 12 && new Set(ticks.map((value) => write(value, digits))).size < ticks.length) digits += 1;
  return { ticks, tickFormat: (value) => write(value, digits) };
}

/** Move each name next to its point where it covers no other name, point or bar; otherwise remove it. */
function placeNames(names, marks) {
  const taken = marks.map((mark) => mark.getBoundingClientRect());
  const covers = (box, dx, dy) =>
    taken.some(
      (other) =>
        box.right + dx > other.left - 1 &&
        box.left + dx < other.right + 1 &&
        box.bottom + dy > other.top &&
        box.top + dy < other.bottom,
    );
  for (const name of names.reverse()) {
    const box = name.getBoundingClientRect();
    const aside = box.width / 2 + 11;
    const places = [12, 21].flatMap((far) => [
      [0, -far],
      [aside, 0],
      [-aside, 0],
      [aside, -far],
      [-aside, -far],
      [0, far],
    ]);
    const found = places.find(([dx, dy]) => !covers(box, dx, dy));
    if (!found) {
      name.remove();
      continue;
    }
    const [dx, dy] = found;
    name.setAttribute("transform", `${name.getAttribute("transform") ?? ""} translate(${dx},${dy})`);
    taken.push(name.getBoundingClientRect());
  }
}

/** Make a point respond to hover, keyboard and click. */
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

/** Give the elements of points a class and the number of their run; return them. */
function tie(plot, selector, points, name) {
  const found = [...plot.querySelectorAll(selector)];
  for (const [index, element] of found.entries()) {
    element.setAttribute("class", name);
    element.dataset.run = points[index].run.number;
  }
  return found;
}
