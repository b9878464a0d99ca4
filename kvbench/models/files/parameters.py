"""Parameters of modules: building without memory, filling from a checkpoint or with random values, comparing."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from kvbench.core.files import derive_seed, hash_values
from kvbench.models.files.checkpoints import Clean, State, WeightsError, is_safe, read, split_layers
from kvbench.models.files.mapped import list_file_maps, release_pages
from kvbench.models.files.weights import Source, prepare

M = TypeVar("M", bound=nn.Module)
Place = Callable[[str, Tensor], Tensor]
"""Maps a parameter's name and a tensor to the tensor on its device, in its dtype."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that parameters may have in files."""
MAX_TENSORS = 2**13
"""Maximum number of parameters of a module, several times as many as the largest published decoders have."""
RANDOM_RECIPE = 2
"""Version of `fill_random`, hashed together with the shapes into a run's identity."""


class _NoInit(TorchFunctionMode):
    """Mode in which the functions of `torch.nn.init` do nothing."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def build_on_meta(make: Callable[[], M]) -> M:
    """Build a module in evaluation mode on the meta device, for `load_into` or `fill_random`.

    Initialisation is skipped: random numbers on the meta device make torch import its compiler, which takes 2 s.

    Raises:
        WeightsError: the settings give a module of more than `MAX_TENSORS` parameters.
    """
    with torch.device("meta"), _NoInit(), bound_tensors():
        return make().eval()


@contextmanager
def bound_tensors() -> Iterator[None]:
    """Raise a WeightsError as soon as more than `MAX_TENSORS` parameters are made in the block."""
    made = count(1)

    def note(*_: object) -> None:
        if next(made) > MAX_TENSORS:
            raise WeightsError(
                f"model: its shape has more than {MAX_TENSORS} tensors; reduce its number of layers"
            )

    hook = register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        hook.remove()


def check(state: Mapping[str, Tensor], module: nn.Module, name: str, path: Path | None = None) -> None:
    """Check that a state has a module's names and shapes.

    The config key `name` and the file or folder `path` are for the message.

    Raises:
        WeightsError: tensors are missing, unexpected or of another shape; the message lists them.
    """
    expected = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    shapes = {k: tuple(v.shape) for k, v in state.items()}
    problems = [f"missing {k}" for k in expected.keys() - shapes.keys()]
    problems += [f"unexpected {k} {shapes[k]}" for k in shapes.keys() - expected.keys()]
    problems += [
        f"{k} is {shapes[k]}, should be {expected[k]}"
        for k in expected.keys() & shapes.keys()
        if expected[k] != shapes[k]
    ]
    if problems:
        listed = "; ".join(sorted(problems)[:8])
        where = "" if path is None else f" (in {path})"
        raise WeightsError(f"{name}: the checkpoint does not fit ({len(problems)} tensors): {listed}{where}")


def _check_dtype(name: str, tensor: Tensor, expected: Tensor, where: str) -> None:
    """Raise a WeightsError if a tensor for a parameter is not floating-point with at least 16 bits.

    Complex numbers would lose a part. Integers and 8-bit floats are quantised, with scales in other tensors.
    """
    if expected.is_floating_point() and tensor.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        found = str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(f"{where}: {name} is {found}; must be one of {names}: convert the file")


def set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer on the meta device by a tensor."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    old = getattr(part, leaf)
    setattr(part, leaf, nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor)


def to_float32(_: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 on its device."""
    return tensor.float()


def load_into(module: nn.Module, source: Source, clean: Clean, place: Place = to_float32) -> str:
    """Fill a module on the meta device layer by layer and return the SHA-256 of the source.

    `place` receives tensors that are mapped from the file. The module gets copies, which keep their values if the file
    is overwritten or truncated.

    Raises:
        WeightsError: the file was changed while it was read; or see `Source.locate`, `read` and `check`.
    """
    original = source.locate()
    safe = is_safe(original)
    try:
        files = prepare(source, clean)
        raw = read(files.path)
    except WeightsError as error:
        raise WeightsError(f"{source.key}.path: {error}; give another copy") from None
    whole = module.state_dict()
    state: State = {}
    mapped = {_find_memory(tensor) for tensor in raw.values() if isinstance(tensor, Tensor)}
    maps = list_file_maps()
    for group in split_layers(raw):
        cleaned = clean(group) if safe else group
        for name, tensor in cleaned.items():
            assert isinstance(tensor, Tensor)
            if name in whole:
                _check_dtype(name, tensor, whole[name], f"{source.key}: {original}")
            if name in whole and whole[name].shape == tensor.shape:
                placed = place(name, tensor)
                set_parameter(module, name, placed.clone() if _find_memory(placed) in mapped else placed)
            state[name] = tensor.to("meta")
        release_pages((tensor for tensor in group.values() if isinstance(tensor, Tensor)), maps)
    check(state, module, source.key, original)
    files.check_unchanged()
    return files.sha256


def _find_memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which the tensors of a mapped file share."""
    return tensor.untyped_storage().data_ptr()


def fill(module: nn.Module, source: Source | None, clean: Clean, place: Place = to_float32) -> str:
    """Fill a module from a source, or with random values if it is None, and return the SHA-256.

    Raises:
        WeightsError: see `load_into`.
    """
    return fill_random(module, place) if source is None else load_into(module, source, clean, place)


def fill_random(module: nn.Module, place: Place = to_float32) -> str:
    """Fill a module on the meta device with random values and return the SHA-256 of names, shapes and recipe.

    These determine the values, which are drawn in float32. Layers preserve variance, norms are the identity, biases 0,
    attention is sharpened eightfold and gates are open, so that activations stay finite and attention affects the
    images. Each parameter has its own generator, seeded by its name, so that threads can draw them in parallel.

    Raises:
        WeightsError: the parameters in 16 bits exceed this machine's memory.
    """
    size = sum(parameter.numel() for parameter in module.parameters())
    if 2 * size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise WeightsError(
            f"model.weights=random: {size:.3g} parameters do not fit in {memory >> 30} GiB of memory; "
            "reduce model.transformer or model.tokenizer"
        )
    listed = [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]
    parts = [
        (path, owner, name, parameter.shape)
        for path, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
    ]

    def fill(path: str, owner: nn.Module, name: str, shape: torch.Size) -> None:
        full = f"{path}.{name}".lstrip(".")
        generator = torch.Generator().manual_seed(derive_seed(full))
        set_parameter(module, full, place(full, _draw(owner, name, torch.empty(shape), generator)))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, *zip(*parts, strict=True)))  # raises the errors of threads
    return hash_values([RANDOM_RECIPE, listed])


def _draw(owner: nn.Module, name: str, values: Tensor, generator: torch.Generator) -> Tensor:
    """Overwrite a layer's parameter with its initial values, random or constant, and return it."""
    if name.endswith("bias"):
        return values.zero_()
    if name == "scale_mul_1H11":
        return values.fill_(math.log(8))
    if name != "weight":
        return values.normal_(0, 0.5, generator=generator)
    if values.ndim == 1:
        return values.fill_(1)
    spread = 1.0 if isinstance(owner, nn.Embedding) else values[0].numel() ** -0.5
    return values.normal_(0, spread, generator=generator)
