"""Lumina-mGPT's prompts: the official request, tokens of a tokenizer like the published one, and what does not fit."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.lumina.prompt import name_size, read_tokens, write_request
from kvbench.models.parts.image_lines import LinedTokens, hash_tokens
from kvbench.models.parts.tokens import encode_prompts, lay_out, read_tokenizer
from tests.support.byte_tokenizer import TEXT, write_byte_tokenizer
from tests.support.reference_lumina import CONFIGS, golden, meta, read_numbers

tokenizers = pytest.importorskip("tokenizers")
CONFIG = replace(CONFIGS["lm"], vocabulary=65536, image=(48, 32))
SPECIAL = {"<s>": 0, "<racm3:break>": 8197} | {f"<reserved{i:05d}>": i + 4 for i in range(8194, 8850)}


def spell(code: int) -> str:
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def name_codes(codes: int = 8192) -> dict[str, int]:
    """Names of the reference permutation's codes."""
    return {spell(int(golden()["bpe2img"][number])): number for number in range(4, 4 + codes)}


def write_tokenizer(
    path: Path, special: dict[str, int] = SPECIAL, codes: dict[str, int] | None = None
) -> Path:
    words = {**special, **(name_codes() if codes is None else codes)}
    return write_byte_tokenizer(path, special, words, 9000)


def read(path: Path) -> tuple[LinedTokens, str]:
    make = partial(read_tokens, config=CONFIG)
    return read_tokenizer(Source("model.sources.text", str(path)), make, "Lumina-mGPT")


def test_the_request_is_the_official_one() -> None:
    assert write_request("a red cube", (48, 48)) == meta()["template_768"]
    assert "of 512x768 according" in write_request("", (48, 32))  # width first
    assert [name_size(side)[1] for side in (32, 48, 64)] == [8820, 8828, 8836]


def test_tokens_say_what_the_request_says(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer, digest = read(path)
    assert len(digest) == 64
    tokens = tokenizer.encode(TEXT)
    assert tokens[-4:] == [8710, 8197, 8828, 8820]  # rows before columns
    assert tokens[0] == tokenizer.pad == 0
    assert tokenizer.newline == 8803
    reader = tokenizers.Tokenizer.from_file(str(path))
    assert reader.decode(tokens[1:-3], skip_special_tokens=False) == write_request(TEXT, (48, 32))
    assert len(tokens) == len(write_request(TEXT, (48, 32)).encode()) - len("<reserved08706>") + 5
    assert torch.equal(tokenizer.codes, golden()["bpe2img"])


def test_texts_have_their_own_length_whatever_the_file_remembers(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    expected = read(path)[0].encode(TEXT)
    for settings in ("enable_truncation", "enable_padding"):
        reader = tokenizers.Tokenizer.from_file(str(path))
        getattr(reader, settings)(**({"max_length": 9} if "trunc" in settings else {"length": 500}))
        reader.save(str(path))
        assert read(path)[0].encode(TEXT) == expected


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    last, swapped = spell(int(golden()["bpe2img"][8195])), name_codes()
    swapped[last] = 8900
    few = name_codes(8191)
    cases = [
        (
            {"special": {k: v for k, v in SPECIAL.items() if k != "<racm3:break>"}},
            "it has no token <racm3:break>",
        ),
        (
            {"special": SPECIAL | {"<reserved08706>": 8711, "<reserved08707>": 8710}},
            "its token <reserved08706> is number 8711, not 8710",
        ),
        (
            {"special": SPECIAL | {"<reserved08824>": 8900}},
            "its token <reserved08824> is number 8900, not 8828",
        ),
        ({"codes": few}, "its image tokens are not 8192 codes from number 4 on"),
        ({"codes": swapped}, "its image tokens are not 8192 codes from number 4 on"),
        ({"codes": few | {spell(8192): 8195}}, "its image tokens are not 8192 codes from number 4 on"),
    ]
    for change, reason in cases:
        path = write_tokenizer(tmp_path / "other.json", **change)
        with pytest.raises(WeightsError, match=rf"^model\.sources\.text: .* is not Lumina-mGPT's.*{reason}"):
            read(path)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(WeightsError, match=r"^model\.sources\.text: .* is not Lumina-mGPT's tokenizer\.json"):
        read(broken)
    with pytest.raises(WeightsError, match=r"^model\.sources\.text\.path=.*does not exist"):
        read(tmp_path / "none.json")


def test_a_separator_that_is_read_as_text_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    plain = json.loads(path.read_text())
    plain["added_tokens"] = [one for one in plain["added_tokens"] if one["content"] != "<reserved08706>"]
    path.write_text(json.dumps(plain))
    with pytest.raises(WeightsError, match="it does not read <reserved08706> as one token"):
        read(path)


def test_padding_stands_in_front_and_the_other_branch_has_three_tokens() -> None:
    numbers = read_numbers()
    prefix = numbers.drop_condition([])
    assert prefix == [8197, 8806, 8807]
    prompts = ["0 9 9 8710 8197 8806 8807", "0 9 8710 8197 8806 8807"]
    rows, padding = lay_out(prompts, numbers, 9, guided=True)
    assert padding == [2, 3, 6, 6]
    for row, prompt in zip(rows, prompts, strict=False):
        given = numbers.encode(prompt)
        assert row.tolist() == [0] * (9 - len(given)) + given
    for row in rows[2:]:
        assert row.tolist() == [0] * 6 + prefix
    assert torch.equal(lay_out(prompts, numbers, 9, guided=False)[0], rows[:2])
    with pytest.raises(ValueError, match=r"has 7 tokens: set model\.prompt_tokens=7, which is 6"):
        lay_out(prompts, numbers, 6, guided=True)


def test_the_stand_in_tells_words_apart_and_stays_in_the_vocabulary() -> None:
    tokenizer = hash_tokens(replace(CONFIGS["lm"], vocabulary=250, codes=100))
    assert tokenizer.encode("") == [0, 2, 3, 4, 5]
    tokens = tokenizer.encode("a red cat a")
    assert tokens[1] == tokens[4] != tokens[2]
    assert all(106 <= token < 250 for token in tokens[1:5])
    assert len({tuple(tokenizer.encode(str(i))) for i in range(200)}) > 90
    assert tokenizer.codes.tolist() == [-1] * 6 + list(range(100))
    encode_prompts(["a b"], tokenizer, 7)
