"""ImageReward v1.0, a BLIP network tuned to human rankings (Xu et al., arXiv:2304.05977)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.core import checkpoint
from kvbench.core.files import read_text
from kvbench.eval.alignment.clip import PACKAGES, read_head, read_state
from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.files.weights import Snapshot
from kvbench.eval.networks import Pixels, expecting, full_float32, stack_pictures
from kvbench.eval.protocol.scores import MetricSpec

IMAGE_REWARD = Snapshot("THUDM/ImageReward", ("ImageReward.pt", "med_config.json"))
BERT = Snapshot(
    "google-bert/bert-base-uncased",
    ("vocab.txt",),
    revision="86b5e0934494bd15c9632b12f734a8a67f723594",
    sha256=(("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),),
)
ADDED_TOKENS = ("[DEC]", "[ENC]")
"""Tokens that BLIP adds to BERT's vocabulary."""
MAX_TOKENS = 35
"""Maximum number of tokens of a prompt, including the start and end tokens."""
HEAD_CHANNELS = 64
"""Channels of an attention head in BLIP's vision networks."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the raw scores on the authors' validation set."""
VISION_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.qkv.": ".self_attn.qkv.",
    ".attn.proj.": ".self_attn.projection.",
    "norm.": "post_layernorm.",
}
"""Parts of the checkpoint's names, and their names in transformers."""


@dataclass(frozen=True)
class ImageReward(PromptScore):
    """`imagereward`: score of image and prompt, standardised on the authors' validation set; it may be negative.

    The shorter side is resized to 224 pixels (PIL, bicubic) and the centre is cropped; prompts are cut to 35 tokens.
    Arithmetic is in float32.

    Attributes:
        tokenizer_path: path of the folder with BERT's vocabulary, if it is neither in $KVBENCH_WEIGHTS nor in a cache.
        model: folder of the network.
        tokenizer: folder of the vocabulary.
    """

    tokenizer_path: str | None = None
    model: Snapshot = IMAGE_REWARD
    tokenizer: Snapshot = BERT
    name: ClassVar[str] = "imagereward"
    protocol: ClassVar[str] = "v1.0"
    metric: ClassVar[str] = "imagereward"
    packages: ClassVar[tuple[str, ...]] = ("transformers", *PACKAGES)
    paths: ClassVar[Mapping[str, str]] = {"tokenizer": "tokenizer_path"}
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3)

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load both networks and the vocabulary; return their scorer and the hashes of their files."""
        [folder, vocabulary], hashes = self.require()
        return load_scorer(folder, vocabulary / "vocab.txt", device), hashes


def load_scorer(folder: Path, vocabulary: Path, device: str) -> Scorer:
    """Load a folder's ImageReward.pt and med_config.json, and BERT's vocab.txt; raise ValueError for other contents."""
    import open_clip

    state = read_state(folder / "ImageReward.pt")
    with expecting("ImageReward", folder):
        vision, text = _build_vision(state), _build_text(state, _read_config(folder / "med_config.json"))
        rate = read_head(state, "mlp.layers.", device)
    vision, text = vision.eval().to(device), text.eval().to(device)
    tokenize = load_tokenizer(vocabulary)
    transform = open_clip.image_transform(vision.config.image_size, is_train=False)

    @torch.inference_mode()
    def score(pixels: Pixels, prompts: Sequence[str]) -> Tensor:
        pictures = stack_pictures(pixels, transform).to(device)
        tokens, attention = (tensor.to(device) for tensor in tokenize(prompts))
        with full_float32():
            seen = vision(pixel_values=pictures).last_hidden_state
            read = text(tokens, attention_mask=attention, encoder_hidden_states=seen).last_hidden_state
            return (rate(read[:, 0]) - MEAN) / STD

    return score


def load_tokenizer(vocabulary: Path) -> Callable[[Sequence[str]], tuple[Tensor, Tensor]]:
    """Return a function from N prompts to their token ids and attention mask, both int64 [N, 35], padded."""
    from transformers import BertTokenizer

    tokenizer = BertTokenizer(str(vocabulary))
    tokenizer.add_tokens(list(ADDED_TOKENS), special_tokens=True)

    def tokenize(prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        inputs = tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        return inputs["input_ids"], inputs["attention_mask"]

    return tokenize


def _build_vision(state: Mapping[str, Tensor]) -> Any:
    """Build the vision network with sizes from the tensors; raise KeyError or RuntimeError if tensors are missing."""
    from transformers import BlipVisionConfig, BlipVisionModel

    tensors = checkpoint.group(state, "blip.visual_encoder", ".")
    channels, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    side = round((tensors["pos_embed"].shape[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=channels,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=len([name for name in tensors if name.endswith(".attn.qkv.weight")]),
        num_attention_heads=channels // HEAD_CHANNELS,
        image_size=side * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,  # as in the checkpoint; the default of transformers is 1e-5
    )
    network = BlipVisionModel(config)
    network.load_state_dict({_rename(name): value.float() for name, value in tensors.items()})
    return network


def _build_text(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> Any:
    """Build the text network, which attends to the image; raise KeyError or RuntimeError if tensors are missing."""
    from transformers import BlipTextConfig, BlipTextModel

    tensors = checkpoint.group(state, "blip.text_encoder", ".")
    tensors.pop("embeddings.position_ids", None)  # 0, 1, 2, ...: transformers makes this buffer itself
    width = tensors["encoder.layer.0.crossattention.self.key.weight"].shape[1]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    more = ("max_position_embeddings", "hidden_act", "layer_norm_eps")
    settings = {name: config[name] for name in (*names, *more)}
    network = BlipTextModel(BlipTextConfig(encoder_hidden_size=width, **settings), add_pooling_layer=False)
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network


def _rename(name: str) -> str:
    for theirs, ours in VISION_NAMES.items():
        if name.startswith(theirs) or (theirs.startswith(".") and theirs in name):
            name = name.replace(theirs, ours, 1)
    return name


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as settings by name: {error}; copy it again") from None
