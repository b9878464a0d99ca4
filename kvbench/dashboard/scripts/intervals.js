// 95 % intervals of differences as kvbench/eval/protocol has them, with the same resamples.

const RESAMPLES = 2000;
const NORMAL = 1.959964; // 97.5 % quantile of the normal distribution
const MANY = 50; // clusters from which it replaces Student's
const MAX_DRAWN = 2 ** 25; // numbers of resampled clusters that are kept
const drawnClusters = new Map();

/** Return half the width of an interval in standard errors, for so many clusters (which may be fractional). */
function findQuantile(clusters) {
  if (clusters >= MANY) return NORMAL;
  const { first, step, logarithms } = DOC.quantiles; // by the inverse of the degrees of freedom
  const place = (1 / (clusters - 1) - first) / step;
  const left = Math.max(0, Math.min(Math.floor(place), logarithms.length - 2));
  return Math.exp(logarithms[left] + (place - left) * (logarithms[left + 1] - logarithms[left]));
}

/** Return NumPy's default generator (PCG64) in the page's state, as a function that returns 32 bits. */
function makeGenerator() {
  const split = (text) => Uint16Array.from({ length: 8 }, (_, i) => Number((BigInt(text) >> BigInt(16 * i)) & 65535n));
  const [factor, increment] = [split("0x2360ed051fc65da44385df649fccf645"), split(DOC.generator.inc)];
  let [state, next] = [split(DOC.generator.state), new Uint16Array(8)];
  let kept = null;
  return () => {
    if (kept !== null) {
      const value = kept;
      kept = null;
      return value;
    }
    let carry = 0;
    for (let i = 0; i < 8; i += 1) {
      carry += increment[i];
      for (let j = 0; j <= i; j += 1) carry += state[j] * factor[i - j];
      next[i] = carry; // modulo 2^16
      carry = Math.floor(carry / 65536);
    }
    [state, next] = [next, state];
    let low = (state[0] ^ state[4]) | ((state[1] ^ state[5]) << 16);
    let high = (state[2] ^ state[6]) | ((state[3] ^ state[7]) << 16);
    const turn = state[7] >> 10;
    if (turn & 32) [low, high] = [high, low];
    const shift = turn & 31;
    if (shift) {
      const [a, b] = [low, high];
      low = (a >>> shift) | (b << (32 - shift));
      high = (b >>> shift) | (a << (32 - shift));
    }
    kept = high >>> 0;
    return low >>> 0;
  };
}

/** Return the clusters of each resample, [resamples x clusters], as NumPy's `integers` draws them. */
function drawClusters(count) {
  if (drawnClusters.has(count)) return drawnClusters.get(count);
  if (d3.sum(drawnClusters.values(), (one) => one.length) > MAX_DRAWN) drawnClusters.clear();
  const [draw, drawn] = [makeGenerator(), new Uint32Array(RESAMPLES * count)];
  const threshold = (2 ** 32 - count) % count;
  for (let i = 0; i < drawn.length; i += 1) {
    for (;;) {
      const product = draw() * count; // below 2^53
      if (product % 2 ** 32 < threshold) continue;
      drawn[i] = Math.floor(product / 2 ** 32);
      break;
    }
  }
  drawnClusters.set(count, drawn);
  return drawn;
}

/** Return the number of each item's cluster, from 0 in order of appearance. */
function numberClusters(clusters) {
  const numbers = new Map();
  return clusters.map((cluster) => {
    if (!numbers.has(cluster)) numbers.set(cluster, numbers.size);
    return numbers.get(cluster);
  });
}

/** Return sums and sizes of values by cluster. */
function sumClusters(values, clusters) {
  const members = [...d3.group(d3.range(values.length), (i) => clusters[i]).values()];
  return { sums: members.map((own) => d3.sum(own, (i) => values[i])), sizes: members.map((own) => own.length) };
}

/** Return the percentile bootstrap of a mean as [low, high], widened below 50 clusters; null below two. */
function bootstrap(values, clusters) {
  const { sums, sizes } = sumClusters(values, clusters);
  const count = sums.length;
  if (count < 2) return null;
  const drawn = drawClusters(count);
  const means = new Float64Array(RESAMPLES);
  for (let i = 0; i < RESAMPLES; i += 1) {
    let [sum, size] = [0, 0];
    for (let j = i * count; j < (i + 1) * count; j += 1) {
      sum += sums[drawn[j]];
      size += sizes[drawn[j]];
    }
    means[i] = sum / size;
  }
  means.sort();
  const ends = [0.025, 0.975].map((share) => d3.quantileSorted(means, share));
  if (count >= MANY) return ends;
  const centre = d3.mean(values);
  const factor = (Math.sqrt(count / (count - 1)) * findQuantile(count)) / NORMAL;
  return ends.map((end) => centre + factor * (end - centre));
}

/** Return the interval of a mean difference of right and wrong answers, by Agresti and Min; null below two clusters. */
function changeInterval(values, clusters) {
  const { sums, sizes } = sumClusters(values, clusters);
  if (sums.length < 2) return null;
  const size = values.length / sums.length;
  const count = values.length + 2 * size;
  const centre = d3.sum(values) / count;
  // The last summand is of the added pairs: halves of -1, 0, 0 and 1.
  const squares = d3.sum(sums, (sum, i) => (sum - centre * sizes[i]) ** 2) + size ** 2 * (1 + 2 * centre ** 2);
  const reach = (findQuantile(sums.length) * Math.sqrt(squares)) / count;
  return [Math.max(-1, centre - reach), Math.min(1, centre + reach)];
}

/** Return the interval of the mean of independent means, each with its interval; null if one is missing. */
function combineIntervals(means, intervals) {
  if (intervals.includes(null)) return null;
  const centre = d3.mean(means);
  const reach = (distance) => Math.hypot(...means.map(distance)) / means.length;
  return [
    centre - reach((mean, i) => mean - intervals[i][0]),
    centre + reach((mean, i) => intervals[i][1] - mean),
  ];
}
