"""One prompt that the user types."""

import json
from dataclasses import dataclass

from kvbench.core.config import ConfigError
from kvbench.eval.files.prompt_lines import check_letters
from kvbench.prompts.base import Prompt, PromptSource, leave_out


@dataclass(frozen=True)
class Typed:
    """One prompt, beside a set whose prompts a method is calibrated on.

    Attributes:
        quoted: the prompt as `quote` writes it.
        of: the set; its texts that are read calibrate no text that is written.
    """

    quoted: str
    of: PromptSource

    def load(self) -> list[Prompt]:
        """Return the prompt.

        Raises:
            ConfigError: no file of text can hold it.
        """
        text = json.loads(self.quoted)
        try:
            check_letters(text)
        except ValueError as error:
            raise ConfigError(f"the prompt cannot be stored: {error}") from None
        return [Prompt(0, text)]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` calibration prompts of `of`; if it has none, its own prompts."""
        others = self.of.load_others(count, seed) or self.of.load()
        return leave_out((prompt for prompt in others if prompt.reading is None), self.load(), count)


def quote(text: str) -> str:
    """Return a text as JSON without a dollar sign, which a configuration would take for an interpolation."""
    return json.dumps(text).replace("$", r"\u0024")
