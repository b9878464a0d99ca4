"""`task=weights`: download of a model's weights, and list of its parts."""

from omegaconf import DictConfig

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.console import say
from kvbench.core.settings import Settings
from kvbench.models.base import Model
from kvbench.models.files.hub import format_bytes
from kvbench.models.files.stored import list_files


def fetch_weights(cfg: DictConfig, _: Settings) -> None:
    """Run `task=weights`: fetch, convert and stage what the model reads; list its parts and their bytes."""
    model: Model = instantiate(cfg.model)
    model.prepare()
    for part, source in model.list_sources().items():
        files = list_files(source.locate())
        about = source.describe()
        size = format_bytes(sum(file.stat().st_size for file in files))
        commit = f", commit {about['commit']}" if about.get("commit") else ""
        say(f"{part}: {size} in {source.locate()}{commit}, sha256 {about['sha256']}")
