// Paired differences between two runs of the same samples, with their 95 % intervals.

const columnsOfRuns = new Map();

/** Return the values of a metric for all samples of a run, float32; null if the page lacks them. */
function readColumn(run, name) {
  const packed = run.samples.columns?.[name];
  if (!packed) return null;
  const key = `${run.number} ${name}`;
  if (!columnsOfRuns.has(key)) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    columnsOfRuns.set(key, new Float32Array(bytes.buffer));
  }
  return columnsOfRuns.get(key);
}

/** Return whether two runs have the same samples: prompts, seeds and number. */
function areSameSamples(run, base) {
  return run.model === base.model && run.samples.drawn === base.samples.drawn;
}

/**
 * Return the mean difference of a metric, run minus base, as {value, half, n}; null if there is none.
 *
 * Samples without a value in either run are left out. `half` is half of the 95 % interval: the standard error over
 * prompts times the quantile of Student's distribution; null below two prompts.
 */
function findDifference(run, base, name) {
  if (run.number === base.number || !areSameSamples(run, base)) return null;
  const [own, other] = [readColumn(run, name), readColumn(base, name)];
  if (!own || !other) return null;
  const sums = new Map();
  for (const [index, [prompt]] of shared(run.samples.drawn).entries()) {
    const change = own[index] - other[index];
    if (!Number.isFinite(change)) continue;
    const sum = sums.get(prompt) ?? { total: 0, count: 0 };
    sums.set(prompt, { total: sum.total + change, count: sum.count + 1 });
  }
  const groups = [...sums.values()];
  const n = d3.sum(groups, (group) => group.count);
  if (!n) return null;
  const value = d3.sum(groups, (group) => group.total) / n;
  if (groups.length < 2) return { value, half: null, n };
  const squares = d3.sum(groups, ({ total, count }) => (total - count * value) ** 2);
  const error = Math.sqrt((squares * groups.length) / (groups.length - 1)) / n;
  return { value, half: quantile(groups.length) * error, n };
}

/** Return the 97.5 % quantile of Student's distribution for a number of prompts. */
function quantile(count) {
  return DOC.quantiles[Math.min(count - 2, DOC.quantiles.length - 1)];
}

/** Return the cell of a difference: signed, bold if its interval excludes zero on the better side. */
function makeDifference(run, base, name) {
  if (run.number === base.number) return make("span", { class: "dim" }, "base");
  const { digits, better } = readMetric(run, name) ?? {};
  const found = run.merged ? null : findDifference(run, base, name);
  if (!found) return makeNothing();
  const sign = better === "higher" ? 1 : -1;
  return makeNumber(formatSigned(found.value, digits), () => openDifference(run, base, name, found), {
    more: found.half === null ? "" : `±${format(found.half, digits)}`,
    best: found.half !== null && sign * found.value > found.half,
  });
}

function formatSigned(value, digits) {
  return `${value > 0 ? "+" : ""}${format(value, digits)}`;
}

/** Show the provenance of a difference. */
function openDifference(run, base, name, { value, half, n }) {
  const metric = readMetric(run, name);
  openDrawer(
    `${nameMetric(name)}, ${run.label} minus ${base.label}`,
    makeFigure(
      formatSigned(value, metric.digits),
      metric.unit,
      half === null ? null : `95 % interval ${format(value - half, metric.digits)} to ${format(value + half, metric.digits)}`,
    ),
    makeFacts("Difference", [
      ["samples", `${n} with a value in both runs`],
      ["interval by", "Student's t over the mean differences of the prompts; task=report against= bootstraps them"],
      [run.label, `${formatBudget(run)}, ${format(findMetric(run, name).value, metric.digits)}`],
      [base.label, `${formatBudget(base)}, ${format(findMetric(base, name).value, metric.digits)}`],
      ["base's folder", base.folder, true],
    ]),
    ...describeRun(run),
  );
}
