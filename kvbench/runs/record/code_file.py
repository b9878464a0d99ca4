"""Record of a run's code in its folder: its files in code.json, and copies of files that no commit holds."""

import json
from collections.abc import Mapping
from pathlib import Path

from kvbench.core.checkout import ROOT, run_git
from kvbench.core.files import parse_json, read_text
from kvbench.core.source import Code
from kvbench.runs.record.folder import RunFolder
from kvbench.runs.record.results import FILE as RESULTS_FILE

FILE = "code.json"
SOURCE = "source"
"""Subfolder of a run with copies of code."""
SHOWN = 3
"""Maximum number of files that a message names."""


def write_code(folder: RunFolder, plain: str, codes: Mapping[str, Code]) -> None:
    """Write the code of a run's parts (method, model) into its folder; classes that match a pin have no files in it.

    Files that kvbench's checkout has not committed, and files outside it, are copied to source/. `plain` is the hash of
    the run's identity without its code.
    """
    sources = {module: source for code in codes.values() for module, source in code.sources.items()}
    for module in _list_uncommitted({module: path for module, (path, _) in sources.items()}):
        path, content = sources[module]
        name = module.replace(".", "/") + ("/__init__" if path and path.name == "__init__.py" else "")
        folder.write(f"{SOURCE}/{name}{path.suffix if path else '.py'}", content)
    parts = {name: {"sha256": code.sha256, "files": code.files} for name, code in codes.items()}
    folder.write(FILE, json.dumps({"plain": plain, **parts}, indent=1))


def _list_uncommitted(paths: Mapping[str, Path | None]) -> list[str]:
    """Return the modules whose files are outside kvbench's checkout, or that it has not committed."""
    inside = {module: path for module, path in paths.items() if path and path.resolve().is_relative_to(ROOT)}
    if not inside:  # without files, git would list the whole checkout
        return sorted(paths)
    files = map(str, inside.values())
    status = run_git("status", "--porcelain", "--untracked-files=all", "--ignored", "--", *files)
    if status is None:  # no checkout
        return sorted(paths)
    changed = {ROOT / line[3:].strip('"') for line in status.splitlines()}
    return [module for module in sorted(paths) if module not in inside or inside[module].resolve() in changed]


def describe_change(
    folder: Path, plain: str, codes: Mapping[str, Code], released: Mapping[str, str]
) -> str | None:
    """Return a line on the files that changed since the latest run of equal settings; None if none changed.

    `released` stands for the files of parts that are as released, which have none in their record.
    """
    label, _, _ = folder.name.rpartition("-")
    others = [path for path in folder.parent.glob(f"{label}-*/{FILE}") if path.parent != folder]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            record = parse_json(read_text(path))
            known = {part: record[part]["files"] for part in codes if record["plain"] == plain}
        except (OSError, ValueError, KeyError, TypeError):  # a damaged record of another run does no harm
            continue
        names = [name for part in known for name in list_changed(known[part], codes[part].files, released)]
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
            finished = (path.parent / RESULTS_FILE).is_file()
            state = "which stays" if finished else "which is unfinished and is not resumed"
            return f"{folder.name}: made anew, its code differs from {path.parent.name}, {state}: {shown}"
    return None


def list_changed(
    before: Mapping[str, str], after: Mapping[str, str], released: Mapping[str, str]
) -> list[str]:
    """Return the files that were changed, added or removed; a file that a side lacks is as released."""
    sides = ({**released, **before}, {**released, **after})
    return [name for name in sorted({*before, *after}) if sides[0].get(name) != sides[1].get(name)]
