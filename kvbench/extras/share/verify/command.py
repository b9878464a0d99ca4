"""`kvbench verify FOLDER`: samples of recorded runs generated again and compared, for third parties."""

import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.console import say
from kvbench.core.config import MAX_SEED, ConfigError
from kvbench.core.files import find_obstacle, write_whole
from kvbench.data.verification import name_verification
from kvbench.extras.share.arguments import read_name, split_arguments
from kvbench.extras.share.verify.verdict import Choice, write_badge, write_document

USAGE = "kvbench verify FOLDER [samples=3] [seed=0] [out=FILE.json] [by=NAME] [weights=FOLDER] [code=PACKAGE,FOLDER...]"
KEYS = ("samples", "seed", "out", "by", "weights", "code")


def verify(arguments: Sequence[str]) -> bool:
    """Verify recorded runs, print a line for each, and write the outcome; return whether all are verified.

    Args:
        arguments: arguments after `verify`.

    Raises:
        ConfigError: an argument is wrong, or the folder holds no runs.
        OSError: an error of the disk.
    """
    folders, values = split_arguments(arguments, KEYS, USAGE)
    if len(folders) != 1:
        raise ConfigError(f"verify: {len(folders)} folders given, name one; {USAGE}")
    [folder] = folders
    samples = _read_count("samples", values.get("samples", "3"), 1, 10**6)
    choice = Choice(samples, _read_count("seed", values.get("seed", "0"), 0, MAX_SEED))
    weights = Path(values["weights"]).expanduser() if "weights" in values else None
    if weights is not None and not weights.is_dir():
        raise ConfigError(f"weights={weights}: no such folder")
    out = Path(values["out"]).expanduser() if "out" in values else name_verification(folder)
    if out.suffix != ".json":
        raise ConfigError(f"out={out}: must be a file name that ends with .json")
    if (problem := find_obstacle(out.parent)) is not None or out.is_dir():
        raise ConfigError(f"out={out}: cannot be written ({problem or 'it is a folder'})")
    by = read_name("by", values["by"]) if "by" in values else None
    code = open_code(values["code"].split(",") if "code" in values else ())
    from kvbench.extras.share.verify.dataset import verify_dataset  # these import torch
    from kvbench.extras.share.verify.folders import find_recorded
    from kvbench.extras.share.verify.recorded import RecordedJobs
    from kvbench.extras.share.verify.run import verify_run
    from kvbench.runs.record.provenance import provenance

    verdicts = []
    with tempfile.TemporaryDirectory(prefix="kvbench-verify-") as scratch:
        make_job = RecordedJobs(Path(scratch, "runs"), code, weights)
        recorded = find_recorded(folder, Path(scratch, "staged"))
        if recorded[0].dataset is not None:
            verdicts.append(verify_dataset(folder, [run.folder for run in recorded]))
            say(verdicts[-1].describe())
        for run in recorded:
            verdicts.append(verify_run(run, make_job, choice))
            say(verdicts[-1].describe())
    known = provenance("cpu", None)
    here = {name: known[name] for name in ("code", "versions", "machine")}
    write_whole(out, write_document(folder, choice, verdicts, here, by))
    say(f"outcome: {out}")
    say(f"for the card: {write_badge(folder, choice, verdicts, by)}")
    return all(verdict.status == "verified" for verdict in verdicts)


def open_code(names: Sequence[str]) -> list[str]:
    """Make modules in named folders importable; return the top-level names of code that may be run.

    Raises:
        ConfigError: a name is neither a folder nor a package's.
    """
    allowed: list[str] = []
    for name in names:
        folder = Path(name).expanduser()
        if name and folder.is_dir():  # an empty name would be the working directory
            sys.path.insert(0, str(folder.absolute()))
            importlib.invalidate_caches()
            allowed += [path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()]
        elif name.isidentifier() and name not in sys.stdlib_module_names:
            allowed.append(name)
        else:
            raise ConfigError(f"code={name}: neither a folder nor the name of a package")
    return allowed


def _read_count(key: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(f"{key}={text:.40}: must be a whole number from {least} to {most}")
    return int(text)
