"""Tokenizers of Qwen3, which encode prompts in the chat template and decode texts."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from kvbench.core.files import parse_json
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.parts.tokens import Tokenizer, hash_words

WORDS = "vocabulary.json"
"""Name of the tokenizer's file for models with a list of words."""


class TextTokenizer(Tokenizer):
    """Base class of tokenizers that also turn tokens into text.

    Attributes:
        ends: tokens that end a text.
    """

    ends: tuple[int, ...]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without its end."""


class ChatTokenizer(TextTokenizer):
    """Tokenizer of a model's folder, with its chat template.

    Args:
        folder: folder of its files.
        thinking: whether the model thinks before it answers; otherwise the template ends the thinking block at once.
        chat: whether prompts are put into the chat template; otherwise the model continues them.

    Raises:
        ImportError: the `text` extra is not installed.
        OSError, ValueError: no tokenizer, or one without a chat template or an end token.
    """

    def __init__(self, folder: Path, *, thinking: bool, chat: bool = True) -> None:
        from transformers import AutoTokenizer

        self._reader = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._thinking, self._chat = thinking, chat
        if chat and self._reader.chat_template is None:
            raise ValueError("it has no chat template")
        end, pad = self._reader.eos_token_id, self._reader.pad_token_id
        if end is None:
            raise ValueError("it has no token that ends an answer")
        self.pad = end if pad is None else pad
        self.ends = tuple(dict.fromkeys((end, self.pad)))  # without a chat, the padding token ends a text

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a user's question up to the beginning of the answer; without a chat, of the prompt."""
        if not self._chat:
            return list(self._reader(prompt)["input_ids"])
        text = self._reader.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self._thinking,
        )
        return list(self._reader(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, thoughts included, without special tokens."""
        return str(self._reader.decode(list(tokens), skip_special_tokens=True))


class WordTokens(TextTokenizer):
    """Tokenizer with a list of words, `vocabulary.json`.

    The first word is padding and the second ends a text; both are invisible.

    Args:
        words: all words in the order of their numbers.

    Raises:
        ValueError: fewer than three words, or a repeated word.
    """

    pad = 0
    ends: tuple[int, ...] = (1,)

    def __init__(self, words: Sequence[str]) -> None:
        if len(words) < 3 or len(set(words)) < len(words):
            raise ValueError("its vocabulary must have three words or more, all of them different")
        self._words = tuple(words)
        self._numbers = {
            word: number for number, word in enumerate(words) if number not in (self.pad, *self.ends)
        }
        longest = sorted(self._numbers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)))

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, at each place the longest matching word.

        Raises:
            ValueError: a part of the prompt is not a word.
        """
        tokens, position = [], 0
        while position < len(prompt):
            match = self._pattern.match(prompt, position)
            if match is None:
                raise ValueError(
                    f"prompt {prompt[:40]!r}...: {prompt[position : position + 12]!r} is not in the model's vocabulary"
                )
            tokens.append(self._numbers[match[0]])
            position = match.end()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without padding and end."""
        return "".join(self._words[token] for token in tokens if token not in (self.pad, *self.ends))


class HashedTextTokenizer(TextTokenizer):
    """Stand-in for a tokenizer without its files.

    Args:
        vocabulary: number of tokens, at least 3.
    """

    pad = 0
    ends: tuple[int, ...] = (1,)

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def encode(self, prompt: str) -> list[int]:
        """Return a token for each word, at least one."""
        return hash_words(prompt.split() or [""], 2, self._vocabulary)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the token numbers as words."""
        return " ".join(f"w{token}" for token in tokens if token not in self.ends)


def read_tokenizer(source: Source, *, thinking: bool, chat: bool = True) -> TextTokenizer:
    """Read the tokenizer of a model's folder, a `WordTokens` or a `ChatTokenizer` with these options.

    Raises:
        WeightsError: its files are missing or unreadable, or the `text` extra is not installed.
    """
    folder = source.locate()
    try:
        if (folder / WORDS).is_file():
            return WordTokens(parse_json((folder / WORDS).read_text(encoding="utf-8")))
        return ChatTokenizer(folder, thinking=thinking, chat=chat)
    except ImportError:
        raise WeightsError(f"{source.key}: install the `text` extra, which reads the tokenizer") from None
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(
            f"{source.key}: {folder} contains no tokenizer with a chat template ({reason}); it must be the model's "
            f"folder, with tokenizer.json and tokenizer_config.json, or with {WORDS}"
        ) from None
