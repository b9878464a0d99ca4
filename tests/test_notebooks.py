"""Every notebook runs from top to bottom, and what it shows is what its files hold."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
import pytest
from nbclient import NotebookClient

from tests.support.places import ROOT


class Shown(NamedTuple):
    """What an executed notebook shows: cells of code, printed text and last values, the number of figures."""

    folder: Path
    code: list[str]
    text: str
    figures: int

    def numbers(self, pattern: str) -> list[float]:
        """Numbers in the groups of the one place that a pattern fits."""
        [found] = re.findall(pattern, self.text)
        return [float(one) for one in found]

    def results(self, method: str) -> dict[str, Any]:
        """results.json of a run of the notebook."""
        [path] = self.folder.glob(f"runs/infinity_tiny/{method}-0.1-*/results.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def psnr(self, method: str) -> float:
        value: float = self.results(method)["metrics"]["psnr"]["value"]
        return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where notebooks are executed one after the other, so that they share references."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture
def show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Shown]:
    """Executes a notebook in the interpreter of the tests."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(folder / "jupyter"))

    def execute(name: str) -> Shown:
        notebook = jupytext.read(ROOT / "notebooks" / f"{name}.py")
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
        code = [str(cell["source"]) for cell in notebook.cells if cell["cell_type"] == "code"]
        outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
        data = [one.get("data", {}) for one in outputs]
        printed = [one["text"] for one in outputs if one.get("name") == "stdout"]
        text = "\n".join([*printed, *(one["text/plain"] for one in data if "text/plain" in one)])
        return Shown(folder, code, text, sum("image/png" in one for one in data))

    return execute


@pytest.mark.nightly
def test_quickstart(show: Callable[[str], Shown]) -> None:
    shown = show("01_quickstart")
    assert "finished: runs/infinity_tiny/snapkv-0.1-" in shown.text
    assert "reused   True" in shown.text
    psnr = shown.results("snapkv")["metrics"]["psnr"]
    low, high = psnr["ci95"]
    assert f"{psnr['value']:.2f} [{low:.2f}, {high:.2f}]" in shown.text
    assert shown.figures == 1


@pytest.mark.nightly
def test_add_a_method(show: Callable[[str], Shown]) -> None:
    shown = show("02_add_a_method")
    [method] = [code for code in shown.code if "class Lottery" in code]
    assert len(method.splitlines()) < 50
    held, budget, psnr = shown.numbers(r"lottery +held (\d+) of (\d+) tokens, PSNR ([\d.]+) dB")
    assert 0.97 * budget < held <= budget
    assert psnr == pytest.approx(shown.psnr("lottery"), abs=0.005)
    gain, low, high = shown.numbers(
        r"lottery - heatkv +([+-][\d.]+) dB \[([+-][\d.]+), ([+-][\d.]+)\], n = 16"
    )
    assert gain == pytest.approx(shown.psnr("lottery") - shown.psnr("heatkv"), abs=0.005)
    assert 0 < low < gain < high


@pytest.mark.nightly
def test_where_heads_look(show: Callable[[str], Shown]) -> None:
    shown = show("03_where_heads_look")
    assert "attention of a scale to all scales so far sums to 1.000000" in shown.text
    held, capacity = shown.numbers(r"held (\d+) of (\d+) tokens; a head holds")
    assert 0.8 * capacity < held <= capacity == 918
    assert shown.figures == 4


@pytest.mark.nightly
def test_read_results(show: Callable[[str], Shown]) -> None:
    shown = show("04_read_results")
    assert "6 runs, " in shown.text
    difference = shown.psnr("random") - shown.psnr("streaming_llm")
    value, low, high = shown.numbers(r"random - streaming_llm, psnr: (\S+) \[(\S+), (\S+)\], n = 16")
    assert value == pytest.approx(difference, abs=5e-5)
    assert low < value < high
    assert shown.figures == 1


def test_notebooks_are_plain_text_in_one_form() -> None:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("[!._]*"))
    assert names == ["01_quickstart", "02_add_a_method", "03_where_heads_look", "04_read_results"]
    for name in names:
        form = jupytext.read(ROOT / "notebooks" / f"{name}.py").metadata["jupytext"]["text_representation"]
        assert form["format_name"] == "percent"
