"""kvbench: KV-cache compression methods for autoregressive image models, on one engine, at one strict budget."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout kernels/, eval/ and conf/ lie beside this folder, in a wheel inside it; both import as kvbench.<name>.
# A top-level package called `kernels` would shadow the one that transformers looks for.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "run.py").is_file():
    __path__.append(str(_ROOT))
