"""DPG's rules against the official scores, and BLIP with a few random channels against transformers."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kvbench.eval.alignment.dpg import CATEGORIES, COLUMNS, Dpg
from kvbench.eval.alignment.vqa import BlipVqa, Vqa
from kvbench.eval.files.weights import Weight, file_sha256
from tests.support.image_sets import make_noise, only, reason
from tests.support.marks import needs
from tests.support.places import GOLDENS

GOLDEN = json.loads((GOLDENS / "eval" / "dpg_cases.json").read_text())
COUNTING_L1 = {"entity": 50, "attribute": 50, "relation": 25, "global": 75, "other": 25}
"""Means over all images of the answers that count, by category, from the golden answers by hand."""
pytestmark = [pytest.mark.usefixtures("offline"), needs("transformers")]


@dataclass(frozen=True)
class Told(Vqa):
    """Gives the stored answers; the image's number is its first pixel."""

    packages: tuple[str, ...] = ()
    weights: tuple[Weight, ...] = ()

    def load(self, device: str) -> tuple[Callable[[np.ndarray, Sequence[str]], list[str]], dict[str, str]]:
        def answer(pixels: np.ndarray, questions: Sequence[str]) -> list[str]:
            item, image = divmod(int(pixels[0, 0, 0]), 4)
            numbers = {q["question"]: str(q["qid"]) for q in GOLDEN["items"][item]["questions"]}
            return [GOLDEN["items"][item]["answers"][image][numbers[question]] for question in questions]

        return answer, {"told": "no hash"}


def write_csv(path: Path, before: Sequence[Sequence[object]] = ()) -> str:
    rows = [
        (i["id"], q["qid"], ",".join(map(str, q["dependency"])), q["tuple"], q["question"])
        for i in GOLDEN["items"]
        for q in i["questions"]
    ]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([*before, *rows])
    return str(path)


def test_dpg_scores_a_run(tmp_path: Path) -> None:
    images = make_noise(
        tmp_path / "run", [{"item_id": "ab"[n // 4]} for n in range(8)], [f"p{n // 4}" for n in range(8)]
    )
    table = write_csv(tmp_path / "q.csv")
    result = only(Dpg(Told(), "told", table), images)
    assert result.scores["dpg[told]"].value == GOLDEN["official_dpg"]
    assert result.scores["dpg[told]"].n == 2
    shares = [share for item in GOLDEN["items"] for share in item["official_per_image"]]
    assert result.samples["dpg[told]"] == [100 * share for share in shares]
    assert {c: result.scores[f"dpg[told]/{c}"].value for c in CATEGORIES} == COUNTING_L1
    assert result.save(tmp_path / "metrics").name == "dpg-told.json"

    first = [("z", 1, "0", "entity - whole (sky)", "Is there a sky?")]
    quirks = only(Dpg(Told(), "told", write_csv(tmp_path / "z.csv", first), official=True), images)
    assert quirks.scores["dpg[told-official]"].value == GOLDEN["official_dpg"]
    categories = {c: quirks.scores[f"dpg[told-official]/{c}"].value for c in CATEGORIES}
    assert categories == GOLDEN["official_l1"]
    # Without a line before it, item a loses its first question, on which others rest: the program drops the item.
    dropped = only(Dpg(Told(), "told", table, official=True), images)
    assert dropped.scores["dpg[told-official]"].value == 100 * GOLDEN["items"][1]["official_score"]
    assert dropped.reason == "left out, as the official code does: a"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("item_id,tuple\na,b\n", "no column 'proposition_id'"),
        (f"{','.join(COLUMNS)}\n", "holds no questions"),
        (f"{','.join(COLUMNS)}\na,1,0,t\n", "line 2: not a DPG"),
        (f"{','.join(COLUMNS)}\na,1,2,t,Is it?\n", "item a depends on a missing question"),
        (f"{','.join(COLUMNS)}\na,1,0,t,Is it?\n", "no questions about item q"),
    ],
)
def test_malformed_and_other_questions_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text(text)
    evaluator = Dpg(Told(), "told", str(tmp_path / "q.csv"))
    assert complaint in reason(evaluator, "failed", make_noise(tmp_path / "run", [{"item_id": "q"}]))
    assert "prompts=dpg" in reason(evaluator, "skipped", make_noise(tmp_path / "other", [{}, {}]))


def test_blip_answers_as_transformers_does(tmp_path: Path) -> None:
    import transformers

    special = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "DEC")]
    words = [*special[:4], *("is", "there", "a", "dog", "the", "red", "?", "yes", "no", "two"), special[4]]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    folder = tmp_path / "blip"
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "sep_token_id": 3, "bos_token_id": 14, "eos_token_id": 3}
    config = transformers.BlipConfig(
        text_config={
            **small, **ids, "vocab_size": 15, "encoder_hidden_size": 16, "max_position_embeddings": 32,
        },
        vision_config={**small, "image_size": 32, "patch_size": 16},
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.BlipForQuestionAnswering(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    processor = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    answer, hashes = BlipVqa(str(folder)).load("cpu")
    assert hashes["Salesforce/blip-vqa-capfilt-large/model.safetensors"] == file_sha256(
        folder / "model.safetensors"
    )
    questions = ["Is there a dog?", "Is the dog red?", "a a a dog?"]
    said = set()
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), np.uint8)
        expected = []
        for question in questions:
            tokens = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
            inputs = {**tokens, **processor(Image.fromarray(pixels), return_tensors="pt")}
            tokens = model.generate(**inputs, max_new_tokens=10, do_sample=False)
            expected.append(tokenizer.decode(tokens[0], skip_special_tokens=True).strip())
        assert answer(pixels, questions) == expected
        said |= set(expected)
    assert len(said) > 1  # the questions and images do matter
