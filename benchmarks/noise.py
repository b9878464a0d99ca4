"""Time that processors spend on noise: of a token drawn by a host that launches a device's steps, and of whole images.

In the first table, a sleep replaces the device's step. `launching` is processor time of the thread that launches the
steps, `all` is processor time of all threads, and `wait` is the wall time until the noise is drawn. `by counter` is the
noise that a CPU computes in torch; a GPU computes it in the program that draws the token.

In the second table, `stream` is the processor time that the host spends on an image's numbers whatever computes the
rest, `counter` what a CPU spends that generates with `noise=counter`. On a GPU, `counter` leaves nothing to the host.

python -m benchmarks noise [--model llamagen_xl] [--batch 8] [--tokens 100] [--pause 3]
python -m benchmarks noise --images infinity_2b var_d30 llamagen_xl
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from benchmarks.support.fake_gpu import Model
from benchmarks.support.table import Table
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import Noise, draw_ahead, make_noise
from kvbench.models.var.model import VARModel

CPU = torch.device("cpu")
SAMPLED = 20
"""Draws of one size that are timed at most; equal draws take equal times."""
OPTIONS = {
    "model": "llamagen_xl", "batch": 8, "tokens": 100,
    "pause": Option(3.0, "milliseconds of a step of the device"),
    "images": Option([""], "models whose images are timed, in place of the tokens of one model"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print a row per way of drawing, or per model."""
    if options.images != [""]:
        time_images(options.images, options.batch)
        return
    choices, tokens = build_model(options.model).transformer.choices, options.tokens
    print(f"{options.model}, batch {options.batch}, {choices} numbers a prompt; ms of a token, medians")
    table = Table(dict.fromkeys(("launching", "all", "wait"), ".2f"), "noise", 12)
    kinds = ("stream", "stream", "counter")
    direct, ahead, counter = (make_noise(kind, 0, range(options.batch), CPU) for kind in kinds)
    ways = {
        "when needed": nullcontext(direct),
        "ahead": draw_ahead(ahead, options.batch, choices, tokens, CPU),
        "by counter": nullcontext(counter),
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


def time_images(names: list[str], batch: int) -> None:
    """Print the numbers of an image and the processor milliseconds that they take."""
    print(f"batch {batch}; of an image: thousands of numbers, and milliseconds of a processor")
    columns = {"numbers, stream": ".0f", "counter": ".0f", "ms, stream": ".1f", "counter ": ".1f"}
    table = Table(columns, "model")
    for name in names:
        model = build_model(name)
        counts = {"stream": count_numbers(model, 2), "counter": count_numbers(model, 1)}
        seconds = [time_draws(counts[kind], make_noise(kind, 0, range(batch), CPU)) for kind in counts]
        totals = (sum(size * draws for size, draws in own.items()) / 1e3 for own in counts.values())
        table.add(name, *totals, *(1e3 * each / batch for each in seconds))


def count_numbers(model: Model, of_a_bit: int) -> Counter[int]:
    """Return the draws of an image by their numbers; a bit takes two of a stream, and one by counter."""
    if isinstance(model, InfinityModel):
        channels = of_a_bit * model.transformer.token_channels
        return Counter(segment.length * channels for segment in model.spec.segments)
    if isinstance(model, VARModel):
        return Counter(segment.length * model.transformer.codes for segment in model.spec.segments)
    return Counter({model.transformer.choices: model.spec.drawn_tokens})


def time_draws(counts: Counter[int], noise: Noise) -> float:
    """Return the processor seconds of draws, all threads counted."""
    total = 0.0
    for size, draws in counts.items():
        noise.draw(size)
        started, sampled = time.process_time(), min(draws, SAMPLED)
        for _ in range(sampled):
            noise.draw(size)
        total += (time.process_time() - started) * draws / sampled
    return total
