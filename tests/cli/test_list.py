"""`kvbench list`: what there is, beside the table of the pages, the classes and the files."""

import re

import pytest

from kvbench.cli.completion import complete
from tests.support.command_line import Command
from tests.support.places import ROOT


@pytest.mark.slow
def test_methods_are_those_of_the_page(command: Command) -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    status, out, _ = command("list", "methods")
    _, *lines, rest = out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines] == re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)
    assert re.fullmatch(r"and \d+ variants in folders: kvbench list methods /", rest)
    assert all("/" in line for line in command("list", "methods", "/")[1].splitlines()[1:])


def test_models_have_a_family_and_weights(command: Command) -> None:
    lines = command("list", "models", "INFINITY")[1].splitlines()[1:]
    assert [line.split()[:3] for line in lines[:2]] == [
        [name, "infinity", "FoundationVision/Infinity"] for name in ("infinity_2b", "infinity_8b")
    ]
    assert [line.split()[:3] for line in lines[2:]] == [
        [f"infinity_{name}", "infinity", "shipped"] for name in ("emoji", "tiny")
    ]


@pytest.mark.parametrize(
    ("line", "words", "is_setting"),
    [
        ("kvbench pub", ["publish"], True),
        ("python run.py -m task=ch", ["task=choose", "task=check"], True),
        ("kvbench task=choose metric=lpips_", ["metric=lpips_scenes"], True),
        ("kvbench show ring method=cake/t", ["method=cake/text"], False),
    ],
)
def test_the_tab_key_completes_what_hydra_does_not_know(
    line: str, words: list[str], is_setting: bool
) -> None:
    assert complete(line) == (words, is_setting)


def test_several_kinds_and_words_are_listed(command: Command) -> None:
    assert command("list")[1].splitlines()[0] == "kvbench list methods   method=..."
    lines = command("list", "tasks", "sampling")[1].splitlines()
    assert [line for line in lines if line[0] == "="] == ["== tasks ==", "== sampling =="]
    [title, line] = command("list", "tasks", "sampling", "finished", "SWEEP")[1].splitlines()
    assert (title, line.split()[0]) == ("== tasks ==", "task=report")


def test_help_of_a_task_or_a_method_is_its_keys(command: Command) -> None:
    read = [line.split()[0] for line in command("task=report", "--help")[1].splitlines()]
    assert {"task=report", "report.seeds=mean", "against=null"} <= {*read}
    assert not {"budget=1.0", "choose.block=16"} & {*read}
    title, *keys = command("--help", "method=snapkv")[1].splitlines()
    assert title.startswith("method=snapkv  Tokens with the most attention")
    assert "  method.kernel=5             slots of the smoothing kernel, odd; 1 for none." in keys
