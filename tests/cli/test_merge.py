"""task=merge and runs_dirs: runs made in other folders, told in lines and found again."""

import json
from pathlib import Path

import pytest

from kvbench.eval.files.kinds import TEXTS
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.outputs import Text
from kvbench.runs.record.folder import RunFolder, RunName
from tests.support.command_line import Command


def write(runs_dir: Path, *texts: str) -> None:
    """Write a run with some samples."""
    folder = RunFolder(runs_dir, "m", RunName("swa-0.1", "0123456789"), kind=TEXTS)
    folder.add(
        [{"index": index} for index in range(len(texts))], [Text(text, 3, ended=True) for text in texts]
    )


def test_conflicts_end_in_the_exit_status(command: Command, tmp_path: Path) -> None:
    write(tmp_path / "runs", "one")
    write(tmp_path / "b", "ONE")
    write(tmp_path / "c", "one", "two")
    assert command("task=merge", "from=c")[0] == 0
    status, out, err = command("task=merge", "from=[b,c]")
    assert out.splitlines()[-1].endswith(": 0 samples added, 2 known; 1 conflicts")
    assert (status, err.startswith("error: task=merge: 1 conflicts; ")) == (1, True)


@pytest.mark.slow
def test_shards_merge_into_one_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("method=random", "budget=0.2", "prompts.count=2", "batch_size=1", "eval=[psnr]")
    for index in (0, 1):
        assert command(*job, f"shard.index={index}", "shard.count=2", f"runs_dir=part{index}")[0] == 0
    assert command(*job, "runs_dir=whole")[0] == 0
    assert command("task=merge", "from=[part0,part1]", "runs_dir=both")[0] == 0
    monkeypatch.setattr(InfinityModel, "generate", lambda *_: pytest.fail("a sample was drawn again"))
    assert command(*job, "runs_dir=both")[0] == 0
    assert command(*job, "runs_dir=other", "runs_dirs=[nowhere,whole]")[0] == 0

    def read_samples(runs_dir: str) -> dict[str, list[str]]:
        lines = {
            path.parent.name: [json.loads(line)["sha256"] for line in path.read_text().splitlines()]
            for path in sorted((tmp_path / runs_dir).glob("*/*/samples.jsonl"))
        }
        assert len(lines) == 2
        return lines

    assert read_samples("whole") == read_samples("both") == read_samples("other")
    for path in (tmp_path / "whole").glob("*/*/results.json"):
        other = tmp_path / "other" / path.relative_to(tmp_path / "whole")
        assert other.read_bytes() == path.read_bytes()  # copied, not scored anew
