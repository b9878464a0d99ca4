"""Kernel launches of default runs on a GPU: the full cache of each model, and every low-bit storage.

Models have their real width and five layers, of which turboquant keeps four in 16 bits, on tensors without data
(`fake_gpu`). Where lengths depend on data, a run goes by a GPU's branches on a CPU, with zeros in place of what kernels
compute: storages on few heads with real head dims.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.support.build import CONF, built, composed, list_choices, open_cache
from benchmarks.support.cuda_branches import on_cuda_branches
from benchmarks.support.device_watch import DeviceWatch
from benchmarks.support.fake_gpu import CountedReplays, list_prompts, prepare, run
from benchmarks.support.triton_launches import Variant, record_launches
from kvbench.models.noise import CounterNoise

BATCH = 2
BY_NUMBERS = ("infinity_tiny", "infinity_emoji", "llamagen_tiny")
"""Models that run with real data, because their text encoders drop padding by the contents of a mask."""
NARROW = {
    "infinity_2b": ("transformer.width=128", "transformer.heads=1", "pixels=0.06M"),
    "var_d16": ("transformer.width=64", "transformer.heads=1"),
    "qwen3_4b": ("transformer.width=512", "transformer.heads=4", "transformer.kv_heads=1"),
}
"""Models whose head dims represent all that storages accept, and overrides that make the models small."""


def list_launched(models: Sequence[str]) -> dict[str, Variant]:
    """Return by source the variants of default runs of models, and of all storages for `NARROW` models.

    `all` stands for every model.
    """
    launches: list[Variant] = []
    if "all" in models:
        models = [name for name in list_choices("model") if name != "decoder"]  # `decoder` launches no others
    storages = sorted(
        path.relative_to(CONF / "storage").with_suffix("") for path in CONF.glob("storage/**/*.yaml")
    )
    for name in models:
        if name in BY_NUMBERS:
            record_numbers(launches, name, None, ())
            continue
        model = composed([f"model={name}"])["model"]
        fewer = ["transformer.depth=5"]
        fewer += ["transformer.block_chunks=1"] if "block_chunks" in model["transformer"] else []
        fewer += ["max_tokens=256"] if "max_tokens" in model else []
        given = prepare(list_overrides(name, fewer))
        run(*given, BATCH, DeviceWatch(), launches, record=CountedReplays())
        for stored in [f"int4:{storage}" for storage in storages] + ["fp8:channel"] if name in NARROW else ():
            record_numbers(launches, name, stored, (*fewer, *NARROW[name]))
    return {variant.source: variant for variant in launches}


def list_overrides(name: str, settings: Sequence[str]) -> list[str]:
    """Return the overrides of a run of a model with the full cache and some settings of the model."""
    return [f"model={name}", "method=full", "budget=1", *(f"model.{setting}" for setting in settings)]


def record_numbers(launches: list[Variant], name: str, stored: str | None, settings: Sequence[str]) -> None:
    """Add the variants that a generation launches if the CPU takes a GPU's branches and its dtype."""
    overrides = list_overrides(name, settings)
    model, method = prepare(overrides)
    prompts = list_prompts(model, BATCH)
    if name in BY_NUMBERS:
        prompts = [prompt.text for prompt in built(composed(overrides)["prompts"]).load()[:BATCH]]
    keys = torch.zeros(BATCH, dtype=torch.int64)
    with ExitStack() as stack:
        stack.enter_context(patch.object(type(model), "compute_dtype", lambda self, _: self.half))
        model.load("cpu")
        cache = open_cache(model, method, "cpu", stored)
        stack.enter_context(patch.object(Tensor, "new_empty", Tensor.new_zeros))
        for made in ("empty", "empty_like"):
            stack.enter_context(patch(f"torch.{made}", getattr(torch, made.replace("empty", "zeros"))))
        stack.enter_context(on_cuda_branches("kernel"))
        stack.enter_context(record_launches(launches))
        model.generate(prompts, cache, CounterNoise(keys, keys[:1]))
