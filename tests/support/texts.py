"""Golden texts: what the program writes about a fixture, as files that a reviewer reads."""

import os
from difflib import unified_diff

from tests.support.places import ROOT

TEXTS = ROOT / "tests" / "golden" / "texts"
WRITE = "KVBENCH_WRITE_TEXTS"
"""Environment variable with which a test writes its texts in place of comparing them."""


def check_text(name: str, text: str) -> None:
    """Fail with the lines that differ from a golden text; line ends count, spaces before them do not."""
    lines = [line.rstrip(" ") for line in text.split("\n")]
    path = TEXTS / name
    if WRITE in os.environ:
        path.write_text("\n".join(lines), encoding="utf-8", newline="")
    with path.open(encoding="utf-8", newline="") as file:
        wanted = file.read().split("\n")
    changed = "\n".join(unified_diff(wanted, lines, f"golden/texts/{name}", "now", lineterm="", n=1))
    assert not changed, f"{changed}\n\nif this is meant, set {WRITE}=1 and read the difference in git"
