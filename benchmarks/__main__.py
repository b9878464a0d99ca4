"""Command line of the benchmarks: `python -m benchmarks <name> [options]`.

Every file of this folder is a program of the same name: it declares its options in `OPTIONS` and runs in `main`. The
programs need no installation, only a checkout as the working directory, and no Hydra, except those that call the
command line or the tests (`startup`, `mutations`).
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.support.arguments import add_options
from kvbench.core.devices import keep_freed_memory, use_device
from kvbench.core.gpus import resolve_device

PROGRAMS = tuple(
    sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("__"))
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmark; return its exit status."""
    overview = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of the engine and its kernels.",
        epilog="python -m benchmarks <name> --help describes a program.",
    )
    overview.add_argument("name", choices=PROGRAMS, metavar="name", help=", ".join(PROGRAMS))
    args = list(sys.argv[1:] if arguments is None else arguments)
    name = overview.parse_args(args[:1]).name
    program = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"{overview.prog} {name}",
        description=program.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, program.OPTIONS)
    options = parser.parse_args(args[1:])
    if getattr(options, "threads", None) is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    if "device" in options:
        options.device = resolve_device(options.device)
    try:
        use_device(getattr(options, "device", "cpu"))
        return program.main(options) or 0
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
