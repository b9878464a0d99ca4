"""The command line as `python -m kvbench`."""

from kvbench.cli.entry import main

if __name__ == "__main__":
    main()
