"""Space of DreamSim's embeddings: three vision transformers with low-rank updates fitted to human judgements."""

import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load as read_tensors
from torch import Tensor, nn

from kvbench.eval.alignment.hps import MEAN as CLIP_MEAN
from kvbench.eval.alignment.hps import STD as CLIP_SD
from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.networks import Pixels, expecting, resize_normalised
from kvbench.eval.spaces.base import Network, Space
from kvbench.eval.spaces.dinov2 import MEAN, SD

ENSEMBLE = Weight.at(
    "https://github.com/ssundaram21/dreamsim/releases/download/v0.2.0-checkpoints/dreamsim_ensemble_checkpoint.zip"
)
DINO = Weight.at(
    "https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
    caches=TORCH_CACHES,
)
ADAPTER = "ensemble_lora/adapter_model"
ADAPTER_CONFIG = "ensemble_lora/adapter_config.json"
SIDE = 224  # pixels of a resized image
UPDATE = re.compile(r".*extractor_list\.(?P<branch>\d)\.model\.(?P<layer>.+)\.lora_A\.weight")
"""Tensor name of the first factor of a low-rank update."""
UNSUPPORTED = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")
"""Settings of an adapter that change how it is merged into the weights."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Branch:
    """One of the three transformers.

    Attributes:
        file: member of the authors' archive; None for DINO, which has a separate file.
        mean: mean of each colour channel on the scale from 0 to 1, by which images are normalised.
        sd: standard deviation of each colour channel.
        eps: epsilon of the layer norms.
        activation: name of the activation in timm.
    """

    file: str | None
    mean: tuple[float, ...]
    sd: tuple[float, ...]
    eps: float
    activation: str


BRANCHES = (
    Branch(None, MEAN, SD, 1e-6, "gelu"),
    Branch("clip_vitb16_pretrain.pth.tar", CLIP_MEAN, CLIP_SD, 1e-5, "quick_gelu"),
    Branch("open_clip_vitb16_pretrain.pth.tar", CLIP_MEAN, CLIP_SD, 1e-5, "gelu"),
)


@dataclass(frozen=True)
class DreamSimEmbeddings(Space):
    """Embeddings of DreamSim's `ensemble` (Fu et al., arXiv:2306.09344): 1792 channels of mean zero and unit length.

    DINO's class token after its last block, before the final norm, followed by the projections of CLIP and OpenCLIP,
    all ViT-B/16 with the authors' low-rank updates. Images are resized to 224 x 224 (PIL, bicubic), in float32.

    Attributes:
        trunk_path: path of DINO's file, if it is neither in $KVBENCH_WEIGHTS nor in torch's cache.
        heads: number of attention heads of each network.
        network: the authors' archive, which is not unpacked.
        trunk: DINO's file.
    """

    trunk_path: str | None = None
    heads: int = 12
    network: Weight = ENSEMBLE
    trunk: Weight = DINO
    name: ClassVar[str] = "dreamsim"
    distance: ClassVar[str] = "fd"
    packages: ClassVar[tuple[str, ...]] = ("timm",)
    paths: ClassVar[Mapping[str, str]] = {"trunk": "trunk_path"}

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded networks as one function, which gives 1792 features per image."""
        [_, trunk], _ = self.require()
        networks = [network.to(device) for network in load_branches(file, trunk, self.heads)]

        def embed(stack: Pixels) -> Mapping[str, Tensor]:
            parts = [
                network(resize_normalised(stack, SIDE, branch.mean, branch.sd).to(device))
                for branch, network in zip(BRANCHES, networks, strict=True)
            ]
            return {"features": centre(torch.cat(parts, 1))}

        return embed


def centre(features: Tensor) -> Tensor:
    """Return features [n, D] minus their mean over channels, normalised to unit length."""
    return nn.functional.normalize(features - features.mean(1, keepdim=True), dim=1)


def load_branches(archive: Path, trunk: Path, heads: int) -> list[nn.Module]:
    """Load the three networks with their updates from the authors' archive and DINO's state dict.

    Raises:
        ValueError: a tensor is missing, or the adapter has unsupported settings.
    """
    with expecting(f"DreamSim's ensemble, with {trunk}", archive), zipfile.ZipFile(archive) as members:
        updates = read_updates(members)
        states: list[State] = [
            _load(trunk) if branch.file is None else _load(members, branch.file)["state_dict"]
            for branch in BRANCHES
        ]
        for branch_updates, state in zip(updates.values(), states, strict=True):
            for layer, update in branch_updates.items():
                state[layer] = state[layer].float() + update
        return [build_branch(branch, state, heads) for branch, state in zip(BRANCHES, states, strict=True)]


def read_updates(members: zipfile.ZipFile) -> dict[int, State]:
    """Return the low-rank update of each weight, alpha / r x B A, by index of the branch and name.

    Raises:
        ValueError: the adapter has unsupported settings, or a network has no update.
    """
    config = json.loads(members.read(ADAPTER_CONFIG))
    if unsupported := [key for key in UNSUPPORTED if config.get(key)]:
        raise ValueError(
            f"{members.filename}: {ADAPTER_CONFIG} sets {unsupported[0]}, which is not supported"
        )
    if f"{ADAPTER}.safetensors" in members.namelist():
        factors = read_tensors(members.read(f"{ADAPTER}.safetensors"))
    else:
        factors = _load(members, f"{ADAPTER}.bin")
    updates: dict[int, State] = {number: {} for number in range(len(BRANCHES))}
    for name, first in factors.items():
        if match := UPDATE.fullmatch(name):
            product = factors[name.replace("lora_A", "lora_B")].float() @ first.float()
            scaled = config["lora_alpha"] / config["r"] * product
            updates[int(match["branch"])][f"{match['layer']}.weight"] = scaled
    if not all(updates.values()):
        raise ValueError(f"{members.filename}: {ADAPTER} does not update every network")
    return updates


def _load(file: Path | zipfile.ZipFile, member: str = "") -> Any:
    source = file if isinstance(file, Path) else io.BytesIO(file.read(member))
    return torch.load(source, map_location="cpu", weights_only=True)


def build_branch(branch: Branch, state: State, heads: int) -> nn.Module:
    """Return timm's network for a state dict with DINO's names; sizes come from the tensors.

    CLIP's networks have a norm named `pos_drop`, a projection, and a bias of the patch embedding, which timm's network
    lacks here; the bias is added to the position embeddings.

    Raises:
        RuntimeError, KeyError: the state dict is from another network.
    """
    from timm.models.vision_transformer import VisionTransformer

    clip, width = branch.file is not None, state["cls_token"].shape[-1]
    projection = state.pop("proj") if clip else None
    network: nn.Module = VisionTransformer(
        img_size=SIDE,
        patch_size=state["patch_embed.proj.weight"].shape[-1],
        num_classes=0,
        embed_dim=width,
        depth=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        num_heads=heads,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        pre_norm=clip,
        norm_layer=partial(nn.LayerNorm, eps=branch.eps),
        act_layer=branch.activation,
    )
    if clip:
        state["pos_embed"][:, 1:] += state.pop("patch_embed.proj.bias")
    network.load_state_dict({name.replace("pos_drop.", "norm_pre."): value for name, value in state.items()})
    if projection is None:
        network.norm = nn.Identity()
        return network.eval()
    last = nn.Linear(projection.shape[0], projection.shape[1], bias=False)
    last.weight.data = projection.T.float()
    return nn.Sequential(network, last).eval()
