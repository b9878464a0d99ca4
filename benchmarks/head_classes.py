"""Whether heads that HeadKV sorts early stay what they are: its Table 5, on a model with a full cache.

python benchmarks/head_classes.py [--model llamagen_tiny] [--prompts 48] [--group-at 100] [--thresholds 0.85,0.9,0.95]
Heads are sorted at the end of every line, as `method=headkv` sorts them once. The class at the first line at which the
cache is longer than `--group-at` is compared with that of every later line (HeadKV, arXiv:2605.20600, Table 5, whose
reference are classes of an early stage): the share of equal classes, and of heads that were called local and are global
later, over layers, heads, prompts and later lines.
"""

import argparse
from dataclasses import dataclass

import torch
from build import built, composed
from llamagen_loop import read_prompts
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.engine.cache import KVCache
from kvbench.methods.headkv import HeadKV
from kvbench.methods.view import View
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.noise import PromptNoise


@dataclass(kw_only=True)
class Classes(HeadKV):
    """Keeps everything and notes after every line which heads are local, at several thresholds."""

    thresholds: tuple[float, ...]

    def keep(self, view: View) -> None:
        """Sort the layer's heads once more."""
        if view.layer == 0 and view.segment.index == 0:
            self.found: list[Tensor] = []
        if view.segment.index < self._first:
            return
        for threshold in self.thresholds:
            self.threshold = threshold
            self.found.append(self._find_local(view))

    def gather(self) -> Tensor:
        """Return which heads were local, bool [lines, layers, thresholds, sequences, heads]."""
        shape = (-1, self.spec.layers, len(self.thresholds))
        return torch.stack(self.found).unflatten(0, shape)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llamagen_tiny")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--group-at", type=int, default=100)
    parser.add_argument("--thresholds", default="0.85,0.9,0.95")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    model = built(composed([f"model={options.model}", *options.overrides])["model"])
    assert isinstance(model, LlamaGenModel)
    model.load("cpu")
    thresholds = tuple(float(text) for text in options.thresholds.split(","))
    method = Classes(sinks=model.default_sinks, group_at=options.group_at, thresholds=thresholds)
    method.prepare(model.spec, Budget.parse(1, model.spec))
    cache = KVCache(model.spec, method, dtype=torch.float32)
    texts, parts = read_prompts(model, options.prompts), []
    for start in range(0, len(texts), 8):
        some = texts[start : start + 8]
        model.generate(some, cache, PromptNoise(0, range(start, start + len(some))))
        found = method.gather()
        parts.append(found[..., : len(some), :])  # both branches of a prompt have one class
    local = torch.cat(parts, 3)
    early, later = local[0], local[1:]
    print(
        f"{model.name}: {len(texts)} prompts, sorted beyond {options.group_at} tokens, {len(later)} later lines"
    )
    print(f"{'threshold':>9}{'local early':>13}{'same later':>12}{'local -> global':>17}")
    for index, threshold in enumerate(thresholds):
        first, rest = early[:, index], later[:, :, index]
        same = (rest == first).float().mean()
        turned = (first & ~rest).float().mean()
        print(f"{threshold:9g}{first.float().mean():13.1%}{same:12.2%}{turned:17.2%}")


if __name__ == "__main__":
    main()
