"""`task=train`: scenes -> tokenizer -> latents -> transformer -> feature network -> the files that ship."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.models.bsq import BSQ
from kvbench.models.infinity import Infinity
from kvbench.models.pipeline import InfinityModel
from kvbench.models.text import VocabularyEncoder
from kvbench.scenes import grammar
from kvbench.training import features, tokenizer, transformer
from kvbench.training.loop import generator
from kvbench.training.transformer import Corpus, TextToBits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSettings:
    """What `task=train` does.

    Attributes:
        out: folder of checkpoints and of the finished weights; training resumes from what lies there.
        pool: rendered scenes to train on.
        seed: seed of the scenes.
        threads: torch threads.
        compiled: use torch.compile for the transformer (needs a C++ compiler).
        tokenizer: recipe of the tokenizer.
        transformer: recipe of the transformer.
    """

    out: Path
    pool: int = 60_000
    seed: int = 0
    threads: int = 2
    compiled: bool = True
    tokenizer: tokenizer.TokenizerRecipe = field(default_factory=tokenizer.TokenizerRecipe)
    transformer: transformer.TransformerRecipe = field(default_factory=transformer.TransformerRecipe)


def train(model: InfinityModel, settings: TrainSettings) -> Path:
    """Trains `model`'s tokenizer, transformer and feature network; returns the folder with the finished weights."""
    torch.set_num_threads(settings.threads)
    settings.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    pixels, captions = grammar.pool(settings.pool, settings.seed, processes=settings.threads)
    images = torch.from_numpy(pixels)
    bsq = BSQ(model.bsq_config)
    _seeded(bsq, settings.tokenizer.seed)
    sizes = [(s.height, s.width) for s in model.spec.segments]
    weights = tokenizer.fit(bsq, images, sizes, settings.tokenizer, settings.out / "tokenizer.checkpoint.safetensors")
    bsq.load_state_dict(weights)
    _export(settings.out / "tokenizer.safetensors", weights, {"recipe": asdict(settings.tokenizer)})
    corpus = Corpus(tokenizer.encode(bsq, images), _tokens(captions), bsq.amplitudes.detach().clone())
    del images
    network = TextToBits(VocabularyEncoder(model.text_config), Infinity(model.transformer_config))
    rng = generator(settings.transformer.seed, 3)
    network.text.init_weights(rng)
    network.transformer.init_weights(rng)
    weights = transformer.fit(
        network,
        corpus,
        model.spec.segments,
        settings.transformer,
        settings.out / "transformer.checkpoint.safetensors",
        compiled=settings.compiled,
    )
    _export(settings.out / "transformer.safetensors", weights, {"recipe": asdict(settings.transformer)})
    features.train_features(settings.out / "features.safetensors")
    log.info("trained in %.0f s: %s", time.perf_counter() - started, settings.out)
    return settings.out


def _tokens(captions: list[str]) -> Tensor:
    rows = torch.zeros(len(captions), grammar.MAX_TOKENS, dtype=torch.int64)
    for row, caption in zip(rows, captions, strict=True):
        ids = grammar.tokenize(caption)
        row[: len(ids)] = torch.tensor(ids)
    return rows


def _export(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    half = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    save_file(half, path, metadata={"kvbench": json.dumps(metadata, sort_keys=True)})
