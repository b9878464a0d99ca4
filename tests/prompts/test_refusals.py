"""Settings and files of prompts that cannot be: each is refused in one line that names the key or the file."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError, check_objects
from kvbench.prompts.base import PromptSource
from kvbench.prompts.benchmarks import Coco, GenEval, GenEval2, HpsV2, OneIg, Parti, UniGenBench
from kvbench.prompts.files import PromptFile, RulerFile
from kvbench.prompts.imagenet import ImageNet
from kvbench.prompts.math_tiny import MathTiny
from kvbench.prompts.own import Own
from kvbench.prompts.preferences import ImageReward, Mjhq30k
from kvbench.prompts.problems import GpqaDiamond, Math500
from kvbench.prompts.retrieval import Passkey, PlantedFacts
from kvbench.prompts.scenes import Scenes
from kvbench.prompts.tasks import Chains, Needles, WordCounts
from kvbench.prompts.texts import Texts
from tests.prompts.test_benchmarks import LINES
from tests.prompts.test_problems import gpqa

SETTINGS: list[tuple[Callable[..., PromptSource], Mapping[str, object], str]] = [
    (ImageNet, {"classes": ()}, r"prompts\.classes=\[\]"),
    (ImageNet, {"classes": [3, 1000]}, r"prompts\.classes=\[3, 1000\]: must be a list .* at most 999"),
    (MathTiny, {"rooms": 13}, r"prompts\.rooms"),
    (MathTiny, {"max_moves": 400}, r"prompts\.max_moves"),
    (MathTiny, {"min_moves": 331}, r"prompts\.min_moves"),
    (Passkey, {"context": 511}, r"prompts\.context=511: must be a whole number of at least 512"),
    (Passkey, {"asked": "before"}, r"prompts\.asked=before: choose from within, after"),
    (Passkey, {"depths": (50, 101)}, r"prompts\.depths=\[50, 101\]: must be percentages"),
    (PlantedFacts, {"gaps": (1000,)}, r"prompts\.gaps=\[1000\]: at most 8\d\d in prompts\.context=1024"),
    (PlantedFacts, {"facts": 9}, r"prompts\.facts=9: must be a whole number of at least 1 and at most 8"),
    (Needles, {"answer": "told"}, r"prompts\.answer=told: choose from written, read"),
    (Needles, {"queries": 5}, r"prompts\.queries=5: must be at most 4"),
    (Chains, {"chains": 17}, r"prompts\.chains=17: must be at most 16"),
    (WordCounts, {"times": 1}, r"prompts\.times=1: must be at least 2"),
    (WordCounts, {"zipf": 0.9}, r"prompts\.zipf=0\.9: must be a number of at least 1 and at most 3 or null"),
    (Scenes, {"count": 4, "per_prompt": 10**6}, r"prompts\.per_prompt=1000000"),
    (Texts, {"domain": "poems"}, r"prompts\.domain=poems: choose from manuals, novels, code, chat"),
    (Texts, {"count": 17}, r"prompts\.count=17: the set has 16 prompts"),
    (Texts, {"length": 1}, r"prompts\.length=1: must be a whole number of at least 3"),
    (Texts, {"given": 771}, r"prompts\.given=771: must be at least 1, and at least 2 less than prompts\.length=772"),
    (Own, {"of": Texts(count=1)}, r"prompts\.of: these are texts to read"),
    (Mjhq30k, {"categories": ("cats",)}, r"prompts\.categories=\['cats'\]: choose from animals, art"),
    (HpsV2, {"styles": ("oil",)}, r"prompts\.styles=\['oil'\]: choose from anime"),
    (OneIg, {"classes": ()}, r"prompts\.classes=\[\]: choose from anime, human"),
    (Math500, {"frame": "Solve."}, r"prompts\.frame='Solve\.': must contain \{question\}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "message"), SETTINGS, ids=range(len(SETTINGS)))
def test_bad_settings_are_refused_by_key(
    kind: Callable[..., PromptSource], settings: Mapping[str, object], message: str
) -> None:
    def load() -> None:
        check_objects({"_target_": f"{kind.__module__}.{kind.__name__}", **settings}, "prompts")
        kind(**settings).load()

    with pytest.raises(ConfigError, match=f"^{message}"):
        load()


ASKED = '{"problem": "p", "answer": "1"}\n'
NEEDED = r"line 2 is not a problem \("
SHORT = partial(Texts, count=None, length=9, given=3)
FILES: list[tuple[Callable[..., PromptSource], str, str | bytes, str]] = [
    (Coco, "set", '{"images": [{"id": 1}], "annotations": [{"image_', "cannot be read"),
    (Coco, "set", '{"images": [{"id": 1}], "annotations": []}', "not a COCO captions file: .*KeyError 1"),
    (Coco, "set", '{"images": [], "annotations": []}', "contains no prompts"),
    (GenEval, "set", b"\xff\xfe\x00", "cannot be read"),
    (GenEval, "set", '{"prompt": "a dog"}\n', "line 1 is not a GenEval line"),
    (GenEval, "set", "3\n", "line 1 is not a GenEval line"),
    (GenEval2, "set", json.dumps(LINES[0]), "line 1 is not a GenEval2 line"),
    (UniGenBench, "set", "index,prompt_en\n1,x\ry\n2,z\r", "no column prompt_en, or a line without it"),
    (OneIg, "set", "category,id,prompt_en\nCats,1,x\n", "Cats is not one of Anime_Stylization, Portrait"),
    (Mjhq30k, "set", '{"a": {"prompt": "a"}}', "not MJHQ-30K's meta_data.json"),
    (Mjhq30k, "set", '{"a": {"prompt": "a", "category": "cats"}}', "cats is no MJHQ-30K category. Get meta_data.json"),
    (ImageReward, "set", '[{"prompt": "b"}]', "not a JSON list of objects"),
    (Parti, "set", "Prompt\tCategory\tChallenge\na dog\n", "no column Category, or a line without it"),
    (Parti, "set", "Prompt\tCategory\tChallenge\na\rb\tArts\tBasic\n", "no column Category, or a line without it"),
    (Math500, "set", ASKED + '{"problem": "p"}', f"{NEEDED}no answer"),
    (Math500, "set", ASKED + '{"problem": "p", "answer": true}', f"{NEEDED}no answer"),
    (Math500, "set", ASKED + "[1]", f"{NEEDED}not an object"),
    (Math500, "set", "\n{", NEEDED),  # a blank line counts
    *(
        (GpqaDiamond, "set", f"{json.dumps(gpqa(0))}\n{json.dumps(line)}", rf"{NEEDED}{why}\); needed: JSON with Quest")
        for line, why in (
            ({"Question": "q", "Correct Answer": "a"}, "no Incorrect Answer 1"),
            (gpqa(0) | {"Incorrect Answer 2": "right"}, "two choices are equal"),
            ({"problem": "q", "answer": "A"}, "no Question"),
        )
    ),
    (RulerFile, "p.jsonl", '{"input": "a", "outputs": []}', "line 1 is not of RULER's form: `outputs` must be a list"),
    (RulerFile, "p.jsonl", '{"question": "a"}', "line 1 is not a JSON object with `input`"),
    (PromptFile, "p.csv", "text\na\n", ".*has no column `prompt`"),
    (PromptFile, "p.csv", "id,prompt\n1,\n", "line 2 has no prompt"),
    (PromptFile, "p.csv", "id,prompt\n1,a dog, wet\n", "line 2 has no prompt, or too many columns"),
    (PromptFile, "p.jsonl", '{"prompt": "a"}\n{"promp', "line 2 is not a JSON object"),
    (PromptFile, "p.jsonl", '"prompt"\n', "line 1 is not a JSON object"),
    (PromptFile, "p.txt", " \n", "contains no prompts"),
    (SHORT, "a.jsonl", '{"prompt": "x"}', "cannot be read .line 1 is not a JSON object with `text`"),
    (SHORT, "a.jsonl", '{"text": 3}', "cannot be read .line 1: `text` must be a non-empty string"),
    (SHORT, "a.jsonl", '{"text": "\\ud800"}', "cannot be read .line 1.*surrogate"),
    (SHORT, "a.jsonl", "", "contains no texts"),
    (SHORT, "a.csv", "text\nabc", "must be .txt, .jsonl or a folder"),
    (SHORT, "a.txt", b"\xff\xfe", "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "content", "complaint"), FILES, ids=range(len(FILES)))
def test_bad_files_are_one_error_that_names_them(
    kind: Callable[..., PromptSource], name: str, content: str | bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=rf"(?s)^prompts\.path={path}: {complaint}") as caught:
        kind(path=str(path)).load()
    assert "\n" not in str(caught.value)


def test_texts_that_are_short_or_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.path=.*: the folder has no \.txt files"):
        SHORT(path=str(tmp_path)).load()
    with pytest.raises(ConfigError, match=r"^prompts\.path=.*a\.txt: cannot be read"):
        SHORT(path=str(tmp_path / "a.txt")).load()
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ConfigError, match=r"^prompts\.length=9: text 1 has only 3 characters"):
        SHORT(path=str(tmp_path / "a.txt")).load()
