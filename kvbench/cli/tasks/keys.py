"""`task=... --help` and `method=... --help`: the keys of a task or a method, one line each."""

import inspect
import re
from collections.abc import Iterator

import hydra
from omegaconf import OmegaConf

from kvbench.cli.config.checks import check_kind
from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.help import read_config, read_help
from kvbench.cli.config.search_path import describe_choice
from kvbench.cli.config.words import is_read
from kvbench.cli.console import CONSOLE, say
from kvbench.cli.tasks.listing import align
from kvbench.core.config import ConfigError, show
from kvbench.core.settings import TASKS
from kvbench.core.suggestions import suggest

KEY = re.compile(r"(  )?(- )?(\w+):(?: +([^#\s].*?))?(?: +# (.*))?")
"""Line of conf/config.yaml: a key, below a group or in the list of defaults, its default and its comment."""
FIELD = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""Pattern of a field in the docstring of its class."""


def show_keys(topic: str, name: str) -> None:
    """Print the keys of a task or a method with their defaults, one line each.

    Args:
        topic: `task` or `method`.
        name: the task or the method.

    Raises:
        ConfigError: the task or method does not exist.
    """
    if topic == "method":
        title, rows = f"method={name}  ", list(_list_fields(name))
        with hydra_of_kvbench():
            title += describe_choice("method", name)
    elif name in TASKS:
        title = next(line for line in read_help().splitlines() if line.startswith(f"task={name} "))
        rows = [(word, about) for word, about in list_keys() if is_read(word.partition("=")[0], name)]
    else:
        raise ConfigError(f"task={show(name)}: no such task{suggest(name, TASKS, 'task')}")
    CONSOLE.print(title, highlight=False, markup=False)
    for line in align(rows, CONSOLE.width - 2, whole=True):
        say(f"  {line}")


def list_keys() -> Iterator[tuple[str, str]]:
    """Yield the keys of conf/config.yaml with their defaults, and their comments."""
    group, text = "", read_config().partition("\nhydra:")[0]
    for match in filter(None, map(KEY.fullmatch, text.splitlines())):
        below, listed, key, default, about = match.groups()
        group = group if below else key
        if default:
            whole = f"{group}.{key}" if below and not listed else key
            yield f"{whole}={'...' if '$' in default else default}", about or ""


def _list_fields(name: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of a method with their values, and their lines in its class's docstring."""
    with hydra_of_kvbench():
        values = OmegaConf.to_container(
            hydra.compose("config", overrides=[f"method={name}"]).method, resolve=True
        )
    docs = "\n".join(
        inspect.getdoc(one) or "" for one in reversed(check_kind(values, "method", "method").__mro__)
    )
    about = dict(FIELD.findall(docs))
    assert isinstance(values, dict)
    for name, value in ((str(key), value) for key, value in values.items()):
        target = value.get("_target_") if isinstance(value, dict) else None
        shown = show(value) if target is None else target.rpartition(".")[2]
        if name[0] != "_":
            yield f"method.{name}={shown}", " ".join(about.get(name, "").split())
