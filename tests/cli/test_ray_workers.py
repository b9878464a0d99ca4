"""Workers on a Ray cluster of two nodes: left there, started again where one is killed, stopped, refused."""

import re
import time
from pathlib import Path

import pytest

from kvbench.cli.submit.ray import count_fitting
from kvbench.cli.workers.log import read_logs
from tests.support.command_line import Command, run_program
from tests.support.two_nodes import SWEEP, find_worker, kill_workers, start_ray, submit


@pytest.mark.nightly
def test_workers_are_left_on_a_ray_cluster_and_started_again_where_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    outcome = kill_workers(tmp_path, start_ray, kills=2, samples=6)
    assert (outcome.kills, outcome.workers, outcome.different) == (2, 4, [])
    assert abs(outcome.drawn - outcome.samples) <= outcome.kills  # but for blocks in flight nothing twice


@pytest.mark.nightly
def test_workers_on_a_ray_cluster_are_stopped_and_must_fit(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    with start_ray() as cluster:
        words = (*SWEEP, "prompts.count=2000")  # more than fast machines draw before they are told to stop
        sweep, out = submit(tmp_path, cluster, *words)
        assert re.search(
            rf"submitted 2 workers to the Ray cluster at \S+, output in {sweep.relative_to(tmp_path)}", out
        )
        worker = find_worker(sweep, blocks=1)
        assert worker is not None
        assert not (sweep / "background.log").exists()
        command("task=work", f"work.folder={sweep}", "work.do=stop")
        while any(log.alive for log in read_logs(sweep)):
            time.sleep(0.1)
        assert sum(log.samples for log in read_logs(sweep)) < 2000
        large = ("-m", *words, *cluster.words, "work.wait=false", "hydra.launcher.ray.remote.num_gpus=1")
        refused = run_program(tmp_path, *large)
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert re.search(r"no machine of the cluster at \S+ has num_cpus=1 and num_gpus=1", said)


def test_workers_fit_into_what_a_machine_has() -> None:
    node = {"CPU": 7.0, "GPU": 2.0, "memory": 1e9}
    assert [
        count_fitting(node, {"num_cpus": cpus, "num_gpus": gpus})
        for cpus, gpus in ((1, 0), (1, 1), (4, 1), (1, 0.5), (8, 0), (0, 0), (1, 3))
    ] == [7, 2, 1, 4, 0, 1, 0]
    assert count_fitting(node, {"num_cpus": 1, "num_gpus": 0, "resources": {"a100": 1}}) == 0
