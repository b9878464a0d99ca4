"""Files of names: what is refused, vocabularies, what a run's identity has of them."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.prompts.names import Names
from kvbench.scenes import grammar
from kvbench.scenes.names import Name, find_vocabulary, read_names
from kvbench.scenes.vocabulary import END, Vocabulary
from tests.support.small_models import configured

HEADER = "caption,category,picture,background,split\n"
ROWS = [
    Name("red apple", "Food & Drink", "0.png", "white", "train"),
    Name("flag: egypt", "Flags", "1.png", "blue", "train"),
    Name("red flag", "Flags", "2.png", "white", "held_out"),
    Name("pear", "Food, or drink", "3.png", "grey", "train"),
]


def write_names(path: Path, names: Iterable[Name]) -> None:
    """Write a file of names."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Name._fields, *names])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    write_names(path, ROWS)
    return path


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("prompt\na\n", "line 1 is 'prompt', needed: caption,category,picture,background,split"),
        (HEADER + "a,b\n", "line 2: 2 columns, needed: 5"),
        (HEADER + "a,b,c,d,train\n,b,c,d,train\n", "line 3: ''"),
        (HEADER + "Red,b,c,d,train\n", "line 2: 'Red' is not words in lower case"),
        (HEADER + "a,b,c,d,train\na,b,e,d,train\n", "line 3: 'a' is also an earlier name"),
        (HEADER + "a,b,c,d,test\n", "line 2: split 'test' must be train or held_out"),
        (HEADER + "a " * 13 + "a,b,c,d,train\n", "line 2: 14 words, at most 13"),
    ],
)
def test_wrong_files_are_refused_by_line(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "names.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=why):
        read_names(path)
    model = configured("model=infinity_emoji", f"model.captions={path}")
    with pytest.raises(ConfigError, match=r"^model.captions=.*names.csv: cannot be read \(.*" + why[:8]):
        model.check_prompts(["a"])
    with pytest.raises(ConfigError, match=r"^prompts.path=.*names.csv: cannot be read"):
        Names(str(path)).load()


def test_a_field_that_is_too_long_is_refused_by_line(tmp_path: Path) -> None:
    longest = csv.field_size_limit()  # of the process; a file of prompts raises it
    for before, line in (("", 1), (HEADER, 2)):
        (tmp_path / "names.csv").write_text(before + "a" * (longest + 1))
        with pytest.raises(ValueError, match=rf"^line {line}: field larger than field limit \({longest}\)$"):
            read_names(tmp_path / "names.csv")


def test_a_vocabulary_has_all_words_of_the_names(file: Path) -> None:
    vocabulary = find_vocabulary(str(file))
    assert vocabulary.words == ("apple", "egypt", "flag", "flag:", "pear", "red")
    assert vocabulary.tokenize("Red  FLAG: pear") == [7, 5, 6, END]
    assert vocabulary.tokenize_filled("pear") == [6, *[END] * 13]
    assert len(vocabulary) == 8
    with pytest.raises(ValueError, match=r"^prompt 'a pear': the own vocabulary has no word 'a'; it has"):
        vocabulary.check(["pear", "a pear"])
    words = Vocabulary("many", tuple(f"w{number:03}" for number in range(61)), 4)
    with pytest.raises(ValueError, match=r"has no word 'w0001'; nearest: w0"):
        words.tokenize("w0001")
    assert find_vocabulary("scenes") is grammar.VOCABULARY


def test_names_are_prompts_with_their_category(file: Path) -> None:
    trained, held_out = Names(str(file)).load(), Names(str(file), held_out=True).load()
    assert [prompt.text for prompt in trained] == ["red apple", "flag: egypt", "pear"]
    assert trained[2].meta["category"] == "Food, or drink"
    assert [prompt.text for prompt in held_out] == ["red flag"]
    others = Names(str(file), count=1).load_others(5, seed=1)
    assert [prompt.text for prompt in others] == ["flag: egypt", "pear"]


def test_the_shipped_sets_share_no_name() -> None:
    path = "pkg://kvbench/assets/infinity_emoji/names.csv"
    trained, held_out = Names(path).load(), Names(path, held_out=True).load()
    assert not {prompt.text for prompt in trained} & {prompt.text for prompt in held_out}
    first = Names(path, count=96).load()
    assert {prompt.meta["category"] for prompt in first} == {"Animals & Nature", "Food & Drink"}
    assert len({prompt.text.split()[-1] for prompt in first}) == 8
    with pytest.raises(ConfigError, match=r"^prompts.path=nowhere.csv: does not exist\. Get names.csv"):
        Names("nowhere.csv").load()


def test_a_run_is_identified_by_the_words_not_by_the_path(file: Path, tmp_path: Path) -> None:
    def find(path: Path | str) -> object:
        model = configured("model=infinity_emoji", f"model.captions={path}")
        return model.resolve_settings("cpu").get("captions")

    moved, other = tmp_path / "moved.csv", tmp_path / "other.csv"
    moved.write_bytes(file.read_bytes())
    write_names(other, ROWS[:2])
    assert find(file) == find(moved) != find(other)
    assert find("scenes") is None
