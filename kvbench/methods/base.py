"""The contract of a method: what it is told, what it may look at, what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.core.storage import Precision


@dataclass(frozen=True)
class Artifact:
    """What a calibration found, and the circumstances under which it did.

    Attributes:
        kind: name of the observer that made it.
        tensors: the calibrated values, by name.
        metadata: model, weights hash, schedule, prompts hash and settings, all JSON values; a run checks them.
    """

    kind: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)


class View(Protocol):
    """One layer right after a segment ran: what a method may look at.

    Rows are (sequence, KV head), sequence-major: row = sequence x heads + head; sequences are all conditional prompts,
    then their unconditional twins. Slots are the cached tokens followed by those of the current segment, in position
    order. Queries are numbered within the current segment, 0 to segment.length - 1.

    Attributes:
        layer: index of the layer.
        segment: the current segment.
        sequences: sequences in the batch.
        heads: KV heads of a sequence.
        position: int64 [rows, slots], position of each token, -1 where the row has no such slot.
        segment_ids: int64 [rows, slots], index of the segment the token came from, -1 where empty.
        prompts: number of every sequence's prompt in the run, so that what is drawn at random is the same in any batch.
        state: float32 [rows, slots], what a `stateful` method wrote on each slot earlier, 0 on new ones; written in
            place, it moves with the slots that are kept.
        padding: int64 [rows], tokens in front of each row's prompt that do not exist, where prompts of a batch are not
            equally long; else None. In the prompt's segment they have no slot (-1), receive nothing, and means over
            queries leave them out.
        padding_charge: int64 [rows], tokens of each row's room that padding takes where it counts as held; else None.
    """

    layer: int
    segment: Segment
    sequences: int
    heads: int
    position: Tensor
    segment_ids: Tensor
    prompts: Sequence[int]
    state: Tensor
    padding: Tensor | None
    padding_charge: Tensor | None

    def mass(self, queries: Tensor | None = None) -> Tensor:
        """Return the attention that each slot receives, float32 [rows, slots].

        Args:
            queries: int64 [n], over which the mean is taken; None takes all.
        """
        ...

    def segment_mass(self) -> Tensor:
        """Return the attention that the slots of each segment receive together, float32 [rows, segment.index + 1].

        It is the mean over all queries.
        """
        ...

    def scores(self, queries: Tensor) -> Tensor:
        """Return scaled q k^T of a few queries, float32 [rows, query heads per KV head, queries, slots].

        It is -inf where a row has no such slot, so that a softmax over the last dimension gives attention, and all of
        it where a row has no such query (`select.find_asking`).

        Args:
            queries: int64 [n].
        """
        ...

    def queries(self, chosen: Tensor) -> Tensor:
        """Return a few queries, scaled, float32 [rows, query heads per KV head, n, D]: `scores` are theirs with keys.

        Args:
            chosen: int64 [n].
        """
        ...

    def logits(self, queries: Tensor, *, raw_queries: bool = False) -> Tensor:
        """Return `scores` summed over the chosen queries, float32 [rows, slots], at the cost of one query.

        Args:
            queries: int64 [n].
            raw_queries: take q as projected, before bias, norm, learned scale and rotation, and 1/sqrt(D) for the
                scale.
        """
        ...

    def column_variance(self) -> Tensor:
        """Return how much the attention of a slot varies over all queries, summed over slots: float32 [rows]."""
        ...

    def keys(self, *, rotated: bool = True) -> Tensor:
        """Return the current segment's keys, [rows, segment.length, D].

        Args:
            rotated: after the rotation by position; else without it, as keys are stored in few bits, with the
                even channels first, if the model exposes its rotation.
        """
        ...

    def values(self) -> Tensor:
        """Return the current segment's values, [rows, segment.length, D]."""
        ...

    def read_back(self, keys: Tensor, values: Tensor, segment: Segment, bits: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as attention would read them out of static codebooks.

        Both are [rows, segment.length, D]. Only an `Observer` that `reads_books` may ask. The codebooks were fitted to
        other prompts than the one that is shown.

        Args:
            keys: of all tokens of a segment, [rows, segment.length, D].
            values: shaped like keys.
            segment: the segment.
            bits: of a number, as a `Precision` has them.
        """
        ...

    def cached_keys(self) -> Tensor:
        """Return the keys of all slots, cached and current, [rows, slots, D]; zeros where a row has no such slot."""
        ...

    def cached_values(self) -> Tensor:
        """Return the values of all slots, as `cached_keys` does their keys."""
        ...

    def value_norms(self) -> Tensor:
        """Return the Euclidean norm of each slot's value, float32 [rows, slots]; 0 where a row has no such slot."""
        ...

    def output_projection(self) -> Tensor | None:
        """Return W_o of each query head, [heads, query heads per KV head, width, D], as the model computes with it.

        It maps a query head's attention output [D] to what it adds to the residual stream [width], before any bias or
        gate. None if the model does not tell it.
        """
        ...

    def bias(self) -> Tensor:
        """Return what is added to all scores of each slot, float32 [rows, slots] in nats, of a method with a bias."""
        ...

    def replace(self, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Give slots other contents: those that `keep` then keeps are stored with them, at the positions they have.

        Not in the last segment, where nothing is kept.

        Args:
            keys: [rows, slots, D], shaped like `cached_keys`; of slots that are not kept they do not matter.
            values: shaped like `keys`.
            bias: float32 [rows, slots] in nats, of a method with a bias (`Method.biased`) and of it only.
        """
        ...

    def previous_keys(self) -> Tensor:
        """Return the keys of the segment before, [rows, tokens, D], also of tokens that left the cache since.

        Only a method with `compares_keys` may ask, and not at segment 0.
        """
        ...


class Method:
    """A rule for what a cache keeps. Subclasses are dataclasses; their fields are the method's settings.

    Attributes:
        families: models that the method is for; `check` refuses others.
        static: the answer of `keep` depends on the layer, the segment and the slots' positions only, never on data or
            sequence. The cache then asks once per (layer, segment) and reuses the answer.
        stateful: the method keeps a number per slot in `View.state`.
        compares_keys: the method asks for `View.previous_keys`.
        observes_last: `keep` is also called at the last segment, where its answer is ignored.
        revision: raised when the same settings come to keep other tokens, so that runs made before are not found again.
        strict: exceeding the budget is an error; otherwise tables show the measured peak. It is a field where a method
            can be either.
        spec: the model's shapes, known once the method is prepared.
        budget: the capacity B, known once the method is prepared.
    """

    families: ClassVar[tuple[Family, ...]] = ("next-scale", "next-token")
    static: ClassVar[bool] = False
    stateful: ClassVar[bool] = False
    compares_keys: ClassVar[bool] = False
    observes_last: ClassVar[bool] = False
    revision: ClassVar[int] = 0
    strict: bool = True

    spec: ModelSpec
    budget: Budget

    @property
    def budgeted(self) -> bool:
        """Whether the budget decides what is kept or stops a run; if not, runs at all budgets are one."""
        return True

    @property
    def headwise(self) -> bool:
        """Whether what a head keeps depends on no other head, so that processes may each have some of them."""
        return self.needs() is None

    @property
    def biased(self) -> bool:
        """Whether slots have a bias that is added to their scores; keys, values and queries then get wider by it.

        Such a method cannot ask for `View.logits` of raw queries.
        """
        return False

    @property
    def replaces(self) -> bool:
        """Whether `keep` gives slots other contents (`View.replace`), which storage in few bits refuses."""
        return False

    @property
    def sparse_reads(self) -> bool:
        """Whether `read` chooses which slots a segment attends to; otherwise it attends to all."""
        return False

    @property
    def lse_queries(self) -> int:
        """How many of a segment's last queries are watched: what a drop does to their log-sum-exp is in the ledger."""
        return 0

    @property
    def mixes_precisions(self) -> bool:
        """Whether `precisions` says how tokens are stored; only a static method can."""
        return False

    def precisions(self, layer: int, segment: Segment) -> Sequence[Precision] | None:
        """Return in what form each KV head of a layer stores the tokens of a segment; None: as the run says.

        Asked after `prepare`, of a method that is `mixes_precisions`.
        """
        return None

    def compares(self, layer: int, segment: Segment) -> bool:
        """Return whether `keep` may ask for the keys of segment `segment` once the next one ran; asked after `keep`."""
        return self.compares_keys

    def needs(self) -> "Observer | Path | None":
        """Return what `prepare` wants beside shapes: a calibration, a file that stands in its place, or None."""
        return None

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse what can never work, from shapes alone, before weights are loaded or anything is calibrated.

        A method that has more to refuse calls this one first.

        Raises:
            InfeasibleBudget: the budget is below what the method must keep.
            ValueError: the method is for models of another family, or a setting does not fit the model.
        """
        if spec.family not in self.families:
            raise ValueError(
                f"method: {type(self).__name__} is for {' and '.join(self.families)} models and {spec.name} is a "
                f"{spec.family} model; take one of the methods that task=plan model={spec.name} lists"
            )

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Get ready for a model and a budget, before any generation; raises what `check` raises.

        Args:
            spec: the model's shapes.
            budget: the capacity B.
            artifact: what the calibration found that `needs` asked for.
        """
        self.check(spec, budget)
        self.spec, self.budget = spec, budget

    def room(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the most slots that a row of this layer holds once segment `segment` is over; None where data decides.

        Every row then holds this many slots, or all that it has seen where those are fewer: `keep` sees to it. Padding
        in front of a prompt may count as held (`View.padding_charge`). One number is for all KV heads, a tuple has one
        for each. Storage and `task=plan` know from it how long rows become; a static method need not say, since they
        ask its `keep` beforehand.
        """
        return None

    def select_attended(self, view: View) -> Tensor | None:
        """Decide which slots a segment attends to, its own among them: bool [rows, slots]; None reads all.

        A method with `sparse_reads`, which is neither static nor `biased`, is asked before the attention of each
        segment whose tokens come at once. What is not read stays in the cache all the same, unless `keep`, which is
        asked afterwards, says otherwise.
        """
        return None

    def keep(self, view: View) -> Tensor | None:
        """Decide which slots stay: bool [rows, slots], or [heads, slots] from a static method; None keeps all."""
        raise NotImplementedError


class Observer(Method):
    """A calibration: it keeps everything and watches. Subclasses are dataclasses; their fields tell its settings.

    Attributes:
        kind: name of the artifact.
        reads_books: it asks for `View.read_back`, so that codebooks are calibrated first.
        sums: float64 sums over prompts of each tensor in it, by name.
    """

    kind: ClassVar[str]
    observes_last: ClassVar[bool] = True
    reads_books: ClassVar[bool] = False
    sums: dict[str, Tensor]

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the calibration leaves, by name."""
        raise NotImplementedError

    def accumulate(self, view: View) -> None:
        """Add what one layer shows, summed over the prompts of the batch, to `sums`."""
        raise NotImplementedError

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero."""
        super().prepare(spec, budget, artifact)
        shapes = self.tensor_shapes(spec)
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._prompts = 0

    def room(self, layer: int, segment: Segment) -> int:
        """Return the tokens so far: nothing leaves."""
        return segment.end

    def keep(self, view: View) -> None:
        """Watch one layer and keep everything."""
        if view.layer == 0 and view.segment.index == 0:
            self._prompts += view.sequences // self.spec.branches
        self.accumulate(view)

    def select_conditional(self, rows: Tensor) -> Tensor:
        """Return the conditional sequences' part of values [rows, ...]: float64 [prompts, heads, ...] on the CPU."""
        sequences = rows.unflatten(0, (-1, self.spec.heads))
        return sequences[: len(sequences) // self.spec.branches].double().cpu()

    def average(self) -> dict[str, Tensor]:
        """Return the means over the prompts seen, by name; zeros when none were."""
        return {name: sums / max(self._prompts, 1) for name, sums in self.sums.items()}

    def make_stand_in(self, spec: ModelSpec) -> Artifact:
        """Make an artifact of random numbers, equal in every call: good for timing, nothing else.

        What methods do with it takes the time that a real one takes, but rows may become longer or shorter.
        """
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.rand(shape, generator=generator, dtype=torch.float64)
            for name, shape in self.tensor_shapes(spec).items()
        }
        return Artifact(self.kind, tensors)
