"""Emu3's prompts: the frame of transformers' processor, and tokenizers that do not fit."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from kvbench.models.emu3.prompt import read_tokens, write_prompt
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.parts.image_lines import LinedTokens
from kvbench.models.parts.tokens import lay_out, read_tokenizer
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.reference_emu3 import (
    CONFIG,
    FIRST,
    NEGATIVE,
    NUMBERS,
    ORDER,
    SPECIAL,
    SUFFIX,
    meta,
    write_tokenizer,
)

pytest.importorskip("tokenizers")


def read(path: Path, suffix: str = "") -> LinedTokens:
    make = partial(read_tokens, config=CONFIG, suffix=suffix, negative=NEGATIVE)
    return read_tokenizer(Source("model.sources.text", str(path)), make, "Emu3")[0]


def test_frames_are_the_ones_of_transformers(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    plain = read(path)
    for text, tokens in meta()["framed"].items():
        assert plain.encode(text) == tokens
    whole = read(path, SUFFIX)
    assert whole.encode("a red cube") == meta()["prompt"]
    assert whole.drop_condition(meta()["prompt"]) == meta()["negative"]
    assert (whole.pad, whole.newline) == (NUMBERS["<|endoftext|>"], NUMBERS["<|extra_200|>"])
    assert torch.equal(whole.codes, torch.tensor([-1] * FIRST + ORDER))


def test_rows_precede_columns() -> None:
    assert write_prompt("x", (4, 6)) == "x<|image start|>4*6<|image token|>"


def test_branches_are_padded_in_front(tmp_path: Path) -> None:
    tokenizer = read(write_tokenizer(tmp_path / "tokenizer.json"))
    prompts, negative = ["a", "a longer prompt"], meta()["negative"]
    rows, padding = lay_out(prompts, tokenizer, 40, guided=True)
    for row, count, tokens in zip(
        rows, padding, [*map(tokenizer.encode, prompts), negative, negative], strict=True
    ):
        assert row.tolist() == [tokenizer.pad] * count + tokens


@pytest.mark.parametrize(
    ("special", "words", "reason"),
    [
        ([name for name in SPECIAL if name != "<|image token|>"], {}, r"it has no token <\|image token\|>"),
        (SPECIAL, {"<|visual token 000003|>": 900}, "its image tokens are not 64 codes from number 265 on"),
        (SPECIAL, {"<|visual token 000064|>": 329}, "its image tokens are not 64 codes from number 265 on"),
    ],
)  # fmt: skip
def test_files_of_other_models_are_refused(
    tmp_path: Path, special: list[str], words: dict[str, int], reason: str
) -> None:
    numbers = {name: number for name, number in NUMBERS.items() if name in special or name not in SPECIAL}
    path = write_byte_tokenizer(tmp_path / "tokenizer.json", special, numbers | words, len(SPECIAL))
    with pytest.raises(
        WeightsError, match=rf"^model\.sources\.text: .* is not Emu3's tokenizer\.json \({reason}"
    ):
        read(path)


def test_special_tokens_that_are_read_as_text_are_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    plain = json.loads(path.read_text())
    plain["added_tokens"] = [one for one in plain["added_tokens"] if one["content"] != "<|image start|>"]
    path.write_text(json.dumps(plain))
    with pytest.raises(
        WeightsError, match=r"it does not read <\|image start\|> and <\|image token\|> as one token"
    ):
        read(path)
