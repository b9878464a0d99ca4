"""Texts to read: those that ship, and the user's own."""

import json
from pathlib import Path

import pytest

from kvbench.prompts.text_files import DOMAINS, read_shipped
from kvbench.prompts.texts import Texts


@pytest.mark.parametrize("domain", DOMAINS)
def test_texts_that_ship_are_long_enough_and_calibrations_have_others(domain: str) -> None:
    """A paragraph of more than 200 characters is in one of the parts; headings and short answers may recur."""
    paragraphs = []
    for part in ("evaluation", "calibration"):
        texts = read_shipped(domain, part)
        assert len(texts) >= 10
        # SmolLM2 has 2.8 characters in a token of code, and more of prose.
        assert all(len(text) >= 2.8 * 2100 and meta["source"] for text, meta in texts)
        paragraphs.append({block for text, _ in texts for block in text.split("\n\n") if len(block) > 200})
    assert paragraphs[0]
    assert not paragraphs[0] & paragraphs[1]


def test_a_text_is_read_up_to_its_length_and_scored_after_what_is_given() -> None:
    prompts = Texts(count=4, length=300, given=200).load()
    assert [prompt.meta["text_index"] for prompt in prompts] == [0, 4, 8, 12]
    for prompt in prompts:
        assert prompt.reading is not None
        (part,) = prompt.reading.parts
        assert (part.text, part.tokens) == (prompt.text, 300)
        assert (prompt.reading.given, prompt.reading.chunked, prompt.reading.cuts) == (200, True, ())


def test_another_domain_calibrates() -> None:
    source = Texts(calibration="code")
    assert {prompt.text for prompt in source.load_others(99, 1)} == {
        text for text, _ in read_shipped("code", "calibration")
    }
    few = Texts().load_others(5, 1)
    assert [prompt.index for prompt in few] == [0, 1, 2, 3, 4]
    assert few == Texts().load_others(5, 1) != Texts().load_others(5, 2)


def test_own_texts_come_from_lines_a_file_or_a_folder(tmp_path: Path) -> None:
    lines = [{"text": f"text {number} " * 20, "title": number} for number in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    source = Texts(path=str(tmp_path / "a.jsonl"), count=2, length=100, given=50)
    assert [prompt.meta for prompt in source.load()] == [
        {"title": 0, "text_index": 0},
        {"title": 2, "text_index": 2},
    ]
    assert [prompt.meta["title"] for prompt in source.load_others(9, 0)] == [1, 3, 4]
    for name in ("b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\n" * 50, encoding="utf-8")
    folder = Texts(path=str(tmp_path), count=None, length=100, given=50).load()
    assert [prompt.text for prompt in folder] == ["b\n\n" * 50, "c\n\n" * 50]
    one = Texts(path=str(tmp_path / "c.txt"), count=1, length=100, given=50).load()
    assert [prompt.text for prompt in one] == ["c\n\n" * 50]
