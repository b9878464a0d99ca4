"""The page with its images in one file, for a reader without the run folders."""

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from kvbench.core.files import name_sample, read_bytes
from kvbench.eval.files.kinds import IMAGES
from kvbench.eval.files.pictures import open_picture

MAX_BYTES = 10 * 2**20
"""Maximum bytes of all images of a page, before base64, so that the page fits in an email."""
MAX_SIDE, QUALITY = 512, 85
"""Maximum side in pixels, and WebP quality, of an image."""
SMALL_BYTES = 16 * 2**10
"""Maximum bytes of an image file that is stored unchanged."""


def add_pictures(document: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    """Return the page's data with images in place of links to files.

    Samples are added worst first, each for all runs with the same samples, up to `MAX_BYTES`; other samples of images
    are left out of the lists of runs.
    """
    pictures: list[str] = []
    chosen: list[dict[int, int]] = [{} for _ in document["runs"]]
    space, complete = MAX_BYTES, True
    for number, index in _order_samples(document["runs"], document["metrics"]):
        run = document["runs"][number]
        folder = run["samples"].get("folder", f"{run['folder']}/{IMAGES.kind}")
        picture = _read_picture(Path(os.path.normpath(runs_dir / folder)), index)  # runs_dir may not exist
        if picture is None:
            continue
        kind, content = picture
        if len(content) > space:
            complete = False
            break
        space -= len(content)
        chosen[number][index] = len(pictures)
        pictures.append(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")
    runs = [
        {**run, "sheet": False} | ({"samples": _keep(run["samples"], picture_of)} if _has_images(run) else {})
        for run, picture_of in zip(document["runs"], chosen, strict=True)
    ]
    bundle = {"side": MAX_SIDE, "complete": complete, "pictures": pictures}
    return {**document, "runs": runs, "bundle": bundle}


def _has_images(run: Mapping[str, Any]) -> bool:
    return run["samples"]["kind"] == IMAGES.kind


def _order_samples(runs: list[Mapping[str, Any]], metrics: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield indices of run and sample, sample by sample, alternating between groups of runs of equal samples."""
    groups: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        if _has_images(run):
            groups.setdefault(run["samples"]["drawn"], []).append(number)
    for members in groups.values():
        # The reference first: all runs are shown beside it.
        members.sort(key=lambda number: runs[number]["reference"] is not None)
    orders = {
        drawn: _rank_samples([runs[number] for number in members], metrics)
        for drawn, members in groups.items()
    }
    for rank in range(max(map(len, orders.values()), default=0)):
        for drawn, order in orders.items():
            if rank < len(order):
                index = order[rank]
                yield from (
                    (number, index) for number in groups[drawn] if index in runs[number]["samples"]["index"]
                )


def _rank_samples(runs: Iterable[Mapping[str, Any]], metrics: Mapping[str, Any]) -> list[int]:
    """Return the indices of samples by their best rank among the worst of any run and metric."""
    ranks: dict[int, int] = {}
    for run in runs:
        samples = run["samples"]
        for index in samples["index"]:
            ranks.setdefault(index, len(samples["index"]))
        for name, values in samples["values"].items():
            sign = 1 if metrics[name]["better"] == "higher" else -1
            known = [
                (sign * value, index)
                for value, index in zip(values, samples["index"], strict=True)
                if value is not None
            ]
            for rank, (_, index) in enumerate(sorted(known)):
                ranks[index] = min(ranks[index], rank)
    return sorted(ranks, key=lambda index: (ranks[index], index))


def _read_picture(folder: Path, index: int) -> tuple[str, bytes] | None:
    """Return the format and content of an image; None if it cannot be read."""
    path = folder / name_sample(index, IMAGES.suffix)
    try:
        with open_picture(path) as image:
            if path.stat().st_size <= SMALL_BYTES:
                return "png", read_bytes(path)
            shown = image.convert("RGB")
        shown.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        shown.save(buffer, "WEBP", quality=QUALITY)
        return "webp", buffer.getvalue()
    except (OSError, ValueError):
        return None


def _keep(samples: Mapping[str, Any], pictures: Mapping[int, int]) -> dict[str, Any]:
    """Return the samples of a run that have an image, with the indices of these images."""
    positions = [position for position, index in enumerate(samples["index"]) if index in pictures]

    def pick(values: list[Any]) -> list[Any]:
        return [values[position] for position in positions]

    index = pick(samples["index"])
    return {
        **samples,
        "index": index,
        "prompt": pick(samples["prompt"]),
        "values": {name: pick(values) for name, values in samples["values"].items()},
        "picture": [pictures[sample] for sample in index],
    }
