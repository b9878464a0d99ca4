"""The methods of conf/method by the family of models they are for."""

from functools import cache

import hydra
from hydra.utils import instantiate

from kvbench.core.segments import Family
from tests.support.places import ROOT


@cache
def methods_for(family: Family) -> tuple[str, ...]:
    """Names of the methods that fit a family, in alphabetical order."""
    names = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        methods = {name: hydra.compose("config", overrides=[f"method={name}"]).method for name in names}
    return tuple(name for name, node in methods.items() if family in instantiate(node).families)
