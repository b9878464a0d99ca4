// Numbers of a run that are no metrics: what its cache held and how long it took.
// Those that are `shown` are columns of the leaderboard by themselves, others on request.

const COSTS = {
  budget: {
    title: "budget",
    unit: "% of the full cache",
    digits: 2,
    field: "memory.budget_tokens",
    about: "Capacity that held tokens, or bytes, may not exceed after any layer of any segment.",
    value: (run) => 100 * run.budget,
  },
  byte_share: {
    shown: true,
    title: "memory %",
    unit: "%",
    digits: 2,
    field: "memory.sequence_bytes",
    about: "Most bytes that a sequence held after any layer, of those of the run's reference, the full cache.",
    value: (run) => (100 * (run.memory.sequence_bytes ?? NaN)) / findFullBytes(run),
  },
  sequence_mib: {
    title: "sequence MiB",
    unit: "MiB",
    digits: 2,
    field: "memory.sequence_bytes",
    about: "Most bytes that a sequence held after any layer, as stored.",
    value: (run) => (run.memory.sequence_bytes ?? NaN) / MIB,
  },
  peak_mib: {
    title: "peak MiB",
    unit: "MiB",
    digits: 2,
    field: "memory.peak_bytes",
    about: "Storage of keys and values at the peak, as allocated, of the largest batch.",
    value: (run) => run.memory.peak_bytes / MIB,
  },
  peak_share: {
    title: "peak %",
    unit: "%",
    digits: 2,
    field: "memory.peak_tokens",
    about: "Most tokens held after any layer, of those of the full cache.",
    value: (run) => (100 * run.memory.peak_tokens) / run.memory.full_tokens,
  },
  rebuild_mib: {
    title: "rebuild MiB",
    unit: "MiB",
    digits: 2,
    field: "memory.rebuild_bytes",
    about: "Storage at the worst instant of a rebuild, old and new rows of the layer in work included.",
    value: (run) => run.memory.rebuild_bytes / MIB,
  },
  least_share: {
    title: "least / B",
    unit: "",
    digits: 3,
    field: "memory.least_share",
    better: "higher",
    least: 0.97,
    about:
      "Least share of the budget, or of all tokens so far, that is held after any segment; ! below 97 %.",
    value: (run) => run.memory.least_share,
  },
  utilisation: {
    title: "slots used",
    unit: "",
    digits: 3,
    field: "memory.utilisation",
    better: "higher",
    about:
      "Tokens held over the slots of rows that are all as long as the longest (Hard-KV's slot utilisation).",
    value: (run) => run.memory.utilisation,
  },
  seconds: {
    shown: true,
    title: "s / sample",
    unit: "s",
    digits: 3,
    field: "latency.seconds_per_image",
    about: "Mean over samples of the time of their batch over the prompts in it; generation alone.",
    value: (run) => run.latency.seconds_per_image,
  },
  tokens_per_second: {
    shown: true,
    title: "tokens / s",
    unit: "1/s",
    digits: 0,
    field: "latency.tokens_per_second",
    better: "higher",
    about: "Tokens of all texts, their ends included, over total time.",
    value: (run) => run.latency.tokens_per_second,
  },
  n: {
    title: "n",
    unit: "samples",
    digits: 0,
    field: "n",
    better: "higher",
    about: "Samples of the run, images or texts.",
    value: (run) => run.n,
  },
};
const AXES = {
  byte_share: "memory per sequence, % of the full cache",
  sequence_mib: "memory per sequence, MiB",
  peak_share: "peak tokens, % of the full cache",
  peak_mib: "storage of the largest batch, MiB",
  rebuild_mib: "worst instant of the largest batch, MiB",
  seconds: "seconds per sample",
};

/** Bytes of a sequence under the full cache, of the reference's dtype; in 16 bits where the page lacks the reference. */
function findFullBytes(run) {
  const reference = RUNS[run.reference] ?? (run.method === "full" ? run : null);
  return reference?.memory.sequence_bytes ?? run.memory.full_sequence_bytes;
}

/** A cost of a run; of runs that are shown as one, their mean. */
function costOf(run, key) {
  return run.merged ? d3.mean(run.merged, COSTS[key].value) : COSTS[key].value(run);
}

/** A cost as tables show it. */
function formatCost(run, key) {
  const { digits, least = -Infinity } = COSTS[key];
  const value = costOf(run, key);
  return format(value, digits) + (value < least ? "!" : "");
}
