"""GenEval2, its aggregates and VQAScore on stored logits, and on a random Qwen3-VL of a few channels."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kvbench.eval.alignment.geneval2 import (
    WORD_QUESTION,
    GenEval2,
    GenEval2VqaScore,
    HardTifa,
    VqaScore,
    is_right,
)
from kvbench.eval.alignment.judge import JudgeModel, VlmJudge
from kvbench.eval.alignment.soft_tifa import Atom, Grade, Questions, SoftTifa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.intervals import bootstrap
from tests.support.image_sets import GOLDEN, make_noise, only

pytestmark = pytest.mark.usefixtures("offline")
STORED = json.loads((GOLDEN / "geneval2.json").read_text())
BENCH = STORED["bench"][:5]
PARTS = ("vision_start", "vision_end", "image_pad", "video_pad", "im_start", "im_end")
SPECIAL = [f"<|{part}|>" for part in PARTS]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@dataclass(frozen=True)
class Stored(VlmJudge):
    """A judge that answers with the stored logits, in the order of the questions."""

    asked: str = "asked"
    logits: str = "logits"
    weights = ()

    def load(self, device: str) -> JudgeModel:
        answers = zip(STORED[self.asked], STORED[self.logits], strict=True)

        def predict(pixels: np.ndarray, texts: Sequence[str]) -> Tensor:
            texts_stored, logits = zip(*islice(answers, len(texts)), strict=True)
            assert list(texts_stored) == texts
            return torch.tensor(logits).softmax(-1)

        def decode(token: int) -> str:
            return STORED["decode"][str(token)]

        return JudgeModel(predict, STORED["first_token"].__getitem__, decode, {})


def noise_images(folder: Path, lines: Sequence[dict]) -> ImageSet:
    return make_noise(folder, lines, [line["prompt"] for line in lines], size=8)


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


@pytest.mark.parametrize(("key", "totals"), [("given_probabilities", "given"), ("hard_scores", "hard")])
def test_scores_are_those_of_the_authors(key: str, totals: str, tmp_path: Path) -> None:
    result = only(Given(key), noise_images(tmp_path / "run", STORED["bench"]))
    expected = STORED[totals]
    near = {"abs": 1e-7}
    for name, each in (("geneval2[given]", "gm_per_prompt"), ("geneval2_am[given]", "am_per_prompt")):
        assert result.samples[name] == pytest.approx([100 * value for value in expected[each]], **near)
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
    assert skill.ci95 == (0, 100)  # of two prompts
    many = Given().summarise(
        questions[:1] * 30, [[0.4 + 0.01 * n] for n in range(30)], list(map(str, range(30)))
    )
    interval = bootstrap([40.0 + n for n in range(30)])
    assert many["geneval2[given]/object"].ci95 == pytest.approx((interval.low, interval.high))
    assert scores["geneval2[given]/count"].ci95 is None
    assert scores["geneval2[given]/atoms-3"].value == pytest.approx(100 * 0.25 ** (1 / 3))
    assert "geneval2[given]/verb" not in scores


def test_soft_scores_are_those_of_the_authors(tmp_path: Path) -> None:
    images = noise_images(tmp_path / "run", BENCH)
    result = only(GenEval2(Stored()), images)
    for found, expected in zip(result.samples["probabilities"], STORED["soft_scores"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    once = only(GenEval2(Stored(), unique=True), images)
    assert next(iter(once.scores)) == "geneval2[qwen3-vl-8b-unique]"
    both = [
        (one, other)
        for pair in zip(once.samples["probabilities"], result.samples["probabilities"], strict=True)
        for one, other in zip(*pair, strict=True)
    ]
    assert all(one <= min(other, 1) + 1e-9 for one, other in both)
    assert any(one < other for one, other in both)


def test_hard_scores_are_those_of_the_authors(tmp_path: Path) -> None:
    result = only(HardTifa(Stored(logits="hard_logits")), noise_images(tmp_path / "run", BENCH))
    assert result.samples["probabilities"] == STORED["hard_scores"][: len(BENCH)]
    means = result.samples["geneval2_hard_am[qwen3-vl-8b]"]
    assert means == pytest.approx([100 * mean for mean in STORED["hard"]["am_per_prompt"][: len(BENCH)]])
    assert next(iter(result.scores)) == "geneval2_hard[qwen3-vl-8b]"
    assert is_right(" FOUR", [" four"])
    assert not is_right("four", [" four"])
    assert not is_right("fo", ["four"])


def test_vqascores_of_four_spellings_are_those_of_the_authors(tmp_path: Path) -> None:
    lines = STORED["bench"][: len(STORED["vqascores"])]
    judge = Stored(asked="vqascore_asked", logits="vqascore_logits")
    result = only(GenEval2VqaScore(judge=judge), noise_images(tmp_path / "run", lines))
    assert list(result.scores) == ["vqascore[qwen3-vl-8b,geneval2]"]
    assert result.samples["vqascore[qwen3-vl-8b,geneval2]"] == pytest.approx(STORED["vqascores"], abs=1e-5)


@pytest.mark.parametrize("change", [{"skills": ["count"]}, {"vqa_list": 1}, {"vqa_list": [], "skills": []}])
def test_other_lines_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="not a GenEval2 line"):
        GenEval2().check_meta({**BENCH[0], **change})


def save_judge(folder: Path) -> tuple[Any, Any]:
    """Save a random Qwen3-VL with a vocabulary of bytes; return the network and its processor."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=SPECIAL, pad_token="<|im_end|>"
    )
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 4, "out_hidden_size": 32,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        **{f"{part.replace('pad', 'token')}_id": ids[f"<|{part}|>"] for part in PARTS[2:4]},
        **{f"{part}_token_id": ids[f"<|{part}|>"] for part in PARTS[:2]},
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 65536}
        ),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


@pytest.mark.slow
@torch.no_grad()
def test_a_judge_predicts_what_greedy_generation_scores(tmp_path: Path) -> None:
    model, processor = save_judge(tmp_path / "judge")
    images = make_noise(tmp_path / "run", BENCH[:2], [line["prompt"] for line in BENCH[:2]], size=64)
    judge = VlmJudge("tiny", str(tmp_path / "judge"), "float32")
    opinion = judge.load("cpu")
    texts = [WORD_QUESTION.format(question=question) for question, _ in BENCH[0]["vqa_list"]]
    found = opinion.predict(images.image(0), texts)
    assert found.sum(-1).tolist() == pytest.approx([1] * len(texts), abs=1e-5)
    for text, row in zip(texts, found, strict=True):
        words = f"<|im_start|>user <|vision_start|><|image_pad|><|vision_end|>{text}<|im_end|><|im_start|>assistant "
        inputs = processor(text=[words], images=[Image.fromarray(images.image(0))], return_tensors="pt")
        made = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        assert torch.allclose(made.scores[0][0].softmax(-1), row, atol=1e-6)
    assert not torch.allclose(opinion.predict(images.image(1), texts), found, atol=1e-4)
    assert opinion.decode(opinion.first_token(" four")) == " "

    result = only(VqaScore(judge=judge), images)
    assert list(result.scores) == ["vqascore[tiny]"]
    question = f'Does this figure show "{BENCH[1]["prompt"]}"? Please answer Yes or No.'
    expected = opinion.predict(images.image(1), [question])[0, opinion.first_token("Yes")]
    assert result.samples["vqascore[tiny]"][1] == pytest.approx(float(expected))
