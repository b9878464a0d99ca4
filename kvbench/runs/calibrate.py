"""Calibration: observers of full-cache generations, and the artifacts that they produce."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from kvbench.core import checkpoint
from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.devices import run_or_none_if_oom
from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.settings import CalibrateSettings
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import CodebookTensors
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.models.base import Model
from kvbench.models.noise import make_noise
from kvbench.prompts.base import Prompt, PromptSource
from kvbench.prompts.files import PromptFile

log = logging.getLogger(__name__)

FOLDS = 2
"""Number of folds of the calibration prompts; codebooks for a fold are fitted to the other folds."""


def choose_calibration(
    settings: CalibrateSettings, source: PromptSource, evaluated: Sequence[Prompt]
) -> list[Prompt]:
    """Return calibration prompts: from the configured file, else prompts of the set that are not evaluated.

    Prompts of a file that are evaluated too are used, with a warning.

    Raises:
        ConfigError: the file cannot be read.
    """
    if settings.prompts is None:
        return source.load_others(settings.count, settings.seed)
    try:
        found = PromptFile(settings.prompts).load()
    except ConfigError as error:
        raise ConfigError("calibrate." + str(error).replace("prompts.path=", "prompts=", 1)) from None
    if len(found) < settings.count:
        count = len(found)
        raise ConfigError(
            f"calibrate.count={settings.count}: {settings.prompts} has {count} prompts; set calibrate.count={count}"
        )
    chosen = found[: settings.count]
    evaluated_texts = {prompt.text for prompt in evaluated}
    if both := [prompt.text for prompt in chosen if prompt.text in evaluated_texts]:
        log.warning(
            f"calibrate.prompts={settings.prompts}: {len(both)} of its {len(chosen)} prompts are evaluated too, such "
            f"as {both[0]!r}"
        )
    return chosen


def check_calibration(prompts: Sequence[Prompt]) -> None:
    """Check that there are calibration prompts.

    Raises:
        ConfigError: there are none, for instance because the run evaluates all prompts of its set.
    """
    if not prompts:
        raise ConfigError(
            "calibrate.prompts=null: the set has no prompt left for calibration; set calibrate.prompts=my.txt, a file "
            "with one prompt per line, or evaluate fewer: prompts.count=..."
        )


class Observation(Method):
    """Keep everything and show each layer to observers.

    Args:
        observers: observers prepared for the model.
        spec: the model's shapes.
    """

    def __init__(self, observers: Sequence[Observer], spec: ModelSpec) -> None:
        self.observers = observers
        self.prepare(spec, Budget.parse(1, spec))

    @property
    def uses(self) -> Uses:
        """Requirements of the observers, and views of the last segment."""
        previous_keys = any(observer.uses.previous_keys for observer in self.observers)
        return Uses(last_segment=True, previous_keys=previous_keys)

    def capacity(self, layer: int, segment: Segment) -> int:
        """Return the number of tokens so far, as nothing is dropped."""
        return segment.end

    def keep(self, view: View) -> None:
        """Show the layer to each observer and keep everything."""
        for observer in self.observers:
            observer.observe(view)


def calibrate(
    model: Model,
    prompts: Sequence[Prompt],
    observers: Sequence[Observer],
    seed: int,
    device: str,
    advance: Callable[[int], object],
    batch: int = 1,
    noise: str = "stream",
) -> list[dict[str, Tensor]]:
    """Show full-cache generations to observers.

    Observers that read codebooks see each prompt through codebooks that were fitted to other prompts, since error on
    the fitted prompts is lower than on new ones. They see prompts one by one, separately from other observers, whose
    statistics depend on no other observer.

    Args:
        model: loaded model.
        prompts: calibration prompts.
        observers: the observers.
        seed: seed of the prompts' noise.
        device: torch device.
        advance: function called after every batch with its number of prompts.
        batch: prompts at a time; changes rounding only. Official code uses 1.
        noise: kind of noise, `stream` or `counter`.

    Returns:
        The calibrated tensors of each observer, by name.

    Raises:
        ConfigError: there are no prompts, or a batch does not fit in memory.
    """
    check_calibration(prompts)
    readers = [observer for observer in observers if observer.uses.codebooks]
    others = [observer for observer in observers if not observer.uses.codebooks]
    watch = partial(_watch, model, seed, device, noise)
    for observer in observers:
        observer.prepare(model.spec)
    progress = (lambda _: None) if others else advance  # `others` count each prompt once
    if others:
        watch(prompts, others, advance, batch=batch)
    while others := [observer for observer in others if observer.needs_another_pass()]:
        watch(prompts, others, lambda _: None, batch=batch)
    if readers:
        codebooks = Codebooks()
        codebooks.prepare(model.spec)
        watch(prompts, [codebooks], lambda _: None)
        folds = min(FOLDS, len(prompts))
        for fold in range(folds):
            own = range(fold, len(prompts), folds)
            fitted = codebooks.fit(without=[number + 1 for number in own] if folds > 1 else ())
            watch([prompts[number] for number in own], readers, progress, fitted)
    return [observer.average() for observer in observers]


def _watch(
    model: Model,
    seed: int,
    device: str,
    kind: str,
    prompts: Sequence[Prompt],
    observers: Sequence[Observer],
    advance: Callable[[int], object],
    codebooks: CodebookTensors | None = None,
    batch: int = 1,
) -> None:
    """Show generations to observers, `batch` prompts at a time."""
    cache = KVCache(
        model.spec,
        Observation(observers, model.spec),
        dtype=model.compute_dtype(device),
        device=device,
        projection=model.output_projection,
        rotation=model.key_rotation(),
        codebooks=codebooks,
    )
    for start in range(0, len(prompts), batch):
        chunk = prompts[start : start + batch]
        noise = make_noise(kind, seed, [prompt.index for prompt in chunk], device)
        work = partial(model.generate, [prompt.text for prompt in chunk], cache, noise)
        if len(chunk) == 1:
            work()
        elif run_or_none_if_oom(work, cache.forget) is None:
            raise ConfigError(
                f"calibrate.batch_size={batch}: out of memory; set calibrate.batch_size={len(chunk) // 2}"
            )
        advance(len(chunk))


def save_artifact(path: Path, artifact: Artifact) -> None:
    """Write an artifact with its metadata as safetensors, atomically."""
    checkpoint.save(path, artifact.tensors, {"kind": artifact.kind, **artifact.metadata})


def load_artifact(path: Path, kind: str, expected: Mapping[str, object]) -> Artifact:
    """Read an artifact and check that its metadata has the expected values.

    Raises:
        ConfigError: the file is unreadable, or names the first field that differs.
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
