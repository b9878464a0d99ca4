# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Add a method
#
# A method decides which tokens a cache keeps. `h2o` and `snapkv` keep those that receive most attention. `random` keeps
# a random choice, which is hard to beat on `infinity_tiny`: tokens that receive little attention now may be needed
# later. The method below combines both. It is a lottery in which a token's chance is the attention that it receives.
#
# Each token gets a number u between 0 and 1, and tokens with the highest u^(1/w) stay, where w is their attention. This
# is a weighted sample without replacement (Efraimidis and Spirakis, 2006). The numbers u are multiples of the golden
# ratio, which are spread more evenly than random numbers, and a token keeps its number.
#
# A method that scores tokens derives from `Scored`, which handles the budget and the sinks.

# %%
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View

GOLDEN, PLASTIC = 0.6180339887, 0.7548776662


@dataclass
class Lottery(Scored):
    """Keep the sinks and a sample of all other tokens so far, weighted by attention; an even share of B in every head.

    Attributes:
        power: of the attention; 0 draws blindly, a large one keeps what receives most.
    """

    power: float = 1.0

    def score(self, view: View) -> Tensor:
        """Return log(u) / attention^power, float32 [rows, slots]; other heads have other numbers u."""
        head = (
            view.layer * view.heads
            + torch.arange(len(view.position), device=view.position.device) % view.heads
        )
        drawn = (view.position * GOLDEN + head[:, None] * PLASTIC) % 1
        return drawn.clamp(1e-6, 1 - 1e-6).log() / view.mass().clamp(min=1e-9) ** self.power


# %% [markdown]
# `conf/method/` is the registry: a file there names the class and its settings. In a notebook, Hydra's config store
# does the same. (A run belongs to its settings and to the code of its method: after an edit, the same settings give a
# new run, and the old one stays.)

# %%
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store(
    group="method", name="lottery", node={"_target_": "__main__.Lottery", "sinks": "${sinks}", "power": 1.0}
)

# %% [markdown]
# The new name can be used like any other. Three methods, one budget, the same prompts and the same noise:

# %%
import kvbench

metrics = ["psnr", "lpips_scenes", "geneval"]
shared = {"budget": 0.1, "prompts": {"count": 16}, "calibrate": {"count": 4}, "eval": metrics}
runs = {method: kvbench.run(method, **shared) for method in ("heatkv", "random", "lottery")}

# %%
for method, run in runs.items():
    memory, psnr, right = run.memory, run.metrics["psnr"], run.metrics["geneval[scenes]"]
    low, high = psnr.ci95
    print(
        f"{method:8} held {memory.peak_tokens} of {memory.budget_tokens:g} tokens, "
        f"PSNR {psnr.value:.2f} dB [{low:.2f}, {high:.2f}], right {right.value:.3f}"
    )

# %% [markdown]
# These intervals belong to each value separately. Prompts and noise are shared, so most of the variation between images
# cancels in the paired difference. If its interval contains zero, these prompts cannot distinguish the methods.

# %%
for other in ("random", "heatkv"):
    [difference] = kvbench.compare([runs["lottery"]], to=runs[other]).differences
    psnr = difference.metrics["psnr"]
    low, high = psnr.ci95
    print(f"lottery - {other:7} {psnr.value:+.2f} dB [{low:+.2f}, {high:+.2f}], n = {psnr.n}")

# %% [markdown]
# 16 prompts are a demonstration, not a result. For a result, use `prompts.count=512`.
#
# To keep a method, write the class into `kvbench/methods/lottery.py` and
#
# ```yaml
# _target_: kvbench.methods.lottery.Lottery
# sinks: ${sinks}
# power: 1.0   # of the attention
# ```
#
# into `conf/method/lottery.yaml`. The conformance tests then check that it keeps to the budget, is reproducible and
# equals the full cache at budget 1. See `docs/extending.md`, and `docs/plugins.md` for a package of your own.
