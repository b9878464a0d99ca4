// Costs of a run: memory of its cache, and time.
// Costs that are `shown` are default columns of the leaderboard.

const COSTS = {
  budget: {
    title: "budget",
    digits: 2,
    about: "Largest number of tokens, or bytes, allowed after any layer of any segment.",
    value: (run) => 100 * run.budget,
  },
  peak_share: {
    shown: true,
    title: "peak %",
    digits: 2,
    about: "Most tokens after any layer, as a share of the full cache.",
    value: (run) => (100 * run.memory.peak_tokens) / run.memory.full_tokens,
  },
  byte_share: {
    title: "bytes %",
    digits: 2,
    about: "Most bytes of a sequence after any layer, as a share of the full cache's in 16 bits.",
    value: (run) => (100 * run.memory.sequence_bytes) / run.memory.full_sequence_bytes,
  },
  sequence_mib: {
    title: "sequence MiB",
    digits: 2,
    about: "Most stored bytes of a sequence after any layer.",
    value: (run) => run.memory.sequence_bytes / MIB,
  },
  peak_mib: {
    title: "peak MiB",
    digits: 2,
    about: "Peak of allocated keys and values in the largest batch.",
    value: (run) => run.memory.peak_bytes / MIB,
  },
  rebuild_mib: {
    title: "rebuild MiB",
    digits: 2,
    about: "Peak during a layer's rebuild, including its old and new rows.",
    value: (run) => run.memory.rebuild_bytes / MIB,
  },
  least_share: {
    title: "least / B",
    digits: 3,
    better: "higher",
    least: DOC.wellUsed,
    about:
      "Smallest share of the budget, or of all tokens so far, in use after any segment; " +
      `! below ${100 * DOC.wellUsed} %.`,
    value: (run) => run.memory.least_share,
  },
  utilisation: {
    title: "slots used",
    digits: 3,
    better: "higher",
    about:
      "Held tokens over slots, if all rows were as long as the longest (Hard-KV's slot utilisation).",
    value: (run) => run.memory.utilisation,
  },
  seconds: {
    shown: true,
    title: "s / sample",
    digits: 3,
    timed: true,
    about:
      "Mean over samples of the batch's generation time divided by its prompts; " +
      "~: beside other work, or without samples of another batch size, machine or load.",
    value: (run) => run.latency.seconds_per_image,
  },
  tokens_per_second: {
    shown: true,
    title: "tokens / s",
    digits: 0,
    timed: true,
    better: "higher",
    about: "Tokens of all texts, including end tokens, divided by total time; ~ as for s / sample.",
    value: (run) => run.latency.tokens_per_second,
  },
  n: {
    title: "n",
    digits: 0,
    better: "higher",
    about: "Samples of the run, images or texts.",
    value: (run) => run.n,
  },
};
const AXES = {
  peak_share: "peak tokens, % of the full cache",
  byte_share: "peak bytes, % of the full cache in 16 bits",
  sequence_mib: "memory per sequence, MiB",
  peak_mib: "storage of the largest batch, MiB",
  rebuild_mib: "peak of a rebuild in the largest batch, MiB",
  seconds: "seconds per sample",
};

/** Return the share of memory by which rows are compared, as uses_bytes in report/memory.py. */
function chooseShare(rows) {
  return rows.some((run) => run.unit === "bytes" || hasFewBits(run)) ? "byte_share" : "peak_share";
}

/** Return whether a run stores codes of fewer than 16 bits, as CODE_DTYPES in core/storage.py. */
function hasFewBits(run) {
  return /^(int|fp8)/.test(shared(run.config.cache_dtype));
}

/** Return a cost of a row; memory and latency of a mean over seeds are combined when the page is made. */
function costOf(row, key) {
  return COSTS[key].value(row);
}

/** Return a cost as text. */
function formatCost(run, key) {
  if (key === "n") return countSamples(run);
  const { digits, least = -Infinity } = COSTS[key];
  const value = costOf(run, key);
  const others = COSTS[key].timed && (run.latency.others || run.latency.busy) ? "~" : "";
  return format(value, digits) + (value < least ? "!" : others);
}
