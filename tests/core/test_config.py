"""Keys of objects are checked against the constructors that take them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from kvbench.core.config import ConfigError, check_fields, check_objects, quote_prompt


@dataclass
class Base:
    size: int = 1


class Heir(Base):
    """Its constructor is the dataclass's."""


class Other(Base):
    """Its constructor takes no fields."""

    def __init__(self, text: str) -> None:
        super().__init__(len(text))


@pytest.mark.parametrize("kind", [Base, Heir])
@pytest.mark.parametrize(("key", "message"), [("size", r"method\.size=x: must be a whole"), ("text", "text")])
def test_keys_are_the_fields_of_the_constructor(kind: type, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_objects({"_target_": f"{__name__}.{kind.__name__}", key: "x"}, "method")


def test_a_constructor_of_its_own_takes_other_keys() -> None:
    check_objects({"_target_": f"{__name__}.Other", "text": "x"}, "method")


def test_long_prompts_are_quoted_without_their_middle() -> None:
    assert quote_prompt("a\nb") == r"'a\nb'"
    quoted = quote_prompt("begin " + "x" * 100 + " end")
    assert len(quoted) == 60
    assert (quoted[:7], quoted[-5:]) == ("'begin ", " end'")


@dataclass
class Every:
    """A field of every kind."""

    whole: int
    number: float
    text: str
    path: Path
    flag: bool
    either: int | float | None
    choice: Literal["a", "b"]
    by_name: dict[str, int]
    inner: Base
    pair: tuple[int, float]
    several: tuple[int, ...]


WANTED = {
    "whole": ([3], "a whole number"),
    "number": ([3, 3.5], "a number"),
    "text": (["words"], "text"),
    "path": (["words"], "a path"),
    "flag": ([True, False], "true or false"),
    "either": ([3, 3.5, None], "a number or null"),
    "choice": (["a"], "one of a, b"),
    "by_name": ([{"size": 3}], "a group of keys"),
    "inner": ([], "a group of keys (size)"),
    "pair": ([[3, 3.5], [3, 3]], "a list of 2: [a whole number, a number]"),
    "several": ([[3, 3]], "a list (a whole number each)"),
}
"""What a field accepts of `GIVEN`, and how it is described."""
GIVEN = (3, 3.5, True, False, "words", "a", None, [3, 3.5], [3, 3], [3, True], [True, 3], {"size": 3})


@pytest.mark.parametrize("name", [field.name for field in fields(Every)])
def test_a_field_accepts_values_of_its_type_and_says_which(name: str) -> None:
    accepted, described = WANTED[name]
    for value in (one for one in GIVEN if name != "inner" or not isinstance(one, dict)):
        text = name in ("text", "path") and isinstance(value, str)
        if text or any(type(value) is type(one) and value == one for one in accepted):
            check_fields({name: value}, Every, "part.")
            continue
        with pytest.raises(ConfigError) as error:
            check_fields({name: value}, Every, "part.")
        assert str(error.value).startswith(f"part.{name}=")
        assert str(error.value).endswith(f": must be {described}")


def test_values_of_a_group_are_numbers_and_not_answers() -> None:
    with pytest.raises(ConfigError, match=r"part\.by_name\.size=true: must be a whole number"):
        check_fields({"by_name": {"size": True}}, Every, "part.")
