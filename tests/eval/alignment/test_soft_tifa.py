"""Aggregates of Soft-TIFA against the benchmark's authors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvbench.eval.alignment.soft_tifa import Atom, Grade, Questions, SoftTifa, geometric_mean
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.intervals import bootstrap
from tests.support.image_sets import GOLDEN, make_noise, only

STORED = json.loads((GOLDEN / "geneval2.json").read_text())
ASKED = [
    Questions(
        tuple(Atom(*pair, skill) for pair, skill in zip(line["vqa_list"], line["skills"], strict=True)),
        line["atom_count"],
    )
    for line in STORED["bench"]
]


@dataclass(frozen=True)
class Given(SoftTifa):
    """The stored probabilities; an image's first pixel is its number."""

    key: str = "given_probabilities"
    protocol: ClassVar[str] = "given"
    part_names: ClassVar[tuple[str, ...]] = (
        *(f"atoms-{number}" for number in range(3, 11)),
        *("count", "object", "attribute", "position", "verb"),
    )

    def read_questions(self, images: ImageSet) -> list[Questions]:
        return [ASKED[index] for index in images.indices]

    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        return lambda pixels, atoms: STORED[self.key][pixels[0, 0, 0]], {}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("key", "totals"), [("given_probabilities", "given"), ("hard_scores", "hard")])
def test_scores_are_those_of_the_authors(key: str, totals: str, tmp_path: Path) -> None:
    prompts = [line["prompt"] for line in STORED["bench"]]
    result = only(Given(key), make_noise(tmp_path / "run", [{}] * 24, prompts, size=8))
    expected = STORED[totals]
    near = {"abs": 1e-7}
    assert result.samples["geneval2[given]"] == pytest.approx(
        [100 * value for value in expected["gm_per_prompt"]], **near
    )
    assert result.samples["geneval2_am[given]"] == pytest.approx(
        [100 * value for value in expected["am_per_prompt"]], **near
    )
    found = {name: score.value for name, score in result.scores.items()}
    assert found.pop("geneval2[given]") == pytest.approx(expected["gm"], **near)
    assert found.pop("geneval2_am[given]") == pytest.approx(expected["am"], **near)
    parts = {f"geneval2[given]/{skill}": value for skill, value in expected["skills"].items()}
    parts |= {f"geneval2[given]/atoms-{number}": value for number, value in expected["atomicity"].items()}
    assert found == pytest.approx(parts, **near)


def test_a_skill_is_a_mean_over_questions_and_resamples_prompts() -> None:
    atoms = [Atom("", "Yes", skill) for skill in ("object", "count")]
    questions = [Questions((atoms[0],), 1), Questions((atoms[0], atoms[0], atoms[1]), 3)]
    scores = Given().summarise(questions, [[0.25], [0.5, 1.0, 0.5]], ["a", "b"])
    skill = scores["geneval2[given]/object"]
    assert (skill.value, skill.n) == (pytest.approx(100 * 1.75 / 3), 3)
    interval = bootstrap([25, 50, 100], ["a", "b", "b"])
    assert interval.low < 0 < 100 < interval.high  # of two prompts
    assert skill.ci95 == (0, 100)
    many = Given().summarise(
        questions[:1] * 30, [[0.4 + 0.01 * n] for n in range(30)], list(map(str, range(30)))
    )
    interval = bootstrap([40.0 + n for n in range(30)])
    assert many["geneval2[given]/object"].ci95 == pytest.approx((interval.low, interval.high))
    assert scores["geneval2[given]/count"].ci95 is None
    assert scores["geneval2[given]/atoms-3"].value == pytest.approx(100 * 0.25 ** (1 / 3))
    assert "geneval2[given]/verb" not in scores


def test_geometric_mean_with_a_zero_is_zero() -> None:
    assert geometric_mean([0.5, 0.0, 1.0]) == 0
    rng = np.random.default_rng(0).random(9)
    assert geometric_mean(rng.tolist()) == pytest.approx(np.prod(rng) ** (1 / 9))
