"""Captions and layouts: a closed grammar with GenEval's six tasks.

`single_object` and `two_object` prompts look like `colors` and `color_attr` prompts but are judged by shapes only.
Metadata have the fields of GenEval's lines: tag, include, exclude, prompt.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvbench.scenes.vocabulary import Vocabulary
from kvbench.scenes.world import BACKGROUNDS, COLORS, SHAPES, SIDE, Object, Scene, render

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
HELD_OUT_PAIRS = (("cyan", "triangle"), ("purple", "cross"), ("green", "ring"))  # not in training scenes
TASK_SHARES: Mapping[str, float] = {"colors": 0.28, "counting": 0.20, "color_attr": 0.17, "position": 0.35}


def pluralise(shape: str) -> str:
    """Return the plural of a shape."""
    return shape + ("es" if shape == "cross" else "s")


_WORDS = ("a", "and", "of", "on", "background", "left", "right", "above", "below", *NUMBERS.values())
VOCABULARY = Vocabulary("scenes", (*_WORDS, *BACKGROUNDS, *COLORS, *SHAPES, *map(pluralise, SHAPES)), 14)

Pair = tuple[str, str]
Meta = dict[str, object]
PAIRS: tuple[Pair, ...] = tuple((color, shape) for color in COLORS for shape in SHAPES)
"""All pairs of colour and shape; their indices are the classes of a class-conditional model."""


def sample(
    rng: np.random.Generator,
    task: str,
    *,
    pairs: Sequence[Pair] | None = None,
    relations: Sequence[str] = RELATIONS,
) -> tuple[Scene, str, Meta]:
    """Sample a scene of a task, with its caption and GenEval line.

    Args:
        rng: source of randomness.
        task: one of `TASKS`.
        pairs: pairs of the first object; None for all except `HELD_OUT_PAIRS`, as for the second object.
        relations: possible relations of position prompts.
    """
    seen = [pair for pair in PAIRS if pair not in HELD_OUT_PAIRS]
    first = _pick(rng, pairs or seen)
    second = _pick(rng, [pair for pair in seen if pair[0] != first[0] and pair[1] != first[1]])
    exclude: list[dict[str, object]] = []
    if task in ("single_object", "colors"):
        body, objects = f"a {first[0]} {first[1]}", _place_one(rng, first)
        include = [_make_clause(first, color=task == "colors")]
    elif task == "counting":
        count = int(rng.integers(2, 5))
        body, objects = f"{NUMBERS[count]} {first[0]} {pluralise(first[1])}", _place_group(rng, first, count)
        include = [{**_make_clause(first, color=False), "count": count}]
        exclude = [{"class": first[1], "count": count + 1}]
    elif task == "position":
        relation = relations[int(rng.integers(len(relations)))]
        body = f"a {first[0]} {first[1]} {relation} a {second[0]} {second[1]}"
        objects = _place_two(rng, first, second, relation)
        placed = {**_make_clause(first, color=False), "position": [relation, 0]}
        include = [_make_clause(second, color=False), placed]
    else:
        body = f"a {first[0]} {first[1]} and a {second[0]} {second[1]}"
        objects = _place_two(rng, first, second, "left of")
        include = [_make_clause(pair, color=task == "color_attr") for pair in (first, second)]
    background = list(BACKGROUNDS)[int(rng.integers(2))]
    caption = f"{body} on a {background} background" if rng.random() < 0.3 else body
    line: Meta = {"tag": task, "include": include, "exclude": exclude, "prompt": caption}
    return Scene(objects, background), caption, line


def evaluation_prompts(
    count: int, seed: int = 0, *, held_out: bool = False, relations: Sequence[str] = RELATIONS
) -> list[Meta]:
    """Sample GenEval lines that cycle through the six tasks; `held_out` takes first objects from `HELD_OUT_PAIRS`."""
    rng = np.random.default_rng([seed, 20_250, int(held_out)])
    pairs = list(HELD_OUT_PAIRS) if held_out else None
    return [sample(rng, TASKS[i % len(TASKS)], pairs=pairs, relations=relations)[2] for i in range(count)]


def describe_class(number: int) -> Meta:
    """Return the GenEval line of a class, a single object of the pair `PAIRS[number]`."""
    pair = PAIRS[number]
    include = [_make_clause(pair, color=True)]
    return {"tag": "colors", "include": include, "exclude": [], "prompt": f"a {pair[0]} {pair[1]}"}


def pool(
    count: int,
    seed: int = 0,
    *,
    mix: Mapping[str, float] = TASK_SHARES,
    pairs: Sequence[Pair] | None = None,
    processes: int = 1,
) -> tuple[NDArray[np.uint8], list[str]]:
    """Sample training scenes uint8 [count, 96, 96, 3] and their captions.

    Args:
        count: number of scenes.
        seed: seed of the scenes.
        mix: relative frequency of each task.
        pairs: see `sample`.
        processes: number of processes; it does not change the scenes.
    """
    chunk = 1000
    starts = range(0, count, chunk)
    draw = partial(_draw_chunk, seed=seed, mix=dict(mix), pairs=pairs)
    sizes = [min(chunk, count - start) for start in starts]
    if processes == 1:
        parts = [draw(size, index) for index, size in enumerate(sizes)]
    else:
        with ProcessPoolExecutor(processes) as executor:
            parts = list(executor.map(draw, sizes, range(len(sizes))))
    return np.concatenate([images for images, _ in parts]), [text for _, texts in parts for text in texts]


def _draw_chunk(
    size: int, index: int, seed: int, mix: Mapping[str, float], pairs: Sequence[Pair] | None
) -> tuple[NDArray[np.uint8], list[str]]:
    rng = np.random.default_rng([seed, 1, index])
    tasks, weights = list(mix), np.array(list(mix.values()))
    images = np.empty((size, SIDE, SIDE, 3), np.uint8)
    captions = []
    for row in range(size):
        scene, caption, _ = sample(rng, tasks[rng.choice(len(tasks), p=weights / weights.sum())], pairs=pairs)
        images[row] = render(scene)
        captions.append(caption)
    return images, captions


def _pick(rng: np.random.Generator, pairs: Sequence[Pair]) -> Pair:
    return pairs[int(rng.integers(len(pairs)))]


def _make_clause(pair: Pair, *, color: bool) -> dict[str, object]:
    return {"class": pair[1], "count": 1, **({"color": pair[0]} if color else {})}


def _place(rng: np.random.Generator, pair: Pair, x: float, y: float, r: float) -> Object:
    jitter = rng.uniform(-2, 2, 2)
    return Object(pair[1], pair[0], x + float(jitter[0]), y + float(jitter[1]), r)


def _place_one(rng: np.random.Generator, pair: Pair) -> tuple[Object, ...]:
    centres = ((48, 48), (30, 30), (66, 30), (30, 66), (66, 66))
    x, y = centres[int(rng.integers(len(centres)))]
    return (_place(rng, pair, x, y, 23),)


def _place_two(rng: np.random.Generator, first: Pair, second: Pair, relation: str) -> tuple[Object, ...]:
    side = 48 + (-10, 0, 10)[int(rng.integers(3))]
    r = (15, 19)[int(rng.integers(2))]
    near, far = (25, 71) if relation in ("left of", "above") else (71, 25)
    if relation in ("left of", "right of"):
        return _place(rng, first, near, side, r), _place(rng, second, far, side, r)
    return _place(rng, first, side, near, r), _place(rng, second, side, far, r)


def _place_group(rng: np.random.Generator, pair: Pair, count: int) -> tuple[Object, ...]:
    if count == 2:
        return _place_two(rng, pair, pair, "left of")
    corners = [(26, 26), (70, 26), (26, 70), (70, 70)]
    if count == 3:
        up = rng.random() < 0.5
        corners = [(48, 26), (26, 70), (70, 70)] if up else [(26, 26), (70, 26), (48, 70)]
    return tuple(_place(rng, pair, x, y, 17) for x, y in corners)
