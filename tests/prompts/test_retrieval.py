"""Questions on statements in real text: what is stated where, in the tokens of a tokenizer of words and digits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.forced.text import FILL
from kvbench.prompts.base import Prompt
from kvbench.prompts.retrieval import Passkey, PlantedFacts, Retrieval

PIECES = re.compile(r"\d|\s*[A-Za-z]{1,5}|\s*[^A-Za-z0-9\s]|\s+")


def encode(text: str, first: bool = True) -> list[int]:
    """Return a number per piece: up to five letters with the space before them, a digit, a sign."""
    return [hash(piece) for piece in PIECES.findall(text)]


def write(tokens: tuple[int, ...], prompt: Prompt) -> str:
    """Return the text of tokens."""
    pieces = {hash(piece): piece for part in prompt.reading.parts for piece in PIECES.findall(part.text)}
    return "".join(pieces[token] for token in tokens)


def lay(prompt: Prompt) -> tuple[str, str]:
    """Return the characters of the context and of the answer."""
    laid = prompt.reading.tokenize(encode)
    return write(laid.tokens[: laid.given], prompt), write(laid.tokens[laid.given :], prompt)


@pytest.mark.parametrize(
    "source",
    [
        Passkey(count=5),
        Passkey(count=2, context=20000),
        PlantedFacts(count=4, context=2048, facts=8, times=3),
        PlantedFacts(count=4, context=4096, gaps=(0, 3500), domain="novels"),
    ],
)
def test_the_context_has_its_tokens_and_ends_with_the_question(source: Retrieval) -> None:
    for prompt in source.load():
        context, answer = lay(prompt)
        assert prompt.reading.tokenize(encode).given == source.context
        assert answer == prompt.meta["answer"]
        subject = "pass key is" if isinstance(source, Passkey) else "office is"
        assert context.rstrip().endswith(subject)
        question = context[context.rindex("\n\n") :].strip()
        statement = re.findall(rf"(?:{re.escape(question.split('? ')[-1])}) (\d+)", context)
        assert set(statement) == {answer}
        assert len(statement) == getattr(source, "times", 1)


def test_a_passkey_is_at_its_depth() -> None:
    for prompt, depth in zip(Passkey(count=5).load(), (10, 30, 50, 70, 90), strict=True):
        context, answer = lay(prompt)
        before = len(encode(context[: context.index(answer)]))
        assert before / 1024 == pytest.approx(depth / 100, abs=0.04)
        assert (prompt.meta["depth"], prompt.reading.chunked, prompt.reading.cuts) == (depth, False, ())


def test_gap_is_the_text_between_the_asked_fact_and_the_question() -> None:
    for prompt in PlantedFacts(count=8, facts=5, distractors=2, times=2).load():
        parts = prompt.reading.parts
        last = max(
            number for number, part in enumerate(parts[:-2]) if f" {prompt.meta['answer']}." in part.text
        )
        hay = [part.tokens for part in parts[last:-2] if part.tokens is not None]
        assert FILL not in hay
        assert sum(hay) == prompt.meta["gap"]
        stated = [part.text for part in parts[:-2] if part.tokens is None]
        assert len(stated) == 5 + 2 + 1
        assert sum("access code" in text for text in stated) == 2 + 2
        starts = [part.text[:200] for part in parts if part.tokens is not None]
        assert len(set(starts)) == len(starts)
    assert [prompt.meta["gap"] for prompt in PlantedFacts(count=5).load()] == [64, 256, 512, 768, 64]


def test_a_question_asked_after_begins_a_segment_at_one_place() -> None:
    for source in (Passkey(count=5, asked="after"), PlantedFacts(count=8, asked="after")):
        texts = [prompt.reading.tokenize(encode) for prompt in source.load()]
        assert len({text.cuts for text in texts}) == 1
        [cut] = texts[0].cuts
        assert 1000 < cut < texts[0].given == 1024


def test_calibration_questions_are_others_in_other_texts() -> None:
    source = Passkey(count=3)
    ours, others = source.load(), source.load_others(4, 1)
    assert len(others) == 4
    assert not {prompt.meta["answer"] for prompt in ours} & {prompt.meta["answer"] for prompt in others}
    hay = [
        {part.text[:500] for prompt in side for part in prompt.reading.parts[:-2]} for side in (ours, others)
    ]
    assert not hay[0] & hay[1]
    assert replace(source, count=2).load() == ours[:2]
    assert replace(source, seed=1).load() != ours


def test_own_text_surrounds_statements(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("apples and pears " * 800)
    [prompt] = Passkey(count=1, path=str(path)).load()
    assert lay(prompt)[0].startswith("apples and pears")
    path.write_text("short")
    with pytest.raises(ConfigError, match=r"prompts\.path=.*a\.txt: text 1 has only 5 characters"):
        Passkey(path=str(path)).load()
