"""One run's parts: model, method, prompts, settings, and the runs it is compared with."""

import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.graphs import CudaGraphs, Record
from kvbench.core.processes import Processes
from kvbench.core.segments import ModelSpec
from kvbench.core.settings import Settings
from kvbench.core.storage import CHANNEL, CODE_DTYPES
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing, wants_books
from kvbench.eval.protocol.base import Evaluator
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method, Observer
from kvbench.methods.shared.capabilities import mixes_precisions, reads_sparsely, replaces_contents
from kvbench.models.base import Model
from kvbench.prompts.base import Prompt, hash_prompts
from kvbench.runs.allowance import Allowance, find_allowance, find_dtype, find_packing
from kvbench.runs.calibrate import check_calibration
from kvbench.runs.record.results import Results

log = logging.getLogger(__name__)

SHORTENED = reprlib.Repr()
"""Form of prompts in messages."""
SHORTENED.maxstring = 60
Config = Mapping[str, object]


class Busy(Exception):
    """Another process does what a job needs, and the job does not wait."""


class Logger(Protocol):
    """Destination of finished runs."""

    def send(self, folder: Path, results: Results, sweep: str | None) -> None:
        """Send one run, whose folder has its name, and the name of the sweep that it belongs to."""
        ...

    def send_sweep(self, folder: Path, name: str, runs: Sequence[Results], page: Path | None) -> None:
        """Send the finished runs of a sweep and its dashboard, an HTML file, where there is one."""
        ...


@dataclass(frozen=True)
class Job:
    """One run, with everything it is made of.

    Attributes:
        settings: what belongs to no group.
        model: loaded or not.
        method: not yet prepared.
        method_name: as in `conf/method`.
        prompts: what to generate.
        config: the resolved configuration, JSON values.
        calibration_prompts: what a calibration watches.
        evaluators: by config name.
        logger: None to send nothing.
        sweep: name of the sweep that the run belongs to; None for a run by itself.
        bounded: the job whose reference this full-cache run with other rounding or other seeds is compared with.
        patient: wait for what other processes do at this run, its reference and its calibration.
        leads: check that samples are whole; false where a worker helps with a run that another one leads and checks.
        around_block: context in which a block of a run's folder is generated; entering it may raise `Busy`, which
            leaves the block to others.
    """

    settings: Settings
    model: Model
    method: Method
    method_name: str
    prompts: list[Prompt]
    config: Config = field(default_factory=dict)
    calibration_prompts: list[Prompt] = field(default_factory=list)
    evaluators: Mapping[str, Evaluator] = field(default_factory=dict)
    logger: Logger | None = None
    sweep: str | None = None
    bounded: "Job | None" = None
    patient: bool = True
    leads: bool = True
    around_block: Callable[[Path, range], AbstractContextManager[object]] = lambda *_: nullcontext()

    @property
    def reference(self) -> bool:
        """Whether this is the uncompressed run that others are compared with: all tokens, in 16 or 32 bits."""
        return isinstance(self.method, Full) and self.bounded is None and self.packing is None

    @property
    def prompts_sha256(self) -> str:
        """SHA-256 of the texts of `prompts`."""
        return hash_prompts(self.prompts)

    @property
    def processes(self) -> Processes:
        """The processes that hold the model together."""
        return self.model.processes

    @cached_property
    def shard_spec(self) -> ModelSpec:
        """Shapes of the heads that this process holds."""
        return self.model.spec.take_share(self.processes.rank, self.processes.count)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of stored keys and values; a method with forms of its own stores what they say."""
        if mixes_precisions(self.method):
            return self.model.compute_dtype(self.settings.device)
        return find_dtype(self.settings, self.model)

    @property
    def packing(self) -> Packing | None:
        """Storage of keys and values in few bits; None where they are stored in `dtype`."""
        return find_packing(self.settings, self.method)

    @property
    def codebooks(self) -> Codebooks | None:
        """Observer that calibrates static codebooks for the storage or the method; None if none are needed."""
        packing = self.packing
        if packing is None or not wants_books(packing, self.method):
            return None
        return Codebooks(before_rotation=packing.storage.before_rotation)

    @property
    def record(self) -> Record | None:
        """Recorder of CUDA graphs, if steps are to be recorded."""
        return CudaGraphs() if self.graph_obstacle is None else None

    @property
    def graph_obstacle(self) -> str | None:
        """Why no CUDA graphs are recorded; None where steps or scales are."""
        if self.settings.cuda_graph is False:
            return "cuda_graph=false"
        if not self.settings.device.startswith("cuda"):
            return f"device={self.settings.device} has no CUDA graphs"
        if self.processes.count > 1:
            return (
                f"steps of several processes are not recorded (model.tensor_parallel={self.processes.count})"
            )
        if self.packing is not None:
            return "steps that read numbers of few bits are not recorded"
        if self.model.spec.family != "next-token" and not self.method.static:
            return (
                f"{type(self.method).__name__} looks at data after every layer of {self.model.name}, so that no scale "
                "can be repeated"
            )
        if reads_sparsely(self.method):
            return f"{type(self.method).__name__} selects what every step attends to, so that no step can be repeated"
        return None

    @property
    def allowance(self) -> Allowance:
        """The budget as requested and as it is granted; the full cache for a method without a budget."""
        return find_allowance(self.settings, self.model, self.method, self.shard_spec)

    def check(self) -> None:
        """Refuses, before weights are read, a budget that the method and prompts that the model cannot work with.

        Raises:
            ValueError: naming what does not fit.
        """
        if self.settings.cuda_graph is True and self.graph_obstacle is not None:
            raise ConfigError(f"cuda_graph=true: {self.graph_obstacle}; set cuda_graph=auto")
        if self.processes.count > 1:
            self._check_split()
        if self.packing is not None:
            self._check_packed()
        try:
            self.method.check(self.model.spec, self.allowance.upper)
        except ValueError as error:  # methods know `sinks`, not which of two keys it came from
            own = self.section("method").get("sinks", self.settings.sinks) != self.settings.sinks
            if own and str(error).startswith("sinks="):
                raise ConfigError(f"method.{error}") from None
            raise
        calibrated = isinstance(self.method.needs(), Observer) or self.codebooks is not None
        if calibrated:
            check_calibration(self.calibration_prompts)
        if not self.method.budgeted and self.settings.budget != 1 and not self.reference:
            log.warning(
                "method=%s has no budget: budget=%s changes nothing", self.method_name, self.settings.budget
            )
        self._check_prompts([*self.prompts, *(self.calibration_prompts if calibrated else ())])
        self._check_metadata()

    def _check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that the model cannot read; the message names the line of their file and cuts long ones."""
        try:
            self.model.check_prompts([prompt.text for prompt in prompts])
        except ValueError:
            for prompt in prompts:
                try:
                    self.model.check_prompts([prompt.text])
                except ValueError as error:
                    line = str(error).replace(repr(prompt.text), SHORTENED.repr(prompt.text))
                    raise ConfigError(f"{prompt.place}: {line}" if prompt.place else line) from None
            raise

    def _check_metadata(self) -> None:
        """Refuse prompts of which some have what an evaluator reads and others do not."""
        for name, evaluator in self.evaluators.items():
            asks = evaluator.asks
            if asks is None or all(prompt.meta.get(asks) is None for prompt in self.prompts):
                continue
            for prompt in self.prompts:
                try:
                    evaluator.check_meta(prompt.meta)
                except ValueError as error:
                    place = prompt.place or f"prompt {prompt.index}"
                    raise ConfigError(f"{place}: eval={name}: {error}") from None

    def _check_split(self) -> None:
        """Refuse what several processes cannot do together."""
        split = f"model.tensor_parallel={self.processes.count}"
        if not self.method.heads_independent:
            raise ConfigError(
                f"{split}: method={self.method_name} compares all heads, and each process holds some of them; "
                "set model.tensor_parallel=1"
            )

    def _check_packed(self) -> None:
        """Refuse what storage in few bits cannot do."""
        what = f"cache_dtype={self.settings.cache_dtype}"
        if mixes_precisions(self.method):
            what = f"method={self.method_name} stores tokens in forms of its own"
        if replaces_contents(self.method):
            raise ConfigError(
                f"{what}: method={self.method_name} replaces what is stored, which would be quantised again and "
                "again; set cache_dtype=auto, or let the method merge nothing"
            )
        if self.processes.count > 1:
            raise ConfigError(f"{what}: storage in few bits is for one process; set model.tensor_parallel=1")
        if self.model.spec.head_dim % 8:
            raise ConfigError(
                f"{what}: codes lie in whole bytes and heads of {self.model.name} have {self.model.spec.head_dim} "
                "channels, no multiple of 8; set cache_dtype=auto"
            )

    @property
    def model_settings(self) -> Config:
        """The model's settings without the places its weights come from and how many processes hold it.

        The latter changes the order of sums and so nothing but rounding, as the size of a batch does. What methods take
        from a model where the configuration names nothing stands among their own settings. Decoding in float32 is not
        named, as there was nothing else once.
        """
        apart = ("sources", "tensor_parallel", "default_alpha", "default_tau")
        return {
            key: value
            for key, value in self.section("model").items()
            if key not in apart and (key, value) != ("decoder_dtype", "float32")
        }

    def section(self, group: str) -> Config:
        """A group of the configuration, empty if it has none."""
        values = self.config.get(group)
        return values if isinstance(values, Mapping) else {}

    @contextmanager
    def hold(self, place: Path) -> Iterator[None]:
        """Claim a piece of work that one process does and others may wait for; see `kvbench.core.claims.claim`.

        Raises:
            Busy: another process does it, and the job does not wait.
        """
        with claim(place, wait=self.patient, lapse=self.settings.work.lapse) as mine:
            if not mine:
                raise Busy(f"{place}: another process is working on it")
            yield

    def bounds(self) -> "list[Job]":
        """Two full-cache runs to compare with the reference: in another batch size, and with other seeds.

        The first is what rounding alone changes, the second what an image has in common with any other of its prompt.
        """
        full, settings = self.as_reference(), self.settings
        other = settings.batch_size // 2 or 2
        changed = {
            f"full, batch {other}": replace(full.settings, batch_size=other),
            f"full, seed {settings.seed + 1}": replace(full.settings, seed=settings.seed + 1),
        }
        return [replace(full, method_name=name, settings=s, bounded=self) for name, s in changed.items()]

    def as_reference(self) -> "Job":
        """The run this one is compared with."""
        if self.bounded is not None:
            return self.bounded.as_reference()
        method = {"_target_": f"{Full.__module__}.{Full.__qualname__}"}
        # Numbers of 16 and of 32 bits have a reference each; those in fewer bits, and forms, have the one of `auto`.
        own = self.settings.cache_dtype
        dtype = "auto" if own in CODE_DTYPES or mixes_precisions(self.method) else own
        plain = {"budget": 1, "budget_unit": "tokens", "cache_dtype": dtype, "storage": asdict(CHANNEL)}
        return replace(
            self,
            method=Full(),
            method_name="full",
            settings=replace(
                self.settings, budget=1, budget_unit="tokens", cache_dtype=dtype, storage=CHANNEL
            ),
            config={**self.config, "method": method, **plain},
        )
