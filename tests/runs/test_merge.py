"""Runs that were made in several folders and are merged into one: joined by samples, nothing overwritten."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.files.kinds import TEXTS
from kvbench.models.outputs import Text
from kvbench.runs.record.folder import RunFolder
from kvbench.runs.record.merge import Merged, import_run, merge_run, merge_runs
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.results import read_results
from kvbench.runs.run_hash import Identity
from tests.support.results import made_up

IDENTITY = Identity({}, "a" * 64, {"_target_": "Swa"}, None, "1", "c" * 64, 0, "float32", label="swa-0.1")


def write(
    runs_dir: Path, texts: Sequence[tuple[int, str]], *, label: str = "swa-0.1", seed: int = 0
) -> RunFolder:
    """Write a run with some samples."""
    folder = RunFolder(runs_dir, "m", replace(IDENTITY, label=label, seed=seed), kind=TEXTS)
    records = [{"index": index, "prompt": f"p{index}", "seconds": 0.1 + index} for index, _ in texts]
    folder.add(records, [Text(text, 3, ended=True) for _, text in texts])
    return folder


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finish(folder: RunFolder, reference: str | None = None) -> None:
    """Write results that say nothing but which run this is and what it is compared with."""
    folder.write("metrics/psnr.json", "{}")
    run = made_up("swa", 0.1, {}, n=len(folder.recorded()))
    results = replace(run, run=folder.path.name, reference=reference)
    folder.write("results.json", results.to_json())
    folder.note("done")


def test_a_missing_run_is_copied_with_its_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [(0, "one"), (1, "two")])
    finish(folder)
    folder.write("config.yaml", "seed: 0\n")
    before = read_all(tmp_path / "a")
    (tmp_path / "a/m/calibration-0123456789.safetensors").write_bytes(b"c")
    for path in tmp_path.glob("a/**/*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    merged = list(merge_runs(tmp_path / "a", tmp_path / "b"))
    assert merged == [
        Merged("m/calibration-0123456789.safetensors"),
        Merged(f"m/{folder.path.name}", added=2),
    ]
    (tmp_path / "b/m/calibration-0123456789.safetensors").unlink()
    assert read_all(tmp_path / "b") == before
    assert list(merge_runs(tmp_path / "a", tmp_path / "b"))[1] == Merged(f"m/{folder.path.name}", known=2)


def test_identical_runs_are_joined_by_samples(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", [(0, "one"), (1, "two"), (2, "three")])
    first, second = write(tmp_path / "a", [(2, "three")]), write(tmp_path / "b", [(0, "one"), (1, "two")])
    assert merge_run(second.path, tmp_path / "a") == Merged(f"m/{first.path.name}", added=2)
    assert first.samples() == whole.samples()
    assert first.tidy([0, 1, 2]) == whole.tidy([0, 1, 2])
    assert not first.finished()


def test_results_come_only_with_all_of_their_samples(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "a", [(1, "two")]), write(tmp_path / "b", [(0, "one"), (1, "two")])
    finish(theirs)
    assert merge_run(theirs.path, tmp_path / "a").added == 1
    assert read_results(ours.path) == read_results(theirs.path)
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")
    more = write(tmp_path / "c", [(0, "one"), (1, "two"), (2, "three")])
    assert merge_run(theirs.path, tmp_path / "c").problem is None
    assert not more.finished()  # of three samples, and those results are of two


def test_samples_that_differ_are_named_and_stay(tmp_path: Path) -> None:
    write(tmp_path / "a", [(0, "one"), (1, "two"), (4, "five")])
    theirs = write(tmp_path / "b", [(0, "one"), (1, "TWO"), (2, "three"), (4, "FIVE")])
    finish(theirs)
    before = read_all(tmp_path / "a")
    merged = merge_run(theirs.path, tmp_path / "a")
    name = f"m/{theirs.path.name}"
    assert merged == Merged(name, 1, 1, "sample 1 and 1 more differ; the existing samples are kept")
    after = read_all(tmp_path / "a")
    assert {key for key in before if after[key] != before[key]} == {f"{name}/samples.jsonl"}
    assert set(after) - set(before) == {f"{name}/texts/000002.txt"}


def test_scores_against_another_reference_are_left_out(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", [(0, "full")], label="full", seed=1)
    reference = write(tmp_path / "b", [(0, "FULL")], label="full", seed=1)
    theirs = write(tmp_path / "b", [(0, "one")])
    finish(theirs, reference=reference.path.name)
    merged = merge_run(theirs.path, tmp_path / "a")
    assert (
        merged.problem
        == f"scores are left out, since {ours.path.name} differs; repeat the command to score the run"
    )
    copied = RunFolder(tmp_path / "a", "m", IDENTITY, kind=TEXTS)
    assert (sorted(copied.samples()), copied.finished()) == ([0], False)


def test_damaged_samples_are_not_copied(tmp_path: Path) -> None:
    theirs = write(tmp_path / "b", [(0, "one"), (1, "two"), (2, "three")])
    finish(theirs)
    (theirs.path / "texts/000001.txt").write_text("torn")
    (theirs.path / "texts/000002.txt").unlink()
    merged = merge_run(theirs.path, tmp_path / "a")
    assert (merged.added, merged.problem) == (1, f"2 samples of {theirs.path} are damaged or missing")
    assert not RunFolder(tmp_path / "a", "m", IDENTITY, kind=TEXTS).finished()


def test_a_merged_run_names_the_origins_of_its_samples(tmp_path: Path) -> None:
    """Origins of added samples follow our own once each; a run without added samples stays as it is."""
    ours, theirs = write(tmp_path / "a", [(0, "one")]), write(tmp_path / "b", [(1, "two")])
    ours.write("provenance.json", json.dumps({"machine": "A", "hostname": "h"}))
    resumed = [{"machine": "A"}, {"machine": "C", "load": 0.5}]
    theirs.write("provenance.json", json.dumps({"machine": "B", "hostname": "h", "resumed": resumed}))
    for _ in range(2):
        merge_run(theirs.path, tmp_path / "a")
        found = ours.read_json("provenance.json")
        own, *others = list_origins(found)
        assert (own["machine"], own["hostname"]) == ("A", "h")
        assert others == [{"machine": "B"}, {"machine": "C", "load": 0.5}]
    known = write(tmp_path / "c", [(0, "one")])
    known.write("provenance.json", json.dumps({"machine": "D"}))
    merge_run(known.path, tmp_path / "a")
    assert ours.read_json("provenance.json") == found


@pytest.mark.parametrize("name", ["notes.txt", "texts/000000.txt", "metrics/psnr.json", "source"])
@pytest.mark.parametrize("inside", ["theirs", "ours"])
def test_a_link_that_leaves_its_folder_is_refused_by_name(tmp_path: Path, name: str, inside: str) -> None:
    (tmp_path / "secret").write_text("password")
    theirs = write(tmp_path / "theirs", [(0, "one"), (1, "two")])
    finish(theirs)
    ours = write(tmp_path / "ours", [(0, "one")])
    other = write(tmp_path / "theirs", [(0, "x")], seed=1)
    link = (theirs if inside == "theirs" else ours).path / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path if name == "source" else tmp_path / "secret")
    before = read_all(tmp_path / "ours")
    merged = {one.name: one for one in merge_runs(tmp_path / "theirs", tmp_path / "ours")}
    problem = f"{link} is a symbolic link that leaves its folder; remove it or copy what it names"
    assert merged[f"m/{ours.path.name}"] == Merged(f"m/{ours.path.name}", problem=problem)
    assert merged[f"m/{other.path.name}"].added == 1
    after = {name: data for name, data in read_all(tmp_path / "ours").items() if ours.path.name in name}
    assert after == before
    assert (tmp_path / "secret").read_text() == "password"


def test_links_to_runs_models_and_calibrations_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "elsewhere", [(0, "one")])
    (tmp_path / "secret").write_text("password")
    (tmp_path / "theirs/n").mkdir(parents=True)
    (tmp_path / "theirs/m").symlink_to(tmp_path / "elsewhere/m")
    (tmp_path / "theirs/n" / folder.path.name).symlink_to(folder.path)
    (tmp_path / "theirs/n/calibration-0123456789.safetensors").symlink_to(tmp_path / "secret")
    merged = list(merge_runs(tmp_path / "theirs", tmp_path / "ours"))
    assert len(merged) == 3
    assert all("is a symbolic link that leaves its folder" in str(one.problem) for one in merged)
    assert read_all(tmp_path / "ours") == {}
    more = write(tmp_path / "more", [(0, "one"), (1, "two")])
    (tmp_path / "ours/m").mkdir(parents=True)
    (tmp_path / "ours/m" / more.path.name).symlink_to(folder.path)  # it is not written through
    before = read_all(tmp_path / "elsewhere")
    [one] = merge_runs(tmp_path / "more", tmp_path / "ours")
    assert (one.added, "is a symbolic link" in str(one.problem)) == (0, True)
    assert read_all(tmp_path / "elsewhere") == before


def test_a_link_inside_a_run_is_read_and_its_log_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", [(0, "one")])
    finish(folder)
    (folder.path / "copy.txt").symlink_to("texts/000000.txt")
    folder.write("wandb/files/summary.json", "{}")
    (folder.path / "wandb/debug-core.log").symlink_to(tmp_path / "cache/core.log")
    [merged] = merge_runs(tmp_path / "theirs", tmp_path / "ours")
    assert merged == Merged(f"m/{folder.path.name}", added=1)
    copy = tmp_path / "ours/m" / folder.path.name / "copy.txt"
    assert (copy.is_symlink(), copy.read_text()) == (False, "one")
    assert not list((tmp_path / "ours").rglob("wandb"))


@pytest.mark.parametrize("file", ["samples.jsonl", "results.json"])
@pytest.mark.parametrize("content", ["[" * 10**5 + "\n", '{"index": 1e999999999, "sha256": ""}\n'])
def test_a_damaged_run_is_a_problem_and_others_are_merged(tmp_path: Path, file: str, content: str) -> None:
    bad, good = (write(tmp_path / "theirs", [(0, "one")], seed=seed) for seed in (0, 1))
    finish(bad)
    finish(good)
    (bad.path / file).write_text(content)
    merged = {one.name: one for one in merge_runs(tmp_path / "theirs", tmp_path / "ours")}
    assert file in str(merged[f"m/{bad.path.name}"].problem)
    assert not (tmp_path / "ours/m" / bad.path.name / "texts").is_dir()
    assert merged[f"m/{good.path.name}"] == Merged(f"m/{good.path.name}", added=1)


@pytest.mark.parametrize("name", ["..", "/etc", "a/b", ""])
def test_a_record_names_no_folder_but_those_beside_it(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "theirs", [(0, "one")])
    finish(folder, reference=name)
    with pytest.raises(ConfigError, match=r"results\.json: damaged \(reference is "):
        read_results(folder.path)
    with pytest.raises(ConfigError, match="reference is"):
        import_run("m", replace(IDENTITY, seed=0), tmp_path / "ours", [str(tmp_path / "theirs")])
