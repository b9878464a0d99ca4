"""Identity of a run: everything that can change its samples, and the hash that names its folder."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.core.files import hash_values


@dataclass(frozen=True)
class Identity:
    """Everything that can change a run's images, as JSON values; its hash names the folder.

    Attributes:
        model: settings of the model, sampling included.
        weights: SHA-256 of its weights.
        method: class and settings of the method.
        calibration: SHA-256 of the artifact or order file it used.
        budget: capacity B as an exact fraction; of a budget in bytes these, `7344/5 bytes`.
        prompts: SHA-256 of the prompts' texts.
        seed: seed of the noise.
        cache_dtype: dtype of stored keys and values, or how the configuration names numbers of fewer bits.
        label: readable start of the folder's name; not hashed.
        storage: how numbers of fewer than 16 bits are stored, and the SHA-256 of their codebooks; None of others.
        batch_invariant: whether kernels of a GPU divide attention alike in every batch; hashed only if they do, so that
            other runs keep their names.
        bound: what sets a bound's run apart from the reference, which it equals in everything above; None otherwise.
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

    @property
    def hash(self) -> str:
        """Ten hex digits."""
        left_out = {"label"} if self.batch_invariant else {"label", "batch_invariant"}
        return hash_values({name: value for name, value in vars(self).items() if name not in left_out})[:10]
