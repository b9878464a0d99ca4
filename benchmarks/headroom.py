"""What the cache of the embedded model is worth: paired PSNR of fixed choices of (source scale, layer) blocks.

A greedy search on its own prompts adds blocks to the sink by gain per token; what it chose is then measured on others,
beside no past at all, the sink alone and the first scales: python benchmarks/headroom.py [--prompts 256] [--search 16]
Finished runs of the same prompts and seed are compared with the search image by image: [--against RUN_FOLDER ...]
"""

import argparse
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from build import built, composed
from torch import Tensor
from tqdm import tqdm

from kvbench.core.budget import Budget
from kvbench.data.frames import list_samples
from kvbench.engine.cache import KVCache
from kvbench.eval.protocol.intervals import bootstrap
from kvbench.methods.base import Method
from kvbench.methods.view import View
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import PromptNoise
from kvbench.scenes.grammar import evaluation_prompts

BATCH = 8
Block = tuple[int, int]
"""(source scale, layer), all heads."""


@dataclass
class Blocks(Method):
    """Keep the named blocks, drop the others as soon as they were seen."""

    kept: frozenset[Block]
    static: ClassVar[bool] = True

    def keep(self, view: View) -> Tensor:
        """Slots whose scale is kept in this layer."""
        chosen = torch.tensor([(scale, view.layer) in self.kept for scale in range(view.segment.index + 1)])
        return chosen[view.segment_ids.clamp(min=0)]


class Measure:
    """PSNR in dB against the full cache, on prompts and noise of its own."""

    def __init__(self, model: InfinityModel, count: int, seed: int) -> None:
        self.model, self.seed = model, seed
        self.prompts = [str(line["prompt"]) for line in evaluation_prompts(count, seed)]
        self.reference = self._images(every_block(model))

    def __call__(self, kept: frozenset[Block]) -> float:
        """Return the mean over images; those without any difference count as 60 dB."""
        return float(self.each(kept).clamp(max=60).mean())

    def each(self, kept: frozenset[Block]) -> Tensor:
        """Return the value of each image [n], infinite where there is no difference."""
        error = (self._images(kept) - self.reference).square().mean((1, 2, 3))
        return 10 * torch.log10(255**2 / error)

    def _images(self, kept: frozenset[Block]) -> Tensor:
        method = Blocks(kept)
        method.prepare(self.model.spec, Budget.parse(1, self.model.spec))
        cache = KVCache(self.model.spec, method, dtype=torch.float32)
        parts = []
        for start in range(0, len(self.prompts), BATCH):
            texts = self.prompts[start : start + BATCH]
            noise = PromptNoise(self.seed, range(start, start + len(texts)))
            parts.append(self.model.generate(texts, cache, noise))
        return torch.cat(parts).float()


def every_block(model: InfinityModel, scales: int | None = None) -> frozenset[Block]:
    """All layers of the first `scales` scales, of all but the last by default."""
    scales = len(model.spec.segments) - 1 if scales is None else scales
    return frozenset((scale, layer) for scale in range(scales) for layer in range(model.spec.layers))


def tokens(model: InfinityModel, kept: frozenset[Block]) -> int:
    """Tokens one sequence holds at the end."""
    return sum(model.spec.lengths[scale] * model.spec.heads for scale, _ in kept)


def search(
    model: InfinityModel, measure: Measure, shares: Sequence[float]
) -> Iterator[tuple[float, frozenset[Block]]]:
    """Greedy choices at rising budgets; a block's gain per token is looked up again only when it leads."""
    kept, score = every_block(model, 1), measure(every_block(model, 1))
    queue = [(-float("inf"), -1, block) for block in sorted(every_block(model) - kept)]
    for share in shares:
        capacity, waiting, rounds = share * model.spec.full_tokens, [], len(kept)
        with tqdm(desc=f"search {share:.0%}", unit="choice") as bar:
            while queue:
                gain, age, block = heapq.heappop(queue)
                if tokens(model, kept | {block}) > capacity:
                    waiting.append((gain, age, block))
                elif age == rounds:
                    if gain >= 0:  # nothing that fits helps
                        waiting.append((gain, age, block))
                        break
                    kept, score, rounds = kept | {block}, measure(kept | {block}), rounds + 1
                else:
                    gained = (measure(kept | {block}) - score) / model.spec.lengths[block[0]]
                    heapq.heappush(queue, (-gained, rounds, block))
                    bar.update()
        queue = [(-float("inf"), -1, block) for _, _, block in [*queue, *waiting]]
        yield share, kept


def print_differences(folder: Path, measure: Measure, searched: Mapping[str, Tensor]) -> None:
    """Print by how much the images of a finished run are ahead of those of each searched choice, with 95 % intervals.

    Args:
        folder: of the run.
        measure: of the same prompts.
        searched: PSNR of each image under each choice.

    Raises:
        SystemExit: the run is of other prompts or another seed.
    """
    rows = list_samples(folder)
    drawn = [(row["index"], row["prompt"], row["seed"]) for row in rows]
    if drawn != [(i, prompt, measure.seed) for i, prompt in enumerate(measure.prompts)]:
        raise SystemExit(
            f"{folder}: its {len(rows)} images are not of the {len(measure.prompts)} prompts measured here"
        )
    for name, values in searched.items():
        ahead = [
            float(row["psnr"]) - value
            for row, value in zip(rows, values.tolist(), strict=True)
            if isinstance(row.get("psnr"), float) and value < torch.inf
        ]
        interval = bootstrap(ahead)
        assert interval is not None
        mean = sum(ahead) / len(ahead)
        print(
            f"{folder.name} over {name}: {mean:+.2f} [{interval.low:.2f}, {interval.high:.2f}] dB, n = {len(ahead)}"
        )


def main() -> None:
    """Prints tokens and PSNR of every choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--search", type=int, default=16)
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="folders of finished runs with eval=psnr"
    )
    options = parser.parse_args()
    model = built(composed()["model"])
    model.load("cpu")
    measure = Measure(model, options.prompts, 0)
    choices = {"no past": frozenset[Block](), "sink alone": every_block(model, 1)}
    choices |= {f"first {n} scales": every_block(model, n) for n in (2, 3, 4)}
    for share, kept in search(model, Measure(model, options.search, 5), (0.04, 0.1, 0.2)):
        choices[f"searched, {share:.0%}"] = kept
    searched = {}
    for name, kept in choices.items():
        share, values = tokens(model, kept) / model.spec.full_tokens, measure.each(kept)
        print(f"{name:16s} {share:6.1%} of the tokens   {values.clamp(max=60).mean():6.2f} dB")
        if name.startswith("searched"):
            searched[name] = values
            layers = {s: [layer for scale, layer in sorted(kept) if scale == s] for s, _ in sorted(kept)}
            print("   layers by source scale:", "; ".join(f"{s}: {layers[s]}" for s in layers))
    for folder in options.against:
        print_differences(folder, measure, searched)


if __name__ == "__main__":
    main()
