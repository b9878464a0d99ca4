"""Identity of a run: everything that can change its samples, and the hash in its folder's name."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.core.files import hash_values


@dataclass(frozen=True)
class Identity:
    """Everything that can change a run's samples, as JSON values.

    Attributes:
        model: settings of the model, sampling included.
        weights: SHA-256 of the weights.
        method: class and settings of the method.
        calibration: name of the calibration, or SHA-256 of the file that the user gives.
        budget: capacity B as an exact fraction, or exact bytes: `7344/5 bytes`.
        prompts: SHA-256 of the prompts' texts.
        seed: seed of the noise.
        cache_dtype: dtype of stored keys and values, or the low-bit `cache_dtype`.
        label: readable start of the folder's name; not hashed.
        bound: name of a bound's run, which otherwise equals the reference; None for other runs.
        storage: settings of low-bit storage and the name of its codebooks; None for other storage.
        batch_invariant: whether attention is batch invariant.
        noise: kind of noise.
        code: SHA-256 of the code of method and model, by part, if it is not as released; None if all code is.
    """

    model: Mapping[str, object]
    weights: str
    method: Mapping[str, object]
    calibration: str | None
    budget: str
    prompts: str
    seed: int
    cache_dtype: str
    label: str = ""
    bound: str | None = None
    storage: Mapping[str, object] | None = None
    batch_invariant: bool = False
    noise: str = "stream"
    code: Mapping[str, str] | None = None

    @property
    def hash(self) -> str:
        """The first ten hex digits of the SHA-256 of all fields except the label."""
        return hash_values({name: value for name, value in vars(self).items() if name != "label"})[:10]
