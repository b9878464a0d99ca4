"""Settings of `task=choose`, checked before classes of methods, and torch with them, are imported."""

from collections.abc import Mapping

from kvbench.cli.config.search_path import list_choices
from kvbench.cli.config.words import is_choice
from kvbench.core.config import ConfigError, show
from kvbench.core.suggestions import suggest


def check_race(values: Mapping[str, object]) -> None:
    """Check the names of a race's methods; Hydra must be initialised. Its metric is found among those of classes.

    Raises:
        ConfigError: there is no such method, no metric, or the race is one of several shards or of full caches.
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
    if values.get("budget") == 1 and methods is None and values.get("cache_dtype") == "auto":
        raise ConfigError("budget=1: a race among full caches; give a smaller budget, such as budget=0.1")
