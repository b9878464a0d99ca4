"""Composition by Hydra with caches, so that a sweep's jobs are composed in milliseconds."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any, Literal

import hydra
import hydra._internal.defaults_list as hydra_defaults
import omegaconf.base
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, grammar_parser
from omegaconf.errors import OmegaConfBaseException

from kvbench.core.config import ConfigError, show
from kvbench.core.files import resolve_path
from kvbench.core.kept import find_state
from kvbench.core.settings import CHOICE_KEYS
from kvbench.core.suggestions import suggest

_FILES: dict[tuple[str, str], Callable[[], Any]] = {}
"""Parsed files by search path and name; a call gives a copy."""
_STATES: dict[Path, object] = {}
"""States of these files (`find_state`) before they were first parsed or looked for."""
_COMPOSED: dict[tuple[object, ...], Callable[[], Any]] = {}
"""Composed configurations by search path and choices of groups; a call gives a copy."""
_MODEL_CHOICES: dict[tuple[str, ...], list[str]] = {}
"""Results of `find_model_choices` by search path, groups and the words that determine them."""
USUAL_CHOICES = {"prompts": "scenes", "eval": "scenes", "windows": "image", "method@method.base": "forecast"}
"""Choices of conf/config.yaml and conf/method/pricekv.yaml that a model's file can replace."""
MODEL_KEYS = {group: f"default_{group.rpartition('.')[2]}" for group in USUAL_CHOICES}
"""Keys of a model's file with its choices: `default_prompts`, `default_base` ..."""
EXTRAS = {"joblib": "joblib", "submitit_slurm": "slurm", "ray": "ray"}
"""Extra of kvbench that each preset of a launcher needs."""
FILE_METRICS = "default_file_eval"
"""Key of a model's file with the metrics of `prompts=file`."""
MAX_COMPOSED = 512  # maximum number of configurations, 30 kB each


def keep(value: object) -> Callable[[], Any]:
    """Return a function that gives copies of a value.

    Copies are made by pickle, in memory, because `deepcopy` of a configuration takes six times as long. Hydra loads its
    plugins a second time in processes of launchers; their configurations cannot be pickled.
    """
    try:
        return partial(pickle.loads, pickle.dumps(value))
    except pickle.PicklingError:
        return partial(copy.deepcopy, value)


class CachingRepository(ConfigRepository):
    """Hydra's repository of files, each of which is parsed once per process."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a copy of a parsed file; None if it does not exist."""
        use_presets()  # Hydra imports a launcher again, in processes of the launcher too
        path = " ".join(f"{source.scheme()}://{source.path}" for source in self.sources)
        key = (path, config_path)
        if key not in _FILES:
            for source in self.sources:
                place = locate_file(source, f"{config_path}.yaml")
                _STATES.setdefault(place, find_state(place))
            _FILES[key] = keep(super().load_config(config_path))
        loaded: ConfigResult | None = _FILES[key]()
        return loaded

    def __deepcopy__(self, _: Mapping[int, object]) -> "CachingRepository":
        return copy.copy(self)  # sources are replaced as a list, never changed in place


def locate_file(source: ConfigSource, file: str) -> Path:
    """Return the path of a file in a source of configuration files, whether it exists or not."""
    return resolve_path(f"{source.full_path().removeprefix('file://')}/{file}")


def compose_words(words: Sequence[str]) -> DictConfig:
    """Compose a job, with its `hydra` node, from overrides and its model's defaults; Hydra must be initialised.

    Each combination of choices is composed once per process. Other values are set on a copy, as Hydra does after
    composition.

    Raises:
        HydraException: a word matches no key or no choice.
        ConfigError: see `find_model_choices`.
    """
    every = [*words, *find_model_choices(words)]
    parsed = list(map(parse_word, every))
    kinds = list(map(_classify, parsed))
    # A key that is added or removed must stay before or after other words.
    apart = [kind == "value" and "key" not in kinds for kind in kinds]
    cfg = _compose([*compress(every, map(not_, apart))])
    try:
        for override in compress(parsed, apart):
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException:
        hydra.compose("config", every)  # raises Hydra's own error
        raise
    _describe(cfg, parsed[: len(words)])
    return cfg


def _compose(words: Sequence[str]) -> DictConfig:
    """Return a copy of Hydra's composition of words."""
    loader: Any = GlobalHydra.instance().config_loader()
    key = (str(loader.get_search_path()), *words)
    if key not in _COMPOSED:
        keep_files()
        composed = hydra.compose("config", [*words], return_hydra_config=True)
        if len(_COMPOSED) >= MAX_COMPOSED:
            _COMPOSED.clear()
        _COMPOSED[key] = keep(composed)
    composed_copy: DictConfig = _COMPOSED[key]()
    return composed_copy


def find_model_choices(words: Sequence[str]) -> list[str]:
    """Return overrides for choices of the model's file that neither `words` nor the file of a sweep name.

    Raises:
        HydraException: a word matches no choice.
        ConfigError: the model's file names something that is not a choice of the group.
    """
    parsed = {word: parse_word(word) for word in words}
    named = [
        f"{one.key_or_group}@{one.package}" if one.package else one.key_or_group for one in parsed.values()
    ]
    groups = [group for group in USUAL_CHOICES if group not in named]
    if not groups:
        return []
    names = (*MODEL_KEYS.values(), FILE_METRICS)
    keys = [f"model.{name}" for name in names]
    chosen = [word for word, one in parsed.items() if _classify(one) == "choice" or one.key_or_group in keys]
    loader: Any = GlobalHydra.instance().config_loader()
    key = (str(loader.get_search_path()), *groups, *chosen)
    if key not in _MODEL_CHOICES:
        choices, model = _read_choices(loader, chosen, names)
        found = {group: MODEL_KEYS[group] for group in groups if choices.get(group) == USUAL_CHOICES[group]}
        if "eval" in found and choices.get("prompts") == "file" and model.get(FILE_METRICS) is not None:
            found["eval"] = FILE_METRICS
        _MODEL_CHOICES[key] = [
            f"{group}={_check_choice(group, name, choice)}"
            for group, name in found.items()
            if (choice := model.get(name)) is not None
        ]
    return _MODEL_CHOICES[key]


def _read_choices(
    loader: Any, words: Sequence[str], names: Sequence[str]
) -> tuple[Mapping[str, object], dict[str, Any]]:
    """Return the choice of each group, and the model's values of these names, after overrides.

    Composing all files only to read these keys would take three times as long.
    """
    keep_files()
    files = loader.compute_defaults_list("config", words, RunMode.RUN)
    model: dict[str, Any] = {}
    for file in files.defaults:
        if file.package in ("", "model"):
            node = loader.repository.load_config(file.config_path).config
            part = node if file.package else node.get("model") or {}
            model.update((name, part[name]) for name in names if name in part)
    model.update((one.key_or_group.partition(".")[2], one.value()) for one in files.config_overrides)
    return files.overrides.known_choices, model


def _check_choice(group: str, key: str, choice: object) -> str:
    """Return a model's choice of a group, under `key`, as the value of an override."""
    names = [choice] if isinstance(choice, str) else choice
    known = GlobalHydra.instance().config_loader().get_group_options(group.partition("@")[0])
    if not isinstance(names, Sequence) or not names or not all(name in known for name in names):
        choices = suggest(str(choice), known, group)
        raise ConfigError(f"model.{key}={show(choice)}: not a choice{choices}")
    return names[0] if isinstance(choice, str) else f"[{','.join(names)}]"


def use_presets() -> None:
    """Remove the schemas that launchers' packages store under the names of the presets when they are imported."""
    Plugins.instance()  # imports them
    for name in EXTRAS:
        ConfigStore.instance().repo["hydra"]["launcher"].pop(f"{name}.yaml", None)


def keep_files() -> None:
    """Have Hydra 1.3, which is initialised, parse each file once; other versions keep their own repository."""
    loader: Any = GlobalHydra.instance().config_loader()
    if hydra.__version__.startswith("1.3.") and not isinstance(loader.repository, CachingRepository):
        loader.repository = CachingRepository(loader.get_search_path())


def forget_edited_files() -> None:
    """Forget all parsed files if one was edited, made or removed since; of a Hydra other than 1.3, in any case."""
    if not _STATES or any(find_state(place) != state for place, state in _STATES.items()):
        for cache in (_FILES, _STATES, _COMPOSED, _MODEL_CHOICES):
            cache.clear()


# OmegaConf has no public way to parse each interpolation once.
omegaconf.base.parse = lru_cache(maxsize=1024)(grammar_parser.parse)  # type: ignore[attr-defined]


def map_choices(
    create: Callable[..., DictConfig],
    overrides: hydra_defaults.Overrides,
    defaults_list: list[InputDefault],
    self_added: bool,
) -> DictConfig:
    """Return the choices to which a defaults list can refer as `${group}`; an empty map for a list that does not.

    Hydra 1.3 calls `create`, its own function of the other arguments, for each file: a third of a composition.
    """
    if any(entry.is_interpolation() for entry in defaults_list):
        return create(overrides, defaults_list, self_added)
    return DictConfig({})


CREATE_MAP = "_create_interpolation_map"
"""Name of Hydra 1.3's function in `hydra_defaults`; later versions have none."""
if hydra.__version__.startswith("1.3."):
    setattr(hydra_defaults, CREATE_MAP, partial(map_choices, getattr(hydra_defaults, CREATE_MAP)))


@lru_cache(maxsize=4096)
def parse_word(word: str) -> Override:
    """Parse an override without patterns of choices; the result is shared and must not be changed."""
    [parsed] = OverridesParser.create().parse_overrides([word])
    return parsed


def parse_words(words: Sequence[str]) -> list[Override]:
    """Parse overrides; patterns of choices become lists. Hydra must be initialised."""
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(words))


def _describe(cfg: DictConfig, overrides: list[Override]) -> None:
    """Write the overrides and the working directory into Hydra's part of a configuration."""
    own = [override for override in overrides if not override.is_hydra_override()]
    form = cfg.hydra.job.config.override_dirname
    cfg.hydra.runtime.cwd = str(Path.cwd())
    cfg.hydra.overrides.task = [override.input_line for override in own]
    cfg.hydra.overrides.hydra = [override.input_line for override in overrides if override not in own]
    named = sorted(str(one.input_line) for one in own if one.key_or_group not in form.exclude_keys)
    cfg.hydra.job.override_dirname = form.item_sep.join(named).replace("=", form.kv_sep)


def _classify(override: Override) -> Literal["choice", "value", "key"]:
    """Return whether an override chooses files, sets a value that composition does not read, or adds or removes a key.

    A list of values counts as a choice, because it is composed.
    """
    of_file = override.is_hydra_override() or override.package is not None or is_about_group(override)
    if of_file and override.key_or_group != "hydra.mode":  # Hydra adds this word to a sweep's
        return "choice"
    if override.type is not OverrideType.CHANGE:
        return "key"
    return "choice" if override.is_sweep_override() else "value"


def is_about_group(override: Override) -> bool:
    """Return whether an override's key is a group of kvbench or Hydra."""
    key, _, inner = override.key_or_group.partition(".")
    return not inner and (key in CHOICE_KEYS or key.partition("/")[0] == "hydra")
