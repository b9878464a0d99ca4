"""Finding, reading and checking checkpoints; official files are converted to safetensors once."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvbench.core.config import UserError
from kvbench.core.files import hash_path, hash_values, parse_json, resolve_path, write_beside

M = TypeVar("M", bound=nn.Module)
State = dict[str, Tensor]
Clean = Callable[[Mapping[str, object]], State]
"""From a file's contents to a module's state: names as the module has them, nothing else."""
WHOLE = "model.safetensors"
"""The one file of a model's folder, or the start of the name of its index."""


class WeightsError(UserError, RuntimeError):
    """A checkpoint that is missing, unreadable or not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies.

    Attributes:
        key: config key, for messages.
        path: local file or folder (`pkg://package/inside/it` for one that ships with a package); wins over the Hub.
        repo: Hub id, None where only a local copy will do.
        file: file or folder inside the repository, None for all of it.
        revision: commit of the repository; a branch name is refused, since it may change.
    """

    key: str
    path: str | None = None
    repo: str | None = None
    file: str | None = None
    revision: str | None = None

    def locate(self) -> Path:
        """Return the local file or folder, downloaded from the Hub if need be.

        Raises:
            WeightsError: nothing there, no pinned revision, or the Hub cannot be reached.
        """
        if self.path is not None:
            path = resolve_path(self.path)
            if not path.exists():
                raise WeightsError(f"{self.key}.path={self.path}: does not exist")
            return path
        if self.repo is None or self.revision is None or not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            hub = f", or the commit (40 hex digits) of {self.repo} to download with {self.key}.revision=..."
            raise WeightsError(
                f"{self.key}: weights missing. Give a local copy of {self.file or self.repo} with {self.key}.path=..."
                + (hub if self.repo else "")
            )
        return self._download()

    def _download(self) -> Path:
        try:
            from huggingface_hub import snapshot_download
            from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
        except ImportError:
            raise WeightsError(f"{self.key}: install the `text` extra to download {self.repo}") from None
        try:
            wanted = None if self.file is None else [self.file, f"{self.file}/*"]
            root = snapshot_download(str(self.repo), revision=self.revision, allow_patterns=wanted)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise WeightsError(
                f"{self.key}: cannot download {self.file or 'all'} of {self.repo} ({error}); give a local copy with "
                f"{self.key}.path"
            ) from None
        return Path(root, self.file or "")


def read(path: Path) -> State:
    """Return the raw contents of a safetensors file, a torch file, or a folder as the Hugging Face Hub has it.

    Torch files are read with `weights_only=True`: nothing in them is executed.

    Raises:
        WeightsError: truncated, foreign or unsafe.
    """
    try:
        if path.is_dir():
            return _read_shards(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(raw, Mapping):
            raise ValueError(f"it holds a {type(raw).__name__}, not tensors by name")
        return dict(raw)
    except UnpicklingError:  # torch's own words advise to unpickle it all the same
        raise WeightsError(
            f"{path}: not a readable checkpoint (it is damaged, or holds more than tensors)"
        ) from None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError) as error:
        raise WeightsError(f"{path}: not a readable checkpoint ({str(error).splitlines()[0]})") from None


def _read_shards(folder: Path) -> State:
    if (folder / WHOLE).is_file():
        return load_file(folder / WHOLE)
    for name in (f"{WHOLE}.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            shards = sorted(set(parse_json((folder / name).read_text())["weight_map"].values()))
            merged: State = {}
            for shard in shards:
                if Path(shard).name != shard:
                    raise ValueError(f"the index names a file outside the folder: {shard}")
                merged |= read(folder / shard)
            return merged
    raise ValueError(f"no {WHOLE}, {WHOLE}.index.json or pytorch_model.bin.index.json in the folder")


def _find_tensors(raw: Mapping[str, object], *wrappers: str) -> State:
    """Return the tensors by name, of the first wrapper that there is if any."""
    inner = next((raw[key] for key in wrappers if key in raw), raw)
    assert isinstance(inner, Mapping)
    return {name: tensor for name, tensor in inner.items() if isinstance(tensor, Tensor)}


def clean_transformer(raw: Mapping[str, object]) -> State:
    """Return a transformer's state out of any published form: flat, nested by a trainer, with constant buffers."""
    nested = raw.get("trainer")
    if isinstance(nested, Mapping):
        raw = nested.get("gpt_fsdp", nested)  # type: ignore[assignment]
    dropped = ("lvl_1L", "attn_bias_for_masking", "Infinity_visible_kvlen", "Infinity_invisible_qlen")
    state = {k: v for k, v in _find_tensors(raw).items() if not k.endswith(("zero_k_bias", *dropped))}
    return {k: v.reshape(1, -1, 1, 1) if k.endswith("scale_mul_1H11") else v for k, v in state.items()}


def clean_tokenizer(raw: Mapping[str, object]) -> State:
    """Return the tokenizer's state: under `vae` in official files, convolutions and norms wrapped or not.

    What else official files hold is left out; learned amplitudes are the embedded model's.
    """
    kept = ("encoder.", "decoder.", "amplitudes")
    return {_wrapped(k): v for k, v in _find_tensors(raw, "vae").items() if k.startswith(kept)}


def clean_vqvae(raw: Mapping[str, object]) -> State:
    """Return the state of VAR's tokenizer without its statistics of code use, convolutions and norms wrapped or not."""
    return {_wrapped(k): v for k, v in _find_tensors(raw).items() if not k.endswith("ema_vocab_hit_SV")}


def clean_decoder(raw: Mapping[str, object]) -> State:
    """Return the state of a next-token transformer, flat or nested by a trainer, without tables and caches."""
    state = _find_tensors(raw, "model", "module", "state_dict")
    return {k: v for k, v in state.items() if not re.search("freqs_cis|causal_mask|kv_cache", k)}


def clean_vqgan(raw: Mapping[str, object]) -> State:
    """Return the state of a VQGAN (LlamaGen's, Chameleon's) under the names of `kvbench.models.autoencoder`.

    Files keep the projections of an attention apart, and LlamaGen's count the decoder's levels from the lowest
    resolution; statistics of code use are left out.
    """
    found = _find_tensors(raw, "model", "state_dict")
    state = {k: v for k, v in found.items() if not k.endswith("codebook_used")}
    for name in [name for name in state if re.search(r"\.q\.(weight|bias)$", name)]:
        parts = [name.replace(".q.", f".{part}.") for part in "qkv"]
        if all(part in state for part in parts):
            state[name.replace(".q.", ".qkv.")] = torch.cat([state.pop(part) for part in parts])
    levels = [re.match(r"decoder\.conv_blocks\.(\d+)\.", name) for name in state]
    last = max((int(found[1]) for found in levels if found), default=0)

    def rename(name: str) -> str:
        name = re.sub(
            r"^decoder\.conv_blocks\.(\d+)", lambda found: f"decoder.up.{last - int(found[1])}", name
        )
        name = re.sub(r"^encoder\.conv_blocks\.", "encoder.down.", name).replace(".res.", ".block.")
        middle = ("block_1", "attn_1", "block_2")
        return re.sub(r"\.mid\.([012])\.", lambda found: f".mid.{middle[int(found[1])]}.", name)

    return {_wrapped(rename(name)): tensor for name, tensor in state.items()}


def _wrapped(name: str) -> str:
    parts = name.split(".")
    owner, layer = ("", "", *parts)[-3:-1]
    resampling = layer == "conv" and owner in ("downsample", "upsample")
    if resampling or layer == "nin_shortcut" or (layer.startswith("conv") and layer != "conv"):
        return ".".join([*parts[:-1], "conv", parts[-1]])
    if layer.startswith("norm") and layer != "norm":
        return ".".join([*parts[:-1], "norm", parts[-1]])
    return name


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


def convert(path: Path, clean: Clean, digest: str) -> Path:
    """Return a safetensors file with the cleaned state of a checkpoint, made on first use in the weights cache."""
    root = Path(os.environ.get("KVBENCH_WEIGHTS", "~/.cache/kvbench/weights")).expanduser()
    target = root / f"{path.stem}-{digest[:16]}.safetensors"
    if not target.is_file():
        state = {k: v.contiguous() for k, v in clean(read(path)).items()}
        with write_beside(target) as beside:
            save_file(state, beside, metadata={"source_sha256": digest})
    return target


def load_into(module: nn.Module, source: Source, clean: Clean, dtype: torch.dtype = torch.float32) -> str:
    """Fill a module built on the meta device and return the SHA-256 of the source.

    Args:
        module: what to fill.
        source: where the checkpoint lies.
        clean: from its contents to the module's state.
        dtype: of the weights.

    Raises:
        WeightsError: see `Source.locate`, `read` and `check`.
    """
    path = source.locate()
    digest = hash_path(path)
    try:
        state = clean(read(path)) if _is_safe(path) else load_file(convert(path, clean, digest))
    except WeightsError as error:
        raise WeightsError(f"{source.key}.path: {error}; give another copy") from None
    check(state, module, source.key, path)
    module.load_state_dict({k: v.to(dtype) for k, v in state.items()}, assign=True)
    return digest


def _is_safe(path: Path) -> bool:
    """Return whether a file, or a folder's files, can be read without being converted first."""
    return path.suffix == ".safetensors" or any(
        (path / name).is_file() for name in (WHOLE, f"{WHOLE}.index.json")
    )


def check_sources(weights: str, sources: Mapping[str, Source], *needed: str) -> None:
    """Check that a model whose `weights` are `files` names a source for each part.

    Raises:
        ValueError: naming the parts of the model that `model.sources` lacks.
    """
    if weights == "files" and (lacking := set(needed) - set(sources)):
        raise ValueError(
            f"model.weights=files: model.sources names no {' and no '.join(sorted(lacking))}; use model.weights=random"
        )


def fill(module: nn.Module, source: Source | None, clean: Clean, dtype: torch.dtype = torch.float32) -> str:
    """Fill a module built on the meta device, with random numbers if it has no source, and return their SHA-256.

    Random numbers are float32 whatever `dtype` is; for the arguments see `load_into`.

    Raises:
        WeightsError: see `load_into`.
    """
    return fill_random(module) if source is None else load_into(module, source, clean, dtype)


RANDOM_RECIPE = 1
"""Version of `fill_random`; it and the shapes stand for the numbers in a run's identity."""


@torch.no_grad()
def fill_random(module: nn.Module) -> str:
    """Fill a module built on the meta device with float32 random numbers, the same ones every time.

    Layers keep the variance of what they get, norms start as the identity, biases at 0, attention is sharpened
    eightfold and gates are open: activations stay finite, and what attention returns can be seen in the images.

    Returns:
        SHA-256 of names, shapes and recipe, which determine the numbers.
    """
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    module.load_state_dict({name: torch.empty(shape) for name, shape in shapes.items()}, assign=True)
    generator = torch.Generator().manual_seed(0)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if name.endswith("bias"):
                parameter.zero_()
            elif name == "scale_mul_1H11":
                parameter.fill_(math.log(8))
            elif name != "weight":
                parameter.normal_(0, 0.5, generator=generator)
            elif parameter.ndim == 1:
                parameter.fill_(1)
            else:
                spread = 1.0 if isinstance(owner, nn.Embedding) else parameter[0].numel() ** -0.5
                parameter.normal_(0, spread, generator=generator)
    listed = [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]
    return hash_values([RANDOM_RECIPE, listed])
