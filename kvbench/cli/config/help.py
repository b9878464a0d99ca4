"""Help on one screen, from the header of Hydra's long help."""

from importlib.resources import files

import yaml

HELP = ("-h", "--help", "help")


def read_help() -> str:
    """Return the help as `conf/config.yaml` has it; `--help -v` goes on with every choice and key."""
    header: str = yaml.safe_load(read_config())["hydra"]["help"]["header"]
    return header.rstrip()


def read_config() -> str:
    """Return the text of `conf/config.yaml`."""
    return files("kvbench.conf").joinpath("config.yaml").read_text(encoding="utf-8")
