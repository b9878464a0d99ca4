"""Presses of kvpress as guests: their scores, under kvbench's budgets and on its models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import UserError
from kvbench.core.files import derive_seed
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Artifact
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import pair_halves
from kvbench.methods.shared.view import View

PACKAGE = "kvpress"


class PressError(UserError, ValueError):
    """A press that is missing, is not a scorer, or cannot score what it is shown."""


@dataclass
class KVPress(Scored):
    """Keep what a press of NVIDIA's kvpress scores highest, an even share of B in every head.

    A press is shown one sequence at a time, without padding: keys and values of all slots, and hidden states of the
    newest segment's tokens, from which its projections take queries and keys before rotation. What it draws at random
    is the same in every batch. It is shown no other weights of the model, and no attention that the model computed.

    Many presses score a whole prompt only. With `asked=prompt` the scores of the prompt's tokens stay, and tokens that
    come later leave after them, the oldest first; with `asked=every` the press is asked after each segment. kvpress
    itself compresses the prompt once, by a ratio, and keeps everything that follows.

    Attributes:
        press: class of kvpress whose scores are used; it derives from `ScorerPress` and chooses as that does.
        settings: arguments of the press, by name. Its compression ratio follows from the budget.
        asked: see above.
        seed: of what a press draws at random.
    """

    press: str = "ExpectedAttentionPress"
    settings: Mapping[str, Any] = field(default_factory=dict)
    asked: Literal["prompt", "every"] = "prompt"
    seed: int = 0

    @property
    def stateful(self) -> bool:
        """Whether slots keep a score."""
        return self.asked == "prompt" or super().stateful

    @property
    def heads_independent(self) -> bool:
        """Presses may compare heads."""
        return False

    def last_asked(self, index: int) -> int:
        """Return the last segment after which scores were asked for, at most `index`."""
        return 0 if self.asked == "prompt" else super().last_asked(index)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a press that kvpress does not have, and what `Scored` refuses."""
        super().check(spec, budget)
        make_press(self.press, self.settings)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Make the press."""
        super().prepare(spec, budget, artifact)
        self._press = make_press(self.press, self.settings)

    def score(self, view: View) -> Tensor:
        """Return the scores of the press, float32 [rows, slots]; 0 where a row has no such slot.

        Raises:
            PressError: the press fails, or its scores are NaN.
        """
        keys, values, hidden = (
            view.cached_keys().float(),
            view.cached_values().float(),
            join_projections(view),
        )
        if view.rotation(view.position[:1, -1]) is not None:
            keys = pair_halves(keys)
        module, offsets = describe_layer(view, self.spec, hidden), torch.arange(view.segment.length)
        scores = keys.new_zeros(keys.shape[:2])
        for sequence, tokens in enumerate(hidden.split(1)):
            rows = slice(sequence * view.heads, (sequence + 1) * view.heads)
            there = view.position[rows.start] >= 0  # heads of a sequence have their slots at the same places
            now = there[-view.segment.length :]
            kwargs = {
                "hidden_states": tokens[:, now],
                "position_embeddings": rotate_positions(view, offsets.to(now.device)[now], tokens),
            }
            self._press.compression_ratio = max(0.0, 1 - self.min_capacity(view) / int(there.sum()))
            with torch.random.fork_rng([keys.device] if keys.is_cuda else []):
                torch.manual_seed(self._draw_seed(view, sequence))
                found = self._ask(view, (module, keys[rows, there], values[rows, there]), kwargs)
            scores[rows, there] = found.float()
        return scores

    def _ask(
        self, view: View, shown: tuple[SimpleNamespace, Tensor, Tensor], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the press's scores of one sequence, [heads, slots]; `shown` are its layer, keys and values."""
        module, keys, values = shown
        tokens = kwargs["hidden_states"]
        try:
            found: Tensor = self._press.score(module, tokens, keys[None], values[None], None, kwargs)[0]
            why = "its scores are NaN" if found.isnan().any() else ""
        except Exception as error:  # whatever a guest raises
            why = " ".join(str(error).split()) or type(error).__name__
        if why:
            remedy = "set method.asked=prompt" if self.asked == "every" else "change method.settings"
            raise PressError(
                f"method.press={self.press} cannot score layer {view.layer} after segment {view.segment.index}, "
                f"{tokens.shape[1]} queries and {keys.shape[1]} slots ({why}); {remedy} or take another press"
            )
        return found

    def _draw_seed(self, view: View, sequence: int) -> int:
        return derive_seed(f"{self.seed}:{view.layer}:{view.segment.index}:{view.prompts[sequence]}")


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

    kind = getattr(kvpress, name, None)
    if not (isinstance(kind, type) and issubclass(kind, kvpress.ScorerPress)):
        raise PressError(
            f"method.press={name}: not a scorer of kvpress; choose from {', '.join(list_presses())}"
        )
    if name not in list_presses():
        raise PressError(
            f"method.press={name}: it does not choose by its scores alone, and has no place here"
        )
    try:
        return kind(**settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise PressError(f"method.settings={dict(settings)}: {name} refuses them ({error})") from None


def list_presses() -> list[str]:
    """Return the names of the installed kvpress's scorers that keep the slots of highest score."""
    import kvpress

    base = kvpress.ScorerPress
    found = {name: getattr(kvpress, name) for name in kvpress.__all__}
    return sorted(
        name
        for name, kind in found.items()
        if isinstance(kind, type) and kind is not base and getattr(kind, "compress", None) is base.compress
    )


def join_projections(view: View) -> Tensor:
    """Return the newest segment's queries and keys before rotation side by side, [sequences, tokens, (Hq + H) D].

    Queries are such that q k / sqrt(D) is the model's scaled score.
    """
    chosen = torch.arange(view.segment.length)
    queries = view.queries(chosen, rotated=False)
    keys = view.keys(rotated=False).to(queries.dtype)
    both = (queries * queries.shape[-1] ** 0.5, keys[:, None])
    parts = [x.unflatten(0, (view.sequences, view.heads)).movedim(3, 1).flatten(2) for x in both]
    return torch.cat(parts, 2)


def describe_layer(view: View, spec: ModelSpec, hidden: Tensor) -> SimpleNamespace:
    """Return what a press asks of an attention module, whose hidden states are those of `join_projections`."""
    width = hidden.shape[-1] - view.heads * spec.head_dim  # of all queries
    queries = width // spec.head_dim

    def rotate(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Count positions from the segment's start, and leave out those after the model's last."""
        last = spec.segments[-1].end - view.segment.start - 1
        return rotate_positions(view, positions[0].clamp(max=last).unique(), x)

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


def rotate_positions(view: View, offsets: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [1, n, D] of positions from the segment's start, equal for both halves of the channels.

    They are 1 and 0, [1, n, 1], where a model does not expose its rotation.
    """
    rotation = view.rotation(view.segment.start + offsets)
    if rotation is None:
        ones = like.new_ones(1, len(offsets), 1)
        return ones, torch.zeros_like(ones)
    cos, sin = (torch.cat((x, x), -1)[None].to(like) for x in (rotation.real, rotation.imag))
    return cos, sin
