"""kvbench: `python run.py method=heatkv budget=0.04`; `python run.py --help` lists what can be chosen."""

import sys

# Completion in the shell fish looks for the word @hydra.main in a program.
if __name__ == "__main__":
    try:
        from kvbench.cli.entry import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)  # before the handler of Ctrl-C was installed
