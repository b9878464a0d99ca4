"""Keys of objects are checked against the constructors that take them."""

from dataclasses import dataclass

import pytest

from kvbench.core.config import ConfigError, check_objects, quote_prompt


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
