"""Outputs of the full cache, which are scored under a method."""

from dataclasses import dataclass, replace

from kvbench.core.config import ConfigError
from kvbench.forced.text import OWN_OUTPUT
from kvbench.prompts.base import Prompt, PromptSource


@dataclass(frozen=True)
class Own:
    """Prompts whose outputs under the full cache are generated once, then scored by forced decoding.

    Attributes:
        of: the prompts.
    """

    of: PromptSource

    def load(self) -> list[Prompt]:
        """Return the prompts of `of`, whose outputs are scored; raise ConfigError if they are texts to score."""
        prompts = self.of.load()
        if any(prompt.reading is not None for prompt in prompts):
            raise ConfigError(
                "prompts.of: these are texts to read, which have no output; name prompts to answer"
            )
        return [replace(prompt, reading=OWN_OUTPUT) for prompt in prompts]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` calibration prompts of `of`, whose outputs are generated as in any run."""
        return self.of.load_others(count, seed)
