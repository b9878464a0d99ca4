"""A damaged file of a folder in `hydra.searchpath` is one line that names it, whatever the command is about."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from yaml import YAMLError

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.loader import forget_edited_files
from kvbench.cli.config.messages import check_arguments, describe_error
from kvbench.cli.config.search_path import REMEDY, PluginSearchPath, list_choices, list_methods
from kvbench.cli.tasks import doctor

Add = Callable[[str, str], str]
"""Adds a file to the folder; gives the word that names the folder."""
TAG = 'defaults: [h2o, _self_]\nseed: !!python/object/apply:os.mkdir ["made"]\n'


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    Plugins.instance().register(PluginSearchPath)
    named = f"hydra.searchpath=[file://{tmp_path}/conf]"
    monkeypatch.setattr(sys, "argv", ["run.py", named])
    monkeypatch.chdir(tmp_path)
    forget_edited_files()

    def write(name: str, text: str) -> str:
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
        return named

    return write


DAMAGED = {
    TAG: "line 2: could not determine a constructor for the tag",
    "defaults: [h2o, _self_]\nsinks: 1\nsinks: 2\n": "line 3: found duplicate key sinks; write plain YAML",
    "defaults: [mine, _self_]\n": "defaults: the file includes itself; remove the entry that leads back",
    "defaults: [nowhere, _self_]\n": "defaults: there is no file method/nowhere; correct the entry",
    "defaults: [h2o, _self_]\nlevels: &one [*one]\n": "refers to itself, or is nested too deeply; remove the alias",
    "_target_: kvbench.methods.h2o.H2O\nx: {y: '${'}\n": "is not an interpolation; write ${key}, or \\${ for",
    "sinks: 1\n": "has no key _target_; name the class of this method",
    "- h2o\n": "is not a group of keys; ",
    "\xff\xfe": "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte; write plain YAML",
}


def test_a_slip_in_a_file_of_the_checkout_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("half_life:100\nx: 3\n")
    with pytest.raises(YAMLError) as caught:
        OmegaConf.load(file)
    assert describe_error(caught.value) == f"{file}: line 2: mapping values are not allowed here; {REMEDY}"


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_method_is_named_before_it_is_chosen(add: Add, tmp_path: Path, text: str) -> None:
    named = add("method/mine.yaml", text)
    problem = check_arguments([named])
    assert problem is not None
    assert problem.startswith(f"file://{tmp_path}/conf/method/mine.yaml: ")
    assert DAMAGED[text] in problem
    assert "\n" not in problem
    assert not (tmp_path / "made").exists()


def test_files_that_include_each_other_are_named(add: Add) -> None:
    add("model/a.yaml", "defaults: [b, _self_]\n")
    problem = check_arguments([add("model/b.yaml", "defaults: [{/model@inner: a}, _self_]\n")])
    assert problem is not None
    assert "conf/model/a.yaml: defaults: the file includes itself" in problem


CHOSEN = r"""
method | defaults: [h2o, _self_]~recent: ${method.recent} | method.recent: Recursive interpolation detected
method | _target_: kvbench.methods.h2o.H2O~nope: 1 | method.nope: no such key; there are
model | defaults: [infinity_tiny, _self_]~transformer:~  new: ??? | model.transformer.new: missing;
sweeps | hydra: {sweeper: {params: {method: '${hydra.sweeper.params.method}'}}} | hydra.sweeper.params.meth
sweeps | hydra: {sweeper: {params: {nokey: '1,2'}}} | nokey: no such key
sweeps | hydra: {sweeper: {params: 3}} | hydra.sweeper.params: must be a group of keys
"""
"""Group | lines of its file | what is told."""


@pytest.mark.parametrize("row", CHOSEN.strip().splitlines())
def test_a_wrong_key_of_a_chosen_file_names_the_file(add: Add, row: str) -> None:
    group, text, told = row.split(" | ")
    text = text.replace("~", "\n") + "\n"
    named = add(f"{group}/mine.yaml", "# @package _global_\n" * (group == "sweeps") + text)
    problem = check_arguments(["-m", f"{group}=mine", named])
    assert problem is not None
    assert told in problem
    assert f"conf/{group}/mine.yaml" in problem
    assert "\n" not in problem


def test_a_method_without_a_class_stops_no_list(
    add: Add, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_few(group: str) -> list[str]:  # every method composes in a second
        return [name for name in list_choices(group) if name.startswith(("h2", "linear", "mine"))]

    monkeypatch.setattr("kvbench.cli.config.search_path.list_choices", list_few)
    for number, target in enumerate(("nowhere.Method", "kvbench.methods.h2o.Nothing", "builtins.int")):
        add(f"method/mine{number}.yaml", f"_target_: {target}\n")
    with hydra_of_kvbench():
        methods = list_methods("next-scale")
    assert "h2o" in methods
    assert "linear_ar" not in methods
    for name in ("mine0", "mine1", "mine2"):
        assert name not in methods
        assert f"left out: method={name}: " in caplog.text


def test_a_metric_without_a_class_stops_no_doctor(
    add: Add, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("eval/mine.yaml", "mine:\n  _target_: nowhere.Metric\n")
    monkeypatch.setattr("kvbench.cli.config.compose.list_choices", lambda _: ["mine", "psnr", "none"])
    monkeypatch.setattr(doctor, "examine", lambda evaluators, _: [*evaluators])
    shown: list[str] = []
    monkeypatch.setattr(doctor, "show_findings", shown.extend)
    with hydra_of_kvbench():
        cfg = compose_job([])[0]
        doctor.doctor(cfg, read_settings(cfg))
    assert shown == ["psnr"]
    assert "left out: eval." in caplog.text
