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
# A method says which tokens a cache keeps. To keep those that receive most attention (`h2o`, `snapkv`) is one answer,
# to draw them at random (`random`) another, which on `infinity_tiny` is hard to beat: what receives least now may be
# wanted later, and a random choice has some of everything. The method below stands between both. It draws a lottery
# in which a token's chance is the attention that it receives.
#
# Each token gets a number u between 0 and 1, and those with the highest u^(1/w) stay, w being their attention: a
# weighted sample without replacement (Efraimidis and Spirakis, 2006). The numbers are multiples of the golden ratio,
# which lie more evenly than dice, and stay a token's own as long as it is there.
#
# A method that gives every token a worth derives from `Scored`, which takes care of the budget and of the sinks.

# %%
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods.scored import Scored
from kvbench.methods.view import View

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
# `conf/method/` is the registry: a file there names the class and its settings. In a notebook Hydra's store does the
# same. (Runs are found again by their settings. Whoever edits a method whose runs are kept raises its `revision`, so
# that the old ones are not taken for the new.)

# %%
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store(
    group="method", name="lottery", node={"_target_": "__main__.Lottery", "sinks": "${sinks}", "power": 1.0}
)

# %% [markdown]
# The new name is a choice like all others. Three methods, one budget, the same prompts and the same noise:

# %%
from kvbench.cli.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.tasks import make_job
from kvbench.runs.execute import run

shared = ["budget=0.1", "prompts.count=16", "calibrate.count=4", "eval=[psnr,lpips_scenes,geneval]"]


def make(method: str):
    """Run a method, or find it finished."""
    with hydra_of_kvbench():
        cfg, _ = compose_job([f"method={method}", *shared])
        return run(make_job(cfg, read_settings(cfg)))


outcomes = {method: make(method) for method in ("heatkv", "random", "lottery")}

# %%
for method, outcome in outcomes.items():
    memory, metrics = outcome.results.memory, outcome.results.metrics
    psnr, right = metrics["psnr"], metrics["geneval[scenes]"]
    low, high = psnr.ci95
    print(
        f"{method:8} held {memory.peak_tokens} of {memory.budget_tokens:g} tokens, "
        f"PSNR {psnr.value:.2f} dB [{low:.2f}, {high:.2f}], right {right.value:.3f}"
    )

# %% [markdown]
# These intervals are those of each value by itself. Prompts and noise are shared, so most of the spread between
# pictures cancels in the difference, prompt by prompt. An interval that holds zero says that these prompts cannot
# tell the methods apart.

# %%
from kvbench.eval.protocol.compare import compare_runs

for other in ("random", "heatkv"):
    difference = compare_runs(outcomes["lottery"].folder, outcomes[other].folder)["psnr"]
    low, high = difference.ci95
    print(f"lottery - {other:7} {difference.value:+.2f} dB [{low:+.2f}, {high:+.2f}], n = {difference.n}")

# %% [markdown]
# 16 prompts make a demonstration, not a result: `prompts.count=512` is one command away.
#
# To keep a method, write the class into `kvbench/methods/lottery.py` and
#
# ```yaml
# _target_: kvbench.methods.lottery.Lottery
# sinks: ${sinks}
# power: 1.0   # of the attention
# ```
#
# into `conf/method/lottery.yaml`: the conformance tests then hold it to the budget, to its own results and to the
# full cache at budget 1. `docs/extending.md` says more, and `docs/plugins.md` how both files live in a package of
# your own.
