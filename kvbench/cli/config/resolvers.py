"""Functions that files of `conf/` call in interpolations."""

import re

from omegaconf import OmegaConf


def use_resolvers() -> None:
    """Make `name_model` known to interpolations: `${name_model:<path>,<repository>,<otherwise>}`."""
    OmegaConf.register_new_resolver("name_model", name_model, replace=True)


def name_model(path: object, repo: object, otherwise: str) -> str:
    """Return the last part of a model's path or repository, as a folder's name; `otherwise` without either.

    >>> name_model("weights/SmolLM2-135M", None, "decoder"), name_model(None, "owner/Llama-3.2-1B", "decoder")
    ('SmolLM2-135M', 'Llama-3.2-1B')
    """
    words = re.split(r"[/\\\0\n]+", str(path or repo or "").rstrip("/"))
    return re.sub(r"^\W+|\.(gguf|safetensors)$", "", words[-1])[:100] or otherwise
