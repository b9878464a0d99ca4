"""Calibration: observers of full-cache generations, and the artifacts that they produce."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from kvbench.core import checkpoint
from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.devices import if_it_fits
from kvbench.core.files import hash_values
from kvbench.core.segments import ModelSpec
from kvbench.core.settings import CalibrateSettings
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Books
from kvbench.methods.shared.base import Artifact, Method, Observer
from kvbench.methods.shared.capabilities import ComparesKeys, ObservesLast, ReadsCodebooks
from kvbench.methods.shared.view import View
from kvbench.models.base import Model
from kvbench.models.noise import PromptNoise
from kvbench.prompts.base import Prompt, PromptSource
from kvbench.prompts.files import PromptFile

log = logging.getLogger(__name__)

FOLDS = 2
"""Parts of the calibration prompts of which each is read through the codebooks of the others."""


def choose_calibration(
    settings: CalibrateSettings, source: PromptSource, evaluated: Sequence[Prompt]
) -> list[Prompt]:
    """Return the prompts to calibrate on: those of the file that is named, else others of the evaluated kind.

    Prompts of a file that are evaluated too are used, with a warning.

    Raises:
        ConfigError: the file cannot be read.
    """
    if settings.prompts is None:
        return source.load_others(settings.count, settings.seed)
    try:
        chosen = PromptFile(settings.prompts, settings.count).load()
    except ConfigError as error:
        raise ConfigError("calibrate." + str(error).replace("prompts.path=", "prompts=", 1)) from None
    known = {prompt.text for prompt in evaluated}
    if both := [prompt.text for prompt in chosen if prompt.text in known]:
        log.warning(
            "calibrate.prompts=%s: %d of its %d prompts are evaluated too, such as %r",
            settings.prompts,
            len(both),
            len(chosen),
            both[0],
        )
    return chosen


def check_calibration(prompts: Sequence[Prompt]) -> None:
    """Check that there are prompts to calibrate on.

    Raises:
        ConfigError: the run evaluates all prompts of its set.
    """
    if not prompts:
        raise ConfigError(
            "calibrate.prompts=null: every prompt of the set is evaluated, none is left to calibrate on; name a file "
            "of others, one a line: calibrate.prompts=my.txt, or evaluate fewer: prompts.count=..."
        )


@dataclass
class _Watching(ObservesLast, ComparesKeys, Method):
    """Several observers of the same generations."""

    observers: Sequence[Observer]

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Prepares each."""
        for observer in self.observers:
            observer.prepare(spec, budget)
        super().prepare(spec, budget)

    def keep(self, view: View) -> None:
        """Shows each the layer."""
        for observer in self.observers:
            observer.keep(view)


def calibrate(
    model: Model,
    prompts: Sequence[Prompt],
    observers: Sequence[Observer],
    seed: int,
    device: str,
    advance: Callable[[int], object],
    batch: int = 1,
) -> list[dict[str, Tensor]]:
    """Show full-cache generations to observers.

    Observers that read codebooks are shown what those make of each prompt that were fitted to other prompts: noise on
    the prompts that codebooks were fitted to is less than on any that will come. They see prompts one by one, apart
    from observers that do not: what these find depends on no other observer.

    Args:
        model: loaded model.
        prompts: calibration prompts.
        observers: what to watch for.
        seed: seed of the prompts' noise.
        device: torch device.
        advance: called after every batch, with its prompts' number.
        batch: prompts at a time; changes nothing but rounding. Official programs take one.

    Returns:
        What each observer found.

    Raises:
        ConfigError: there are no prompts, or memory does not suffice for a batch.
    """
    check_calibration(prompts)
    readers = [observer for observer in observers if isinstance(observer, ReadsCodebooks)]
    others = [observer for observer in observers if not isinstance(observer, ReadsCodebooks)]
    full, watch = Budget.parse(1, model.spec), partial(_watch, model, seed, device)
    watching, codebooks, reading = _Watching(others), Codebooks(), _Watching(readers)
    for observer in (watching, codebooks, reading):
        observer.prepare(model.spec, full)
    if others:
        watch(prompts, watching, advance, batch=batch)
    while again := [observer for observer in watching.observers if observer.look_again()]:
        watching.observers = again
        watch(prompts, watching, lambda _: None, batch=batch)
    if readers:
        watch(prompts, codebooks, lambda _: None)
        folds = min(FOLDS, len(prompts))
        for fold in range(folds):
            own = range(fold, len(prompts), folds)
            books = codebooks.fit(without=[number + 1 for number in own] if folds > 1 else ())
            progress = advance if not others else lambda _: None  # of every prompt once
            watch([prompts[number] for number in own], reading, progress, books)
    return [observer.average() for observer in observers]


def _watch(
    model: Model,
    seed: int,
    device: str,
    prompts: Sequence[Prompt],
    observer: Method,
    advance: Callable[[int], object],
    books: Books | None = None,
    batch: int = 1,
) -> None:
    """Show an observer the generations of some prompts, so many at a time."""
    cache = KVCache(
        model.spec,
        observer,
        dtype=model.compute_dtype(device),
        device=device,
        projection=model.output_projection,
        rotation=model.key_rotation(),
        books=books,
    )
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        noise = PromptNoise(seed, [prompt.index for prompt in part])
        work = partial(model.generate, [prompt.text for prompt in part], cache, noise)
        if len(part) == 1:
            work()
        elif if_it_fits(work, cache.forget) is None:
            raise ConfigError(
                f"calibrate.batch_size={batch}: out of memory; set calibrate.batch_size={len(part) // 2}"
            )
        advance(len(part))


def save_artifact(path: Path, artifact: Artifact) -> None:
    """Write an artifact as safetensors with its metadata, whole or not at all."""
    checkpoint.save(path, artifact.tensors, {"kind": artifact.kind, **artifact.metadata})


def load_artifact(path: Path, kind: str, expected: Mapping[str, object]) -> Artifact:
    """Read an artifact and check that it belongs to this model, schedule and settings.

    Raises:
        ConfigError: unreadable, or made for something else; names the first field that differs.
    """
    try:
        tensors, metadata = checkpoint.load(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"calibration {path}: cannot be read ({error}); delete it to calibrate again"
        ) from None
    for name, value in {"kind": kind, **json.loads(json.dumps(expected))}.items():
        if metadata.get(name) != value:
            raise ConfigError(
                f"calibration {path}: made for {name}={metadata.get(name)!r}, this run has {value!r}; calibrate again"
            )
    return Artifact(kind, tensors, metadata)


def artifact_name(metadata: Mapping[str, object]) -> str:
    """Return the file name of the artifact that belongs to some metadata."""
    return f"calibration-{hash_values(metadata)[:10]}.safetensors"
