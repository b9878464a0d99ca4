"""Time of one-token attention over heads of unequal length: the ways to read them, which HeadKV's section 4 compares.

python benchmarks/layouts.py [--batch 16] [--heads 20] [--dim 64] [--share 0.3] [--short 49] [--long 97] [--lengths 2]
                             [--device cpu] [--threads 2] [--repeats 50]
Rows are those of one layer of LlamaGen-XL under HeadKV at a sixth of the image's tokens: `share` of the heads local
(the class and two lines), the others global. `--lengths` above 2 spreads the global heads over so many lengths, as rows
of several prompts have them. Printed are the median microseconds of a step: rows read together under a mask, group by
group, and padded; on CUDA also the engine's kernel, which reads rows of any length where they lie (varlen).
"""

import argparse
import statistics
import time

import build  # noqa: F401  makes this checkout importable
import torch
from torch import Tensor

from kvbench.kernels.decode_attention import DecodeRows, _choose, decode_attention, prepare_rows
from kvbench.kernels.layout import Layout, Past, arrange_rows

ROOM = 24
"""Tokens of a line, the room behind every row."""


def draw_lengths(rows: int, share: float, short: int, long: int, lengths: int) -> list[int]:
    """Return the slots of every row: a share has `short` ones, the others between that and `long` in equal parts."""
    local = round(rows * share)
    steps = [short + (long - short) * (index + 1) // (lengths - 1) for index in range(lengths - 1)]
    return [short] * local + [steps[index % len(steps)] for index in range(rows - local)]


def make_layout(counts: list[int], device: str) -> Layout:
    """Return the layout of rows that hold so many tokens, in a shuffled order as heads have it."""
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(0)).tolist()
    counts = [counts[row] for row in order]
    place = torch.arange(max(counts), device=device).expand(len(counts), -1)
    positions = place.masked_fill(place >= torch.tensor(counts, device=device)[:, None], -1)
    return arrange_rows(positions, counts, ROOM)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("batch", 16), ("heads", 20), ("dim", 64), ("short", 49), ("long", 97)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--lengths", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts = draw_lengths(
        options.batch * options.heads, options.share, options.short, options.long, options.lengths
    )
    layout = make_layout(counts, options.device)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=options.device, dtype=dtype)

    keys, values = (normal(1, layout.capacity, options.dim) for _ in range(2))
    past = Past(keys, values, layout)
    q, k, v = (normal(1, len(counts), 1, options.dim) for _ in range(3))
    ways: dict[str, DecodeRows] = {
        name: prepare_rows(past, name) for name in ("together", "grouped", "padded")
    }
    if options.device == "cuda":
        ways["kernel of many"] = prepare_rows(past)
        filled = torch.zeros(1, dtype=torch.int64, device=options.device)
        ways["kernel of one"] = prepare_rows(past, filled=filled)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for repeat in range(options.repeats + 5):
            for name, rows in ways.items():
                wait(options.device)
                started = time.perf_counter()
                decode_attention(q, k, v, rows, repeat % ROOM, options.dim**-0.5)
                wait(options.device)
                if repeat >= 5:
                    seconds[name].append(time.perf_counter() - started)
    default = "kernel (varlen)" if options.device == "cuda" else _choose(layout, options.dim)
    print(
        f"{len(counts)} rows of {len(layout.groups)} lengths, {min(counts)} to {max(counts)} slots, {dtype}"
    )
    for name, found in seconds.items():
        mark = "   the engine's choice" if name == default else ""
        print(f"{name:16} {1e6 * statistics.median(found):8.0f} us{mark}")


def wait(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
