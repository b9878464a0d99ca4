"""Workers in Slurm's queue: what is submitted, what each task of a node does, and what is refused."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from hydra.core.plugins import Plugins

from kvbench.cli import dispatch
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.sweeps.jobs import open_folder
from kvbench.cli.sweeps.launchers import check_launcher
from kvbench.cli.workers import work
from kvbench.core.config import ConfigError
from kvbench.runs.record.sweeps import read_entries
from tests.support.command_line import Command

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
from submitit import SlurmJob
from submitit.core.utils import DelayedSubmission

SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=8", "hydra.launcher.gpus_per_node=8")
SWEEP = ("method=full,swa", "budget=0.2", "prompts.count=1")
WORKERS = ("task=work", *SLURM[1:], "work.workers=8", "work.wait=false")


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where `sbatch`, which takes any job, leaves its script."""
    programs, left = tmp_path / "bin", tmp_path / "queue"
    programs.mkdir()
    left.mkdir()
    for name, line in {"srun": "exit 1", "sbatch": f"cp $1 {left}/7.sh; echo Submitted batch job 7"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(programs), os.environ["PATH"])))
    return left


@pytest.mark.parametrize(
    ("words", "workers", "array"),
    [
        (("task=work", *SWEEP, "work.workers=16"), 16, "0-1%2"),
        (("-m", *SWEEP, "seed=range(30)", "hydra.launcher.array_parallelism=3"), 24, "0-2%3"),
    ],
    ids=("workers", "jobs"),
)
def test_workers_are_submitted_by_whole_nodes(
    words: tuple[str, ...], workers: int, array: str, queue: Path, tmp_path: Path, command: Command
) -> None:
    mail = "+hydra.launcher.additional_parameters.mail-type=END"
    status, out, err = command(*words, *SLURM, mail, "work.wait=false", "work.lapse=5")
    assert status == 0, err
    [folder] = tmp_path.glob("runs/sweeps/*")
    named = folder.relative_to(tmp_path)
    assert (
        f"submitted {workers} workers, 8 to a job, as array 7, output in {tmp_path}/runs/.submitit/7*;" in out
    )
    assert f"watch: task=status work.folder={named}; " in out
    assert "stop: scancel 7;" in out
    options = {line.removeprefix("#SBATCH --") for line in (queue / "7.sh").read_text().splitlines()}
    assert {f"array={array}", "nodes=1", "ntasks-per-node=8", "gpus-per-node=8"} <= options
    assert {"requeue", "mail-type=END", "signal=USR2@120", "export OMP_NUM_THREADS=1"} <= options
    for job in range(workers // 8):
        submitted = tmp_path / f"runs/.submitit/7_{job}/7_{job}_submitted.pkl"
        given = DelayedSubmission.load(submitted).args[0]
        assert {"task=work", f"work.folder={named}", "work.lapse=5", f"work.number={8 * job}"} <= {*given}
        assert not [word for word in given if word.startswith("work.wait")]
    assert not list(folder.glob("background.log"))


def test_each_task_of_a_node_takes_a_card_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path, [("seed=1",)])
    with hydra_of_kvbench():
        cfg, _ = compose_job(["task=work", "device=cuda", f"work.folder={folder}"])
        settings = read_settings(cfg)
    monkeypatch.setattr("kvbench.core.devices.count_gpus", lambda: 8)
    monkeypatch.setattr(work, "do_jobs", lambda _: None)
    taken = []
    for first in (0, 8):
        for task in range(8):
            monkeypatch.setenv("SLURM_LOCALID", str(task))
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")  # what Slurm gives every task
            work.work(replace(settings, work=replace(settings.work, number=first)))
            taken.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert taken == [*"01234567"] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "task=work work.workers=16 hydra.launcher.tasks_per_node=16",
            r"tasks_per_node=16: more workers than GPUs of a node .*gpus_per_node=8\); set .*tasks_per_node=8",
        ),
        ("task=work work.workers=12", r"^work\.workers=12: not a multiple of the 8 .*set work\.workers=16"),
        ("method=swa", r"tasks_per_node=8: only for workers; set task=work or work\.wait=false"),
    ],
    ids=("cards", "workers", "jobs"),
)
def test_what_does_not_fit_a_node_is_refused(words: str, said: str, queue: Path) -> None:
    with hydra_of_kvbench():
        cfg = hydra.compose("config", overrides=[*SLURM, *words.split()], return_hydra_config=True)
    assert cfg.hydra.launcher._target_ in Plugins.instance().class_name_to_class
    with pytest.raises(ConfigError, match=said):
        check_launcher(cfg)


@pytest.mark.parametrize(
    ("words", "sbatch", "said"),
    [
        (WORKERS, "echo invalid partition: x >&2; exit 1", "invalid partition: x"),
        (("-m",), "echo", "Could not "),
    ],
)
def test_what_slurm_refuses_is_told(
    words: Sequence[str], sbatch: str, said: str, queue: Path, command: Command
) -> None:
    (queue.parent / "bin/sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
    status, out, err = command(*words, *SWEEP, SLURM[0])
    assert status == 1
    assert f"error: hydra/launcher=submitit_slurm: Slurm rejects the job ({said}" in out + err
    assert "Traceback" not in out + err


class KilledError(BaseException):
    """What ends a worker in place of Slurm."""


def test_a_worker_waits_for_slurm_to_kill_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were all processes of a preempted job to end by themselves, Slurm would not queue it again."""
    folder = open_folder(tmp_path / "runs", [("seed=1",), ("seed=2",)])

    def do_job(*_: object, **__: object) -> Path:
        signal.raise_signal(signal.SIGTERM)
        return folder

    def wait() -> None:
        raise KilledError

    monkeypatch.setattr(work, "do_job", do_job)
    monkeypatch.setattr(dispatch, "wait_to_be_killed", wait)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    before = signal.signal(signal.SIGTERM, print)  # submitit's only logs the signal
    try:
        with pytest.raises(KilledError):
            dispatch.run_worker(["task=work", f"work.folder={folder}"])
        assert signal.getsignal(signal.SIGTERM) is print
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [entry.outcome for entry in read_entries(folder)] == ["finished", "missing"]
    assert [path for path in folder.rglob(".*") if path.is_file()] == []


def test_a_waiting_command_ends(queue: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(SlurmJob, "wait", lambda job: ended.append(job.job_id))
    status, out, _ = command("task=work", *SWEEP, *SLURM, "work.workers=16")
    assert (status, ended) == (1, ["7_0", "7_1"])
    assert "missing full, swa: not started; " in out
