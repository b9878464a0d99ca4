"""Jobs of a sweep: the product of its lists, and reference methods beside them."""

import re
from collections.abc import Iterable
from dataclasses import replace

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins

BESIDE = "beside."
"""Prefix of the keys of reference methods."""
OF_METHODS = ("method", "calibrate")
"""Groups of keys that are about the methods of a sweep's other lists."""
_multiply = BasicSweeper.split_arguments


def split_product(overrides: Iterable[Override]) -> list[list[str]]:
    """Return the overrides of every job of a sweep.

    They are the product of its lists. Lists under `beside.`, such as `beside.method` and `beside.budget`, make jobs of
    their own, behind the others: they take the place of the lists that have these names without it, and of everything
    that is about the sweep's other methods. So a method that has no such setting stands beside one whose settings are
    compared.
    """
    given = list(overrides)
    beside = [word for word in given if word.key_or_group.startswith(BESIDE)]
    own = [word for word in given if word not in beside]
    [jobs] = _multiply(own, None)
    jobs = [[name_base(word) for word in job] for job in jobs]
    if not beside:
        return jobs
    renamed = [replace(word, key_or_group=word.key_or_group.removeprefix(BESIDE)) for word in beside]
    replaced = {word.key_or_group for word in renamed}
    shared = [word for word in own if not (word.key_or_group in replaced or _is_of_methods(word))]
    [references] = _multiply([*shared, *renamed], None)
    return [*jobs, *(job for job in references if job not in jobs)]


def name_base(word: str) -> str:
    """Return an override that chooses a method's base by name as Hydra writes it; any other as it is.

    >>> name_base("method.base=h2o"), name_base("method.base.base=rkv,h2o"), name_base("method.base.sinks=2")
    ('method@method.base=h2o', 'method@method.base.base=rkv,h2o', 'method.base.sinks=2')
    """
    return re.sub(r"^method((?:\.base)+)=(?=[a-z_])", r"method@method\1=", word)


def _is_of_methods(word: Override) -> bool:
    return word.key_or_group.partition(".")[0] in OF_METHODS


def extend_sweeper() -> None:
    """Have Hydra's sweeper make these jobs; only an installed package of plugins could bring one of its own."""

    def split(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        return list(BasicSweeper.split_overrides_to_chunks(split_product(overrides), max_batch_size))

    classes = Plugins.instance().class_name_to_class  # Hydra has loaded the module once more
    classes[f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"].split_arguments = staticmethod(split)  # type: ignore[attr-defined]
