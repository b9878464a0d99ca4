"""Step that compares CUDA graphs on and off: equal samples, freed memory, and generation after out-of-memory errors."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, Skipped
from benchmarks.gpu_steps.generations import Generator, are_equal, choose_settings, load
from kvbench.core.devices import release_unused, run_or_none_if_oom
from kvbench.engine.cache import KVCache

MAX_LEAK = 1 << 20
"""Maximum bytes by which allocated memory may grow over a generation."""


class Subject(NamedTuple):
    """A model and a method whose steps can be recorded."""

    model: str
    method: tuple[str, ...]
    prompts: int


SUBJECTS = (
    Subject("infinity_tiny", ("method=heatkv",), 64),
    Subject("llamagen_tiny", ("method=h2o",), 64),
    Subject("reasoner_tiny", ("method=hard_kv",), 128),
)


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield two cases for every subject: equal results, and recovery from running out of memory."""
    for subject in SUBJECTS[: machine.choose(None, None, 1)]:
        yield Case(f"{subject.model} recorded", partial(compare_recorded, machine, subject))
        yield Case(f"{subject.model} out of memory", partial(run_out_of_memory, machine, subject))


def prepare(machine: Machine, subject: Subject) -> tuple[Generator, Any]:
    """Load a subject's model; return it and a function that opens a cache."""
    loaded = load(
        choose_settings(machine, subject.model),
        machine.choose(subject.prompts, 4),
        machine.device,
        machine.choose(torch.bfloat16, torch.float32),
    )
    method = loaded.prepare(subject.method, machine.choose("0.5", "0.7"))
    return loaded, partial(loaded.open_cache, method)


def compare_recorded(machine: Machine, subject: Subject) -> Figures:
    """Generate without graphs, then three times with them: before recording, recording, and repeating."""
    loaded, open_cache = prepare(machine, subject)
    if machine.make_record(loaded.model.spec) is None:
        raise Skipped("steps of one token are recorded on a GPU only")
    prompts = len(loaded.prompts) // 2
    plain = loaded.draw(open_cache(), prompts)
    before = 0
    for generation in range(2):  # libraries allocate once, in the first generation
        cache = open_cache(record=machine.make_record(loaded.model.spec))
        for number, name in enumerate(("as it is", "recorded", "repeated")):
            if not are_equal(loaded.draw(cache, prompts), plain):
                raise Failed(f"{name}, generation {number} with graphs differs from the generation without")
        cache.forget()
        del cache
        left = count_allocated(machine)
        if not generation:
            before = left
    if left > before + MAX_LEAK:
        raise Failed(f"{left - before} bytes are still held after the graphs were released")
    return {"allocated_before": before, "allocated_after": left}


def run_out_of_memory(machine: Machine, subject: Subject) -> Figures:
    """Generate all prompts with too little memory, then halve the batch until it fits."""
    loaded, open_cache = prepare(machine, subject)
    few = len(loaded.prompts) // 4
    expected = loaded.draw(open_cache(), few)
    before = count_allocated(machine)
    cache = open_cache(record=machine.make_record(loaded.model.spec))
    least, most = (measure_peak(machine, loaded, cache, prompts) for prompts in (few, len(loaded.prompts)))
    allowed = (least + most) // 2
    with limit_memory(machine, allowed, len(loaded.prompts) // 2):
        prompts, samples, tries = len(loaded.prompts), None, 0
        while samples is None and prompts >= few:
            tries += 1
            samples = run_or_none_if_oom(partial(loaded.draw, cache, prompts), cache.forget)
            prompts = prompts if samples is not None else prompts // 2
    if samples is None or tries == 1:
        which = "no batch fits" if samples is None else "all prompts fit"
        raise Failed(f"{which} into {allowed} bytes; few took {least}, all {most}")
    cache.forget()
    del cache
    if not are_equal(loaded.draw(open_cache(), few), expected):
        raise Failed("samples differ after running out of memory")
    left = count_allocated(machine)
    if left > before + MAX_LEAK:
        raise Failed(f"{left - before} bytes are still held after running out of memory")
    return {"allowed_bytes": allowed, "prompts_that_fit": prompts, "tries": tries}


def measure_peak(machine: Machine, loaded: Generator, cache: KVCache, prompts: int) -> int:
    """Return the peak bytes that torch's allocator reserves for `prompts` prompts; limits apply to reserved bytes."""
    release_unused(machine.device)
    torch.cuda.reset_peak_memory_stats(machine.device)
    loaded.draw(cache, prompts)
    cache.forget()
    return int(torch.cuda.max_memory_reserved(machine.device))


def count_allocated(machine: Machine) -> int:
    """Return the bytes of live tensors, after a garbage collection."""
    gc.collect()
    torch.cuda.synchronize(machine.device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated(machine.device))


@contextmanager
def limit_memory(machine: Machine, allowed: int, prompts: int) -> Iterator[None]:
    """Limit this process to `allowed` bytes of the GPU; a rehearsal limits the batch to `prompts` prompts."""
    if not machine.interpreted:
        total = torch.cuda.get_device_properties(machine.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    attend = KVCache.attend

    def attend_or_refuse(cache: KVCache, layer: int, *inputs: Any, **more: Any) -> Tensor:
        if inputs[0].shape[0] > prompts * cache.spec.branches:
            raise torch.OutOfMemoryError("rehearsed: CUDA out of memory")
        return attend(cache, layer, *inputs, **more)

    with patch.object(KVCache, "attend", attend_or_refuse):
        yield
