"""Generations that the tests of every method drive: shapes, a method as its file describes it, and a batch of three.

`text` is a language model: prompts of unequal length with padding in front, then tokens one by one. In `prompt` no
prompt ever leaves. `small` draws maps, each at once, in two branches. All have two query heads for each KV head.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from kvbench.cli.config.loader import keep
from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.engine.cache import KVCache
from kvbench.engine.ledger import BudgetUse, Ledger
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from tests.support.engine import D
from tests.support.methods import class_of, list_methods, list_variants, settings_of
from tests.support.small_models import composed

LAYERS, HEADS, GROUP = 2, 2, 2
PROMPTS = (24, 17, 9)
"""Tokens of the prompts of a batch of texts; the longest is as long as the model reads."""
BATCH = range(len(PROMPTS))
LATER = (8, 8, 8, 7)
LEADING, SINKS = 3, 2
"""First tokens of a text, or scales of an image, that never leave."""
BUDGETS = {"text": "14", "prompt": "36", "small": "0.3"}
SCALES = next_scale([(side, side) for side in (1, 2, 3, 4, 5, 6)])


def text_of(prompt: int, name: str = "text") -> ModelSpec:
    """A model that reads prompts of so many tokens."""
    segments = next_token(prompt, LATER)
    return ModelSpec(name, LAYERS, HEADS, D, segments, 1, D**-0.5, padding_counts=False, group=GROUP)


SPECS = {
    "text": text_of(PROMPTS[0]),
    "prompt": text_of(PROMPTS[0], "prompt"),
    "small": ModelSpec("small", LAYERS, HEADS, D, SCALES, 2, D**-0.5, group=GROUP),
}
MODELS = {"text": "llamagen_tiny", "prompt": "llamagen_tiny", "small": "infinity_tiny"}
"""Models whose configuration the settings of a method's file refer to."""
OTHER_SETTINGS = {  # whose defaults do not bring out a rule
    "lagkv": {"lag": 5},
    "noncausal": {"chunk": 4},
    "quest": {"page": 4, "attention_budget": 12, "dense_layers": 0},
}
NOT_OF_TEXTS = ("forecast", "pricekv", "pricekv/by_token")
NAMES = [  # a menu of precisions needs a budget in bytes: tests/methods/pricekv
    name for name in dict.fromkeys((*list_methods(), *list_variants())) if not settings_of(name).get("menu")
]


def fits(name: str, shapes: str) -> bool:
    """Whether a method is driven with these shapes, of its family; further settings are, with one of a family."""
    if (shapes != "small" and name in NOT_OF_TEXTS) or (shapes == "prompt" and name in list_variants()):
        return False
    return SPECS[shapes].family in class_of(name).families


@cache
def _open_copies(model: str) -> Callable[[], DictConfig]:
    """A function that gives copies of a model's configuration, to which keys can be added."""
    cfg = composed(f"model={model}").copy()
    OmegaConf.set_struct(cfg, False)
    return keep(cfg)


@cache
def describe(name: str, shapes: str, leading: int = LEADING) -> Method:
    """The method of a file, not prepared: first tokens of a text never leave, and first scales of an image."""
    cfg: DictConfig = _open_copies(MODELS[shapes])()
    cfg.method = OmegaConf.merge(settings_of(name), OTHER_SETTINGS.get(name, {}))
    cfg.sinks, cfg.protect.leading = {"text": (0, leading), "prompt": (1, 0), "small": (SINKS, 0)}[shapes]
    method = instantiate(cfg.method)
    assert isinstance(method, Method)
    return method


def artifact_for(method: Method, spec: ModelSpec) -> Artifact | None:
    """Random numbers where the method wants calibrated ones."""
    observer = method.needs()
    if not isinstance(observer, Observer):
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = observer.tensor_shapes(spec).items()
    return Artifact(observer.kind, {name: torch.rand(x, generator=generator).double() for name, x in sizes})


def parse_budget(value: str, spec: ModelSpec) -> Budget:
    """A budget with one token more than an even share, so that heads have a remainder."""
    budget = Budget.parse(value, spec)
    return budget if Fraction(value) <= 1 else replace(budget, capacity=budget.capacity + 1)


def smallest(refusal: InfeasibleBudget) -> str:
    return str(refusal).split("the smallest feasible budget is ")[1].split(",")[0]


@cache
def _prepare_once(name: str, shapes: str, budget: str, prompt: int) -> Method:
    """A method prepared for prompts of a number of tokens; a refused budget is raised to the smallest."""
    method, room = deepcopy(describe(name, shapes)), SPECS[shapes]
    if isinstance(method, Full):
        budget = "1"
    try:
        method.check(room, parse_budget(budget, room))
    except InfeasibleBudget as refusal:
        budget = smallest(refusal)
    spec = room if shapes == "small" else text_of(prompt, shapes)
    given = replace(parse_budget(budget, room), full=spec.full_tokens)
    method.calibrated_spec = room
    method.prepare(spec, given, artifact_for(method, room))
    return method


def prepare(name: str, shapes: str, budget: str | None = None, prompt: int = PROMPTS[0]) -> Method:
    """A prepared method of its own: some solve a program first, so that copies are made of one."""
    return deepcopy(_prepare_once(name, shapes, budget or BUDGETS[shapes], prompt))


@cache
def draw(shapes: str, prompt: int, branch: int) -> Tensor:
    """Queries of each query head, keys and values of a sequence, [layers, group + 2, heads, tokens, D]."""
    generator = torch.Generator().manual_seed(3 + prompt + 10 * branch)
    tokens = SPECS[shapes].segments[-1].end - (0 if shapes == "small" else PROMPTS[0] - PROMPTS[prompt])
    return torch.randn(LAYERS, GROUP + 2, HEADS, tokens, D, generator=generator)


class Prompt(NamedTuple):
    """What became of one prompt: tokens kept, counted from its first one, outputs behind it, and use of the budget.

    `kept` has a list of rows for each segment and layer; outputs are of segments after the first, or of all maps.
    """

    kept: list[list[list[int]]]
    outputs: list[Tensor]
    use: BudgetUse


@dataclass
class Generation:
    """A generation of a batch: its cache, which others may use again, its ledger, and each prompt by its number."""

    cache: KVCache
    ledger: Ledger
    prompts: dict[int, Prompt]


def open_cache(method: Method, room: ModelSpec | None = None, **options: Any) -> KVCache:
    """A cache of a prepared method, in a model that reads longer prompts if `room` is given."""
    return KVCache(room or method.spec, method, dtype=torch.float32, **options)


def generate(cache: KVCache, prompts: Sequence[int] = BATCH, *, in_steps: bool = False) -> Generation:
    """Generate a batch; `in_steps` feeds later tokens of a text one by one, recorded if the cache records."""
    cut = cache.spec.origin  # padding that all prompts have
    longest = cache.spec.segments[0].length + cut
    room, is_text = cache.spec.with_prompt(longest), cache.spec.family == "next-token"
    numbers = [(prompt, branch) for branch in range(room.branches) for prompt in prompts]
    padding = [longest - PROMPTS[prompt] if is_text else 0 for prompt, _ in numbers]
    noise = torch.Generator().manual_seed(9)
    blank = [torch.randn(LAYERS, GROUP + 2, HEADS, count, D, generator=noise) for count in padding]
    drawn = [torch.cat((x, draw(room.name, *n)), 3) for x, n in zip(blank, numbers, strict=True)]
    inputs = torch.stack(drawn, 2)
    cache.prompts = [*prompts]
    cache.reset(len(numbers), padding if is_text else None)
    kept: list[list[list[int]]] = []
    outputs: list[Tensor] = []
    for segment in room.segments:
        outputs += _run_segment(cache, segment, inputs[..., segment.start : segment.end, :], in_steps)
        for store in [] if segment.last else cache._stores:
            rows = store.layout.positions.tolist()
            kept.append(rows * (len(numbers) * HEADS // len(rows)))
    behind = LAYERS if is_text else 0
    found = {}
    for place, prompt in enumerate(prompts):
        own = range(place, len(numbers), len(prompts))
        counted = [
            [
                [token + cut - padding[sequence] for token in row if token >= 0]
                for sequence in own
                for row in rows[sequence * HEADS : (sequence + 1) * HEADS]
            ]
            for rows in kept
        ]
        use = cache.ledger.measure_use(room, cache.method.budget, own)
        found[prompt] = Prompt(counted, [out[[*own]] for out in outputs[behind:]], use)
    return Generation(cache, cache.ledger, found)


def _run_segment(cache: KVCache, segment: Segment, inputs: Tensor, in_steps: bool) -> list[Tensor]:
    """Outputs of each layer, [sequences, query heads, tokens, D]; a recorded map is repeated as a whole."""
    cache.begin(segment)

    def attend(x: Tensor) -> Tensor:
        given = [(torch.stack([*q], 2).flatten(1, 2), k, v) for *q, k, v in x]
        return torch.stack([cache.attend(layer, *qkv) for layer, qkv in enumerate(given)])

    if not segment.causal and cache.repetitions is not None:
        return [*cache.repetitions.run(segment.index, attend, inputs).clone()]
    if not in_steps or not segment.index or not segment.causal:
        return [*attend(inputs)]
    repeat = cache.open_steps()
    steps = inputs.split(1, -2)
    found = [(attend(x) if repeat is None else repeat(0, attend, x)).clone() for x in steps]
    return [*torch.cat(found, -2)]
