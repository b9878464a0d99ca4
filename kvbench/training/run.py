"""`task=train`: scenes -> tokenizer -> latents -> transformer -> feature network -> the files that ship."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.text import VocabularyEncoder
from kvbench.scenes import grammar
from kvbench.training import checkpoint
from kvbench.training.features import FeatureRecipe, train_features
from kvbench.training.loop import generator
from kvbench.training.tokenizer import TokenizerRecipe, encode, train_tokenizer
from kvbench.training.transformer import Corpus, TextToBits, TransformerRecipe, train_transformer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSettings:
    """What `task=train` does.

    Attributes:
        out: folder of checkpoints and of the finished weights; training resumes from what lies there.
        pool: rendered scenes to train on.
        seed: seed of the scenes.
        device: where networks are trained; a CPU and a GPU do not give the same weights.
        threads: torch threads, on a CPU.
        compiled: use torch.compile (needs a C++ compiler).
        tokenizer: recipe of the tokenizer.
        transformer: recipe of the transformer.
        features: recipe of the feature network.
    """

    out: str
    pool: int = 60_000
    seed: int = 0
    device: str = "cpu"
    threads: int = 2
    compiled: bool = True
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    transformer: TransformerRecipe = field(default_factory=TransformerRecipe)
    features: FeatureRecipe = field(default_factory=FeatureRecipe)


def train(model: InfinityModel, settings: TrainSettings) -> Path:
    """Train `model`'s tokenizer, transformer and feature network; return the folder with the finished weights.

    Raises:
        ValueError, FloatingPointError: see `fit`.
    """
    torch.set_num_threads(settings.threads)
    out = Path(settings.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    pixels, captions = grammar.pool(settings.pool, settings.seed, processes=settings.threads)
    images = torch.from_numpy(pixels)
    bsq = _make_tokenizer(model, settings.tokenizer.seed).to(settings.device)
    sizes = [(s.height, s.width) for s in model.spec.segments]
    weights = train_tokenizer(
        bsq,
        images,
        sizes,
        settings.tokenizer,
        out / "tokenizer.checkpoint.safetensors",
        compiled=settings.compiled,
    )
    bsq.load_state_dict(weights)
    _export(out / "tokenizer.safetensors", weights, {"recipe": asdict(settings.tokenizer)})
    corpus = Corpus(encode(bsq, images), _tokenize_captions(captions), bsq.amplitudes.detach().cpu())
    del images
    network = TextToBits(VocabularyEncoder(model.text_config), Infinity(model.transformer))
    rng = generator(settings.transformer.seed, 3)
    network.text.init_weights(rng)
    network.transformer.init_weights(rng)
    weights = train_transformer(
        network.to(settings.device),
        corpus,
        model.spec.segments,
        settings.transformer,
        out / "transformer.checkpoint.safetensors",
        compiled=settings.compiled,
    )
    for part in ("transformer", "text"):
        state = {
            name.removeprefix(f"{part}."): w for name, w in weights.items() if name.startswith(f"{part}.")
        }
        _export(out / f"{part}.safetensors", state, {"recipe": asdict(settings.transformer)})
    train_features(out / "features.safetensors", settings.features, settings.device)
    log.info("trained in %.0f s: %s", time.perf_counter() - started, out)
    return out


def _make_tokenizer(model: InfinityModel, seed: int) -> BSQ:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bsq = BSQ(model.tokenizer)
    bsq.close_branches()
    return bsq


def _tokenize_captions(captions: list[str]) -> Tensor:
    rows = torch.zeros(len(captions), grammar.MAX_TOKENS, dtype=torch.int64)
    for row, caption in zip(rows, captions, strict=True):
        ids = grammar.tokenize(caption)
        row[: len(ids)] = torch.tensor(ids)
    return rows


def _export(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    checkpoint.save(path, {name: tensor.cpu().half() for name, tensor in tensors.items()}, metadata)
