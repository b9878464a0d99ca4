"""Qwen3: a language model whose shape is in its settings."""

from dataclasses import dataclass

from kvbench.models.files.weights import Source
from kvbench.models.parts.config_file import Expected, check_config, expect_decoder
from kvbench.models.parts.tensor_parallel import check_split
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.text_model import TextModel
from kvbench.models.text_tokens import TextTokenizer, read_tokenizer


@dataclass
class Qwen3Model(TextModel):
    """Qwen3 at any size; see `TextModel` for its settings."""

    transformer: Qwen3Config
    sampling: TextSampling

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split(self.transformer, self.tensor_parallel)

    def check_files(self) -> None:
        """Compare the folder's `config.json`, if it has one, with the settings."""
        tied = Expected(self.transformer.tied, "model.transformer.tied")
        for source in self.list_sources().values():
            check_config(source, {**expect_decoder(self.transformer), "tie_word_embeddings": tied})

    def _open_tokenizer(self, source: Source) -> TextTokenizer:
        return read_tokenizer(source, thinking=self.thinking, chat=self.chat)
