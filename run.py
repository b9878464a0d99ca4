"""kvbench: `python run.py method=heatkv budget=0.04`; `python run.py --help` lists what can be chosen."""

import sys
from importlib.util import find_spec

if find_spec("hydra") is None:
    sys.exit(
        "error: kvbench is not installed for this Python; run `make demo`, then `source .venv/bin/activate`"
    )

from kvbench.cli.app import main

if __name__ == "__main__":
    main()
