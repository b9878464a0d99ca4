"""Hydra's loader of configurations with caches, so that a sweep's jobs are composed in milliseconds."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any, Literal

import hydra._internal.hydra
import omegaconf.base
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, grammar_parser

from kvbench.core.config import ConfigError, show
from kvbench.core.settings import CHOICE_KEYS
from kvbench.core.suggestions import suggest

_FILES: dict[tuple[str, str], Callable[[], Any]] = {}
"""Parsed files by search path and name; a call gives a copy."""
_COMPOSED: dict[tuple[object, ...], Callable[[], Any]] = {}
"""Composed configurations by search path, choices of groups and mode; a call gives a copy."""
USUAL_CHOICES = {"prompts": "scenes", "eval": "scenes", "windows": "image", "method@method.base": "forecast"}
"""Choices of conf/config.yaml and conf/method/pricekv.yaml that a model's file can replace."""
MODEL_KEYS = {group: f"default_{group.rpartition('.')[2]}" for group in USUAL_CHOICES}
"""Keys of a model's file with its choices: `default_prompts`, `default_base` ..."""
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
        path = " ".join(f"{source.scheme()}://{source.path}" for source in self.sources)
        key = (path, config_path)
        if key not in _FILES:
            _FILES[key] = keep(super().load_config(config_path))
        loaded: ConfigResult | None = _FILES[key]()
        return loaded

    def __deepcopy__(self, _: Mapping[int, object]) -> "CachingRepository":
        return copy.copy(self)  # sources are replaced as a list, never changed in place


class CachingLoader(ConfigLoaderImpl):
    """Hydra's loader, which composes each combination of choices once per process.

    Other values are set on a copy, as Hydra does after composition.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = CachingRepository(config_search_path)

    def _load_configuration_impl(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        parsed = list(map(parse_word, overrides))
        if validate_sweep_overrides:
            self.validate_sweep_overrides_legal(parsed, run_mode=run_mode, from_shell=from_shell)
        named, given = [_name(override) for override in parsed], parsed
        if defaults := self._find_model_defaults(config_name, overrides, run_mode, without=named):
            overrides = [*overrides, *defaults]
            parsed = list(map(parse_word, overrides))
        kinds = list(map(_classify, parsed))
        # A key that is added or removed must stay before or after other words.
        apart = [kind == "value" and "key" not in kinds for kind in kinds]
        values, choices = list(compress(parsed, apart)), [*compress(overrides, map(not_, apart))]
        cfg = self._compose(config_name, choices, run_mode)
        self._apply_overrides_to_config(values, cfg)
        _describe(cfg, given)
        return cfg

    def _compose(self, config_name: str | None, words: Sequence[str], run_mode: RunMode) -> DictConfig:
        """Return a copy of the composition of words."""
        key = (str(self.get_search_path()), config_name, run_mode, *words)
        if key not in _COMPOSED:
            composed = super()._load_configuration_impl(config_name, [*words], run_mode, True, False)
            if len(_COMPOSED) >= MAX_COMPOSED:
                _COMPOSED.clear()
            _COMPOSED[key] = keep(composed)
        composed_copy: DictConfig = _COMPOSED[key]()
        return composed_copy

    def _find_model_defaults(
        self, config_name: str | None, overrides: Sequence[str], run_mode: RunMode, *, without: Sequence[str]
    ) -> list[str]:
        """Return words for the choices of the model's file that nothing else names.

        Args:
            config_name: the primary file.
            overrides: words of the command.
            run_mode: a sweep as a whole has no model.
            without: keys and groups that the words name.

        Raises:
            ConfigError: the model's file names no choice.
        """
        groups = [group for group in USUAL_CHOICES if group not in without]
        if config_name != "config" or run_mode is not RunMode.RUN or not groups:
            return []
        keys = [f"model.{key}" for key in (*MODEL_KEYS.values(), FILE_METRICS)]
        words = [
            word
            for word in overrides
            if _classify(one := parse_word(word)) == "choice" or one.key_or_group in keys
        ]
        cfg = self._compose(config_name, words, run_mode)
        choices = cfg.hydra.runtime.choices
        usual = [group for group in groups if choices.get(group) == USUAL_CHOICES[group]]  # not swept
        found = {group: MODEL_KEYS[group] for group in usual}
        if "eval" in found and choices.get("prompts") == "file" and cfg.model.get(FILE_METRICS) is not None:
            found["eval"] = FILE_METRICS
        return [
            f"{group}={self._check_choice(group, key, choice)}"
            for group, key in found.items()
            if (choice := cfg.model.get(key)) is not None
        ]

    def _check_choice(self, group: str, key: str, choice: object) -> str:
        """Return a model's choice of a group under a key as a word's value."""
        names = [choice] if isinstance(choice, str) else choice
        known = self.get_group_options(group.partition("@")[0])
        if not isinstance(names, Sequence) or not names or not all(name in known for name in names):
            choices = suggest(str(choice), known, group)
            raise ConfigError(f"model.{key}={show(choice)}: not a choice{choices}")
        return names[0] if isinstance(choice, str) else f"[{','.join(names)}]"


def forget_files() -> None:
    """Forget parsed files, so that those that were edited since are read again."""
    _FILES.clear()
    _COMPOSED.clear()


_parse_interpolation = lru_cache(maxsize=1024)(grammar_parser.parse)


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
    from hydra._internal.config_loader_impl import get_overrides_dirname  # Hydra 1.4 has moved it

    own = [override for override in overrides if not override.is_hydra_override()]
    form = cfg.hydra.job.config.override_dirname
    cfg.hydra.runtime.cwd = str(Path.cwd())
    cfg.hydra.overrides.task = [override.input_line for override in own]
    cfg.hydra.overrides.hydra = [override.input_line for override in overrides if override not in own]
    cfg.hydra.job.override_dirname = get_overrides_dirname(
        own, kv_sep=form.kv_sep, item_sep=form.item_sep, exclude_keys=form.exclude_keys
    )


def _name(override: Override) -> str:
    """Return the key or group of an override, with its package: `method@method.base`."""
    return override.key_or_group + (f"@{override.package}" if override.package else "")


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


def use_caching_loader() -> None:
    """Make Hydra 1.3 use `CachingLoader` in this process, and OmegaConf parse each interpolation once.

    Neither has a public way to choose them, so other versions of Hydra keep their own.
    """
    if not hydra.__version__.startswith("1.3."):
        return
    hydra._internal.hydra.ConfigLoaderImpl = CachingLoader  # type: ignore[misc, attr-defined]
    omegaconf.base.parse = _parse_interpolation  # type: ignore[attr-defined]
