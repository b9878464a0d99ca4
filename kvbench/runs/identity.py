"""What a run is: everything that can change its images, and the hash that names its folder."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.core.files import hash_values

FORMER_NAMES = {
    "kvbench.methods.hack.method.HACK": "kvbench.methods.hack.HACK",
    "kvbench.methods.heatkv.method.BinaryHeatKV": "kvbench.methods.heatkv.BinaryHeatKV",
    "kvbench.methods.heatkv.method.HeatKV": "kvbench.methods.heatkv.HeatKV",
    "kvbench.models.infinity.model.InfinityModel": "kvbench.models.pipeline.InfinityModel",
    "kvbench.models.infinity.sampling.Sampling": "kvbench.models.sampling.Sampling",
    "kvbench.models.infinity.tokenizer.BSQConfig": "kvbench.models.bsq.BSQConfig",
    "kvbench.models.infinity.transformer.InfinityConfig": "kvbench.models.infinity.InfinityConfig",
    "kvbench.models.var.model.VARModel": "kvbench.models.var_pipeline.VARModel",
    "kvbench.models.var.sampling.VARSampling": "kvbench.models.var_sampling.VARSampling",
    "kvbench.models.var.tokenizer.VQConfig": "kvbench.models.vqvae.VQConfig",
    "kvbench.models.var.transformer.VARConfig": "kvbench.models.var.VARConfig",
}
"""Names under which classes that moved entered identities before: runs and calibrations made then are found again."""


def use_former_names(value: object) -> object:
    """Replace, anywhere in JSON values, the name of a class that moved by the one under which it was known first."""
    if isinstance(value, Mapping):
        return {key: use_former_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [use_former_names(item) for item in value]
    return FORMER_NAMES.get(value, value) if isinstance(value, str) else value


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

    @property
    def hash(self) -> str:
        """Ten hex digits."""
        values = {name: use_former_names(value) for name, value in vars(self).items() if name != "label"}
        for later in ("bound", "storage"):  # runs that were made before these were known keep their names
            if values[later] is None:
                del values[later]
        return hash_values(values)[:10]
