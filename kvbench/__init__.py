"""kvbench: KV-cache compression methods for autoregressive image models, on one engine, at one strict budget."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core import moved

if TYPE_CHECKING:
    from kvbench.data.frames import runs_df as runs_df
    from kvbench.data.frames import samples_df as samples_df

__version__ = "0.1.0"

# kernels/, eval/ and conf/ are next to this folder in a checkout, inside it in a wheel; they import as kvbench.<name>.
# A top-level package called `kernels` would shadow the one that transformers looks for.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "run.py").is_file():
    __path__.append(str(_ROOT))
moved.install()


def __getattr__(name: str) -> object:
    """Return `runs_df` or `samples_df`, imported on first use."""
    if name in ("runs_df", "samples_df"):
        from kvbench.data import frames

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
