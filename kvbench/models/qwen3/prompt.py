"""Prompts and texts of Qwen3: the chat a prompt stands in, tokens, and what ends a text."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from kvbench.core.files import parse_json
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.parts.tokens import Tokenizer, hash_words

WORDS = "vocabulary.json"
"""File of a model whose tokenizer is a list of words."""


class TextTokenizer(Tokenizer):
    """Base class of tokenizers that also turn tokens into text.

    Attributes:
        ends: tokens that end a text.
    """

    ends: tuple[int, ...]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without those that end it."""


class ChatTokenizer(TextTokenizer):
    """The tokenizer of a model's folder, with its chat template.

    Args:
        folder: where its files are.
        thinking: whether the model thinks before it answers; otherwise the template closes its thoughts at once.
        chat: whether a prompt stands in a chat; otherwise it is the beginning of a text that the model goes on with.

    Raises:
        ImportError: the `text` extra is not installed.
        OSError, ValueError: no tokenizer, or one without a chat template or without a token that ends an answer.
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
        self.ends = tuple(
            dict.fromkeys((end, self.pad))
        )  # a text of its own ends with the token that also pads

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a question of the user's, up to where the answer begins; of a text without a chat."""
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
        """Return the text of tokens, thoughts included, without special ones."""
        return str(self._reader.decode(list(tokens), skip_special_tokens=True))


class WordTokens(TextTokenizer):
    """A tokenizer that is a list of words, `vocabulary.json`: texts are made of them and of nothing else.

    The first word pads and the second ends a text; neither is seen in one.

    Args:
        words: all words, in the order of their numbers, no two of them the same.

    Raises:
        ValueError: fewer than three words, or a word that occurs twice.
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
        """Return the tokens of a prompt, the longest word that fits first.

        Raises:
            ValueError: something in it is no word.
        """
        tokens, at = [], 0
        while at < len(prompt):
            found = self._pattern.match(prompt, at)
            if found is None:
                raise ValueError(
                    f"prompt {prompt[:40]!r}...: {prompt[at : at + 12]!r} is not in the model's vocabulary"
                )
            tokens.append(self._numbers[found[0]])
            at = found.end()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without those that pad or end it."""
        return "".join(self._words[token] for token in tokens if token not in (self.pad, *self.ends))


class HashedTokens(TextTokenizer):
    """A stand-in for a tokenizer without its files: one token a word, by the word's hash.

    Args:
        vocabulary: tokens there are, at least 3.
    """

    pad = 0
    ends: tuple[int, ...] = (1,)

    def __init__(self, vocabulary: int) -> None:
        self._words = vocabulary - 2

    def encode(self, prompt: str) -> list[int]:
        """Return a token for each word, one at least."""
        return [2 + word for word in hash_words(prompt.split() or [""], self._words)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the tokens' numbers as words."""
        return " ".join(f"w{token}" for token in tokens if token not in self.ends)


def read_tokenizer(source: Source, *, thinking: bool, chat: bool = True) -> TextTokenizer:
    """Read the tokenizer out of the folder of a model's weights: a list of words, or what transformers reads.

    Args:
        source: of the folder.
        thinking: whether the model thinks before it answers.
        chat: whether a prompt stands in a chat; lists of words know none.

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
            f"{source.key}: {folder} holds no tokenizer with a chat template ({reason}); it must be the model's "
            f"folder, with tokenizer.json and tokenizer_config.json, or with {WORDS}"
        ) from None
