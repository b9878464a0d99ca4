// Numbers of a run that are no metrics: what its cache held and how long it took.
// Those that are `shown` are columns of the leaderboard.

const COSTS = {
  budget: {
    title: "budget",
    unit: "% of the full cache",
    digits: 2,
    field: "memory.budget_tokens",
    about: "Capacity that held tokens, or bytes, may not exceed after any layer of any segment.",
    value: (run) => 100 * run.budget,
  },
  peak_mib: {
    shown: true,
    title: "peak MiB",
    unit: "MiB",
    digits: 2,
    field: "memory.peak_bytes",
    about: "Storage of keys and values at the peak, as allocated, of the largest batch.",
    value: (run) => run.memory.peak_bytes / MIB,
  },
  peak_share: {
    shown: true,
    title: "peak %",
    unit: "%",
    digits: 2,
    field: "memory.peak_tokens",
    about: "Most tokens held after any layer, of those of the full cache.",
    value: (run) => (100 * run.memory.peak_tokens) / run.memory.full_tokens,
  },
  byte_share: {
    shown: true,
    title: "bytes %",
    unit: "%",
    digits: 2,
    field: "memory.sequence_bytes",
    about: "Most bytes that a sequence held after any layer, of those of the full cache in 16 bits.",
    value: (run) => (100 * run.memory.sequence_bytes) / run.memory.full_sequence_bytes,
  },
  rebuild_mib: {
    shown: true,
    title: "rebuild MiB",
    unit: "MiB",
    digits: 2,
    field: "memory.rebuild_bytes",
    about: "Storage at the worst instant of a rebuild, old and new rows of the layer in work included.",
    value: (run) => run.memory.rebuild_bytes / MIB,
  },
  least_share: {
    shown: true,
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
    shown: true,
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
    shown: true,
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
  peak_mib: "peak bytes, MiB",
  peak_share: "peak tokens, % of the full cache",
  byte_share: "peak bytes, % of the full cache in 16 bits",
  rebuild_mib: "worst instant, MiB",
  seconds: "seconds per sample",
};

/** A cost as tables show it. */
function formatCost(run, key) {
  const { value, digits, least = -Infinity } = COSTS[key];
  return format(value(run), digits) + (value(run) < least ? "!" : "");
}
