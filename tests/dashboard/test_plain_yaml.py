"""YAML of other people: plain values are read, and what could take long is refused."""

import pytest

from kvbench.dashboard.plain_yaml import MAX_BYTES, parse_yaml

VALUES = {"a": [1, 2.5, None, True], "b": {"c": "text"}}


def test_plain_values_are_read() -> None:
    assert parse_yaml("a: [1, 2.5, null, true]\nb: {c: text}\n") == VALUES
    assert parse_yaml(b"a: [1, 2.5, null, true]\nb: {<<: {c: text}}\n") == VALUES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x", r"ValueError: it has an alias \(\*name\)"),
        ("a: &x {c: 1}\nb: {<<: [*x, *x]}", "alias"),
        ("x" * (MAX_BYTES + 1), "it is larger than 256 KiB"),
        ("[" * 500, "RecursionError|expected"),
        ("!!python/object/apply:os.getcwd []", "ConstructorError"),
        ("{", "ParserError"),
    ],
)
def test_anything_else_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)
