"""Share of a run's images that are nearest to the picture that their prompt names, for `infinity_emoji`.

Each image is compared with all pictures of the list, in all places, mirrored and not, on the background of the prompt;
the nearest one has the smallest squared error. Chance is one name in 290.

python -m benchmarks nearest_picture --runs RUN [MORE ...] --pictures FOLDER
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.arguments import Option
from benchmarks.support.table import Table
from kvbench.eval.files.pictures import open_picture as open_image
from kvbench.eval.protocol.shares import wilson_interval
from kvbench.runs.record.folder import RunFolder, RunName
from kvbench.runs.record.samples import find_sample
from kvbench.scenes.names import Name
from kvbench.training.pictures import BACKGROUNDS, VARIANTS, draw_variant, list_names, open_picture

OPTIONS = {
    "runs": Option([], "folders of runs of infinity_emoji", type=str),
    "pictures": Option("", "folder of the unpacked npm package, as train.pictures"),
}
Floats = NDArray[np.float32]


def main(options: argparse.Namespace) -> None:
    """Print a row per run.

    Raises:
        ValueError: a run or the pictures cannot be read.
    """
    if not (options.runs and options.pictures):
        raise ValueError("--runs and --pictures must name runs and a folder")
    folder = Path(options.pictures).expanduser()
    try:
        names = {name.caption: name for name in list_names(folder)}
        table = Table({"images": "d", "nearest": ">24", "one of the 5 nearest": ">24"}, "run", 36)
        for run in map(Path, options.runs):
            images = read_images(run, names)
            images = read_images(run, names)
            ranks = [
                rank
                for background in BACKGROUNDS
                if (some := [one for one in images if one[0].background == background])
                for rank in rank_names(some, background, folder, names)
            ]
            table.add(run.name, len(ranks), *(format_share(np.array(ranks) < top) for top in (1, 5)))
    except OSError as error:
        raise ValueError(str(error)) from None


def read_images(run: Path, names: dict[str, Name]) -> list[tuple[Name, Floats]]:
    """Return the name and the pixels [64 * 64 * 3] of each image of a run.

    Raises:
        OSError: an image cannot be read.
        ValueError: the run has no samples, or a prompt is no caption.
    """
    records = RunFolder(run.parents[1], run.parent.name, RunName.of(run.name), make=False).recorded()
    if not records:
        raise ValueError(f"--runs {run}: has no samples")
    found = []
    for index, record in sorted(records.items()):
        if (caption := str(record["prompt"])) not in names:
            raise ValueError(f"--runs {run}: {caption!r} is no caption of the pictures")
        with open_image(find_sample(run, index)) as image:
            found.append((names[caption], np.asarray(image.convert("RGB"), np.float32).ravel()))
    return found


def rank_names(
    images: list[tuple[Name, Floats]], background: str, folder: Path, names: dict[str, Name]
) -> list[int]:
    """Return how many other pictures are nearer to each image than the one that it names, on one background."""
    pictures = [name.picture for name in names.values() if name.background == background]
    opened = [open_picture(folder, picture) for picture in pictures]
    drawn = np.stack(
        [draw_variant(one, background, variant).ravel() for one in opened for variant in VARIANTS]
    )
    candidates, pixels = drawn.astype(np.float32), np.stack([image for _, image in images])
    squares = (candidates**2).sum(1) - 2 * pixels @ candidates.T  # and a constant for each image
    errors = squares.reshape(len(images), len(pictures), len(VARIANTS)).min(2)
    own = np.array([pictures.index(name.picture) for name, _ in images])
    ranks: list[int] = (errors < np.take_along_axis(errors, own[:, None], 1)).sum(1).tolist()
    return ranks


def format_share(hits: NDArray[np.bool_]) -> str:
    """Return a share with its 95 % interval."""
    found = wilson_interval(float(hits.mean()), len(hits))
    return f"{hits.mean():.3f} [{found.low:.3f}, {found.high:.3f}]"
