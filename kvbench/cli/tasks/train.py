"""`task=train`: training of an embedded model from scratch."""

from omegaconf import DictConfig

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.console import say
from kvbench.core.settings import Settings


def train(cfg: DictConfig, settings: Settings) -> None:
    """Run `task=train`: train an embedded model from scratch."""
    cfg.device = settings.device  # recipes read the device from the configuration
    out = instantiate(cfg.train).train(instantiate(cfg.model))
    say(f"trained weights: {out}")
