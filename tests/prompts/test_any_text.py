"""Any text of a prompt file reaches every page, table and picture of its run unchanged, or is refused by its line."""

import io
import json
import tempfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from kvbench.core.config import ConfigError
from kvbench.dashboard.page import render_bundle
from kvbench.data.frames import export_frames, samples_df
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import read_samples
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.prompts.files import PromptFile
from kvbench.report.latex import escape
from kvbench.runs.score.contact_sheet import draw_contact_sheet
from tests.support.results import made_up
from tests.support.run_folders import paint, write_run

NASTY = (
    "\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\ufeff", "\u202e", "\x1b[31m", "\r\n", "\n\n", "</script>",
    "]]>",
)  # fmt: skip
texts = st.lists(st.text(max_size=30) | st.sampled_from(NASTY), max_size=5).map("".join)
metadata = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
records = st.lists(st.tuples(st.just("a red ring ") | texts, metadata), min_size=1, max_size=4)


def is_bounded(value: object) -> bool:
    """Whether all numbers of a value have 64 bits, and squares that are finite."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_bounded, value.values() if isinstance(value, dict) else value))
    if isinstance(value, int):
        return -(2**63) < value < 2**63
    return not isinstance(value, float) or abs(value) <= 1e60


def can_be_stored(value: object) -> bool:
    """Whether strict JSON in UTF-8 holds a value, without null characters and with bounded numbers."""
    if not is_bounded(value):
        return False
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return b"\\u0000" not in written.replace(rb"\\", b"")


@settings(deadline=None, max_examples=60)
@given(records, st.booleans())
def test_a_file_is_read_unchanged_or_its_first_bad_line_is_named(
    rows: list[tuple[str, object]], ascii_only: bool
) -> None:
    lines = [json.dumps({"prompt": text, "note": note}, ensure_ascii=ascii_only) for text, note in rows]
    bad = next((n for n, row in enumerate(rows, 1) if not row[0].strip() or not can_be_stored(row)), None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        path.write_bytes("\r\n".join(lines).encode(errors="surrogatepass"))
        if bad is None:
            prompts = PromptFile(str(path)).load()
            assert [(prompt.text, prompt.meta["note"]) for prompt in prompts] == rows
            return
        with pytest.raises(ConfigError) as caught:
            PromptFile(str(path)).load()
    assert "\n" not in str(caught.value)
    is_utf8 = not any("\ud800" <= letter <= "\udfff" for line in lines for letter in line)
    assert f"line {bad}:" in str(caught.value) or not is_utf8


@settings(deadline=None, max_examples=3, phases=(Phase.generate,))  # an example has many texts
@given(st.lists(texts.filter(can_be_stored), min_size=24, max_size=24))
def test_texts_pass_all_stages_after_a_run(prompts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        samples = [(text, {"note": text, "answer": text}, paint(90)) for text in prompts]
        runs = (("full", "full-0"), ("h2o", "h2o-1"))
        results = [made_up(method, 0.5, {}, run=run, n=len(prompts)) for method, run in runs]
        folders = [write_run(root / "runs", run, samples) for run in results]
        read = read_samples(folders[1] / "samples.jsonl")
        assert [read[index].prompt for index in range(len(prompts))] == prompts
        images = [ImageSet(folder) for folder in folders]
        sheet = draw_contact_sheet(images[1], images[0], {}, "h2o, 0.5", "h2o")
        assert Image.open(io.BytesIO(sheet)).format == "PNG"
        export_frames(root / "runs", "parquet")
        export_frames(root / "runs", "csv")
        for frame in (
            samples_df(folders[1:]),
            pl.read_parquet(root / "runs" / "samples.parquet")[: len(prompts)],
        ):
            assert frame["prompt"].to_list() == prompts
        page = render_bundle(root / "runs", folders)
        document = json.loads(page.split('id="document">')[1].split("</script>")[0])
        assert set(prompts) <= {one for one in document["shared"] if isinstance(one, str)}
        prepare_dataset(read_published(folders[1:]), root / "set", "mit")
        published = pl.read_parquet(root / "set" / "data" / "samples.parquet")
        assert published["prompt"].to_list()[: len(prompts)] == prompts
    for text in prompts:
        assert escape(text).splitlines() in ([], [escape(text)])
