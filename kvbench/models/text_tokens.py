"""Tokenizers of language models, which encode prompts in the chat template and decode texts."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.files import parse_json, read_text
from kvbench.models.files.checkpoints import GGUF, WeightsError
from kvbench.models.files.gguf import read_gguf
from kvbench.models.files.gguf_tokenizer import make_tokenizer
from kvbench.models.files.weights import Source
from kvbench.models.parts.tokens import hash_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = date(2024, 7, 26)
"""Date that chat templates give as today's, so that prompts do not depend on the day of the run."""
WORDS = "vocabulary.json"
"""Name of the tokenizer's file for models with a list of words."""
FRONTS = ("\n", "a")
"""Prefixes with which a part of a text is encoded, before they are cut off; the second is for parts that begin with a
space or a line break, which a tokenizer may join to the first."""


class TextTokenizer(ABC):
    """Base class of tokenizers, which encode prompts and decode texts.

    Attributes:
        pad: token that pads short prompts in front.
        ends: tokens that end a text.
        begin: token that begins a text, if there is one.
        spaced: whether a space is put before every text that is encoded, as SentencePiece does by default.
    """

    pad: int
    ends: tuple[int, ...]
    begin: int | None = None
    spaced: bool = False

    @abstractmethod
    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, special ones included."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens stand for, without the end token."""

    def encode_part(self, text: str, *, first: bool) -> list[int]:
        """Return the tokens of a part of a given text; `first` says whether the part begins the text."""
        return self.encode(text)

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the characters of each token."""
        return tuple(self.decode([token]) for token in tokens)


def _open_reader(path: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of transformers in a folder or a GGUF file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.suffix == GGUF:
        return make_tokenizer(read_gguf(path))
    # AutoTokenizer may take a class by the model's name, which replaces parts of tokenizer.json by its own.
    whole = (path / "tokenizer.json").is_file()
    reader = PreTrainedTokenizerFast if whole else AutoTokenizer
    return reader.from_pretrained(str(path), local_files_only=True)


def _fix_date(template: str) -> str:
    """Return a chat template whose function `strftime_now`, if it calls it, formats DATE."""
    if "strftime_now" not in template:
        return template
    replaced = "".join(f"|replace('%{code}', '{DATE.strftime('%' + code)}')" for code in "aAbBdjmyYHMS")
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro +%}}{template}"


class ChatTokenizer(TextTokenizer):
    """Tokenizer of a model's folder or GGUF file, with its chat template.

    Args:
        path: folder of its files, or GGUF file.
        thinking: whether the model thinks before it answers; otherwise the template ends the thinking block at once.
        chat: whether prompts are put into the chat template; otherwise the model continues them.
        stops: tokens that end a text, besides the tokenizer's own end; None for its padding token, which ends a text
            without a chat.

    Raises:
        ImportError: the `text` extra is not installed.
        OSError, ValueError: the files have no tokenizer, or one without a chat template or an end token.
    """

    def __init__(
        self, path: Path, *, thinking: bool, chat: bool = True, stops: Sequence[int] | None = None
    ) -> None:
        self._reader = _open_reader(path)
        self._thinking, self._chat = thinking, chat
        if chat and self._reader.chat_template is None:
            raise ValueError("no chat template")
        self._template = _fix_date(self._reader.get_chat_template()) if chat else None
        end, pad = self._reader.eos_token_id, self._reader.pad_token_id
        if end is None and not stops:
            raise ValueError("no end-of-answer token")
        others = [pad] if stops is None else stops
        self.ends = tuple(dict.fromkeys(token for token in (end, *others) if token is not None))
        self.pad, self.begin = self.ends[0] if pad is None else pad, self._reader.bos_token_id
        self._letter = self._encode("a")
        self.spaced = self.decode(self._letter * 2) != "aa"

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a user's question up to the beginning of the answer; without a chat, of the prompt."""
        if not self._chat:
            return self._encode(prompt, special=True)
        text = self._reader.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self._thinking,
            chat_template=self._template,
        )
        return self._encode(str(text))

    def encode_part(self, text: str, *, first: bool) -> list[int]:
        """Return the tokens of a part of a text, without the chat template.

        If a tokenizer puts a space before every text, a later part is encoded after a prefix, which is cut off.

        Raises:
            ValueError: the tokenizer gives no character offsets, so that the first token of the part is unknown.
        """
        if first or not self.spaced:
            return self._encode(text, special=first)
        for front in FRONTS if self._reader.is_fast else ():
            found = self._reader(front + text, add_special_tokens=False, return_offsets_mapping=True)
            spans, begin = found["offset_mapping"], len(front)
            if all(end <= begin or start >= begin for start, end in spans):
                return [
                    token
                    for token, (start, _) in zip(found["input_ids"], spans, strict=True)
                    if start >= begin
                ]
        raise ValueError(
            "the tokenizer puts a space before every text and gives no character offsets; set model.sources.weights to "
            "a folder with tokenizer.json"
        )

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._reader(text, add_special_tokens=special)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, thoughts included, without special tokens."""
        # A file may ask for a clean-up of English in which `x != y` becomes `x!= y`.
        text = self._reader.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the characters of each token after other tokens; a text's first token is decoded without its space."""
        begin = len(self.decode(self._letter))
        return tuple(self.decode([*self._letter, token])[begin:] for token in tokens)


class WordTokens(TextTokenizer):
    """Tokenizer with a list of words, `vocabulary.json`.

    The first word is padding and the second ends a text; both are invisible.

    Args:
        words: all words, in the order of their token ids.

    Raises:
        ValueError: fewer than three words, or a repeated word.
    """

    pad = 0
    ends: tuple[int, ...] = (1,)

    def __init__(self, words: Sequence[str]) -> None:
        if len(words) < 3 or len(set(words)) < len(words):
            raise ValueError("its vocabulary must have three words or more, all of them different")
        self._words = tuple(words)
        self._tokens = {
            word: token for token, word in enumerate(words) if token not in (self.pad, *self.ends)
        }
        longest = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)))

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt by greedy longest match.

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
            tokens.append(self._tokens[match[0]])
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
        """Return a word `w<token>` for each token."""
        return " ".join(f"w{token}" for token in tokens if token not in self.ends)


def read_tokenizer(
    source: Source, *, thinking: bool, chat: bool = True, stops: Sequence[int] | None = None
) -> TextTokenizer:
    """Read the tokenizer of a model's folder, a `WordTokens` or a `ChatTokenizer` with these settings.

    Raises:
        WeightsError: its files are missing or unreadable, or the `text` extra is not installed.
    """
    folder = source.locate()
    try:
        if (folder / WORDS).is_file():
            return WordTokens(parse_json(read_text(folder / WORDS)))
        return ChatTokenizer(folder, thinking=thinking, chat=chat, stops=stops)
    except ImportError:
        raise WeightsError(f"{source.key}: install the `text` extra, which reads the tokenizer") from None
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(
            f"{source.key}: {folder} contains no tokenizer with a chat template ({reason}); it must be the model's "
            f"folder, with tokenizer.json and tokenizer_config.json, or with {WORDS} (model.chat=false: no template)"
        ) from None
