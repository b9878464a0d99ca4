"""`kvbench show "a prompt" method=h2o budget=0.1`: the answer to one prompt beside the full cache's."""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.utils import get_class
from omegaconf import DictConfig, open_dict

from kvbench.cli.config.command import Command
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.search_path import check_search_path
from kvbench.cli.config.words import check_words
from kvbench.cli.console import CONSOLE, say, show_device
from kvbench.cli.tasks.complete import complete
from kvbench.core.config import ConfigError, shorten
from kvbench.core.settings import Settings
from kvbench.core.storage import CODE_DTYPES
from kvbench.eval.registry import read_metrics
from kvbench.prompts.typed import quote

USAGE = 'kvbench show "a prompt" method=NAME budget=0.1 [model=NAME] [key=value ...]'
FOLDER = "shown"
"""Folder in `runs_dir` of these runs, which tables of all runs leave out."""
REFUSED = ("task", "sweeps", "shard", "model.tensor_parallel")
"""Keys that have no effect on one run in one process."""
METRICS = {"images": ("psnr", "ssim"), "texts": ("agreement",)}
"""Metrics of one sample against the full cache's, by the model's kind of output."""


def show(words: Sequence[str]) -> None:
    """Answer one prompt under a method and under the full cache, and print both answers and what was held.

    Runs are written to the folder `shown` in `runs_dir`; calibrations and runs in `runs_dir` are used again.

    Args:
        words: words of the command after `show`.

    Raises:
        UserError: the prompt is missing or not for the model, or a setting is wrong.
        OSError: an error of the disk.
    """
    prompt, settings = split_prompt(words)
    check_words(Command.parse(settings))
    with hydra_of_kvbench():
        check_search_path()
        cfg, _ = compose_job(settings)
        _check_method(cfg, read_settings(cfg))
        ask(cfg, prompt, choose_metrics=not any(re.match(r"[+~]*eval\b", word) for word in settings))
        show_device(cfg.device)
        outcome = complete(cfg, changed=True)
    from kvbench.report.one_run import show_outcome  # imports numpy

    show_outcome(CONSOLE, outcome, verbose=bool(cfg.verbose))
    if (sheet := outcome.folder / "contact_sheet.png").is_file():
        say(f"image: {sheet}")


def split_prompt(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the prompt among the words of the command, and its settings.

    Raises:
        ConfigError: there is not exactly one prompt, or `show` does not take an option or a key.
    """
    settings = [word for word in words if re.match(r"[+~]{0,2}[a-z_][\w./@]*=", word)]
    prompts = [word for word in words if word not in settings]
    if options := [word for word in prompts if re.match(r"--?[a-z]+$", word)]:
        raise ConfigError(f"show: {options[0]} is not an option; {USAGE}")
    if len(prompts) != 1 or not prompts[0].strip():
        found = " ".join(prompts)
        quotes = f"put the prompt in quotes: {shorten(repr(found))}"
        reason = quotes if found.strip() else "there is no prompt beside settings"
        raise ConfigError(f"show: {reason}; {USAGE}")
    if lists := Command.parse(settings).lists:
        raise ConfigError(f"show: {lists[0]}: several values are a sweep; give one")
    for word in settings:
        if (key := word.lstrip("+~").partition("=")[0]).startswith(REFUSED):
            raise ConfigError(f"show: {key} has no effect on one prompt; leave it out")
    return prompts[0], settings


def _check_method(cfg: DictConfig, settings: Settings) -> None:
    """Refuse the full cache beside itself."""
    if cfg.method._target_ == "kvbench.methods.full.Full" and settings.cache_dtype not in CODE_DTYPES:
        raise ConfigError(
            "show: an answer of the full cache is shown in any case; name a method beside it, such as "
            "method=streaming_llm budget=0.1"
        )


def ask(cfg: DictConfig, prompt: str, *, choose_metrics: bool) -> None:
    """Replace a configuration's prompts by one prompt; calibration prompts are kept.

    Args:
        cfg: the composed configuration, which is changed.
        prompt: the prompt.
        choose_metrics: also choose metrics of one sample.
    """
    kind = getattr(get_class(cfg.model._target_), "output", "images")
    with open_dict(cfg):
        cfg.prompts = {"_target_": "kvbench.prompts.typed.Typed", "quoted": quote(prompt), "of": cfg.prompts}
        cfg.runs_dirs = [cfg.runs_dir, *cfg.runs_dirs]
        cfg.runs_dir = str(Path(cfg.runs_dir, FOLDER))
        if choose_metrics and kind in METRICS:
            cfg.eval = {name: node for file in METRICS[kind] for name, node in read_metrics(file).items()}
