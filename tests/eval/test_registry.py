"""Metrics by name: what Hydra makes of conf/eval, the registry makes without it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.registry import FOLDER, build_metrics, change_settings, describe_metrics, read_metrics

EVERY = [path.stem for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "none"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_evaluators_are_those_of_run_py(name: str) -> None:
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        expected = {key: instantiate(node) for key, node in compose("config", [f"eval={name}"]).eval.items()}
    metrics = read_metrics(name)
    assert list(metrics) == list(expected)
    assert build_metrics(metrics) == list(expected.values())


def test_a_setting_changes_where_it_is_named() -> None:
    metrics = read_metrics("kid") | read_metrics("fid") | read_metrics("ssim")
    changes = "space.batch=4 kid.subsets=7 kid.space.batch=3 ssim.double=true fid.space.path=a batch=9"
    for change in changes.split():
        change_settings(metrics, change)
    assert metrics["fid"]["space"]["batch"] == 4
    assert (metrics["kid"]["space"]["batch"], metrics["kid"]["subsets"]) == (3, 7)
    assert (metrics["ssim"]["double"], metrics["ssim"]["batch"]) == (True, 9)
    assert (metrics["fid"]["space"]["path"], metrics["kid"]["space"]["path"]) == ("a", None)
    change_settings(metrics, "fid.space.path=null")
    assert metrics["fid"]["space"]["path"] is None
    metrics = {"a": {"_target_": "kvbench.eval.paired.lpips.Lpips", "path": "${weights}"}}
    change_settings(metrics, "path=alexnet.pth")
    assert build_metrics(metrics)[0].path == "alexnet.pth"


def test_every_batch_is_at_least_one() -> None:
    refused = 0
    for name in EVERY:
        metrics = read_metrics(name)
        setting = "space.batch" if "'space'" in str(metrics) else "batch"
        if len(metrics) == 1 and "'batch'" in str(metrics):
            change_settings(metrics, f"{name}.{setting}=0")
            with pytest.raises(ValueError, match=f"^{name}: batch=0: must be a whole number of at least 1$"):
                build_metrics(metrics)
            refused += 1
    assert refused > 15


def test_metrics_of_an_installed_plugin_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my_plugin" / "conf" / "eval"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "mine.yaml").write_text("# My own.\nmine: {_target_: kvbench.eval.paired.psnr.Psnr}\n")
    (folder / "ours.yaml").write_text("defaults: [ssim, mine]\n")
    (folder / "psnr.yaml").write_text("# Taken.\npsnr: {_target_: kvbench.scenes.exact.Exact}\n")
    about = tmp_path / "my_plugin-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[kvbench.plugins]\nmine = my_plugin.conf\n")
    monkeypatch.syspath_prepend(tmp_path)
    described = describe_metrics()
    assert (described["mine"], described["ours"]) == ("My own.", "")
    assert list(read_metrics("ours")) == ["ssim", "mine"]
    assert build_metrics(read_metrics("mine")) == build_metrics(read_metrics("psnr")) == [Psnr()]


BAD_FILES = r"""
- psnr | bad.yaml: must map each metric's name to settings with _target_
psnr: {batch: 4} | bad.yaml: psnr has no _target_; name its class there
psnr: { | bad.yaml: not YAML
defaults: [gone] | ^gone: no such metric or group; did you mean none\?.*all: kvbench list metrics
a: {_target_: kvbench.no.Such} | ^a._target_=kvbench.no.Such: cannot be imported .*No module named
a: {_target_: kvbench.scenes.exact.Exact, b: 1} | ^a: Exact.*unexpected.*'b'
a: {_target_: kvbench.scenes.exact.Exact, batch: '${b}'} | ^a.batch: .{b\} is set by run.py; set it with --set a.batch=
"""


@pytest.mark.parametrize("line", BAD_FILES.strip().splitlines())
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, line: str) -> None:
    content, message = line.split(" | ")
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        build_metrics(read_metrics(str(path)))
    assert "\n" not in str(error.value)
