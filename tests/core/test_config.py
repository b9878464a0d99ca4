"""Keys of objects are checked against the constructors that take them."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Literal

import pytest

from kvbench.core.config import ConfigError, check_fields, check_objects, show


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


GIVEN = (3, 3.5, True, False, "a", None, [3, 3.5], [3, 3], [3, True], {"size": 3}, {"size": True})


@pytest.mark.parametrize(
    ("hint", "accepted", "described"),
    [
        (int, [3], "a whole number"),
        (float, [3, 3.5], "a number"),
        (str, ["a"], "text"),
        (Path, ["a"], "a path"),
        (bool, [True, False], "true or false"),
        (int | float | None, [3, 3.5, None], "a number or null"),
        (Literal["a", "b"], ["a"], "one of a, b"),
        (tuple[int, float], [[3, 3.5], [3, 3]], "a list of 2: [a whole number, a number]"),
        (tuple[int, ...], [[3, 3]], "a list (a whole number each)"),
        (dict[str, int], [{"size": 3}], "a group of keys"),
    ],
)
def test_a_key_takes_values_of_its_type_and_says_which(
    hint: object, accepted: list[object], described: str
) -> None:
    part = make_dataclass("Part", [("key", hint)])
    for value in GIVEN:
        if any(repr(value) == repr(one) for one in accepted):
            check_fields({"key": value}, part, "")
            continue
        with pytest.raises(ConfigError) as error:
            check_fields({"key": value}, part, "")
        wanted = (
            "key.size=true: must be a whole number" if hint == dict[str, int] and value == GIVEN[-1] else ""
        )
        assert str(error.value) == (wanted or f"key={show(value)}: must be {described}")
