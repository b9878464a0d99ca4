"""Llama-style decoders: language models whose shape is read from the `config.json` of their files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property

import torch

from kvbench.core.config import ConfigError
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.generation_config import read_generation_config
from kvbench.models.files.weights import Source
from kvbench.models.llama.config_json import find_stop_tokens, read_shape
from kvbench.models.llama.files import find_hub_name, read_config
from kvbench.models.parts.tensor_parallel import check_split
from kvbench.models.parts.text_decoder import TextDecoderConfig
from kvbench.models.text_model import TextModel
from kvbench.models.text_tokens import TextTokenizer, read_tokenizer


@dataclass(kw_only=True)
class LlamaModel(TextModel):
    """A language model of a supported `model_type` (`config_json.ARCHITECTURES`); see `TextModel` for other settings.

    Texts end with the tokens of `generation_config.json`, of `config.json` and of the tokenizer.

    Attributes:
        transformer: shape of the language model, with which `config.json` must agree; None to read it from that file.
        sources: source of `weights`, the model's folder with `config.json` and tokenizer. A path that does not exist
            and has the form owner/name is a repository of the Hub.
    """

    transformer: TextDecoderConfig | None = None  # type: ignore[assignment]  # `shape` is never None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sources = {part: find_hub_name(source) for part, source in self.sources.items()}

    @cached_property
    def shape(self) -> TextDecoderConfig:  # type: ignore[override]  # computed once
        """Shape of the language model, without its weights.

        Raises:
            WeightsError: `config.json` is missing, unreadable, or of a model that is not supported.
            ConfigError: `tensor_parallel` does not fit the model.
        """
        shape = self.transformer or read_shape(*read_config(self.sources["weights"]))
        try:
            check_split(shape, self.tensor_parallel)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return shape

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the shape of random weights; for files nothing, because the weights' hash implies the shape."""
        return {"transformer": asdict(self.shape)} if self.weights == "random" else {}

    def check_files(self) -> None:
        """Check that `config.json` has the shape that is used, which is given or was read before a download."""
        for source in self.list_sources().values():
            if source.find() is None:
                continue
            config, origin = read_config(source)
            found = read_shape(config, origin)
            names = [field.name for field in fields(found)]
            problems = [
                f"model.transformer.{name} is {getattr(self.shape, name)}, but the file gives {getattr(found, name)}"
                for name in names
                if getattr(found, name) != getattr(self.shape, name)
            ]
            if problems:
                raise WeightsError(f"{origin}: {'; '.join(problems)}")

    def _open_tokenizer(self, source: Source) -> TextTokenizer:
        _ = self.shape  # raises if the model is not supported
        config, origin = read_config(source)
        stops = find_stop_tokens(config, read_generation_config(source), origin)
        return read_tokenizer(source, thinking=self.thinking, chat=self.chat, stops=stops)
