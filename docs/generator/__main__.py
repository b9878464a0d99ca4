"""Command that rewrites the lists in the pages and draws their figure: `make docs` runs it in `docs/`."""

from pathlib import Path

from generator.figures import write_figures
from generator.lists import write_lists

ROOT = Path(__file__).resolve().parents[2]
write_lists(ROOT)
write_figures(ROOT)
