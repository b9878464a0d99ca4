"""Networks of a few channels, for tests of the evaluators."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.eval.files.weights import Weight, file_sha256

MODEL = "kvbench-tiny-clip"
SHAPE = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 28, "layers": 1, "width": 16, "head_width": 8, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


def tiny_clip(folder: Path) -> Weight:
    """A CLIP network of a few channels, registered with open_clip as `MODEL`, and its random weights."""
    import open_clip

    (folder / f"{MODEL}.json").write_text(json.dumps(SHAPE))
    open_clip.add_model_config(folder / f"{MODEL}.json")
    torch.manual_seed(0)
    network = open_clip.create_model(MODEL, load_weights=False)
    for parameter in network.parameters():  # fresh ones are so small that the activations hardly matter
        torch.nn.init.normal_(parameter, std=0.5)
    path = folder / "tiny.safetensors"
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    return Weight("tiny.safetensors", sha256=file_sha256(path), path=str(path))


def make_golden_weight(name: str, shape: Sequence[int]) -> Tensor:
    """A tensor of the networks of tests/golden/eval/README.md."""
    x = torch.from_numpy(np.random.default_rng(zlib.crc32(name.encode())).random(tuple(shape)) - 0.5).float()
    if len(shape) > 1:
        return x * (12 / np.prod(shape[1:])) ** 0.5 * 1.5
    return 1 + x if name.endswith("weight") else 0.4 * x
