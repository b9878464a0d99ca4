"""Weight files that are not what their names say: one line with their hashes, before long work where possible."""

import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from kvbench.cli.tasks.check import check_run
from kvbench.core.config import ConfigError
from kvbench.eval.distribution.fid import Fid
from kvbench.eval.files.weights import Snapshot, Weight, file_sha256, find_wrong, loading
from kvbench.eval.networks import expecting
from kvbench.eval.paired.dists import VGG16, Dists
from kvbench.eval.paired.lpips import ALEXNET, Lpips
from kvbench.eval.protocol.base import Evaluator, evaluate
from kvbench.eval.spaces.inception import ADM, Adm
from kvbench.runs import execute
from tests.support.fake_run import job_in
from tests.support.image_sets import make_noise


def pack(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


DAMAGES = {
    "text": b"<html>404</html>",
    "nothing": b"",
    "another network": pack({"head.weight": torch.zeros(3)}),
    "objects": pack({"features.0.weight": Path}),
    "safetensors": save({"features.0.weight": torch.zeros(3)}),
}
KINDS: dict[str, Callable[..., Evaluator]] = {
    "lpips": lambda path, **more: Lpips(path=path, trunk=replace(ALEXNET, **more)),
    "dists": lambda path, **more: Dists(path=path, trunk=replace(VGG16, **more)),
    "fid": lambda path, **more: Fid(Adm(path=path, network=replace(ADM, **more))),
}


@pytest.mark.parametrize(
    ("metric", "damage"),
    [*(("lpips", damage) for damage in DAMAGES), ("dists", "another network"), ("fid", "objects")],
)
def test_the_reason_of_a_metric_is_one_line_with_the_hash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str, damage: str
) -> None:
    path = tmp_path / "network.pth"
    path.write_bytes(DAMAGES[damage])
    images = make_noise(tmp_path / "images", [{}, {}], size=64)
    known, unknown = KINDS[metric](str(path)), KINDS[metric](str(path), sha256=None)
    for evaluator, problem in (
        (known, f"{path} is not {known.weights[0].file}: sha256 {file_sha256(path)}, expected"),
        (unknown, f"{path} (sha256 {file_sha256(path)}) cannot be used"),
    ):
        caplog.clear()
        [result] = evaluate([evaluator], images, images)
        assert result.status == "failed"
        assert result.reason.startswith(problem)
        assert "etch" in result.reason  # what to do
        assert (len(result.reason.splitlines()), len(result.reason) < 600) == (1, True)
        assert "weights_only" not in result.reason  # torch recommends unsafe loading
        assert "traceback" not in result.provenance
        [record] = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert record.exc_info is None


def test_errors_that_no_file_can_cause_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a")
    pinned = Weight("a", sha256=file_sha256(path), path=str(path))
    free = Weight("a", path=str(path))
    for weights, error in (
        ([pinned], ValueError),
        ([], KeyError),
        ([free], ImportError),
        ([free], MemoryError),
    ):
        with pytest.raises(error), loading(weights):
            raise error("a fault of the program")
    with pytest.raises(torch.OutOfMemoryError), loading([free]), expecting("a network", path):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_wrong_files_are_found_and_missing_ones_are_not_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    right = file_sha256(tmp_path / "config.json")
    folder = Snapshot("a/b", ("config.json",), path=str(tmp_path), sha256=(("config.json", "0" * 64),))
    assert find_wrong([folder, Weight("x", sha256="0" * 64, path=str(tmp_path / "x"))]) == [
        f"{tmp_path}/config.json is not a/b/config.json: sha256 {right}, expected {'0' * 64}. "
        "Correct the setting that names it, or fetch the file again"
    ]
    assert find_wrong([replace(folder, sha256=(("config.json", right),))]) == []


def test_a_run_refuses_a_wrong_file_before_it_draws(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"other")
    job = replace(job_in(tmp_path / "runs"), evaluators={"lpips": Lpips(path=str(tmp_path / "a.pth"))})
    with pytest.raises(
        ConfigError, match=r"^eval=lpips: \S+a\.pth is not alex\S+: sha256 \w+, expected \w+\."
    ):
        execute.run(job)
    assert not list((tmp_path / "runs").rglob("*.png"))
    found = next(one for one in check_run(job, job.method) if one.subject == "eval=lpips")
    assert found.state == "error"
