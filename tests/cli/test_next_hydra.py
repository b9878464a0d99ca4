"""The command line under the newest Hydra of the registry, release candidates included."""

from pathlib import Path

import pytest

from tests.support.command_line import RUN, run_python

pytestmark = pytest.mark.nightly

INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--pre", "--target")
COMPOSE = """
from itertools import zip_longest
from pathlib import Path
import hydra
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.cli.config.instantiate import instantiate
from omegaconf import OmegaConf

print(hydra.__version__)
names = {
    group: [str(file.relative_to(folder).with_suffix("")) for file in sorted(folder.rglob("*.yaml"))]
    for group in ("model", "method", "prompts", "eval", "storage")
    for folder in [Path("conf", group)]
}
together = [dict(zip(names, chosen)) for chosen in zip_longest(*names.values())]
with hydra_of_kvbench():
    for choices in together:
        overrides = [f"{group}={name}" for group, name in choices.items() if name is not None]
        overrides += ["prompts@prompts.of=scenes"] * ("prompts=own" in overrides)
        cfg, _ = compose_job(overrides)
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
        instantiate(cfg.method)
for path in ("os.remove", "kvbench.core.files.Path.unlink"):
    try:
        instantiate(OmegaConf.create({"_target_": path}))
    except hydra.errors.InstantiationException as error:
        print("refused", path)
"""


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment whose Hydra is the newest that the registry has."""
    target = tmp_path_factory.mktemp("hydra")
    done = run_python(target, *INSTALL, str(target), "hydra-core")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        pytest.skip(f"the newest hydra-core cannot be installed here: {lines[-1]}")
    return {"PYTHONPATH": str(target)}


def call(newest: dict[str, str], folder: Path, *words: str) -> str:
    """Standard output of Python with the newest Hydra; the test fails where the program does or will."""
    done = run_python(folder, *words, **newest)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "will become an error in Hydra" not in done.stdout + done.stderr
    assert "will be removed in Hydra" not in done.stdout + done.stderr
    return done.stdout


def test_every_choice_composes(newest: dict[str, str], root: Path) -> None:
    version, *refused = call(newest, root, "-c", COMPOSE).splitlines()
    if not version.startswith("1.3."):
        assert refused == ["refused os.remove", "refused kvbench.core.files.Path.unlink"]
    assert tuple(map(int, version.split(".")[:2])) >= (1, 3)


def test_a_sweep_runs(newest: dict[str, str], root: Path, tmp_path: Path) -> None:
    """One of its methods is that of a plugin, whose classes are of another package."""
    example = root / "docs" / "examples" / "plugin"
    environment = {"PYTHONPATH": f"{newest['PYTHONPATH']}:{example}"}
    words = "-m method=random_tokens,heatkv budget=0.1 prompts.count=1 calibrate.count=1 eval=none"
    path = f"hydra.searchpath=[file://{example / 'kvbench_example' / 'conf'}]"
    call(environment, tmp_path, RUN, *words.split(), path)
    runs = sorted(path.parent.name for path in tmp_path.glob("runs/*/*/results.json"))
    assert [name.split("-")[0] for name in runs] == ["full", "heatkv", "random_tokens"]
