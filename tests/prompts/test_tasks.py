"""Tasks with exact answers at any length on any tokenizer, and a program that answers from what a prompt says."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.text.string_match import StringMatchAll, StringMatchPart
from kvbench.forced.text import OWN_OUTPUT
from kvbench.prompts.base import Prompt, fit
from kvbench.prompts.files import RulerFile
from kvbench.prompts.own import Own
from kvbench.prompts.tasks import PEOPLE, Chains, Needles, Task, WordCounts
from kvbench.runs.job import fit_prompts
from tests.eval.text.test_answers import make
from tests.prompts.test_retrieval import PIECES
from tests.support.image_sets import only
from tests.support.small_models import small_writer

TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "pieces": PIECES.findall,
    "threes": lambda text: [text[start : start + 3] for start in range(0, len(text), 3)],
    "words": str.split,
}
KINDS: dict[str, Task] = {
    "one needle": Needles(count=3, keys=1),
    "keys": Needles(count=3, keys=12, domain="novels"),
    "values": Needles(count=3, keys=2, values=4),
    "queries": Needles(count=3, keys=4, queries=3),
    "all of it": Needles(count=2, keys=4, values=2, queries=2, domain="chat"),
    "chains": Chains(count=3),
    "hops": Chains(count=3, chains=4, hops=3, domain="code"),
    "common words": WordCounts(count=3, answers=5, times=6),
    "frequent words": WordCounts(count=3, zipf=2),
    "frequent words, flat": WordCounts(count=2, answers=2, zipf=1.3, domain="code"),
}
LONG = ("values", "hops", "frequent words")
"""One of each class, which is fitted to more tokens too."""


def fitted(source: Task, name: str = "pieces") -> list[Prompt]:
    return [fit(prompt, lambda text, _: len(TOKENIZERS[name](text))) for prompt in source.load()]


def answer(text: str) -> str:
    """What a program writes that reads statements and question, and knows nothing else."""
    body, _, question = text.rpartition("\n\n")
    if "people have ticket" in question:
        held: dict[str, str] = {}
        for person, ticket, other in re.findall(
            r"^(\w+) has (?:ticket (\d+)|the same ticket as (\w+))\.$", body, re.M
        ):
            held[person] = ticket or held[other]
        wanted = re.findall(r"have ticket (\d+)", question)
        return " and ".join(person for person, ticket in held.items() if ticket in wanted) or "nobody"
    if "come most often" in question:
        number = int(re.findall(r"Which (\d+)", question)[0])
        listed = body.rpartition("\n\n")[2].rstrip(".").split(", ")
        return " ".join(word for word, _ in Counter(filter(None, listed)).most_common(number)) or "none"
    keys = re.split(" and the ", question.split("?")[0].partition("stated as the ")[2])
    return (
        " ".join(
            number for key in keys for number in re.findall(rf"^(?:The|One) {key} is (\d+)\.$", body, re.M)
        )
        or "unknown"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_sees_all_is_right_and_one_that_sees_none_is_wrong(kind: str, tmp_path: Path) -> None:
    for name, length in (("pieces", 512), ("threes", 4096)):
        prompts = fitted(replace(KINDS[kind], length=length), name)
        for sees, right in ((True, 1.0), (False, 0.0)):
            seen = [one.text if sees else "\n\n" + one.text.rpartition("\n\n")[2] for one in prompts]
            texts = make(tmp_path / f"{name} {sees}", list(map(answer, seen)), [one.meta for one in prompts])
            for evaluator in (StringMatchAll(), StringMatchPart()):
                assert only(evaluator, texts).scores[evaluator.name].value == right


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_its_length_and_one_more_word_would_be_too_much(kind: str) -> None:
    for name, length in (("pieces", 400), ("threes", 4096), *[("words", 65536)] * (kind in LONG)):
        source = replace(KINDS[kind], length=length, count=1)
        [prompt], [longer] = fitted(source, name), fitted(replace(source, length=length + 40), name)
        tokens = len(TOKENIZERS[name](prompt.text))
        assert length - 24 <= tokens <= length < len(TOKENIZERS[name](longer.text))
        assert prompt.meta == longer.meta
        assert prompt.draft is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_answer_continues_its_question_and_has_all_outputs_in_order(kind: str) -> None:
    for ours, written in zip(fitted(replace(KINDS[kind], answer="read")), fitted(KINDS[kind]), strict=True):
        laid = ours.reading.tokenize(lambda text, _: list(map(hash, PIECES.findall(text))))
        prompt, right = (part.text for part in ours.reading.parts)
        assert (prompt, prompt + right, written.reading) == (written.text, ours.text, None)
        assert (laid.given, ours.reading.chunked) == (len(PIECES.findall(prompt)), False)
        found = re.findall(r"\b(?:\d{4}|[A-Z][a-z]+|[a-z]{4,10})\b", right)
        assert [one for one in found if one in ours.meta["outputs"]] == ours.meta["outputs"]


def test_questions_follow_their_seed_and_calibrations_have_others() -> None:
    for source in KINDS.values():
        ours = source.load()
        assert ours == source.load()
        assert ours != replace(source, seed=1).load()
        assert replace(source, count=2).load() == ours[:2]
        others = source.load_others(4, 1)
        assert len(others) == 4
        assert not {str(one.meta) for one in ours} & {str(one.meta) for one in others}


def test_statements_are_all_over_the_text_and_chains_are_in_order() -> None:
    places = []
    for prompt in fitted(Chains(count=40, chains=3, hops=3)):
        found = [prompt.text.index(f"\n{person} has ") for person in prompt.meta["outputs"]]
        assert found == sorted(found)
        places += [place / len(prompt.text) for place in found]
    assert all(sum(part <= 5 * place < part + 1 for place in places) > 10 for part in range(5))
    assert not [(a, b) for a in PEOPLE for b in PEOPLE if a != b and a.lower() in b.lower()]


def test_words_have_their_numbers() -> None:
    def count(source: WordCounts) -> tuple[list[str], list[int]]:
        [prompt] = fitted(source)
        listed = Counter(prompt.text.split("\n\n")[1].rstrip(".").split(", ")).most_common()
        outputs = prompt.meta["outputs"]
        assert not [word for word, _ in listed for one in outputs if one in word and one != word]
        assert {word for word, _ in listed[: len(outputs)]} == {*outputs}
        return [word for word, _ in listed], [number for _, number in listed]

    words, numbers = count(WordCounts(count=1, length=20000, answers=4, times=30, rest=3))
    assert {*numbers[:4]} == {30}
    assert {*numbers[4:]} == {3}
    assert any("-" in word for word in words)  # more words than the texts have
    _, numbers = count(WordCounts(count=1, length=4096, zipf=2))
    assert numbers == [int(numbers[0] / rank**2) for rank in range(1, len(numbers) + 1)]
    assert numbers[0] > 500


def test_a_length_without_room_and_a_text_without_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^prompts\.length=40: .* has \d+ tokens; raise prompts\.length"):
        fitted(Needles(count=1, length=40))
    (tmp_path / "a.txt").write_text("on and on " * 300, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^prompts\.path=.*too few different words"):
        WordCounts(count=1, path=str(tmp_path / "a.txt")).load()
    assert "on and on on and" in fitted(Needles(count=1, path=str(tmp_path / "a.txt")))[0].text


def test_prompts_whose_own_outputs_are_read_are_fitted_as_they_are_answered() -> None:
    model = small_writer(20)
    [prompt] = fit_prompts(model, Own(Needles(count=1, length=150, answer="read")).load())
    assert (prompt.reading, len(model.open_tokenizer().encode(prompt.text))) == (OWN_OUTPUT, 150)


def test_files_of_rulers_form_are_read(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    older = {"index": 0, "input": "Where is Ida? Ida is in", "outputs": ["Oslo"], "length": 9}
    newer = older | {"input": "Who runs? ", "outputs": ["Bo", "Cy"], "answer_prefix": "Those are"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (older, newer)), encoding="utf-8")
    prompts = RulerFile(str(path)).load()
    assert [prompt.text for prompt in prompts] == ["Where is Ida? Ida is in", "Who runs? Those are"]
    assert [prompt.meta["outputs"] for prompt in prompts] == [["Oslo"], ["Bo", "Cy"]]
    assert [prompt.meta["length"] for prompt in prompts] == [9, 9]
