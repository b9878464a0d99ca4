"""Base class and results of evaluators that work on the features of a space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.eval.files.store import StoredFeatures
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.scores import Score
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.inception import Clean

PUBLISHED_SAMPLES = 50_000  # number of samples for FID on ImageNet in papers


@dataclass(frozen=True)
class SpaceEvaluator(Evaluator):
    """Base class of evaluators on the features of `space`, which is the protocol."""

    space: Space = field(default_factory=Clean)
    meta_keys: ClassVar[tuple[str, ...]] = ()

    @property
    def protocol(self) -> str:
        """Name of the feature space."""
        return self.space.name


def require_samples(count: int, minimum: int, what: str) -> None:
    """Raise a SkipEvaluation if there are fewer than `minimum` samples, which the metric `what` needs."""
    if count < minimum:
        raise SkipEvaluation(f"too few samples: {what} needs at least {minimum}, got {count}")


def describe_few_samples(count: int) -> str | None:
    """Return a caveat for fewer samples than in papers on ImageNet, else None."""
    caveat = f"{count} samples: not to be compared with published numbers on {PUBLISHED_SAMPLES}"
    return None if count >= PUBLISHED_SAMPLES else caveat


def finish(
    evaluator: Evaluator,
    scores: dict[str, Score],
    sides: Mapping[str, StoredFeatures],
    samples: Mapping[str, Sequence[object]] | None = None,
    caveat: str | None = None,
) -> Result:
    """Return a result like `make_result`; its provenance says whether each side's features were computed or reused."""
    hashes = {file.name: sha256 for file, sha256 in (weight.require() for weight in evaluator.weights)}
    result = make_result(evaluator, scores, samples, hashes, caveat)
    result.provenance["features"] = provenance(sides)
    return result


def provenance(sides: Mapping[str, StoredFeatures]) -> dict[str, str]:
    """Return `reused` or `computed` for each side."""
    return {side: "reused" if features.reused else "computed" for side, features in sides.items()}
