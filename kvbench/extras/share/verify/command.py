"""`kvbench verify FOLDER`: samples of recorded runs drawn again and compared, by somebody else than who drew them."""

import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.cli.console import say
from kvbench.core.config import MAX_SEED, ConfigError
from kvbench.core.files import find_obstacle, write_whole
from kvbench.data.verification import name_verification
from kvbench.extras.share.verify.verdict import Choice, write_badge, write_document
from kvbench.extras.share.words import read_name, split_words

USAGE = "kvbench verify FOLDER [samples=3] [seed=0] [out=FILE.json] [by=NAME] [weights=FOLDER] [code=PACKAGE,FOLDER...]"
KEYS = ("samples", "seed", "out", "by", "weights", "code")


class VerifyRequest(NamedTuple):
    """Request to verify recorded runs.

    Attributes:
        folder: a run, a folder of runs or a published dataset.
        choice: choice of samples of each run that are drawn again.
        out: file of the outcome; None for one beside the folder.
        weights: folder of weights, prompts and other files that configurations name, for those that are not here.
        code: packages, and folders of modules, beside kvbench whose code may be run.
        by: name of the verifier, for the outcome; None if it is not given.
    """

    folder: Path
    choice: Choice = Choice(3, 0)
    out: Path | None = None
    weights: Path | None = None
    code: tuple[str, ...] = ()
    by: str | None = None


def verify(words: Sequence[str]) -> bool:
    """Verify recorded runs, print a line for each, and write the outcome; return whether all are verified.

    Args:
        words: words of the command after `verify`.

    Raises:
        ConfigError: a word is unknown, or the folder holds no runs.
        OSError: an error of the disk.
    """
    folder, choice, given, weights, names, by = parse_words(words)
    from kvbench.extras.share.verify.dataset import verify_dataset
    from kvbench.extras.share.verify.folders import find_recorded
    from kvbench.extras.share.verify.recorded import RecordedJobs
    from kvbench.extras.share.verify.run import verify_run
    from kvbench.runs.record.provenance import provenance

    out = given or name_verification(folder)
    if (problem := find_obstacle(out.parent)) is not None or out.is_dir():
        raise ConfigError(f"out={out}: cannot be written ({problem or 'it is a folder'})")
    code = open_code(names)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="kvbench-verify-") as scratch:
        make_job = RecordedJobs(Path(scratch, "runs"), code, weights)
        recorded = find_recorded(folder, Path(scratch, "staged"))
        if recorded[0].dataset is not None:
            verdicts.append(verify_dataset(folder, [one.folder for one in recorded]))
            say(verdicts[-1].describe())
        for one in recorded:
            verdicts.append(verify_run(one, make_job, choice))
            say(verdicts[-1].describe())
    known = provenance("cpu", None)
    here = {name: known[name] for name in ("code", "versions", "machine")}
    write_whole(out, write_document(folder, choice, verdicts, here, by))
    say(f"outcome: {out}")
    say(f"for the card: {write_badge(folder, choice, verdicts, by)}")
    return all(one.status == "verified" for one in verdicts)


def open_code(names: Sequence[str]) -> list[str]:
    """Make modules of named folders importable; return the top-level names that may be run.

    Raises:
        ConfigError: a package cannot be imported, or a folder holds no module.
    """
    allowed: list[str] = []
    for name in names:
        folder = Path(name).expanduser()
        if name and folder.is_dir():  # an empty name would be the working directory
            modules = [
                path.stem for path in sorted(folder.iterdir()) if path.suffix == ".py" or path.is_dir()
            ]
            if not modules:
                raise ConfigError(f"code={name}: holds no Python module")
            sys.path.insert(0, str(folder.absolute()))
            importlib.invalidate_caches()
            allowed += modules
        elif name.isidentifier() and name not in sys.stdlib_module_names:
            allowed.append(name)
        else:
            raise ConfigError(f"code={name}: neither a folder nor the name of a package")
    return allowed


def parse_words(words: Sequence[str]) -> VerifyRequest:
    """Parse the words of the command.

    Raises:
        ConfigError: a word is unknown or has a wrong value, or not one folder is named.
    """
    folders, values = split_words(words, KEYS, USAGE)
    if len(folders) != 1:
        raise ConfigError(f"verify: {len(folders)} folders given, name one; {USAGE}")
    samples = _read_count("samples", values.get("samples", "3"), 1, 10**6)
    seed = _read_count("seed", values.get("seed", "0"), 0, MAX_SEED)
    out, weights = (Path(values[key]).expanduser() if key in values else None for key in ("out", "weights"))
    if weights is not None and not weights.is_dir():
        raise ConfigError(f"weights={weights}: no such folder")
    if out is not None and out.suffix != ".json":
        raise ConfigError(f"out={out}: must be a file name that ends with .json")
    code = tuple(values["code"].split(",")) if "code" in values else ()
    by = read_name("by", values["by"]) if "by" in values else None
    return VerifyRequest(folders[0], Choice(samples, seed), out, weights, code, by)


def _read_count(key: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(f"{key}={text:.40}: must be a whole number from {least} to {most}")
    return int(text)
