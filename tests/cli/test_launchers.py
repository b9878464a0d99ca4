"""Sweeps on Ray and on Slurm: a job whose process dies goes on where it was, one that fails ends in the exit status."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, open_dict

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.loader import EXTRAS
from kvbench.cli.launch import SweepJob
from kvbench.cli.sweeps.jobs import open_folder
from kvbench.cli.sweeps.launchers import check_launcher
from kvbench.cli.workers.log import read_logs
from kvbench.core.config import ConfigError
from kvbench.runs.record.sweeps import JobStatus, read_entries
from tests.support import slurm
from tests.support.command_line import RUN, Command, start_python
from tests.support.kills import read_files

SHORT = ("method=swa", "method._target_=halting.Halting", "prompts.count=2", "batch_size=1", "eval=none")
HALTING = '''
import json, os, time
from contextlib import nullcontext, suppress
from pathlib import Path
import torch
from kvbench.methods.streaming_llm import StreamingLLM

class Halting(StreamingLLM):
    """At a budget of 20 % it waits to be killed once its run has an image or `at_once`, and the next time goes on."""

    static = False  # asked for every image

    def prepare(self, spec, budget, artifact):
        super().prepare(spec, budget, artifact)
        self.halts = float(budget.fraction) == 0.2

    def keep(self, view):
        drawn = Path("at_once").exists() or any(Path("runs").glob("*/swa-0.2-*/images/*.png"))
        if self.halts and drawn and not Path("halting").exists():
            with suppress(FileExistsError):
                self.halt()
        return super().keep(view)

    def halt(self):
        Path("halting").mkdir()
        told = {"pid": os.getpid(), "threads": torch.get_num_threads()}
        told |= {key: os.environ.get(key) for key in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES")}
        Path("halting.json").write_text(json.dumps(told))
        Path("halting.json").rename("halted.json")
        time.sleep(600)
'''


def start_sweep(
    folder: Path, launcher: str, *arguments: str, env: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a sweep whose job at a budget of 20 % halts after its first image."""
    (folder / "halting.py").write_text(HALTING)
    let_another_halt(folder)
    path = os.pathsep.join((str(folder), env.get("PYTHONPATH", "")))
    words = (RUN, "-m", f"hydra/launcher={launcher}", *SHORT, *arguments)
    return start_python(folder, *words, **{**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"})


def let_another_halt(folder: Path) -> None:
    """Let the next job or worker halt."""
    (folder / "halted.json").unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (folder / "halting").rmdir()


def wait_for_halt(folder: Path) -> dict[str, str]:
    """What the job or worker that halts tells of itself."""
    deadline = time.monotonic() + 600
    while not (folder / "halted.json").exists():
        assert time.monotonic() < deadline, [
            path.read_text() for path in folder.glob("runs/.submit*/*/*.err")
        ]
        time.sleep(0.1)
    return json.loads((folder / "halted.json").read_text())


def end_sweep(folder: Path, sweep: subprocess.Popen[str]) -> tuple[int, str, list[JobStatus]]:
    """Exit status, output in one line and what the jobs left."""
    out = " ".join(sweep.communicate(timeout=600)[0].split())
    left = max((folder / "runs" / "sweeps").iterdir(), key=lambda path: path.stat().st_mtime)
    return sweep.returncode, out, read_entries(left)


@pytest.mark.nightly
def test_a_killed_ray_worker_starts_again(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    cluster = ("ray", "hydra.launcher.ray.init.num_cpus=2")
    again = start_sweep(tmp_path, *cluster, "budget=0.2,0.1", env=os.environ)
    halted = wait_for_halt(tmp_path)
    [image] = tmp_path.glob("runs/infinity_tiny/swa-0.2-*/images/*.png")
    os.utime(image, (1, 1))  # would show that it was drawn again
    os.kill(int(halted["pid"]), signal.SIGKILL)
    status, out, entries = end_sweep(tmp_path, again)
    assert status == 0, out
    assert [(entry.outcome, entry.starts) for entry in entries] == [("finished", 2), ("finished", 1)]
    images = sorted(tmp_path.glob("runs/infinity_tiny/swa-0.2-*/images/*.png"))
    assert [path.stat().st_mtime > 1 for path in images] == [False, True]


def compose_with(launcher: str) -> DictConfig:
    """The configuration of a sweep with a launcher, with Hydra's part."""
    with hydra_of_kvbench():
        return hydra.compose("config", overrides=[f"hydra/launcher={launcher}"], return_hydra_config=True)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_launcher_is_checked_before_a_sweep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose_with(name)
    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", {cfg.hydra.launcher._target_: None})
    monkeypatch.setenv("PATH", "")
    if name == "submitit_slurm":
        with pytest.raises(ConfigError, match=r"submitit_slurm: srun is not installed; start the sweep on"):
            check_launcher(cfg)
    else:
        check_launcher(cfg)
    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", {})
    with pytest.raises(ConfigError, match=rf"^hydra/launcher={name}: not installed; .*\[{EXTRAS[name]}\]'$"):
        check_launcher(cfg)


CARDS = """
cuda | n_jobs=3 | n_jobs=3: 3 jobs at a time, but device=cuda is 2 GPUs .*n_jobs=2
cuda:1 | n_jobs=2 | 2 jobs at a time, but device=cuda:1 is 1 GPU here; .*n_jobs=1
cuda | n_jobs=8 task=work work.workers=2 |
cuda | n_jobs=8 task=work work.workers=4 | n_jobs=8: 4 jobs at a time
auto | n_jobs=3 | 3 jobs at a time, but device=cuda is 2 GPUs
"""
"""Device | settings of joblib | what is told on a machine of two GPUs."""


@pytest.mark.parametrize("row", CARDS.strip().splitlines())
def test_more_jobs_at_a_time_than_gpus_are_refused(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    device, words, said = (part.strip() for part in row.split("|"))
    monkeypatch.setenv("KVBENCH_DEVICE", "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with hydra_of_kvbench():
        given = ["hydra/launcher=joblib", f"device={device}", *f"hydra.launcher.{words}".split()]
        cfg = hydra.compose("config", overrides=given, return_hydra_config=True)
        cfg.hydra.overrides.task = ["method=swa,random,full,h2o"]
        with pytest.raises(ConfigError, match=said) if said else nullcontext():
            check_launcher(cfg)


@pytest.mark.parametrize(("launcher", "taken"), [("joblib", [("cuda", 5)]), ("ray", [])])
def test_a_job_beside_others_takes_the_gpu_of_its_number(
    launcher: str, taken: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, int]] = []
    monkeypatch.setattr("kvbench.core.devices.take_gpu", lambda *given: found.append(given))
    monkeypatch.setattr("kvbench.cli.launch.run_words", lambda *_: tmp_path)
    cfg = compose_with(launcher)
    with open_dict(cfg):
        cfg.device, cfg.hydra.job.num = "cuda", 5
    HydraConfig.instance().set_config(cfg)
    folder = open_folder(tmp_path, [(f"seed={seed}",) for seed in range(6)])
    SweepJob(folder, 60.0)(cfg)
    assert found == taken
    assert [entry.outcome for entry in read_entries(folder)] == [*["missing"] * 5, "finished"]


def test_a_ray_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose_with("ray")
    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", {cfg.hydra.launcher._target_: None})
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        for address in ("local", "auto", f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            cfg.hydra.launcher.ray.init.address = address
            check_launcher(cfg)
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999"):
        cfg.hydra.launcher.ray.init.address = address
        with pytest.raises(
            ConfigError,
            match=rf"^hydra\.launcher\.ray\.init\.address={address}: no Ray cluster at this address",
        ):
            check_launcher(cfg)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_preset_gives_each_job_one_thread_and_the_folder_the_sweep_is_started_in(name: str) -> None:
    cfg = compose_with(name)
    assert cfg.hydra.job.env_set == {"OMP_NUM_THREADS": "1"}
    assert cfg.hydra.job.chdir
    assert Path(cfg.hydra.sweep.dir) / cfg.hydra.sweep.subdir == Path.cwd()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment in which Slurm's commands use a cluster of this machine."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    if (obstacle := slurm.find_obstacle()) is not None:
        pytest.skip(obstacle)
    with slurm.start_cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


@pytest.mark.nightly
def test_workers_of_a_whole_node_are_left_in_the_queue_killed_preempted_and_cancelled(
    tmp_path: Path, cluster: Mapping[str, str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("budget=0.2,0.3", "prompts.count=1")
    nodes = ("hydra.launcher.tasks_per_node=2", "hydra.launcher.gpus_per_node=2")
    (tmp_path / "at_once").touch()
    kept = ("work.wait=false", "work.grace=1")
    left = start_sweep(tmp_path, "submitit_slurm", *words, *nodes, *kept, env=cluster)
    out = left.communicate(timeout=600)[0]
    assert left.returncode == 0, out
    told = re.search(r"submitted 2 workers, 2 to a job, .* work.folder=(\S+); pause: ", out)
    assert told is not None, out
    killed = wait_for_halt(tmp_path)
    assert killed["CUDA_VISIBLE_DEVICES"] == "0,1"
    let_another_halt(tmp_path)
    os.kill(int(killed["pid"]), signal.SIGKILL)
    preempted = wait_for_halt(tmp_path)
    slurm.preempt(cluster, preempted["SLURM_JOB_ID"])
    subprocess.run(["scancel", preempted["SLURM_JOB_ID"]], env=cluster, check=True)
    folder = tmp_path / told[1]
    assert not (folder / "background.log").exists()
    assert len(read_logs(folder)) == 2
    assert "started" in [entry.outcome for entry in read_entries(folder)]
    monkeypatch.syspath_prepend(tmp_path)
    assert command("task=work", *SHORT, *words)[0] == 0
    assert [path for path in folder.rglob(".*") if path.is_file()] == []
    (tmp_path / "runs").rename(tmp_path / "together")
    assert command("task=work", *SHORT, *words)[0] == 0
    assert read_files(tmp_path / "together") == read_files(tmp_path / "runs")
