// Intervals of means over prompts and seeds, as kvbench/eval/protocol/crossed.py has them.

/** Return the interval of the mean of a table [clusters][runs] by two-way analysis of variance. */
function crossInterval(table) {
  const [rows, runs] = [table.length, table[0].length];
  const byRow = table.map((row) => d3.mean(row));
  const byRun = d3.range(runs).map((run) => d3.mean(table, (row) => row[run]));
  const mean = d3.mean(byRow);
  const spread = (values) => d3.sum(values, (value) => (value - mean) ** 2);
  const rest =
    d3.sum(table, (row, i) => d3.sum(row, (value, j) => (value - byRow[i] - byRun[j] + mean) ** 2)) /
    ((rows - 1) * (runs - 1));
  const ofRows = Math.max((runs * spread(byRow)) / (rows - 1), rest);
  const ofRuns = Math.max((rows * spread(byRun)) / (runs - 1), rest);
  const total = ofRows + ofRuns - rest;
  const uncertainty =
    ofRows ** 2 / (rows - 1) + ofRuns ** 2 / (runs - 1) + rest ** 2 / ((rows - 1) * (runs - 1));
  const own = uncertainty ? total ** 2 / uncertainty : rows - 1;
  const free = runs === 2 && ofRuns === rest ? rows - 1 : own;
  const reach = findQuantile(free + 1) * Math.sqrt(total / (rows * runs));
  return [mean - reach, mean + reach];
}

/** Return Student's interval of the mean of a table over its clusters alone. */
function promptsInterval(table) {
  const means = table.map((row) => d3.mean(row));
  const reach = (findQuantile(means.length) * d3.deviation(means)) / Math.sqrt(means.length);
  return [d3.mean(means) - reach, d3.mean(means) + reach];
}

/** Return a table [clusters][runs] whose column means are the means of runs, each the mean of strata's means. */
function tabulate(columns, clusters, strata) {
  const [members, groups] = [numberClusters(clusters), numberClusters(strata ?? clusters.map(() => null))];
  const sizes = d3.rollup(groups, (own) => own.length, (group) => group);
  const count = d3.max(members) + 1;
  const table = d3.range(count).map(() => []);
  for (const [run, values] of columns.entries()) {
    const places = d3.group(d3.range(values.length), (i) => groups[i]);
    const means = new Map([...places].map(([group, own]) => [group, d3.mean(own, (i) => values[i])]));
    for (const row of table) row[run] = d3.mean(means.values());
    for (const [i, value] of values.entries())
      table[members[i]][run] += (count * (value - means.get(groups[i]))) / (sizes.size * sizes.get(groups[i]));
  }
  return table;
}

/**
 * Return the interval of a mean difference over prompts and seeds; null below two prompts.
 *
 * `choices` are the seeds of each run: of its noise, its calibration and its partner's calibration. The widest interval
 * over one kind counts. Where it is wider than the range of differences, the one over prompts replaces it.
 */
function surroundMean(table, choices, range) {
  if (table.length < 2) return null;
  const kinds = d3.transpose(choices)
    .map((kind) => d3.group(d3.range(kind.length), (run) => kind[run]))
    .filter((levels) => levels.size > 1);
  const average = (levels) => table.map((row) => [...levels.values()].map((own) => d3.mean(own, (run) => row[run])));
  const intervals = (kinds.length ? kinds.map(average) : [table]).map(crossInterval);
  const widest = d3.greatest(intervals, ([low, high]) => high - low);
  if (!range) return widest;
  const width = range[1] - range[0];
  const [low, high] = widest[1] - widest[0] > 2 * width ? promptsInterval(table) : widest;
  return cutDifference([low, high], range);
}

/** Return an interval of differences, cut at the largest that the metric's range allows. */
function cutDifference(ends, range) {
  if (!ends || !range) return ends;
  const width = range[1] - range[0];
  return [Math.max(ends[0], -width), Math.min(ends[1], width)];
}
