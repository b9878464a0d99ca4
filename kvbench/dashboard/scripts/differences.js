// Paired differences to a method at the same model, prompts, seed and budget, with the report's 95 % intervals.

const columnsOfRuns = new Map();
const partners = new Map(); // runs by label and place
const intervals = new Map(); // by runs and metric

/** Return the values of a metric for all samples of a run, float32; null if the page lacks them. */
function readColumn(run, name) {
  const packed = run.samples.columns?.[name];
  if (!packed) return null;
  const key = `${run.number} ${name}`;
  if (!columnsOfRuns.has(key)) {
    columnsOfRuns.set(key, unpackFloats(packed));
  }
  return columnsOfRuns.get(key);
}

/** Return 32-bit floats in base64. */
function unpackFloats(packed) {
  return new Float32Array(Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0)).buffer);
}

/** Return whether two runs have the same samples: prompts, seeds and number. */
function areSameSamples(run, base) {
  return run.model === base.model && run.samples.drawn === base.samples.drawn;
}

/** Return what paired runs share: model, reference, prompts, seed and budget. */
function placeOf(run) {
  return JSON.stringify([run.model, run.reference, run.samples.drawn, run.budget.toPrecision(6), run.unit]);
}

/** Return the runs with which a run is compared: its reference, or a method's runs at its place, of its calibration. */
function findBases(run, label) {
  const reference = RUNS[run.reference];
  if (reference?.label === label) return areSameSamples(run, reference) ? [reference] : [];
  if (!partners.size)
    for (const one of RUNS) {
      const key = `${one.label} ${placeOf(one)}`;
      const latest = partners.get(key) ?? new Map();
      const seeds = one.seeds.join();
      if (!(latest.get(seeds)?.finished > one.finished)) latest.set(seeds, one);
      partners.set(key, latest);
    }
  const others = [...(partners.get(`${label} ${placeOf(run)}`)?.values() ?? [])];
  const same = others.filter((base) => base.seeds[1] === run.seeds[1]);
  return same.length ? same : others;
}

/**
 * Return the pairs of a row: a run and its partner, or the runs of a mean and theirs; none if a run has none.
 *
 * Where seeds change no sample on both sides, one pair says all.
 */
function findPairs(row, label) {
  const pairs = listMembers(row).map((run) => findBases(run, label).map((base) => [run, base]));
  const found = pairs.every((own) => own.length) && (row.merged || pairs[0].length === 1) ? pairs.flat() : [];
  return found.every(([run, base]) => run.equal && base.equal) ? found.slice(0, 1) : found;
}

/** Return the paired samples of two runs: differences, clusters, strata, and whether they are of answers. */
function pairSamples(run, base, name) {
  const [own, other] = [readColumn(run, name), readColumn(base, name)];
  if (!own || !other) return null;
  const strata = run.samples.strata?.[name];
  const groups = strata === undefined ? null : shared(strata);
  const answers = Boolean(readMetric(run, name).answers);
  const found = { index: [], values: [], clusters: [], strata: groups && [], answers };
  for (const [index, [prompt]] of shared(run.samples.drawn).entries()) {
    const change = own[index] - other[index];
    if (!Number.isFinite(change)) continue;
    found.index.push(index);
    found.values.push(change);
    found.clusters.push(prompt);
    found.strata?.push(groups[index]);
    found.answers &&= [own[index], other[index]].every((value) => [-1, 0, 1].includes(value));
  }
  return found.values.length ? found : null;
}

/** Return the mean of values, or the mean of the means of strata. */
function averageStrata(values, strata) {
  if (!strata) return d3.mean(values);
  const groups = d3.group(d3.range(values.length), (i) => strata[i]);
  return d3.mean(groups.values(), (places) => d3.mean(places, (i) => values[i]));
}

/** Return the mean difference of a metric as {value, n, pairs}; null if there is none. */
function findDifference(row, label, name) {
  const pairs = findPairs(row, label);
  if (!pairs.length || pairs.some(([run, base]) => run.number === base.number)) return null;
  const samples = pairs.map(([run, base]) => pairSamples(run, base, name));
  if (samples.includes(null)) return null;
  const common = keepCommon(samples);
  if (!common[0].values.length) return null;
  const value = d3.mean(common, ({ values, strata }) => averageStrata(values, strata));
  return { value, n: common[0].values.length, pairs, samples: common };
}

/** Keep the samples that all pairs have, as means over seeds do. */
function keepCommon(samples) {
  if (samples.length === 1) return samples;
  const counts = d3.rollup(samples.flatMap(({ index }) => index), (own) => own.length, (index) => index);
  return samples.map((one) => {
    const places = d3.range(one.index.length).filter((i) => counts.get(one.index[i]) === samples.length);
    const keep = (list) => list && places.map((i) => list[i]);
    return { ...one, values: keep(one.values), clusters: keep(one.clusters), strata: keep(one.strata) };
  });
}

/** Return the 95 % interval of a difference, computed once; null below two prompts. */
function findDifferenceInterval({ pairs, samples }, name) {
  const key = `${name} ${pairs.map(([run, base]) => `${run.number}-${base.number}`).join(" ")}`;
  if (!intervals.has(key)) {
    const one = () => cutDifference(surroundPrompts(samples[0]), DOC.metrics[name].range);
    intervals.set(key, samples.length === 1 ? one() : surroundSeeds(pairs, samples, name));
  }
  return intervals.get(key);
}

/** Return the interval over prompts of differences, right and wrong answers by their own rule. */
function surroundPrompts({ values, clusters, strata, answers }) {
  const find = answers ? changeInterval : bootstrap;
  if (!strata) return find(values, clusters);
  const groups = [...d3.group(d3.range(values.length), (i) => strata[i]).values()];
  const pick = (list, places) => places.map((i) => list[i]);
  return combineIntervals(
    groups.map((places) => d3.mean(places, (i) => values[i])),
    groups.map((places) => find(pick(values, places), pick(clusters, places))),
  );
}

/** Return the interval over prompts and seeds of several pairs. */
function surroundSeeds(pairs, samples, name) {
  const [{ clusters, strata }] = samples;
  const table = tabulate(samples.map(({ values }) => values), clusters, strata);
  const choices = pairs.map(([run, base]) => [run.seeds[0], run.seeds[1], base.seeds[1]]);
  const found = surroundMean(table, choices, DOC.metrics[name].range);
  const isChange = ({ answers, values }) => answers && values.every((value) => Math.abs(value) <= 1);
  if (!found || !samples.every(isChange)) return found;
  // Equal answers have no variance; the interval over prompts has a width.
  const all = (key) => samples[0][key] && d3.range(clusters.length).flatMap((i) => samples.map((one) => one[key][i]));
  const change = surroundPrompts({ values: all("values"), clusters: all("clusters"), strata: all("strata"), answers: true });
  return change && found[1] - found[0] <= change[1] - change[0] ? change : found;
}

/** Return the cell of a difference: signed, with its interval; bold if the interval excludes zero on the better side. */
function makeDifference(row, label, name) {
  if (row.label === label) return make("span", { class: "dim" }, "base");
  const { digits, better } = DOC.metrics[name];
  const found = findDifference(row, label, name);
  if (!found) return makeNothing();
  const ends = findDifferenceInterval(found, name);
  return makeNumber(formatSigned(found.value, digits), {
    more: ends ? formatEnds(ends, digits) : "",
    best: ends !== null && (better === "higher" ? ends[0] > 0 : ends[1] < 0),
  });
}

function formatSigned(value, digits) {
  return `${Number(value.toFixed(digits)) > 0 ? "+" : ""}${format(value, digits)}`;
}

function formatEnds([low, high], digits) {
  return `[${format(low, digits)}, ${format(high, digits)}]`;
}
