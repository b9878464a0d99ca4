"""Names of metrics and methods in `task=choose`, checked before their classes, and torch with them, are imported."""

import re
from collections.abc import Mapping

import hydra
from omegaconf import OmegaConf

from kvbench.cli.config.instantiate import list_targets
from kvbench.cli.config.search_path import describe_choice, list_choices
from kvbench.cli.config.words import is_choice
from kvbench.core.config import ConfigError, shorten, show
from kvbench.core.suggestions import suggest

NAME = r"[\w.]+(?:\[[^]]*\])?"
NAMES = re.compile(rf".*: (?P<names>{NAME}(?:, {NAME})*)\.(?: .*)?")
"""Comment of a file of `conf/eval`, whose first sentence ends with a colon and the names of its metrics."""
OF_SETS = ".eval.distribution."
"""Package of the metrics of whole sets."""


def name_metrics() -> dict[str, str]:
    """Return the file of `conf/eval` by the names of its metrics, or by its own; Hydra must be initialised."""
    found = {file: NAMES.fullmatch(describe_choice("eval", file)) for file in list_choices("eval")}
    return {
        name: file
        for file, match in found.items()
        for name in (match["names"].split(", ") if match else (file,))
    }


def check_race(values: Mapping[str, object]) -> None:
    """Check the names of a race's methods and of its metric; Hydra must be initialised.

    Metrics of classes outside kvbench are left to the race: their names are known once they are imported.

    Raises:
        ConfigError: there is no such method or metric, no metric at all, or the race is one of several shards.
    """
    methods, metric, shard = (values.get(key) for key in ("methods", "metric", "shard"))
    if not metric:
        raise ConfigError("metric: task=choose compares methods by one metric; set it, such as metric=psnr")
    if isinstance(shard, Mapping) and shard.get("count") != 1:
        count = show(shard.get("count"))
        raise ConfigError(f"shard.count={count}: processes share a race without shards; leave it out")
    for name in methods if isinstance(methods, list) else ():
        if not (isinstance(name, str) and is_choice("method", name)):
            near = suggest(str(name), list_choices("method"), "method")
            raise ConfigError(f"methods: {name}: no such method{near}")
    known = name_metrics()
    is_own = all(target.startswith(("kvbench.", "hydra.")) for target in list_targets(values.get("eval")))
    if is_own and isinstance(metric, str) and strip_part(metric) not in map(strip_part, known):
        raise ConfigError(f"metric={shorten(metric)}: no such metric{suggest(metric, known, 'eval')}")
    file = known.get(metric) if isinstance(metric, str) else None
    node = None if file is None else OmegaConf.to_container(hydra.compose(f"eval/{file}"))
    if any(OF_SETS in target for target in list_targets(node)):
        raise ConfigError(
            f"metric={metric}: is of a whole set of images, which prompts cannot be compared by; use psnr or lpips"
        )
    if values.get("budget") == 1 and methods is None and values.get("cache_dtype") == "auto":
        raise ConfigError("budget=1: a race among full caches; give a smaller budget, such as budget=0.1")


def strip_part(metric: str) -> str:
    """Return the name of a metric without its network and its part, as in `geneval2[scenes]/count`."""
    return re.split(r"[/\[]", metric)[0]
