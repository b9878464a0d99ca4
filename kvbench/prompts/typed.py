"""One prompt that the user types."""

import json
from dataclasses import dataclass

from kvbench.core.config import ConfigError
from kvbench.eval.files.prompt_lines import check_letters
from kvbench.prompts.base import Prompt, PromptSource, leave_out


@dataclass(frozen=True)
class Typed:
    """One prompt, with a set whose prompts calibrate methods.

    Attributes:
        quoted: the prompt as `quote` writes it.
        of: the set; its texts for forced decoding are not used, because the prompt is answered.
    """

    quoted: str
    of: PromptSource

    def load(self) -> list[Prompt]:
        """Return the prompt; raise ConfigError if no text file can hold it."""
        text = json.loads(self.quoted)
        try:
            check_letters(text)
        except ValueError as error:
            raise ConfigError(f"the prompt cannot be stored: {error}") from None
        return [Prompt(0, text)]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` calibration prompts of `of` or, if it has none, of its evaluated prompts."""
        others = self.of.load_others(count, seed) or self.of.load()
        return leave_out((prompt for prompt in others if prompt.reading is None), self.load(), count)


def quote(text: str) -> str:
    """Return a text as JSON without a dollar sign, which could begin an interpolation of a configuration."""
    return json.dumps(text).replace("$", r"\u0024")
