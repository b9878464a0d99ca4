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
from kvbench.extras.share.names import read_name

USAGE = "kvbench verify FOLDER [samples=3] [seed=0] [out=FILE.json] [by=NAME] [weights=FOLDER] [code=PACKAGE,FOLDER...]"
KEYS = ("samples", "seed", "out", "by", "weights", "code")


class VerifyRequest(NamedTuple):
    """Request to verify recorded runs.

    Attributes:
        folder: a run, a folder of runs or a published dataset.
        samples: samples of each run that are drawn again.
        seed: seed of their choice.
        out: file of the outcome; None for one beside the folder.
        weights: folder of weights, prompts and other files that configurations name, for those that are not here.
        code: packages, and folders of modules, beside kvbench whose code may be run.
        by: name of the verifier, for the outcome; None if it is not given.
    """

    folder: Path
    samples: int = 3
    seed: int = 0
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
    if {"-h", "--help"} & set(words):
        say(f"usage: {USAGE}")
        return True
    request = parse_words(words)
    from kvbench.data.verification import name_verification
    from kvbench.extras.share.verify.dataset import verify_dataset
    from kvbench.extras.share.verify.document import write_badge, write_document
    from kvbench.extras.share.verify.folders import find_recorded
    from kvbench.extras.share.verify.recorded import RecordedJobs
    from kvbench.extras.share.verify.run import Choice, verify_run
    from kvbench.runs.record.provenance import provenance

    out, choice = request.out or name_verification(request.folder), Choice(request.samples, request.seed)
    if (problem := find_obstacle(out.parent)) is not None:
        raise ConfigError(f"out={out}: cannot be written ({problem})")
    code = open_code(request.code)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="kvbench-verify-") as scratch:
        make_job = RecordedJobs(Path(scratch, "runs"), code, request.weights)
        recorded = find_recorded(request.folder, Path(scratch, "staged"))
        if recorded[0].dataset is not None:
            verdicts.append(verify_dataset(request.folder, [one.folder for one in recorded]))
            say(verdicts[-1].describe())
        for one in recorded:
            verdicts.append(verify_run(one, make_job, choice))
            say(verdicts[-1].describe())
    here = {
        name: value
        for name, value in provenance("cpu", None).items()
        if name in ("code", "versions", "machine")
    }
    write_whole(out, write_document(request.folder, choice, verdicts, here, request.by))
    say(f"outcome: {out}")
    say(f"for the card: {write_badge(request.folder, choice, verdicts)}")
    return all(one.status == "verified" for one in verdicts)


def open_code(names: Sequence[str]) -> list[str]:
    """Make modules of named folders importable; return the top-level names that may be run.

    Raises:
        ConfigError: a package cannot be imported, or a folder holds no module.
    """
    allowed: list[str] = []
    for name in names:
        folder = Path(name).expanduser()
        if folder.is_dir():
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
    folders, values = [], {}
    for word in words:
        key, equals, value = word.partition("=")
        if Path(word).is_dir() or not equals:
            folders.append(Path(word).expanduser())
        elif key not in KEYS or not value:
            raise ConfigError(f"verify: {word}: no such key or no value; {USAGE}")
        else:
            values[key] = value
    if len(folders) != 1:
        raise ConfigError(f"verify: {len(folders)} folders given, name one; {USAGE}")
    counts = {
        key: _read_count(key, values[key], least, most)
        for key, least, most in (("samples", 1, 10**6), ("seed", 0, MAX_SEED))
        if key in values
    }
    paths = {key: Path(values[key]).expanduser() for key in ("out", "weights") if key in values}
    if "weights" in paths and not paths["weights"].is_dir():
        raise ConfigError(f"weights={values['weights']}: no such folder")
    if "out" in paths and paths["out"].suffix != ".json":
        raise ConfigError(f"out={values['out']}: must be a file name that ends with .json")
    code = tuple(values["code"].split(",")) if "code" in values else ()
    by = read_name("by", values["by"]) if "by" in values else None
    return VerifyRequest(folders[0], code=code, by=by, **counts, **paths)  # type: ignore[arg-type]


def _read_count(key: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(f"{key}={text:.40}: must be a whole number from {least} to {most}")
    return int(text)
