"""`smoke=true`: the run of a configuration over two prompts, with one cheap metric."""

from importlib.resources import files

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.core.config import ConfigError

PROMPTS = 2
"""Prompts of a smoke run."""
EVALUATORS = {"images": ("psnr", "psnr"), "texts": ("exact_answer", "text_length")}
"""File of `conf/eval` and the evaluator in it, by the model's kind of output."""


def shrink(cfg: DictConfig) -> None:
    """Set `prompts.count` and `eval` of a composed configuration if it has `smoke: true`.

    Other values of `smoke` are left to the checks of settings.

    Raises:
        ConfigError: the prompt set has no `count`.
    """
    if cfg.get("smoke") is not True:
        return
    if "count" not in cfg.prompts:
        raise ConfigError(
            f"smoke=true: {cfg.prompts.get('_target_')} has no prompts.count; leave out smoke=true"
        )
    file, name = EVALUATORS[getattr(get_class(cfg.model._target_), "output", "images")]
    known = OmegaConf.load(str(files("kvbench.conf").joinpath("eval", f"{file}.yaml")))
    assert isinstance(known, DictConfig)
    with open_dict(cfg):
        cfg.prompts.count = PROMPTS
        cfg.eval = {name: known[name]}
