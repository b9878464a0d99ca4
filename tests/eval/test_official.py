"""Benchmarks' own programs: pictures that they cut our images out of, results as their sources write them."""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.alignment.dpg_official import DpgOfficial
from kvbench.eval.alignment.oneig import TEXTS_FILE, OneIg
from kvbench.eval.alignment.unigenbench import UniGenBench
from kvbench.eval.files.images import ImageSet
from kvbench.eval.geneval.official import GenEvalOfficial
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.protocol.official import OfficialProgram
from kvbench.eval.protocol.scores import share_score
from tests.support.image_sets import GOLDEN, make_noise, only, reason, write_lines

pytestmark = pytest.mark.usefixtures("offline")
STORED = json.loads((GOLDEN / "newer_metrics.json").read_text())
DPG, ONEIG = DpgOfficial(scores=True), OneIg(scores=True)
UNIGENBENCH, GENEVAL = UniGenBench(scores=True), GenEvalOfficial(verdicts=True)
LINE = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "exclude": []}
DOGS = [{**LINE, "prompt": text} for text in ("two dogs", "two wet dogs")]


def keys(*prompts: tuple[str, str]) -> list[dict[str, object]]:
    return [{"oneig_class": one, "oneig_id": number} for one, number in prompts]


METAS: Mapping[OfficialProgram, Sequence[Mapping[str, object]]] = {
    DPG: [{"item_id": item} for item in ("b, 1", "a", "c")],
    ONEIG: keys(("anime", "000"), ("anime", "001"), ("object", "000"), ("reasoning", "000")),
    UNIGENBENCH: [{"unigenbench_index": number} for number in "987"],
    GENEVAL: DOGS,
}
"""Metadata of the prompts of each program."""


def make_run(
    folder: Path,
    program: OfficialProgram,
    metas: Sequence[Mapping[str, object]] | None = None,
    copies: int = 4,
) -> ImageSet:
    each = [meta for meta in metas or METAS[program] for _ in range(copies)]
    return make_noise(folder, each, [str(meta.get("prompt", meta)) for meta in each], size=8)


def place(images: ImageSet, name: str) -> Path:
    path = images.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# Export


@pytest.mark.parametrize(
    ("program", "copies", "words", "names"),
    [
        *((DPG, n, f"--resolution 8 --pic-num {n} --res-path", "images/{0[item_id]}.png") for n in (1, 3)),
        *(
            (ONEIG, n, f'IMAGE_GRIDS=("{grid}")', "images/{0[oneig_class]}/kvbench/{0[oneig_id]}.webp")
            for n, grid in ((1, "1,1"), (2, "2,1"), (3, "2,2"))
        ),
        (UNIGENBENCH, 4, "--data_path {}/images", "images/{0[unigenbench_index]}_{1}.png"),
        (GENEVAL, 2, "evaluate_images.py {0} --outfile {0}/results.jsonl", "{2:05d}/samples/{1:05d}.png"),
    ],
)
def test_the_program_cuts_our_images_out_again(
    program: OfficialProgram, copies: int, words: str, names: str, tmp_path: Path
) -> None:
    images = make_run(tmp_path / "run", program, copies=copies)
    folder = images.folder / program.folder
    first = type(program)()
    why = reason(first, "skipped", images)
    assert words.format(folder) in why
    assert why.endswith(f"then set eval.{program.folder}.{program.switch}=true")
    if names.startswith("images"):
        (folder / "images" / "old.png").touch()  # the program would read it
    assert reason(first, "skipped", images) == why  # again, over what is there
    single = "{1" in names
    found: dict[Path, list[np.ndarray]] = {}
    for index, meta in enumerate(meta for meta in METAS[program] for _ in range(copies)):
        path = folder / names.format(meta, index % copies, index // copies)
        found.setdefault(path, []).append(images.image(index))
    assert sorted(found) == sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".webp"))
    for path, cells in found.items():
        with Image.open(path) as picture:
            whole = np.array(picture)
        columns = 1 if single or copies == 1 else 2
        corners = [(row, column) for row in range(whole.shape[0] // 8) for column in range(columns)]
        cut = [whole[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] for row, column in corners]
        assert (np.stack(cut[: len(cells)]) == np.stack(cells)).all()
        assert not any(cell.any() for cell in cut[len(cells) :])
    assert f"does not exist yet; first, with {program.switch}=false" in reason(program, "failed", images)


# Results as the programs write them


SCORES = {"b, 1": [1.0, 0.5, 2 / 3, 0.0], "a": [0.25, 1.0, 1.0, 1.0], "c": [0.0, 0.0, 1e-05, 1 / 3]}


def written(scores: Mapping[str, Sequence[float]] = SCORES, *, done: bool = True) -> str:
    """The text that DPG's program leaves, by its own statements."""
    text = ""
    for item, each in scores.items():
        image_path, average_score = f"/some, where/images/{item}.png", sum(each) / len(each)
        text += image_path + ", " + ", ".join(str(i) for i in each) + ", " + str(average_score) + "\n"
    mean_dpg_score = np.mean([sum(each) / len(each) for each in scores.values()])
    output = "Model: images\n" + "L1 category scores:\n"
    output += f"\tentity: {np.mean([1.0, 0.0]) * 100}\n" + f"\trelation: {np.mean([1.0]) * 100}\n"
    output += "L2 category scores:\n" + f"\tentity - whole: {12.5}\n"
    output += "Image path: /some, where/images\n" + "Save results to: results.txt\n"
    output += f"DPG-Bench score: {mean_dpg_score * 100}"
    return text + (output + "\n" if done else "")


def write_dpg(images: ImageSet, text: str) -> None:
    place(images, "dpg_official/results.txt").write_text(text)


def test_scores_of_dpg_come_in(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run", DPG)
    write_dpg(images, written(dict(reversed(SCORES.items()))))  # in whatever order
    result = only(DPG, images)
    each = [100 * score for scores in SCORES.values() for score in scores]
    assert result.samples["dpg[official]"] == pytest.approx(each)
    assert result.samples["index"] == images.indices
    assert result.scores["dpg[official]"].value == pytest.approx(np.mean(each))
    assert result.scores["dpg[official]"].n == 3
    values = {name: score.value for name, score in result.scores.items() if "/" in name}
    assert values == {"dpg[official]/entity": 50, "dpg[official]/relation": 100}
    assert result.reason is None
    assert result.save(images.folder / "metrics").name == "dpg-official.json"
    write_dpg(images, written({item: SCORES[item] for item in ("b, 1", "c")}))
    result = only(DPG, images)
    assert result.reason == "left out by the official code: a"
    assert result.samples["index"] == [0, 1, 2, 3, 8, 9, 10, 11]


def write_unigenbench(images: ImageSet, rows: Sequence[Mapping[str, str]]) -> None:
    names = [f"{number}_{copy}" for number in "987" for copy in range(4)]
    with place(images, "unigenbench/results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["index", "testpoint", "result_json", "img_path"])
        writer.writeheader()
        for name, row in zip(names, rows, strict=False):
            writer.writerow({"index": 0, "img_path": f"/elsewhere/images/{name}.png", **row})


def test_scores_of_unigenbench_are_those_of_the_program(tmp_path: Path) -> None:
    images, stored = make_run(tmp_path / "run", UNIGENBENCH), STORED["unigenbench"]
    metric = "unigenbench[qwen2.5-vl-72b]"
    write_unigenbench(images, stored["rows"])
    result = only(UNIGENBENCH, images)
    counts = {name.strip(): each for name, each in stored["result"]["primary_dimensions"].items()}
    shares = {name: 100 * each["correct"] / each["total"] for name, each in counts.items()}
    found = {name: score.value for name, score in result.scores.items()}
    assert found.pop(metric) == pytest.approx(sum(shares.values()) / len(shares))
    assert found == pytest.approx({f"{metric}/{name}": share for name, share in shares.items()})
    numbers = [result.scores[f"{metric}/{name}"].n for name in counts]
    assert numbers == [each["total"] for each in counts.values()]
    assert result.reason == "answers on 1 images could not be read"
    [*scores] = UNIGENBENCH.summarise([[("Style", n == 0)] * 3 for n in range(2)], ["a", "b"]).values()
    expected = share_score([100.0] * 3 + [0.0] * 3, ["a"] * 3 + ["b"] * 3, whole=100)
    assert scores[1].ci95 == expected.ci95  # answers about one image are one cluster


def write_part(images: ImageSet, part: str, column: str, rows: Mapping[str, object], total: float) -> None:
    """Both tables of OneIG's program for a part."""
    for name, heading, cells in (("_prompt_score", "kvbench", rows), ("_score", column, {"kvbench": total})):
        with place(images, f"oneig/results/{part}{name}_EN_2026-11-25.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["", heading], *cells.items()])


def test_scores_of_oneig_are_those_of_the_program(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run", ONEIG)
    four = {"anime_000": 0.5, "anime_001": 0.25, "object_000": 0.125, "reasoning_000": 1}
    for part, column, rows, total in (
        ("alignment", "alignment", {"anime_000": 0.25, "anime_001": 1.0, "object_000": 0.625}, 1.875 / 3),
        ("style", "style", {"001": 0.5}, 0.5),
        ("reasoning", "reasoning", {"000": 0.375, "001": ""}, 0.375),
        ("diversity", "total average", four, 1.875 / 4),
    ):
        write_part(images, part, column, rows, total)
    result = only(ONEIG, images)
    assert {name: (score.value, score.n) for name, score in result.scores.items()} == {
        "oneig_alignment[official]": (pytest.approx(1.875 / 3), 3),
        "oneig_reasoning[official]": (0.375, 1),
        "oneig_style[official]": (0.5, 1),
        "oneig_diversity[official]": (pytest.approx(1.875 / 4), 4),
    }
    assert result.samples["index"] == [0, 4, 8, 12]
    assert result.samples["oneig_alignment[official]"] == pytest.approx(
        [0.25, 1, 0.625, math.nan], nan_ok=True
    )
    assert result.reason == "no scores of text"


def write_texts(images: ImageSet, total: float) -> Path:
    """The tables of six texts, each as read from four images; return the file of texts."""
    stored = STORED["oneig_text"]["rows"]
    read, rows = [stored[start : start + 4] for start in range(0, 24, 4)], {}
    for number, each in enumerate(read):
        distances, matched, words = (
            np.array([row[name] for row in each]) for name in ("edit_distance", "matched_words", "words")
        )
        means = (distances.mean(), (distances == 0).mean(), (matched / words).mean())
        rows[f"{number:03d}"] = list(map(float, means))
    write_part(images, "text", "text score", rows, total)
    path = place(images, f"oneig/results/{TEXTS_FILE}")
    with path.open("w", newline="") as file:
        texts = [[f"{number:03d}", one[0]["truth"]] for number, one in enumerate(read)]
        csv.writer(file).writerows([["id", "text_content"], *texts, ["006", "another"]])
    return path


def test_the_score_of_texts_is_that_of_the_program(tmp_path: Path) -> None:
    stored = STORED["oneig_text"]
    images = make_run(tmp_path / "run", ONEIG, keys(*(("text", f"{number:03d}") for number in range(6))))
    path = write_texts(images, stored["text_score"])
    result = only(ONEIG, images)
    [score] = result.scores.values()
    assert score.value == pytest.approx(stored["text_score"], abs=1e-12)
    assert np.mean(result.samples["edit_distance"]) == pytest.approx(stored["ED"])
    assert np.mean(result.samples["complete"]) == pytest.approx(stored["CR"])
    low, high = score.ci95
    assert low < score.value < high
    write_texts(images, total=0.9)
    assert "the prompts' text gives 0.994" in reason(ONEIG, "failed", images)
    path.write_text("id,text_content\n000,one\n")
    assert "no text of prompt 001" in reason(ONEIG, "failed", images)
    path.unlink()
    assert "copy scripts/text/text_content.csv" in reason(ONEIG, "failed", images)


def verdict(number: int, copy: int, correct: bool, prompt: str) -> dict[str, object]:
    return {"filename": f"/x/{number:05d}/samples/{copy:05d}.png", "correct": correct, "prompt": prompt}


VERDICTS = [
    verdict(n, i, right, str(DOGS[n]["prompt"]))
    for n, i, right in ((1, 1, False), (1, 0, True), (0, 1, False), (0, 0, False))
]


def write_verdicts(images: ImageSet, verdicts: Sequence[Mapping[str, object]]) -> None:
    write_lines(place(images, "geneval_official/results.jsonl").parent, verdicts, "results.jsonl")


def test_verdicts_of_geneval_come_in(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run", GENEVAL, copies=2)
    write_verdicts(images, VERDICTS)
    result = only(GENEVAL, images)
    assert result.samples["geneval[official]"] == [False, False, True, False]
    assert result.scores["geneval[official]"].value == 0.25
    assert result.scores["geneval[official]/correct_prompts"].value == 0.5


def test_rewritten_prompts_are_judged_by_the_originals(tmp_path: Path) -> None:
    metas = [
        {**LINE, "prompt": text, "rewritten_from": text, "image_index": 3}
        for text in ("two dogs", "two cats")
    ]
    images = make_noise(tmp_path / "run", metas, ["a pair", "a pair"])
    [skipped] = evaluate([GenEvalOfficial()], images)
    assert skipped.entries()["geneval[official-rewritten]"].status == "skipped"
    for number, meta in enumerate(metas):
        path = images.folder / "geneval_official" / f"0000{number}" / "metadata.jsonl"
        assert json.loads(path.read_text()) == {**LINE, "prompt": meta["prompt"]}
    write_verdicts(images, [verdict(n, 0, n == 0, str(meta["prompt"])) for n, meta in enumerate(metas)])
    result = only(GENEVAL, images)
    assert result.scores["geneval[official-rewritten]"].value == 0.5


# Refusals


def write_mean(images: ImageSet, rows: Mapping[str, object]) -> None:
    """Tables of alignment whose total is 0.5."""
    write_part(images, "alignment", "alignment", rows, 0.5)


def write_reasoning(images: ImageSet, columns: Sequence[str]) -> None:
    """Tables of reasoning of as many days as columns."""
    place(images, "oneig/results/x")
    for day, column in enumerate(columns):
        write_part(images, "reasoning", column, {"000": 1}, 1)
        path = place(images, "oneig/results/reasoning_score_EN_2026-11-25.csv")
        path.rename(path.with_stem(f"reasoning_score_EN_2026-10-1{day}"))


WRITERS: Mapping[Callable[..., None], OfficialProgram] = {
    write_dpg: DPG, write_mean: ONEIG, write_reasoning: ONEIG,
    write_unigenbench: UNIGENBENCH, write_verdicts: GENEVAL,
}  # fmt: skip
MEANS = {"anime_000": 1, "anime_001": 1, "object_000": 1}
HALVES = {item: each[:2] for item, each in SCORES.items()}


def answered(testpoint: str, result: str) -> list[dict[str, str]]:
    return [{"testpoint": testpoint, "result_json": result}] * 12


@pytest.mark.parametrize(
    ("write", "results", "complaint"),
    [
        (write_dpg, written(done=False), "not the output of a finished compute_dpg_bench.py"),
        (write_dpg, written({**SCORES, "d": [1.0] * 4}), "d is not of this run"),
        (write_dpg, written(HALVES), "b, 1 has 2 scores but 4 images"),
        (write_dpg, written().replace("0.25, 1.0", "0.75, 1.0"), "line 2: 0.8125 is not the mean"),
        (write_dpg, written({**SCORES, "a": [2.0] * 4}), "line 2: 2.0 is not the mean of scores from 0 to 1"),
        (write_dpg, written().split("Model")[0] + written(), "line 4: b, 1 appears twice"),
        (write_dpg, written().replace("score: ", "score: 1"), "is not the mean of its lines"),
        (write_mean, {**MEANS, "anime_001": ""}, "no result for anime_001 (1 of 3"),
        (write_mean, {**MEANS, "anime_001": 0, "object_000": 0}, "the official total is 0.5"),
        (write_reasoning, [], "no table of scores"),
        (write_reasoning, ["score"], "no column 'reasoning'"),
        (write_reasoning, ["reasoning"] * 2, "keep one of them"),
        (write_unigenbench, answered("['Taste']", '{"score": [1]}'), "Taste is not a dimension"),
        (write_unigenbench, answered("['Style']", '{"score": [1, 0]}'), "2 scores for 1 test points"),
        (write_unigenbench, answered("['Style']", "null"), "no answer on any image"),
        (write_verdicts, [{**one, "prompt": "a cat"} for one in VERDICTS], "is about another prompt"),
        (write_verdicts, [{"correct": True}], "line 1: needs filename and correct"),
    ],
)
def test_other_results_are_refused(
    write: Callable[[ImageSet, object], None], results: object, complaint: str, tmp_path: Path
) -> None:
    program = WRITERS[write]
    images = make_run(tmp_path / "run", program, copies=2 if program is GENEVAL else 4)
    write(images, results)
    assert complaint in reason(program, "failed", images)


@pytest.mark.parametrize(
    ("program", "metas", "complaint"),
    [
        (DPG, [{}] * 2, "use prompts=dpg"),
        (DPG, [{"item_id": "a"}] * 5, "at most 4, not 5"),
        (DPG, [{"item_id": "a"}] * 2 + [{"item_id": "b"}], "not 1, 2 (prompts.per_prompt)"),
        (ONEIG, [{}] * 2, "use prompts=oneig"),
        (ONEIG, keys(*(("text", n) for n in ("000", "000", "001"))), "[1, 2] images; give all the same"),
        (UNIGENBENCH, [{"unigenbench_index": "1"}] * 3, "4 images of every prompt, there are 3 of prompt 1"),
    ],
)
def test_other_runs_are_refused(
    program: OfficialProgram, metas: Sequence[Mapping[str, object]], complaint: str, tmp_path: Path
) -> None:
    status = "failed" if any(metas) else "skipped"
    assert complaint in reason(type(program)(), status, make_noise(tmp_path / "run", metas))
