"""kvbench: KV-cache compression methods for autoregressive image models, on one engine, at one strict budget."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.data.frames import runs_df as runs_df
    from kvbench.data.frames import samples_df as samples_df

__version__ = "0.1.0"

# In a checkout kernels/, eval/ and conf/ lie beside this folder, in a wheel inside it; both import as kvbench.<name>.
# A top-level package called `kernels` would shadow the one that transformers looks for.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "run.py").is_file():
    __path__.append(str(_ROOT))


def __getattr__(name: str) -> object:
    """Return what the package offers itself, `runs_df` and `samples_df`, which import more than most commands need."""
    if name in ("runs_df", "samples_df"):
        from kvbench.data import frames

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
