"""The model that stays loaded from one job of a sweep to the next."""

from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.instantiate import instantiate
from kvbench.core.files import hash_values
from kvbench.models.base import Model

_KEPT: dict[str, Model] = {}


def keep_model(node: DictConfig, device: str) -> Model:
    """Return the model of a configuration, the one of the last call if that had the same settings and device.

    One model is kept: the memory of the last one is free before another is made.
    """
    key = hash_values([OmegaConf.to_container(node, resolve=True), device])
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = instantiate(node)
    return _KEPT[key]
