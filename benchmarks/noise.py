"""Time that the host spends on the noise of a token: drawn when it is needed, and ahead by a second thread.

A sleep replaces the device's step. `launching` is processor time of the thread that launches the steps, `all` is
processor time of all threads, and `wait` is the wall time until the noise is drawn.

python -m benchmarks noise [--model llamagen_xl] [--batch 8] [--tokens 100] [--pause 3]
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from benchmarks.support.table import Table
from kvbench.models.noise import Noise, PromptNoise, draw_ahead

OPTIONS = {
    "model": "llamagen_xl", "batch": 8, "tokens": 100,
    "pause": Option(3.0, "milliseconds of a step of the device"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print a row per way of drawing."""
    choices, tokens, device = (
        build_model(options.model).transformer.choices,
        options.tokens,
        torch.device("cpu"),
    )
    print(f"{options.model}, batch {options.batch}, {choices} numbers a prompt; ms of a token, medians")
    table = Table(dict.fromkeys(("launching", "all", "wait"), ".2f"), "noise", 12)
    direct, ahead = (PromptNoise(0, range(options.batch)) for _ in range(2))
    ways = {
        "when needed": nullcontext(direct),
        "ahead": draw_ahead(ahead, options.batch, choices, tokens, device),
    }
    for name, way in ways.items():
        started = time.process_time()
        with way as noise:
            times = list(zip(*measure(noise, choices, tokens, options.pause / 1e3), strict=True))
        launching, wait = map(statistics.median, times)
        table.add(name, 1e3 * launching, 1e3 * (time.process_time() - started) / tokens, 1e3 * wait)


def measure(noise: Noise, count: int, tokens: int, pause: float) -> Iterator[tuple[float, float]]:
    """Yield seconds of this thread's processor time and of wall time that the noise of each token takes."""
    for _ in range(tokens):
        time.sleep(pause)
        processor, wall = time.thread_time(), time.perf_counter()
        noise.draw(count)
        yield time.thread_time() - processor, time.perf_counter() - wall
