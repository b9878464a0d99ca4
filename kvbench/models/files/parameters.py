"""Parameters of modules: built without memory, filled from a checkpoint or with random numbers, compared by name."""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvbench.core.files import derive_seed, hash_values
from kvbench.models.files.checkpoints import Clean, State, WeightsError, is_safe, read, split_layers
from kvbench.models.files.weights import Source, prepare

M = TypeVar("M", bound=nn.Module)
Place = Callable[[str, Tensor], Tensor]
"""From a parameter's name and a tensor to that tensor on its device, in its dtype."""
RANDOM_RECIPE = 2
"""Version of `fill_random`; it and the shapes stand for the numbers in a run's identity."""


class _NoInit(TorchFunctionMode):
    """Turns the functions of `torch.nn.init` into no-ops."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def build_on_meta(make: Callable[[], M]) -> M:
    """Build a module in evaluation mode whose parameters have shapes and no memory, for `load_into` or `fill_random`.

    Nothing is initialised: random numbers on the meta device would make torch import its compiler, two seconds long.
    """
    with torch.device("meta"), _NoInit():
        return make().eval()


def check(state: Mapping[str, Tensor], module: nn.Module, name: str, path: Path | None = None) -> None:
    """Compare names and shapes strictly with those of a module, which may live on the meta device.

    Args:
        state: tensors by name.
        module: what they are for.
        name: config key, for the message.
        path: file or folder, for the message.

    Raises:
        WeightsError: lists what is missing, unexpected, or of another shape.
    """
    expected = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in state.items()}
    problems = [f"missing {k}" for k in expected.keys() - found.keys()]
    problems += [f"unexpected {k} {found[k]}" for k in found.keys() - expected.keys()]
    problems += [
        f"{k} is {found[k]}, should be {expected[k]}"
        for k in expected.keys() & found.keys()
        if expected[k] != found[k]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        where = "" if path is None else f" (in {path})"
        raise WeightsError(f"{name}: the checkpoint does not fit in {len(problems)} places: {shown}{where}")


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a parameter, built on the meta device, its numbers."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    old = getattr(part, leaf)
    setattr(part, leaf, nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor)


def to_float32(_: str, tensor: Tensor) -> Tensor:
    """Leave a tensor where it is, in float32."""
    return tensor.float()


def load_into(module: nn.Module, source: Source, clean: Clean, place: Place = to_float32) -> str:
    """Fill a module built on the meta device layer by layer and return the SHA-256 of the source.

    Args:
        module: what to fill.
        source: where the checkpoint lies.
        clean: from its contents to the module's state.
        place: from the name of a parameter and its tensor, a mapped part of the file, to its device and dtype.

    Raises:
        WeightsError: see `Source.locate`, `read` and `check`.
    """
    given = source.locate()
    safe = is_safe(given)
    try:
        path, digest = prepare(source, clean)
        raw = read(path)
    except WeightsError as error:
        raise WeightsError(f"{source.key}.path: {error}; give another copy") from None
    whole = module.state_dict()
    state: State = {}
    for group in split_layers(raw):
        cleaned = clean(group) if safe else group
        for name, tensor in cleaned.items():
            assert isinstance(tensor, Tensor)
            if name in whole and whole[name].shape == tensor.shape:
                put(module, name, place(name, tensor))
            state[name] = tensor.to("meta")
    check(state, module, source.key, given)
    return digest


def fill(module: nn.Module, source: Source | None, clean: Clean, place: Place = to_float32) -> str:
    """Fill a module built on the meta device, with random numbers if it has no source, and return their SHA-256.

    For the arguments see `load_into`.

    Raises:
        WeightsError: see `load_into`.
    """
    return fill_random(module, place) if source is None else load_into(module, source, clean, place)


def fill_random(module: nn.Module, place: Place = to_float32) -> str:
    """Fill a module built on the meta device with random numbers, drawn in float32, the same ones every time.

    Layers keep the variance of what they get, norms start as the identity, biases at 0, attention is sharpened
    eightfold and gates are open: activations stay finite, and what attention returns can be seen in the images. Every
    parameter has a generator of its own, seeded by its name: processor cores draw billions of numbers side by side.

    Args:
        module: what to fill.
        place: from the name of a parameter and its tensor to its device and dtype.

    Returns:
        SHA-256 of names, shapes and recipe, which determine the numbers.
    """
    listed = [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]
    parts = [
        (path, owner, name, parameter.shape)
        for path, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
    ]

    def fill(path: str, owner: nn.Module, name: str, shape: torch.Size) -> None:
        full = f"{path}.{name}".lstrip(".")
        generator = torch.Generator().manual_seed(derive_seed(full))
        put(module, full, place(full, _draw(owner, name, torch.empty(shape), generator)))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, *zip(*parts, strict=True)))  # raises what a thread raised
    return hash_values([RANDOM_RECIPE, listed])


def _draw(owner: nn.Module, name: str, numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Write the random numbers of a layer's parameter."""
    if name.endswith("bias"):
        return numbers.zero_()
    if name == "scale_mul_1H11":
        return numbers.fill_(math.log(8))
    if name != "weight":
        return numbers.normal_(0, 0.5, generator=generator)
    if numbers.ndim == 1:
        return numbers.fill_(1)
    spread = 1.0 if isinstance(owner, nn.Embedding) else numbers[0].numel() ** -0.5
    return numbers.normal_(0, spread, generator=generator)
