"""Digests of a metric's inputs change with what it reads and with nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from kvbench.core.config import import_target
from kvbench.eval.alignment.dpg import Dpg
from kvbench.eval.alignment.dpg_official import DpgOfficial
from kvbench.eval.alignment.geneval2 import GenEval2
from kvbench.eval.alignment.hps import Hps
from kvbench.eval.alignment.oneig import OneIg
from kvbench.eval.alignment.unigenbench import UniGenBench
from kvbench.eval.distribution.fid import FidReal
from kvbench.eval.distribution.mjhq import CATEGORIES, FidMjhq
from kvbench.eval.files.samples import REWRITTEN_FROM
from kvbench.eval.geneval.official import GenEvalOfficial
from kvbench.eval.geneval.score import GenEval
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.base import Evaluator, evaluate
from kvbench.eval.protocol.inputs import find_changes, hash_inputs
from kvbench.eval.registry import LOOKUP_TARGETS, describe_metrics, read_metrics
from kvbench.eval.spaces.scenes import Scenes
from kvbench.eval.text.answers import ExactAnswer
from kvbench.scenes.exact import Exact
from kvbench.scenes.graded import SceneTifa
from kvbench.scenes.grammar import evaluation_prompts
from tests.support.image_sets import FEATURES, make_noise

LINE: dict[str, object] = {
    "answer": "7", "tag": "counting", "include": [{"class": "dog", "count": 2}],
    "exclude": [{"class": "dog", "count": 3}], "prompt": "two dogs",
    "vqa_list": [["How many dogs are there?", "two"]], "skills": ["count"], "atom_count": 3, "item_id": "12",
    "category": "animals", "style": "photo", "oneig_class": "anime", "oneig_id": "001",
    "unigenbench_index": "5", "comment": "not read by a metric",
}  # fmt: skip


class Stranger(Psnr):
    """Says nothing about metadata."""

    meta_keys: ClassVar[None] = None


def find_dogs(_: np.ndarray) -> list[object]:
    return []


READ: list[tuple[Evaluator, set[str]]] = [
    (Psnr(), set()), (ExactAnswer(), {"answer"}), (GenEval(find_dogs), {"tag", "include", "exclude"}),
    (GenEvalOfficial(), {"tag", "include", "exclude"}), (GenEval2(), {"vqa_list", "skills", "atom_count"}),
    (Exact(), {"tag", "prompt"}), (SceneTifa(), {"tag", "prompt"}), (Dpg(), {"item_id"}),
    (DpgOfficial(), {"item_id"}), (FidMjhq(), {"category"}), (Hps(), {"style"}),
    (OneIg(), {"oneig_class", "oneig_id"}), (UniGenBench(), {"unigenbench_index"}), (Stranger(), set(LINE)),
]  # fmt: skip


@pytest.mark.parametrize(("evaluator", "read"), READ, ids=[type(one).__name__ for one, _ in READ])
def test_metadata_counts_if_a_metric_reads_it(evaluator: Evaluator, read: set[str], tmp_path: Path) -> None:
    def find(meta: Mapping[str, object]) -> list[str]:
        before = hash_inputs(evaluator, [LINE, LINE], tmp_path)
        known = {name: digest for name, digest in before.items() if digest is not None}
        return find_changes(known, hash_inputs(evaluator, [LINE, meta], tmp_path))

    assert find(LINE) == []
    changed = {key for key in LINE if find({**LINE, key: "other"})}
    removed = {key for key in LINE if find({name: value for name, value in LINE.items() if name != key})}
    assert changed == removed == read
    assert find({**LINE, REWRITTEN_FROM: "a shorter prompt"})


def test_every_metric_of_the_program_says_what_it_reads() -> None:
    settings = [one for name in describe_metrics() for one in read_metrics(name).values()]
    targets = {one["_target_"] for one in settings} - {*LOOKUP_TARGETS}
    assert len(targets) > 30
    assert [name for name in targets if import_target(name, "eval").meta_keys is None] == []


class Recorded(dict[str, object]):
    """A line that records its keys that are read."""

    read: ClassVar[set[str]] = set()

    def get(self, key: str, default: object = None) -> object:
        self.read.add(key)
        return super().get(key, default)

    __getitem__ = get

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


SCORED: list[Evaluator] = [
    Exact(), SceneTifa(), GenEval(find_dogs), OneIg(), UniGenBench(), DpgOfficial(),
    FidReal(Scenes(str(FEATURES)), statistics="real"),
]  # fmt: skip


@pytest.mark.parametrize("evaluator", SCORED, ids=lambda one: type(one).__name__)
def test_a_metric_reads_no_other_metadata(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real").mkdir()
    for index in range(3):
        Image.fromarray(np.full((16, 16, 3), 50 * index, np.uint8)).save(f"real/{index}.png")
    lines = [{**LINE, **line} for line in evaluation_prompts(4, 0)]
    images = make_noise(tmp_path / "run", lines, ["one prompt"] * 4)
    monkeypatch.setattr(Recorded, "read", set())
    [result] = evaluate([evaluator], images.with_metadata([Recorded(line) for line in lines]))
    assert result.status == "ok" or "images exported" in str(result.reason), result.reason
    assert Recorded.read <= {*evaluator.meta_keys, REWRITTEN_FROM}
    assert Recorded.read >= {*evaluator.meta_keys[:1]}


REFERENCES: dict[str, tuple[Evaluator, str]] = {
    "questions": (Dpg(questions="dpg.csv"), "dpg.csv"),
    "statistics": (FidReal(statistics="one.safetensors"), "one.safetensors"),
    "folder/art": (FidMjhq(folder="real"), "real/art/1.jpg"),
    "verdicts": (GenEvalOfficial(verdicts=True), "run/geneval_official/results.jsonl"),
    "scores": (DpgOfficial(scores=True), "run/dpg_official/results.txt"),
    "scores of UniGenBench": (UniGenBench(scores=True), "run/unigenbench/results.csv"),
    "scores of OneIG": (OneIg(scores=True), "run/oneig/results/style_score_EN_1.csv"),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_content_of_references_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, changing = REFERENCES[name]
    monkeypatch.chdir(tmp_path)
    for file in (changing, *(f"real/{category}/1.jpg" for category in CATEGORIES)):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(file)

    def find() -> dict[str, str | None]:
        return dict(hash_inputs(evaluator, [LINE], tmp_path / "run"))

    stored = find()
    known = {key: digest for key, digest in stored.items() if digest is not None}
    assert known.keys() == stored.keys()
    Path(changing).write_text("more")
    assert find_changes(known, find()) == [name.partition(" ")[0]]
    Path(changing).unlink()  # as where a disk is not mounted
    assert find_changes(known, find()) == []
