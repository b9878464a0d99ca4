"""Training of `reasoner_tiny` and `reasoner_notes_tiny` on problems of three walkers, as a folder in Qwen3's format."""

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from kvbench.core import checkpoint
from kvbench.core.config import ConfigError
from kvbench.core.files import write_whole
from kvbench.extras.training.base import Training
from kvbench.extras.training.loop import generator
from kvbench.extras.training.qwen3.transformer import (
    END,
    MARKS,
    PAD,
    PUZZLES,
    NextWord,
    WalkRecipe,
    draw_batch,
)
from kvbench.extras.training.transformer import init_decoder
from kvbench.models.base import Model
from kvbench.models.files.checkpoints import WHOLE
from kvbench.models.parts.decoder_files import split_decoder
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.text_tokens import WORDS


@dataclass(frozen=True, kw_only=True)
class Qwen3Training(Training):
    """`train=reasoner_tiny` or `train=reasoner_notes_tiny`; see `Training` for its settings.

    Every step draws new problems.
    """

    kind: ClassVar[type[Model]] = Qwen3Model
    transformer: WalkRecipe = field(default_factory=WalkRecipe)

    def _train(self, model: Qwen3Model, out: Path) -> None:
        config, recipe = model.transformer, self.transformer
        if recipe.puzzle not in PUZZLES:
            raise ConfigError(
                f"train.transformer.puzzle={recipe.puzzle}: must be one of {', '.join(PUZZLES)}"
            )
        words = recipe.vocabulary
        if config.vocabulary != len(words) or not recipe.stages:
            raise ConfigError(
                f"train: problems of three walkers have {len(words)} words (model.transformer.vocabulary="
                f"{config.vocabulary}), and train.transformer.stages names at least one stage"
            )
        network = NextWord(TextDecoder(config))
        init_decoder(network.transformer, generator(recipe.seed, 3))
        rotation = config.rotations(
            max(stage.count_tokens(PUZZLES[recipe.puzzle]) for stage in recipe.stages)
        )
        weights = self._fit_transformer(network, partial(draw_batch, rotation, recipe), out)
        folder = out / "model"
        folder.mkdir(exist_ok=True)
        state = split_decoder(checkpoint.group(weights, "transformer", "."), config)
        half = {name: tensor.cpu().half() for name, tensor in state.items()}
        checkpoint.save(folder / WHOLE, half, {"recipe": asdict(recipe)})
        write_whole(folder / WORDS, json.dumps(words, ensure_ascii=False) + "\n")
        write_whole(folder / "config.json", json.dumps(describe(config), indent=1) + "\n")


def describe(config: Qwen3Config) -> dict[str, object]:
    """Return the `config.json` of the model for transformers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied,
        "pad_token_id": MARKS.index(PAD),
        "eos_token_id": MARKS.index(END),
        "bos_token_id": None,
        "dtype": "float16",
    }
