"""kvbench: KV-cache compression methods for image and language models, compared on one engine at a strict budget."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.imports import note_imports
from kvbench.version import __version__ as __version__

if TYPE_CHECKING:
    from kvbench.cli.api import Comparison as Comparison
    from kvbench.cli.api import Difference as Difference
    from kvbench.cli.api import Run as Run
    from kvbench.cli.api import compare as compare
    from kvbench.cli.api import run as run
    from kvbench.core.config import UserError as UserError
    from kvbench.data.frames import runs_df as runs_df
    from kvbench.data.frames import samples_df as samples_df

# kernels/, eval/ and conf/ are next to this folder in a checkout, inside it in a wheel; they import as kvbench.<name>.
# A top-level package called `kernels` would shadow the one that transformers looks for.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "run.py").is_file():
    __path__.append(str(_ROOT))
note_imports()

_PUBLIC = {
    **dict.fromkeys(("run", "compare", "Run", "Comparison", "Difference"), "kvbench.cli.api"),
    **dict.fromkeys(("runs_df", "samples_df"), "kvbench.data.frames"),
    "UserError": "kvbench.core.config",
}
"""Module of each public name, imported on first use."""


def __getattr__(name: str) -> object:
    """Return a public name from its module."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names too, for completion."""
    return sorted([*globals(), *_PUBLIC])
