"""Command that rewrites the lists in the pages: `make docs` runs it in `docs/`."""

from pathlib import Path

from generator.lists import write_lists

write_lists(Path(__file__).resolve().parents[2])
