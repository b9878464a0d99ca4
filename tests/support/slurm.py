"""A Slurm cluster on this one machine, without systemd, cgroups or a munge daemon, for tests."""

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.command_line import find_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
INSTALL = Path(__file__).with_name("install_slurm.sh")
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
KillWait=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE GraceTime=2
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2
"""
NODE = "NodeName=node{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cores} Gres=gpu:2"
CARDS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
"""Two devices that Slurm takes for GPUs: it names them in CUDA_VISIBLE_DEVICES, and nothing uses them."""


def find_obstacle() -> str | None:
    """Install Slurm unless it is there; return why it cannot be used, None if it can."""
    if all(map(shutil.which, PROGRAMS)):
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"Slurm is not installed, which takes root and apt-get: {INSTALL.name}"
    done = subprocess.run(["sh", str(INSTALL)], capture_output=True, text=True, timeout=600)
    if done.returncode != 0 or not all(map(shutil.which, PROGRAMS)):
        return f"Slurm cannot be installed: {(done.stderr or done.stdout).strip()[-200:]}"
    return None


@contextmanager
def start_cluster(folder: Path, cores: Sequence[int] = (2,)) -> Iterator[Mapping[str, str]]:
    """Start a cluster of nodes with so many cores; gives the environment in which commands use it."""
    conf, user = folder / "slurm.conf", getpass.getuser()
    nodes = [NODE.format(number=number, port=find_port(), cores=count) for number, count in enumerate(cores)]
    conf.write_text(
        CONFIGURATION.format(control_port=find_port(), nodes="\n".join(nodes), user=user, folder=folder)
    )
    (folder / "gres.conf").write_text(CARDS)
    (folder / "state").mkdir()
    env = {**os.environ, "SLURM_CONF": str(conf)}
    daemons = [_start(folder, env, "slurmctld", "-D")]
    daemons += [_start(folder, env, "slurmd", "-D", "-N", f"node{number}") for number in range(len(cores))]
    try:
        _wait_until_idle(env, daemons, folder)
        yield env
    finally:
        subprocess.run(["scancel", "--full", "--user", user], env=env, capture_output=True)
        _wait_until_empty(env)
        for daemon in reversed(daemons):
            _end(daemon)


def _wait_until_empty(env: Mapping[str, str]) -> None:
    """Wait until no job is left, half a minute at most: slurmd waits for steps, which the controller must hear of."""
    for _ in range(60):
        if not subprocess.run(["squeue", "--noheader"], env=env, capture_output=True).stdout.strip():
            return
        time.sleep(0.5)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def requeue(env: Mapping[str, str], job: str) -> None:
    """Stop a job and let it start again at once; by itself Slurm waits two minutes."""
    subprocess.run(["scontrol", "requeue", job], env=env, check=True)
    _wait_until_pending(env, job)
    time.sleep(2)  # a node refuses a job whose credential is of the second in which it revoked the one before
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=env, check=True)


def preempt(env: Mapping[str, str], job: str) -> None:
    """Have an urgent job take the node of another, and return when Slurm has queued that again."""
    urgent = ["--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap=true"]
    subprocess.run(["sbatch", *urgent], env=env, check=True, capture_output=True)
    _wait_until_pending(env, job)


def _wait_until_pending(env: Mapping[str, str], job: str) -> None:
    state = ["squeue", "--noheader", "--format=%T", "--job", job]
    deadline = time.monotonic() + 600
    while (found := subprocess.check_output(state, env=env, text=True).strip()) != "PENDING":
        assert time.monotonic() < deadline, f"{job}: {found or 'has ended'}"
        time.sleep(0.25)


def _start(folder: Path, env: Mapping[str, str], name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}{arguments[-1]}.log").open("w") as log:
        return subprocess.Popen([name, *arguments], env=env, stdout=log, stderr=subprocess.STDOUT)


def _wait_until_idle(env: Mapping[str, str], daemons: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for _ in range(240):
        told = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=test", "--format=%T"],
            env=env,
            capture_output=True,
            text=True,
        )
        if set(told.stdout.split()) == {"idle"}:
            return
        if any(daemon.poll() is not None for daemon in daemons):
            break
        time.sleep(0.25)
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    raise AssertionError(f"the cluster did not come up:\n{told.stdout}{told.stderr}\n{logs}")
