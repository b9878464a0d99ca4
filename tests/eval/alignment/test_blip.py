"""DPG's rules and ImageReward against their authors' programs, BLIP against transformers, on random networks."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from kvbench.eval.alignment.dpg import CATEGORIES, COLUMNS, Dpg
from kvbench.eval.alignment.imagereward import ImageReward, load_scorer, load_tokenizer
from kvbench.eval.alignment.vqa import BlipVqa, Vqa
from kvbench.eval.files.weights import Snapshot, Weight, file_sha256
from tests.support.image_sets import GOLDEN, make_noise, make_set, only, reason
from tests.support.marks import needs
from tests.support.tiny import make_golden_weight

DPG = json.loads((GOLDEN / "dpg_cases.json").read_text())
META = json.loads((GOLDEN / "imagereward.json").read_text())
REWARDS = load_file(GOLDEN / "imagereward.safetensors")
COUNTING_L1 = {"entity": 50, "attribute": 50, "relation": 25, "global": 75, "other": 25}
"""Means over all images of the answers that count, by category, from the golden answers by hand."""
pytestmark = [pytest.mark.usefixtures("offline"), needs("open_clip", "transformers")]


@dataclass(frozen=True)
class Told(Vqa):
    """Gives the stored answers; the image's number is its first pixel."""

    packages: tuple[str, ...] = ()
    weights: tuple[Weight, ...] = ()

    def load(self, device: str) -> tuple[Callable[[np.ndarray, Sequence[str]], list[str]], dict[str, str]]:
        def answer(pixels: np.ndarray, questions: Sequence[str]) -> list[str]:
            item, image = divmod(int(pixels[0, 0, 0]), 4)
            numbers = {q["question"]: str(q["qid"]) for q in DPG["items"][item]["questions"]}
            return [DPG["items"][item]["answers"][image][numbers[question]] for question in questions]

        return answer, {"told": "no hash"}


def write_csv(path: Path, before: Sequence[Sequence[object]] = ()) -> str:
    rows = [
        (i["id"], q["qid"], ",".join(map(str, q["dependency"])), q["tuple"], q["question"])
        for i in DPG["items"]
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
    assert result.scores["dpg[told]"].value == DPG["official_dpg"]
    assert result.scores["dpg[told]"].n == 2
    shares = [share for item in DPG["items"] for share in item["official_per_image"]]
    assert result.samples["dpg[told]"] == [100 * share for share in shares]
    assert {c: result.scores[f"dpg[told]/{c}"].value for c in CATEGORIES} == COUNTING_L1
    assert result.save(tmp_path / "metrics").name == "dpg-told.json"

    first = [("z", 1, "0", "entity - whole (sky)", "Is there a sky?")]
    quirks = only(Dpg(Told(), "told", write_csv(tmp_path / "z.csv", first), official=True), images)
    assert quirks.scores["dpg[told-official]"].value == DPG["official_dpg"]
    categories = {c: quirks.scores[f"dpg[told-official]/{c}"].value for c in CATEGORIES}
    assert categories == DPG["official_l1"]
    # Without a line before it, item a loses its first question, on which others rest: the program drops the item.
    dropped = only(Dpg(Told(), "told", table, official=True), images)
    assert dropped.scores["dpg[told-official]"].value == 100 * DPG["items"][1]["official_score"]
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


def fill(name: str, shape: list[int]) -> Tensor:
    """A tensor of the golden network."""
    places = name.endswith("position_ids")
    return torch.arange(shape[1])[None] if places else make_golden_weight(name, shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imagereward")
    torch.save({name: fill(name, shape) for name, shape in META["shapes"].items()}, path / "ImageReward.pt")
    (path / "med_config.json").write_text(json.dumps(META["med_config"]))
    (path / "vocab.txt").write_text("\n".join(META["vocabulary"]) + "\n")
    return path


def test_tokens_are_those_of_the_official_program(folder: Path) -> None:
    tokens, attention = load_tokenizer(folder / "vocab.txt")(META["prompts"])
    assert torch.equal(tokens, REWARDS["tokens"])
    assert torch.equal(attention, REWARDS["attention"])
    assert load_tokenizer(folder / "vocab.txt")(["[ENC]"])[0][0, 1] == len(META["vocabulary"]) + 1


def test_rewards_are_those_of_the_official_program(folder: Path, tmp_path: Path) -> None:
    images = make_set(tmp_path / "run", list(REWARDS["images"].numpy()), META["prompts"])
    words, expected = Snapshot("who/words", ("vocab.txt",)), REWARDS["rewards"].tolist()
    for batch in (1, 3):
        scorer = ImageReward(str(folder), tokenizer_path=str(folder), batch=batch, tokenizer=words)
        result = only(scorer, images)
        # The same network in float64 differs by 1.8e-5 from the reference, which has the rounding of float32.
        assert result.samples["imagereward"] == pytest.approx(expected, abs=2e-5)
        assert result.scores["imagereward"].value == pytest.approx(np.mean(expected), abs=1e-5)
    assert max(expected) - min(expected) > 1  # images and prompts do matter


@pytest.mark.parametrize(
    ("lost", "settings", "complaint"),
    [
        ("mlp.layers.6.bias", META["med_config"], "does not hold ImageReward"),
        ("blip.text_encoder", META["med_config"], "does not hold ImageReward"),
        ("no such part", [1], "cannot be read as settings by name"),
        ("no such part", {}, "hidden_size"),
    ],
)
def test_incomplete_files_and_another_vocabulary_are_refused(
    lost: str, settings: object, complaint: str, folder: Path, tmp_path: Path
) -> None:
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    torch.save({n: v for n, v in state.items() if not n.startswith(lost)}, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=complaint):
        load_scorer(tmp_path, folder / "vocab.txt", "cpu")
    metric, images = ImageReward(str(folder), tokenizer_path=str(folder)), make_noise(tmp_path / "run", [{}])
    assert "is not google-bert/bert-base-uncased/vocab.txt" in reason(metric, "failed", images)
