"""Verification of texts that were read: the full cache is read again, its hidden states do not count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kvbench.eval.files.kinds import READINGS
from kvbench.eval.text.forced import Kl
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.extras.share.verify.folders import find_recorded
from kvbench.extras.share.verify.redraw import Rule, compare_sample
from kvbench.extras.share.verify.run import verify_run
from kvbench.extras.share.verify.verdict import Choice
from kvbench.forced.decoding import ForcedDecoding
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs import execute
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results
from tests.runs.test_readings import job
from tests.support.run_folders import make_reading


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that read texts, beside its reference."""
    return execute.run(job(tmp_path_factory.mktemp("runs"), evaluators={"kl": Kl()})).folder


def test_readings_are_verified_with_and_without_hidden_states(read: Path, tmp_path: Path) -> None:
    def make(results: Results) -> tuple[Job, Sequence[str]]:
        method: object = Full() if results.method == "full" else StreamingLLM(sinks=1)
        one = job(tmp_path / "again", method=method, evaluators={"kl": Kl()})
        assert isinstance(one.model, ForcedDecoding)
        return replace(one, config=results.config, method_name=results.method), ()

    prepare_dataset(read_published([read]), tmp_path / "set")
    for folder in (read, tmp_path / "set"):
        for one in find_recorded(folder, tmp_path / f"staged-{folder.name}"):
            verdict = verify_run(one, make, Choice(2, 1))
            assert verdict.status == "verified", verdict.describe()
            assert verdict.drawn >= 2


def test_a_changed_divergence_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(READINGS.encode(make_reading([0.5, 0.0, 0.0, 0.0])))
    assert set(load_file(path)) >= {"kl", "nll"}
    same, other = (READINGS.encode(make_reading([first, 0.0, 0.0, 0.0])) for first in (0.5, 0.52))
    exact, rounded = Rule(exact=True), Rule(exact=False)
    assert compare_sample(path, same, READINGS, exact) == (None, False)
    assert compare_sample(path, other, READINGS, rounded) == (None, False)  # 0.02 of one token in four
    assert str(compare_sample(path, other, READINGS, exact)[0]).endswith("differs by 0.005 a token")
    far = READINGS.encode(make_reading([0.6, 0.0, 0.0, 0.0]))
    assert str(compare_sample(path, far, READINGS, rounded)[0]).endswith("differs by 0.025 a token")
