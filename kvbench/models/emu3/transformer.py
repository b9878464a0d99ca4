"""Shape of Emu3's language model (arXiv:2409.18869), a Llama-style decoder."""

from dataclasses import dataclass

from kvbench.models.parts.decoder import LinedImageConfig


@dataclass(frozen=True, kw_only=True)
class Emu3Config(LinedImageConfig):
    """Shape of the language model."""

    codes: int = 32768
    rope_base: float = 1e6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_cells("image")
