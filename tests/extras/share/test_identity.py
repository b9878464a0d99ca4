"""Verification of what a run is: weights, configuration, code, calibration, reference and name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.core.files import hash_values
from kvbench.extras.share.verify.identity import check_calibration
from kvbench.extras.share.verify.run import Choice
from kvbench.runs.prepare import Calibrations, UsedFile
from tests.support.verification import edit, named, verify


def test_other_weights_are_not_a_lie_but_another_hash_of_them_is(run: Path) -> None:
    verdict = verify(run, salt=1)[run.name]
    assert (verdict.status, verdict.drawn) == ("not verifiable here", 0)
    assert named(verdict) == {"weights"}
    edit(run / "provenance.json", lambda all_: all_.update(weights_sha256="0" * 64))
    edit(run / "results.json", lambda all_: all_["provenance"].update(weights_sha256="0" * 64))
    verdict = verify(run)[run.name]
    assert (verdict.status, named(verdict)) == ("differs", {"weights"})
    assert any("folder's name contains" in finding.text for finding in verdict.findings)


def test_a_configuration_is_named(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["method"]["sinks"] = 0
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert (verdict.status, named(verdict)) == ("differs", {"config.yaml"})
    assert "method.sinks is 0, in results.json 1" in verdict.describe()
    edit(run / "results.json", lambda all_: all_["config"]["method"].update(sinks=0))
    assert "name" in named(verify(run, Choice(1, 0))[run.name])


def test_code_of_a_method_is_named(run: Path) -> None:
    def change(all_: Any, *, agreeing: bool) -> None:
        method = all_["method"]
        method["files"]["kvbench.methods.streaming_llm"] = "0" * 12
        method["sha256"] = hash_values(method["files"]) if agreeing else method["sha256"]

    for agreeing in (False, True):
        edit(run / "code.json", lambda all_, same=agreeing: change(all_, agreeing=same))
        verdict = verify(run, Choice(1, 0))[run.name]
        assert (verdict.status, named(verdict)) == ("differs", {"code of method"})
        assert ("do not have its SHA-256" in verdict.describe()) != agreeing
    assert "kvbench.methods.streaming_llm" in verdict.describe()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_code_that_is_not_recorded_is_named(run: Path, damage: Callable[[Path], object]) -> None:
    damage(run / "code.json")
    verdict = verify(run, Choice(1, 0))[run.name]
    assert (verdict.status, named(verdict)) == ("differs", {"code of method", "code of model"})
    assert "code.json is missing or damaged" in verdict.describe()


def test_other_code_of_the_commit_that_verifies_is_named(run: Path) -> None:
    def change(provenance: Any) -> None:
        classes = provenance["classes"]["method"]
        for name in classes:
            classes[name] |= {"sha256": "0" * 64, "pinned": True}

    edit(run / "provenance.json", change)
    edit(run / "results.json", lambda all_: change(all_["provenance"]))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert verdict.status == "differs"
    assert "has other code here than in the record" in verdict.describe()


@pytest.mark.parametrize(
    ("recorded", "same", "differs"), [("a", True, True), ("a", False, False), (None, False, True)]
)
def test_a_calibration_has_its_hash_in_the_same_arithmetic(
    recorded: str | None, same: bool, differs: bool
) -> None:
    again = Calibrations(artifact_file=UsedFile("a", "b"))
    found = list(check_calibration(again, {"calibration_sha256": recorded}, same_arithmetic=same))
    assert bool(found) == differs
    assert not list(check_calibration(again, {"calibration_sha256": "b"}, same_arithmetic=True))


def test_results_of_another_folder_are_named(run: Path) -> None:
    edit(run / "results.json", lambda all_: all_.update(run="streaming_llm-9"))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert f"name: the folder is called {run.name}, results.json is of streaming_llm-9" in verdict.describe()


def test_a_name_that_is_not_the_hash_of_its_record_is_named(run: Path) -> None:
    other = run.rename(run.with_name(f"{run.name[:-1]}{'0' if run.name[-1] != '0' else '1'}"))
    edit(other / "results.json", lambda all_: all_.update(run=other.name))
    verdict = verify(other, Choice(1, 0))[other.name]
    assert (verdict.status, named(verdict)) == ("differs", {"name"})


def test_a_missing_reference_and_an_unfinished_run_are_not_verifiable(run: Path) -> None:
    shutil.rmtree(next(run.parent.glob("full-*")))
    verdicts = verify(run.parent.parent)
    assert {one.status for one in verdicts.values()} == {"not verifiable here"}
    (run / "results.json").unlink()
    assert "is not finished" in verify(run.parent)[run.name].describe()


def test_another_reference_than_the_configuration_gives_is_named(run: Path) -> None:
    for reference in (None, run.name):
        edit(run / "results.json", lambda all_, name=reference: all_.update(reference=name))
        edit(run / "results.json", lambda all_: all_["metrics"]["psnr"].update(value=99.0))
        verdict = verify(run, Choice(1, 0))[run.name]
        assert (verdict.status, "reference" in named(verdict)) == ("differs", True)
