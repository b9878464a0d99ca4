"""Presses of NVIDIA's kvpress as methods: their scores, with kvbench's budgets and models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import UserError
from kvbench.core.files import derive_seed
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import choose_best, split_even_odd
from kvbench.methods.shared.view import View

PACKAGE = "kvpress"


class PressError(UserError, ValueError):
    """A press is missing, is not a scorer, or cannot score a layer."""


@dataclass
class KVPress(Scored):
    """Keep the slots that a press of NVIDIA's kvpress scores highest, an even share of B in every head.

    A press receives one sequence at a time, without padding: the keys and values of all slots, and hidden states of the
    newest segment's tokens, which its projections map to queries and keys before rotation. Random draws are the same in
    every batch. The press receives no other weights of the model, and no attention.

    Many presses score a whole prompt only. With `asked=prompt`, the press scores the prompt's tokens once, and later
    tokens are evicted after them, the oldest first. With `asked=every`, it scores after each segment. kvpress itself
    compresses the prompt once, by a ratio, and keeps all later tokens.

    Attributes:
        press: class of kvpress whose scores are used, a `ScorerPress` that does not override `compress`.
        settings: arguments of the press, by name. Its compression ratio follows from the budget.
        asked: see above.
        seed: seed of the press's random draws.
    """

    press: str = "ExpectedAttentionPress"
    settings: Mapping[str, Any] = field(default_factory=dict)
    asked: Literal["prompt", "every"] = "prompt"
    seed: int = 0

    revision: ClassVar[int] = 3  # before, ratios were a token short, and a press's future began in padding
    graph_obstacle = "a press may read and draw numbers on the host"
    heads_independent = False  # presses may compare heads

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse an unknown press, and what `Scored` refuses."""
        super().check(spec, budget)
        make_press(self.press, self.settings)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Create the press from its settings."""
        super().prepare(spec, budget, artifact)
        self._press = make_press(self.press, self.settings)

    def score(self, view: View) -> Tensor:
        """Return the scores of the press, float32 [rows, slots]; 0 where a row has no such slot.

        Raises:
            PressError: the press fails, or its scores are NaN.
        """
        keys, values = view.cached_keys().float(), view.cached_values().float()
        hidden = join_projections(view)
        if view.rotation(view.position[:1, -1]) is not None:
            keys = split_even_odd(keys)
        positions = torch.arange(view.segment.start, view.segment.end, device=keys.device)
        capacities = torch.as_tensor(self.row_capacities(view)).expand(len(keys)).tolist()
        scores = keys.new_zeros(keys.shape[:2])
        for sequence, tokens in enumerate(hidden.split(1)):
            rows = slice(sequence * view.heads, (sequence + 1) * view.heads)
            exists = view.position[rows.start] >= 0  # the same slots in all heads of a sequence
            current = exists[-view.segment.length :]
            begin = view.segment.end - int(current.sum())
            kwargs = {
                "hidden_states": tokens[:, current],
                "position_embeddings": rotate_positions(view, positions[current], tokens),
            }
            self._press.compression_ratio = find_ratio(min(capacities[rows]), int(exists.sum()))
            module = describe_layer(view, self.spec, hidden, begin)
            seed = derive_seed(f"{self.seed}:{view.layer}:{view.segment.index}:{view.prompts[sequence]}")
            with torch.random.fork_rng([keys.device] if keys.is_cuda else []):
                torch.manual_seed(seed)
                inputs = module, keys[rows, exists], values[rows, exists]
                scores[rows, exists] = self._call_press(view, inputs, kwargs).float()
        return scores

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select the slots of highest score, bool [rows, slots], the newest on ties, as presses score these equally."""
        return choose_best(ranked.flip(1), self.row_capacities(view)).flip(1)

    def _call_press(
        self, view: View, inputs: tuple[SimpleNamespace, Tensor, Tensor], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the press's scores of one sequence, [heads, slots], from its attention module, keys and values."""
        module, keys, values = inputs
        tokens = kwargs["hidden_states"]
        try:
            scores: Tensor = self._press.score(module, tokens, keys[None], values[None], None, kwargs)[0]
            reason = "its scores are NaN" if scores.isnan().any() else ""
        except Exception as error:  # a press may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
        if reason:
            remedy = "set method.asked=prompt" if self.asked == "every" else "change method.settings"
            raise PressError(
                f"method.press={self.press} cannot score layer {view.layer} after segment {view.segment.index}, "
                f"{tokens.shape[1]} queries and {keys.shape[1]} slots ({reason}); {remedy} or use another press"
            )
        return scores


def make_press(name: str, settings: Mapping[str, Any]) -> Any:
    """Return a scorer of kvpress.

    Raises:
        PressError: kvpress is not installed or has no such scorer, or the scorer refuses its settings.
    """
    if find_spec(PACKAGE) is None:
        raise PressError(
            f'method=kvpress: {PACKAGE} is not installed; pip install "kvbench[kvpress]" (with transformers below '
            "5.3)"
        )
    import kvpress

    press: Any = getattr(kvpress, name, None)
    if name not in list_presses():
        is_scorer = isinstance(press, type) and issubclass(press, kvpress.ScorerPress)
        problem = "it does not choose by its scores alone" if is_scorer else "not a scorer of kvpress"
        raise PressError(f"method.press={name}: {problem}; choose from {', '.join(list_presses())}")
    try:
        return press(**settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise PressError(f"method.settings={dict(settings)}: {name} refuses them ({error})") from None


def list_presses() -> list[str]:
    """Return the names of kvpress's scorers that keep the slots of highest score."""
    import kvpress

    base = kvpress.ScorerPress
    presses = {name: getattr(kvpress, name) for name in kvpress.__all__}
    return sorted(
        name
        for name, press in presses.items()
        if isinstance(press, type) and press is not base and getattr(press, "compress", None) is base.compress
    )


def find_ratio(kept: int, count: int) -> float:
    """Return the compression ratio at which kvpress keeps exactly `kept` of `count` slots; 0 if all fit.

    kvpress keeps int(count * (1 - ratio)). The ratio is in the middle of the ratios with this result, where no rounding
    of a float64 changes it.
    """
    return max(0.0, 1 - (kept + 0.5) / count)


def join_projections(view: View) -> Tensor:
    """Return the newest segment's queries and keys before rotation, concatenated: [sequences, tokens, (Hq + H) D].

    Queries are scaled such that q k / sqrt(D) is the model's score.
    """
    chosen = torch.arange(view.segment.length)
    queries = view.queries(chosen, rotated=False)
    keys = view.keys(rotated=False).to(queries.dtype)
    projections = (queries * queries.shape[-1] ** 0.5, keys[:, None])
    by_token = [x.unflatten(0, (view.sequences, view.heads)).movedim(3, 1).flatten(2) for x in projections]
    return torch.cat(by_token, 2)


def describe_layer(view: View, spec: ModelSpec, hidden: Tensor, begin: int) -> SimpleNamespace:
    """Return the attributes of an attention module that presses read; its hidden states are `join_projections`.

    The sequence's first token in the segment is at position `begin`, from which the press counts.
    """
    width = hidden.shape[-1] - view.heads * spec.head_dim  # channels of all queries
    queries = width // spec.head_dim

    def rotate(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of positions from `begin`, without positions after the model's last."""
        last = spec.segments[-1].end - 1
        return rotate_positions(view, (begin + positions[0]).clamp(max=last).unique(), x)

    return SimpleNamespace(
        layer_idx=view.layer,
        head_dim=spec.head_dim,
        config=SimpleNamespace(
            num_attention_heads=queries, num_key_value_heads=view.heads, num_hidden_layers=spec.layers
        ),
        num_key_value_groups=queries // view.heads,
        q_proj=lambda tokens: tokens[..., :width],
        k_proj=lambda tokens: tokens[..., width:],
        rotary_emb=rotate,
    )


def rotate_positions(view: View, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [1, n, D] of positions int64 [n], equal for both halves of the channels.

    If the model does not expose its rotation, they are 1 and 0, [1, n, 1].
    """
    rotation = view.rotation(positions)
    if rotation is None:
        ones = like.new_ones(1, len(positions), 1)
        return ones, torch.zeros_like(ones)
    cos, sin = (torch.cat((x, x), -1)[None].to(like) for x in (rotation.real, rotation.imag))
    return cos, sin
