"""Words, settings and streams that end a command: one line each, before any work."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from kvbench.cli import launch
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.messages import MAX_LINE, describe_error
from kvbench.cli.sweeps.launchers import SETTINGS, check_launcher_settings
from kvbench.core.config import ConfigError, read_count
from tests.support.command_line import run_python
from tests.support.places import ROOT


@pytest.fixture
def hydra_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with hydra_of_kvbench():
        yield


def read_launcher(name: str) -> DictConfig:
    """The part `hydra.launcher` of a preset, beside what it refers to."""
    launcher = OmegaConf.load(ROOT / f"conf/hydra/launcher/{name}.yaml").launcher
    return OmegaConf.create({"hydra": {"launcher": launcher, "sweep": {"dir": "runs"}}}).hydra.launcher


@pytest.mark.parametrize("name", SETTINGS)
def test_launchers_as_shipped_are_valid(name: str) -> None:
    check_launcher_settings(name, read_launcher(name))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("joblib", "n_jobs", -2),
        ("joblib", "timeout", -1.0),
        ("joblib", "nope", 1),
        ("submitit_slurm", "cpus_per_task", 0),
        ("submitit_slurm", "setup", "module load cuda"),
        ("submitit_slurm", "submitit_folder", ""),
        ("submitit_slurm", "additional_parameters", 3),
        ("ray", "ray.remote", None),
        ("ray", "ray.remote.num_cpus", "abc"),
        ("ray", "ray.init.num_gpus", -1),
    ],
)
def test_settings_of_launchers(name: str, key: str, value: object) -> None:
    launcher = read_launcher(name)
    OmegaConf.update(launcher, key, value, merge=False, force_add=True)
    with pytest.raises(ConfigError, match=rf"^hydra\.launcher\.{key}\b[^\n]*$"):
        check_launcher_settings(name, launcher)


@pytest.mark.usefixtures("hydra_files")
def test_a_fraction_is_a_budget() -> None:
    assert read_settings(compose_job(["budget=1/3", "against=heatkv"])[0]).budget == "1/3"


@pytest.mark.usefixtures("hydra_files")
def test_callbacks_of_files_are_refused() -> None:
    """A file of `hydra.searchpath` may set what a word of a command may not."""
    with pytest.raises(ConfigError, match=r"^hydra.callbacks=.*: must stay as in conf/config.yaml"):
        compose_job(["++hydra.callbacks.x={_target_:os.getcwd}"])


def test_lines_are_bounded() -> None:
    assert len(describe_error(ConfigError("x" * 10**5))) <= MAX_LINE


def test_variables_of_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE=abc: must be a whole number; unset it"):
        read_count("WORLD_SIZE", 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (read_count("WORLD_SIZE", 1), read_count("UNSET_COUNT", 7)) == (3, 7)


@pytest.mark.usefixtures("hydra_files")
def test_a_broken_launcher_is_told_before_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise ValueError("workers\nare gone")

    monkeypatch.setattr(launch, "run_in_turn", run)
    with pytest.raises(SystemExit, match=r"^1$"):
        launch.run_sweep(["method=full,swa"])
    broken, _, tables = capsys.readouterr().out.partition("error: workers are gone\n")
    assert broken.startswith("device: ")
    assert "missing full, swa: not started; " in tables


START = "import sys; sys.path.insert(0, {root!r}); import kvbench.cli as p; p.__path__.insert(0, '.'); "


@pytest.mark.parametrize(
    "module",
    [
        "import os\ntry:\n    os.kill(os.getpid(), 2)\n    x = [*range(9)]\n"
        "except BaseException:\n    raise ImportError",
        "import os\ndef main():\n    try:\n        os.kill(os.getpid(), 2)\n        x = [*range(9)]\n"
        "    finally:\n        [][0]",
    ],
    ids=["while-imported", "in-cleanup"],
)
def test_ctrl_c_is_one_line(module: str, tmp_path: Path) -> None:
    """Also where the exception gets lost, in an import or behind an error of code that cleans up."""
    (tmp_path / "app.py").write_text(module)
    program = START.format(root=str(ROOT)) + "import signal; signal.signal(2, signal.default_int_handler); "
    done = run_python(tmp_path, "-c", program + "from kvbench.cli.entry import main; main()")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; run the same command again to resume\n"


@pytest.mark.parametrize(
    ("redirection", "shown"),
    [("| head -1", "a ? b\n"), ("2>&- >&- <&-", ""), ("| tail -1", "a ? b\n")],
)
def test_lost_closed_and_narrow_outputs_end_nothing(redirection: str, shown: str, tmp_path: Path) -> None:
    program = START.format(root=str(ROOT)) + (
        "from kvbench.cli.streams import repair_streams; repair_streams(); repair_streams()\n"
        "for _ in range(20000): print('a \\u2191 b')\n"
        "open('file', 'w').write('done'); sys.stderr.write('')"
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"{sys.executable}" program.py {redirection}'],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")
    assert (tmp_path / "file").read_text() == "done"
