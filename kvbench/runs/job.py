"""Parts of a run: model, method, prompts, settings, and the runs that it is compared with."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.settings import Settings
from kvbench.core.storage import CHANNEL, CODE_DTYPES
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import wants_codebooks
from kvbench.engine.packed.bytes import bound_token_bytes, searches_capacity
from kvbench.eval.protocol.base import Evaluator
from kvbench.forced.decoding import ForcedDecoding, ForcedOutputs
from kvbench.forced.text import OWN_OUTPUT, ForcedText
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.prompts.base import Prompt, fit, hash_prompts
from kvbench.runs.cache_plan import (
    CachePlan,
    find_dtype,
    find_graph_obstacle,
    find_packing,
    read_budget,
)
from kvbench.runs.code import list_classes
from kvbench.runs.record.repeat import find_key
from kvbench.runs.record.results import NEUTRAL, Results

Config = Mapping[str, object]


class Busy(Exception):
    """Another process is doing work that a job needs, and the job does not wait for it."""


class LongestPrompt(NamedTuple):
    """The longest prompt and its number of tokens."""

    prompt: Prompt
    tokens: int


class Logger(Protocol):
    """Service that finished runs and sweeps are sent to."""

    def send(self, folder: Path, results: Results, sweep: str | None) -> None:
        """Send one run; its folder has its name, and `sweep` is the name of its sweep."""
        ...

    def send_sweep(self, folder: Path, name: str, runs: Sequence[Results], page: Path | None) -> None:
        """Send the finished runs of a sweep, and its dashboard (an HTML file) if it has one."""
        ...


@dataclass(frozen=True)
class Job:
    """One run, with everything it is made of.

    Attributes:
        settings: settings outside the groups.
        model: loaded or not.
        method: not yet prepared.
        method_name: name as in `conf/method`.
        prompts: prompts of the run.
        config: the resolved configuration, JSON values.
        overrides: overrides that compose the run, to record (`select_words`); None if they are not known.
        calibration_prompts: prompts of calibrations.
        evaluators: evaluators by config name.
        logger: service that the finished run is sent to; None for none.
        sweep: name of the sweep that the run belongs to; None for a run by itself.
        bounded: job whose bound (`bounds`) this full-cache run is; None for other runs.
        wait_for_others: wait for the work of other processes on this run, its reference and its calibration.
        is_leader: check that samples are whole; false for a worker that helps with a run which another one leads.
        around_block: context in which a block of a run's folder is generated; entering it may raise `Busy`, which
            leaves the block to others.
        full_pass: folder of the reference, whose scores of texts are compared; None for the reference itself.
        read_at: time in nanoseconds before `prompts` were read.
    """

    settings: Settings
    model: Model
    method: Method
    method_name: str
    prompts: list[Prompt]
    config: Config = field(default_factory=dict)
    overrides: tuple[str, ...] | None = None
    calibration_prompts: list[Prompt] = field(default_factory=list)
    evaluators: Mapping[str, Evaluator] = field(default_factory=dict)
    logger: Logger | None = None
    sweep: str | None = None
    bounded: "Job | None" = None
    wait_for_others: bool = True
    is_leader: bool = True
    around_block: Callable[[Path, range], AbstractContextManager[object]] = lambda *_: nullcontext()
    full_pass: Path | None = None
    read_at: int = field(default_factory=time.time_ns, compare=False)

    @property
    def is_reference(self) -> bool:
        """Whether this is the uncompressed run that other runs are compared with: all tokens, in 16 or 32 bits."""
        low_bit = self.settings.cache_dtype in CODE_DTYPES
        return isinstance(self.method, Full) and self.bounded is None and not low_bit

    @property
    def reads(self) -> bool:
        """Whether texts are scored by forced decoding, and compared with the full cache's scores."""
        return isinstance(self.model, ForcedDecoding)

    @cached_property
    def prompts_sha256(self) -> str:
        """SHA-256 of the texts of `prompts`."""
        return hash_prompts(self.prompts)

    @cached_property
    def metadata(self) -> list[dict[str, object]]:
        """Metadata of `prompts` as JSON values, as samples.jsonl has them."""
        return [json.loads(json.dumps(prompt.meta)) for prompt in self.prompts]

    @cached_property
    def cache_plan(self) -> CachePlan:
        """Storage of keys and values; the method need not be prepared."""
        settings, model, method = self.settings, self.model, self.method
        packing = find_packing(settings, method)
        codebooks = None
        if packing is not None and wants_codebooks(packing, method):
            codebooks = Codebooks(before_rotation=packing.storage.before_rotation)
        mixed, rank, count = method.uses.precisions, model.processes.rank, model.processes.count
        return CachePlan(
            spec=model.spec if count == 1 else model.spec.take_share(rank, count),
            dtype=model.compute_dtype(settings.device) if mixed else find_dtype(settings, model),
            packing=packing,
            codebooks=codebooks,
            graph_obstacle=find_graph_obstacle(settings, model, method, packing),
        )

    @cached_property
    def budget(self) -> Budget:
        """The configured budget, which fits whatever the method keeps; the full cache for a method without a budget.

        Raises:
            ValueError: the configured value is not a valid budget.
        """
        given = read_budget(self.settings, self.model, self.method, self.cache_plan.packing)
        return given if self.method.budgeted else Budget.parse(1, self.model.spec)

    @cached_property
    def upper_budget(self) -> Budget:
        """`budget`, with the maximum capacity in tokens that may fit in its bytes."""
        packing = self.cache_plan.packing
        if packing is None or self.budget.bytes is None or not searches_capacity(self.method, packing):
            return self.budget
        min_bytes, _ = bound_token_bytes(self.model.spec, packing)
        return Budget.parse_bytes(self.settings.budget, self.model.spec, min_bytes)

    @cached_property
    def longest(self) -> LongestPrompt | None:
        """The longest prompt if the method is prepared for it; None for the longest prompt that the model takes.

        A method protects the tokens of a prompt, not the padding in front of it. So where padding does not count as
        held, a budget in tokens that is too small for the model's longest prompt may be large enough for the run's. A
        budget in bytes has one plan for prompts of all lengths (`Method.plan_for`).

        Raises:
            ValueError: a prompt cannot be encoded.
            WeightsError: the tokenizer is missing.
        """
        if self.budget.bytes is not None:
            return None
        try:
            self.method.check(self.model.spec, self.upper_budget)
        except InfeasibleBudget:
            counts = self.model.count_prompt_tokens([prompt.text for prompt in self.prompts])
            return max(map(LongestPrompt, self.prompts, counts), key=lambda one: one.tokens, default=None)
        except ValueError:  # another error, which `check_job` reports
            pass
        return None

    @property
    def model_settings(self) -> Config:
        """The model's settings, without settings that only change rounding and without sources of weights.

        `auto` has its meaning on the run's device.
        """
        left_out = ("sources", *NEUTRAL, *self.model.unused)
        settings = {**self.section("model"), **self.model.resolve_settings(self.settings.device)}
        return {key: value for key, value in settings.items() if key not in left_out}

    def section(self, group: str) -> Config:
        """Return a group of the configuration; empty if there is none."""
        values = self.config.get(group)
        return values if isinstance(values, Mapping) else {}

    @cached_property
    def classes(self) -> Mapping[str, tuple[type, ...]]:
        """Classes of the method and of the model, nested ones included, whose code decides the samples."""
        parts: Mapping[str, object] = {"method": self.method, "model": self.model.identified}
        return {name: list_classes(one, self.section(name)) for name, one in parts.items()}

    @cached_property
    def evaluator_classes(self) -> Mapping[str, tuple[type, ...]]:
        """Classes of each evaluator, nested ones included, whose code decides its scores."""
        settings = self.section("eval")
        return {name: list_classes(one, settings.get(name)) for name, one in self.evaluators.items()}

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        """Claim a piece of work (`kvbench.core.claims.claim`); wait for its holder if `wait_for_others`.

        Raises:
            Busy: another process holds the claim, and the job does not wait.
        """
        with claim(path, wait=self.wait_for_others, lapse=self.settings.work.lapse) as is_mine:
            if not is_mine:
                raise Busy(f"{path}: in use by another process; try again later")
            yield

    def bounds(self) -> "list[Job]":
        """Return two full-cache runs to compare with the reference: with another batch size, and with other seeds.

        The first differs by rounding alone; the second shows what two samples of one prompt have in common.
        """
        full, settings = self.reference, self.settings
        size = settings.batch_size // 2 or 2
        changed = {
            f"full, batch {size}": replace(full.settings, batch_size=size),
            f"full, seed {settings.seed + 1}": replace(full.settings, seed=settings.seed + 1),
        }
        return [replace(full, method_name=name, settings=s, bounded=self) for name, s in changed.items()]

    @cached_property
    def reference(self) -> "Job":
        """The uncompressed run that this one is compared with."""
        if self.bounded is not None:
            return self.bounded.reference
        method = {"_target_": f"{Full.__module__}.{Full.__qualname__}"}
        # 16 and 32 bits have a reference each; low-bit storage shares the reference of `auto`.
        dtype = self.settings.cache_dtype
        if dtype in CODE_DTYPES or self.method.uses.precisions:
            dtype = "auto"
        plain: dict[str, Any] = {"budget": 1, "budget_unit": "tokens", "cache_dtype": dtype}
        words = [word for word in self.overrides or () if find_key(word) not in ("method", "storage", *plain)]
        words += ["method=full", *([] if self.settings.cache_dtype == "auto" else [f"cache_dtype={dtype}"])]
        return replace(
            self,
            method=Full(),
            method_name="full",
            settings=replace(self.settings, **plain, storage=CHANNEL),
            config={**self.config, "method": method, **plain, "storage": asdict(CHANNEL)},
            overrides=None if self.overrides is None else tuple(words),
        )


def fit_prompts(model: Model, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with drafts fitted to the tokens of the model.

    Raises:
        ConfigError: the model is not a language model, a length is too small, or the vocabulary lacks a word.
        WeightsError: the tokenizer is missing.
    """
    if all(prompt.draft is None for prompt in prompts):
        return list(prompts)
    from kvbench.models.text_model import TextModel  # slow to import, and other runs do not need it

    if not isinstance(model, TextModel):
        raise ConfigError(f"prompts: questions need a language model, {model.name} is not one; set model=")
    tokenizer = model.open_tokenizer()

    def count_tokens(text: str, read: bool) -> int:
        return len(tokenizer.encode_part(text, first=True) if read else tokenizer.encode(text))

    try:
        return [fit(prompt, count_tokens) for prompt in prompts]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"prompts: {error}") from None


def read_or_write(model: Model, prompts: Sequence[Prompt], others: Sequence[Prompt]) -> Model:
    """Return a model for forced decoding if the prompts have texts to score, else the model.

    Args:
        model: loaded or not.
        prompts: prompts of a run.
        others: calibration prompts of the run.

    Raises:
        ConfigError: the model cannot take the texts, or a calibration text has several parts.
    """
    first = prompts[0].reading
    if first is None:
        return model
    if first == OWN_OUTPUT:
        return ForcedOutputs(model)
    from kvbench.forced.given import GivenTexts  # slow to import, and other runs do not need it

    own, known = (
        {prompt.text: prompt.reading or _read_like(first, prompt) for prompt in several}
        for several in (prompts, others)
    )
    return GivenTexts(model, own, known)


def _read_like(reading: ForcedText, prompt: Prompt) -> ForcedText:
    """Return `reading` with the text of a calibration prompt from a file."""
    if len(reading.parts) > 1:
        raise ConfigError(
            "calibrate.prompts: texts of several parts need others of their set; set calibrate.prompts=null"
        )
    return replace(reading, parts=(reading.parts[0]._replace(text=prompt.text),))
