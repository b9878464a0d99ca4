"""Benchmark prompt sets on small made-up files: what is read, what is chosen, and one clear error for each bad file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.config import ConfigError, check_fields
from kvbench.eval.files.weights import Weight, file_sha256
from kvbench.prompts.base import Prompt
from kvbench.prompts.benchmarks import STYLES, Coco, Dpg, GenEval, GenEval2, HpsV2, OneIg, Parti, UniGenBench
from kvbench.prompts.files import PromptFile
from kvbench.prompts.preferences import ImageReward, Mjhq30k
from kvbench.prompts.sets import PromptSet

pytestmark = pytest.mark.usefixtures("offline")

LINES = [
    {"tag": tag, "include": [{"class": "dog", "count": 1}], "prompt": f"{tag} of a dog, take {take}"}
    for tag in ("single_object", "counting", "colors")
    for take in range(3)
]


QUESTIONS = [["How many dogs are there?", "two"], ["Are there dogs?", "Yes"]]
GRADED = [
    {"prompt": f"{word} dogs", "atom_count": 3, "vqa_list": QUESTIONS, "skills": ["count", "object"]}
    for word in ("two", "three", "four")
]
CAPTIONS = [{"image_id": 34 + n % 7, "caption": f" caption {n} \n"} for n in range(20)]
ROWS = (
    "Prompt\tCategory\tChallenge\tNote",
    'a sign that says "Go"\tArtifacts\tWriting\tnote',
    '"Hello," said the dog\tAnimals\tBasic\t',
    "x\tArts\tBasic\t",
)
CATEGORIES = ("Text_Rendering", "Portrait", "Text_Rendering")
KINDS = ("people", "art", "people", "logo")


def join(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


FILES: dict[type[PromptSet], dict[str, object]] = {
    Coco: {"captions.json": {"images": [{"id": 40 - n} for n in range(6)], "annotations": CAPTIONS}},
    GenEval: {"lines.jsonl": join(*map(json.dumps, LINES))},
    GenEval2: {"graded.jsonl": join(*map(json.dumps, GRADED))},
    HpsV2: {f"{style}.json": [f"{style} {n}" for n in range(5)] for style in STYLES},
    Dpg: {f"{item}.txt": f"a long text about {item}\n" for item in ("b1", "a2", "c0")},
    UniGenBench: {
        "test.csv": join("index,prompt_en,sub_dims_en", *(f'{7 - n},"a, {n}","{{}}"' for n in range(4)))
    },
    OneIg: {
        "oneig.csv": join(
            "category,id,prompt_en", *(f'{one},00{n},"a, {n}"' for n, one in enumerate(CATEGORIES))
        )
    },
    Parti: {"parti.tsv": "".join(f"{row}\r\n" for row in ROWS)},
    Mjhq30k: {
        "meta_data.json": {
            f"f{9 - n}": {"category": kind, "prompt": f" {kind}, take {n} "} for n, kind in enumerate(KINDS)
        }
    },
    ImageReward: {"prompts.json": [{"id": f"{n}-0057", "prompt": f"a vehicle, take {n}"} for n in range(3)]},
}
"""Files of each set: text as it is, all else as JSON."""


def make(kind: type[PromptSet], folder: Path) -> str:
    """Write a set's files; return the path of the only one, or of their folder."""
    place = folder / kind.__name__
    place.mkdir(exist_ok=True)
    for name, content in FILES[kind].items():
        (place / name).write_text(content if isinstance(content, str) else json.dumps(content), newline="")
    return str(place / name if len(FILES[kind]) == 1 else place)


ENTRIES: dict[type[PromptSet], list[tuple[str, dict[str, object]]]] = {
    Coco: [(f"caption {6 - n}", {"image_id": 40 - n}) for n in range(6)],
    GenEval: [(str(line["prompt"]), line) for line in LINES],
    GenEval2: [(str(line["prompt"]), line) for line in GRADED],
    HpsV2: [(f"{style} {n}", {"style": style}) for style in STYLES for n in range(5)],
    Dpg: [(f"a long text about {item}", {"item_id": item}) for item in ("a2", "b1", "c0")],
    UniGenBench: [(f"a, {n}", {"unigenbench_index": str(7 - n)}) for n in range(4)],
    OneIg: [
        (f"a, {n}", {"oneig_class": one, "oneig_id": f"00{n}"})
        for n, one in enumerate(("text", "human", "text"))
    ],
    Parti: [
        (text, {"category": category, "challenge": challenge})
        for text, category, challenge, _ in (row.split("\t") for row in ROWS[1:])
    ],
    Mjhq30k: [
        (f"{kind}, take {n}", {"category": kind, "image_id": f"f{9 - n}"}) for n, kind in enumerate(KINDS)
    ],
    ImageReward: [(f"a vehicle, take {n}", {"id": f"{n}-0057"}) for n in range(3)],
}
IMAGES = {GenEval: 4, Dpg: 4, UniGenBench: 4, OneIg: 4, ImageReward: 10}
"""Images of every prompt, 1 of other sets."""


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_set_has_its_texts_and_metadata_in_order(kind: type[PromptSet], tmp_path: Path) -> None:
    each = IMAGES.get(kind, 1)
    entries = [(text, meta, image) for text, meta in ENTRIES[kind] for image in range(each)]
    assert kind(make(kind, tmp_path)).load() == [
        Prompt(index, text, {**meta, "prompt_index": index // each, "image_index": image})
        for index, (text, meta, image) in enumerate(entries)
    ]


def test_parts_of_sets(tmp_path: Path) -> None:
    assert [p.text for p in Coco(make(Coco, tmp_path), count=2).load()] == ["caption 6", "caption 5"]
    drawn = Coco(make(Coco, tmp_path), count=4, draw=0)
    assert drawn.load() == drawn.load() != replace(drawn, draw=1).load()
    assert len({prompt.text for prompt in drawn.load()}) == 4
    some = GenEval(make(GenEval, tmp_path), count=3, per_prompt=1).load()
    assert [prompt.meta["tag"] for prompt in some] == ["single_object", "counting", "colors"]
    assert {p.meta["style"] for p in HpsV2(make(HpsV2, tmp_path), styles=("photo",)).load()} == {"photo"}
    assert [p.text for p in OneIg(make(OneIg, tmp_path), classes=("human",)).load()] == ["a, 1"] * 4
    named = Mjhq30k(make(Mjhq30k, tmp_path), categories=("logo", "people")).load()
    assert [(prompt.index, prompt.meta["image_id"]) for prompt in named] == [(0, "f9"), (1, "f7"), (2, "f6")]


def test_rewritten_geneval_prompts_keep_their_lines(tmp_path: Path) -> None:
    path, place = tmp_path / "texts.json", make(GenEval, tmp_path)
    texts = {str(line["prompt"]): f"as if {n // 2}" for n, line in enumerate(LINES)}
    path.write_text(json.dumps({"another": "prompt", **texts}))
    plain, prompts = GenEval(place).load(), GenEval(place, rewritten=str(path)).load()
    assert [prompt.text for prompt in prompts] == [texts[prompt.text] for prompt in plain]
    for own, was in zip(prompts, plain, strict=True):
        assert own.meta == {**was.meta, "rewritten_from": was.text}
    missing = r"has no text for 'single_object of a dog, take 0' \(2 of 9 prompts are missing\)"
    for content, complaint in (
        (json.dumps(dict.fromkeys(list(texts)[2:], "a text")), missing),
        (json.dumps({**texts, "x": " "}), "not an object of strings by prompt"),
        ('{"a": ', "cannot be read"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=rf"^prompts\.rewritten={path}: {complaint}"):
            GenEval(place, rewritten=str(path)).load()


@given(total=st.integers(1, 60), data=st.data(), draw=st.none() | st.integers(0, 9))
def test_count_chooses_different_prompts_in_order(total: int, data: st.DataObject, draw: int | None) -> None:
    count = data.draw(st.integers(1, total))
    chosen = Parti(count=count, draw=draw)._choose(total)
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(total))
    if draw is None:
        gaps = [b - a for a, b in zip(chosen, [*chosen[1:], total], strict=True)]
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("kind", FILES)
def test_calibration_draws_other_prompts_of_the_set(kind: type[PromptSet], tmp_path: Path) -> None:
    place = make(kind, tmp_path)
    every = {prompt.text for prompt in kind(place).load()}
    prompts = kind(place, count=2, per_prompt=2)
    own = {prompt.text for prompt in prompts.load()}
    drawn = prompts.load_others(2, seed=1)
    texts = {prompt.text for prompt in drawn}
    assert len(drawn) == len(texts) == min(2, len(every - own)) > 0
    assert [prompt.index for prompt in drawn] == list(range(len(drawn)))
    assert texts <= every - own
    assert prompts.load_others(2, seed=1) == drawn
    assert {prompt.text for prompt in prompts.load_others(10_000, seed=1)} == every - own
    assert kind(place).load_others(3, seed=1) == []


@pytest.mark.parametrize("kind", [Coco, GenEval])
def test_a_missing_set_says_what_to_get_and_which_key_to_set(kind: type[PromptSet], tmp_path: Path) -> None:
    download = ", or set prompts.download=true" if kind.files else ""
    with pytest.raises(ConfigError, match=rf"^prompts\.path=null: .*Get .*prompts\.path to it{download}$"):
        kind().load()
    with pytest.raises(ConfigError, match=r"^prompts\.path=.*nowhere: does not exist\. Get .*prompts\.path"):
        kind(str(tmp_path / "nowhere")).load()
    with pytest.raises(ConfigError, match=r"^prompts\.count=999: the set has \d+ prompts"):
        kind(make(kind, tmp_path), count=999).load()
    for name in ("count", "per_prompt"):
        with pytest.raises(ConfigError, match=rf"^prompts\.{name}=0: must be a whole number of at least 1"):
            check_fields({name: 0}, kind, "prompts.")


def test_sets_with_an_address_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(make(GenEval, tmp_path))
    monkeypatch.setattr(GenEval, "files", (Weight("lines.jsonl", source.as_uri(), file_sha256(source)),))
    prompts = GenEval(download=True).load()
    assert len(prompts) == 36
    source.unlink()
    assert GenEval().load() == prompts  # from the cache
    monkeypatch.setattr(GenEval, "files", (Weight("other.jsonl", source.as_uri(), "0" * 64),))
    with pytest.raises(ConfigError, match=r"^prompts\.download=true: .*set prompts\.path to it"):
        GenEval(download=True).load()


def test_bad_folders_are_one_error_that_names_them(tmp_path: Path) -> None:
    empty, styles, texts = tmp_path / "empty", Path(make(HpsV2, tmp_path)), Path(make(Dpg, tmp_path))
    empty.mkdir()
    (styles / "photo.json").write_text('{"photo": []}')
    (texts / "x.txt").write_text("\n")
    for kind, place, complaint in (
        (Dpg, empty, "empty: contains no prompts"),
        (HpsV2, empty, r"empty: anime\.json is missing\. Get anime\.json"),
        (HpsV2, styles, r"photo\.json: not a JSON list of strings"),
        (Dpg, styles / "anime.json", r"anime\.json: is not a folder"),
        (Dpg, texts, "prompt 3 is empty"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            kind(str(place)).load()


def test_prompt_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('id,prompt\n7,"a dog, wet"\n8,"two\nlines"\n')
    (tmp_path / "p.jsonl").write_text('{"prompt": "a dog\u2028wet", "id": 7}\n\n{"prompt": "b"}\n')
    (tmp_path / "p.txt").write_text("a dog\n\n  b \n")
    table = PromptFile(str(tmp_path / "p.csv")).load()
    assert [(p.text, p.meta["id"]) for p in table] == [("a dog, wet", "7"), ("two\nlines", "8")]
    lines = PromptFile(str(tmp_path / "p.jsonl")).load()
    assert [p.text for p in lines] == ["a dog\u2028wet", "b"]
    assert lines[0].meta == {"prompt": "a dog\u2028wet", "id": 7}
    plain = PromptFile(str(tmp_path / "p.txt"), per_prompt=2).load()
    assert [(p.index, p.text, p.meta["image_index"]) for p in plain] == [
        (0, "a dog", 0), (1, "a dog", 1), (2, "b", 0), (3, "b", 1)
    ]  # fmt: skip
    assert len(PromptFile(str(tmp_path / "p.txt"), count=1, per_prompt=3).load()) == 3
    (other,) = PromptFile(str(tmp_path / "p.txt"), count=1, per_prompt=3).load_others(2, 0)
    assert (other.index, other.text) == (0, "b")
    assert PromptFile(str(tmp_path / "p.txt")).load_others(2, 0) == []
