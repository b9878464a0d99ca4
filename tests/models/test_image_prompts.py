"""Prompts of image models: official frames, tokens of tokenizers like the published ones, and files that do not fit."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.parts import image_prompts as frames
from kvbench.models.parts.image_prompts import EMU3, JANUS
from kvbench.models.parts.tokens import FramedTokens, lay_out, read_tokenizer
from tests.support import reference_emu3 as emu3
from tests.support import reference_lumina as lumina
from tests.support.reference_emu3 import write_byte_tokenizer
from tests.support.reference_janus import meta as janus_meta

tokenizers = pytest.importorskip("tokenizers")
TEXT = "Two  blue rings, café!"
CHAT = (*JANUS, "<|User|>", "<|Assistant|>")
CONFIG = replace(lumina.CONFIGS["lm"], vocabulary=65536, image=(48, 32))
RESERVED = {"<s>": 0, "<racm3:break>": 8197} | {f"<reserved{i:05d}>": i + 4 for i in range(8194, 8850)}


def spell(code: int) -> str:
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def name_codes(codes: int = 8192) -> dict[str, int]:
    """Names of the reference permutation's codes."""
    return {spell(int(lumina.golden()["bpe2img"][number])): number for number in range(4, 4 + codes)}


def write_janus(path: Path, special: tuple[str, ...] = CHAT) -> Path:
    return write_byte_tokenizer(path, special, {}, 0)


def write_lumina(path: Path, special: dict[str, int] = RESERVED, codes: dict[str, int] | None = None) -> Path:
    return write_byte_tokenizer(path, special, special | (name_codes() if codes is None else codes), 9000)


def write_emu3(path: Path, lacking: tuple[str, ...] = (), words: dict[str, int] | None = None) -> Path:
    special = [name for name in emu3.SPECIAL if name not in lacking]
    numbers = {name: number for name, number in emu3.NUMBERS.items() if name not in lacking} | (words or {})
    return write_byte_tokenizer(path, special, numbers, len(emu3.SPECIAL))


READ: dict[str, tuple[Callable[..., Path], Callable[[Path], FramedTokens]]] = {
    "Janus-Pro": (write_janus, frames.read_janus),
    "Lumina-mGPT": (write_lumina, partial(frames.read_lumina, config=CONFIG)),
    "Emu3": (write_emu3, partial(frames.read_emu3, config=emu3.CONFIG, suffix="", negative=emu3.NEGATIVE)),
}
"""Writer and reader of a tokenizer's file, by the model's name in messages."""
each = pytest.mark.parametrize("owner", READ)


def read(owner: str, path: Path) -> FramedTokens:
    tokenizer, digest = read_tokenizer(Source("model.sources.text", str(path)), READ[owner][1], owner)
    assert len(digest) == 64
    return tokenizer


def test_frames_are_the_official_ones(tmp_path: Path) -> None:
    template = janus_meta()["template"]
    assert frames.write_chat("a red cube") == frames.write_chat(" a red cube\n") == template["pro"]
    assert frames.write_chat("") == frames.write_chat("  ") == template["empty_prompt"]
    assert frames.write_request("a red cube", (48, 48)) == lumina.meta()["template_768"]
    assert "of 512x768 according" in frames.write_request("", (48, 32))  # width first
    assert [frames.name_size(side)[1] for side in (32, 48, 64)] == [8820, 8828, 8836]
    assert frames.write_beginning("x", (4, 6)) == "x<|image start|>4*6<|image token|>"
    path = emu3.write_tokenizer(tmp_path / "tokenizer.json")
    for text, tokens in emu3.meta()["framed"].items():
        assert read("Emu3", path).encode(text) == tokens
    whole = frames.read_emu3(path, emu3.CONFIG, emu3.SUFFIX, emu3.NEGATIVE)
    assert whole.encode("a red cube") == emu3.meta()["prompt"]
    assert whole.drop_condition(emu3.meta()["prompt"]) == emu3.meta()["negative"]


def test_tokens_say_what_the_frame_says(tmp_path: Path) -> None:
    path = write_janus(tmp_path / "janus.json")
    tokenizer, reader = read("Janus-Pro", path), tokenizers.Tokenizer.from_file(str(path))
    tokens, marks = tokenizer.encode(TEXT), [reader.token_to_id(name) for name in CHAT]
    assert [tokens[0], tokens[-1], tokenizer.pad] == marks[:3]
    assert reader.decode(tokens, skip_special_tokens=False) == JANUS[0] + frames.write_chat(TEXT)
    assert [tokens.count(number) for number in marks] == [1, 1, 0, 1, 1]
    assert len(tokens) == len(b": \n\n:") + len(TEXT.encode()) + 4
    path = write_lumina(tmp_path / "lumina.json")
    tokenizer, reader = read("Lumina-mGPT", path), tokenizers.Tokenizer.from_file(str(path))
    tokens, request = tokenizer.encode(TEXT), frames.write_request(TEXT, (48, 32))
    assert tokens[-4:] == [8710, 8197, 8828, 8820]  # rows before columns
    assert (tokens[0], tokenizer.pad, tokenizer.newline) == (0, 0, 8803)
    assert reader.decode(tokens[1:-3], skip_special_tokens=False) == request
    assert len(tokens) == len(request.encode()) - len("<reserved08706>") + 5
    assert torch.equal(tokenizer.codes, lumina.golden()["bpe2img"])
    tokenizer = read("Emu3", emu3.write_tokenizer(tmp_path / "emu3.json"))
    assert (tokenizer.pad, tokenizer.newline) == tuple(emu3.NUMBERS[name] for name in EMU3[1:3])
    assert torch.equal(tokenizer.codes, torch.tensor([-1] * emu3.FIRST + emu3.ORDER))


@each
def test_texts_have_their_own_length_whatever_the_file_remembers(owner: str, tmp_path: Path) -> None:
    path = READ[owner][0](tmp_path / "tokenizer.json")
    expected = read(owner, path).encode(TEXT)
    for settings in ("enable_truncation", "enable_padding"):
        reader = tokenizers.Tokenizer.from_file(str(path))
        getattr(reader, settings)(**({"max_length": 9} if "trunc" in settings else {"length": 500}))
        reader.save(str(path))
        assert read(owner, path).encode(TEXT) == expected


SIZES = "its image tokens are not {} codes from id {} on"
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("Janus-Pro", {"special": CHAT[:2]}, f"no token {JANUS[2]}"),
    ("Lumina-mGPT", {"special": RESERVED | {"<reserved08706>": 8711, "<reserved08707>": 8710}},
     "its token <reserved08706> has id 8711, not 8710"),
    ("Lumina-mGPT", {"special": RESERVED | {"<reserved08824>": 8900}},
     "its token <reserved08824> has id 8900, not 8828"),
    ("Lumina-mGPT", {"codes": name_codes(8191)}, SIZES.format(8192, 4)),
    ("Lumina-mGPT", {"codes": name_codes(8191) | {spell(8192): 8195}}, SIZES.format(8192, 4)),
    ("Emu3", {"lacking": ("<|image token|>",)}, "no token <|image token|>"),
    ("Emu3", {"words": {"<|visual token 000003|>": 900}}, SIZES.format(64, 265)),
    ("Emu3", {"words": {"<|visual token 000064|>": 329}}, SIZES.format(64, 265)),
]  # fmt: skip


def refuses(owner: str, path: Path, reason: str) -> None:
    message = rf"^model\.sources\.text: .* is not {owner}'s tokenizer\.json \({re.escape(reason)}"
    with pytest.raises(WeightsError, match=message):
        read(owner, path)


@each
def test_files_of_other_models_are_refused(owner: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for change, reason in [row[1:] for row in OTHERS if row[0] == owner]:
        refuses(owner, READ[owner][0](path, **change), reason)
    path.write_text(json.dumps({"version": "1.0"}))
    refuses(owner, path, "")
    with pytest.raises(WeightsError, match=r"^model\.sources\.text\.path=.*does not exist"):
        read(owner, tmp_path / "none.json")


def test_special_tokens_that_are_read_as_text_are_refused(tmp_path: Path) -> None:
    for owner, name, reason in (
        ("Lumina-mGPT", "<reserved08706>", "<reserved08706> is not one token"),
        ("Emu3", "<|image start|>", "<|image start|> and <|image token|> are not one token each"),
    ):
        path = READ[owner][0](tmp_path / "tokenizer.json")
        plain = json.loads(path.read_text())
        plain["added_tokens"] = [one for one in plain["added_tokens"] if one["content"] != name]
        path.write_text(json.dumps(plain))
        refuses(owner, path, reason)


@each
def test_padding_stands_in_front_of_both_branches(owner: str, tmp_path: Path) -> None:
    """Janus-Pro's other branch is as long as the first, Lumina's has three tokens, Emu3's is the negative prompt."""
    tokenizer = read(owner, READ[owner][0](tmp_path / "tokenizer.json"))
    prompts = ["a cat", "", "a longer cat"]
    own = [tokenizer.encode(prompt) for prompt in prompts]
    [begin, *_, image], pad = own[1], tokenizer.pad
    dropped = {
        "Janus-Pro": [[begin, *[pad] * (len(row) - 2), image] for row in own],
        "Lumina-mGPT": [[8197, 8828, 8820]] * 3,
        "Emu3": [emu3.meta()["negative"]] * 3,
    }[owner]
    room = max(map(len, [*own, *dropped])) + 2
    rows, padding = lay_out(prompts, tokenizer, room, guided=True)
    assert padding == [room - len(row) for row in own + dropped]
    assert rows.tolist() == [[pad] * (room - len(row)) + row for row in own + dropped]
    assert torch.equal(lay_out(prompts, tokenizer, room, guided=False)[0], rows[:3])
