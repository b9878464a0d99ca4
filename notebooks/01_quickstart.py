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
# # Quickstart
#
# A model that draws autoregressively keeps a key and a value for every token it has drawn. Here one such model draws
# the same pictures twice, once with all of them and once with a tenth, and we look at what that changes. Everything
# ships with kvbench: no GPU, no downloads.
#
# A run is one command. It makes its reference, the run with the full cache, if that is missing. (Progress bars go to a
# file here.)

# %%
# %env COLUMNS=110
# !kvbench method=snapkv budget=0.1 prompts.count=16 "eval=[psnr,lpips_scenes,geneval]" 2> progress.txt

# %% [markdown]
# Each metric stands with its 95 % interval. `psnr` and `lpips_scenes` compare every picture with that of the full
# cache, drawn from the same noise; `geneval[scenes]` looks whether the objects that the prompt names are there.
# Called again, the command ends at once: what is finished is found.
#
# The same in Python: a command's words are composed to a configuration, a configuration makes a job, and a job is
# run.

# %%
from pathlib import Path

from kvbench.cli.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.tasks import make_job
from kvbench.runs.execute import run

words = ["method=snapkv", "budget=0.1", "prompts.count=16", "eval=[psnr,lpips_scenes,geneval]"]
with hydra_of_kvbench():
    cfg, _ = compose_job(words)
    outcome = run(make_job(cfg, read_settings(cfg)))

print("folder  ", outcome.folder)
print("reused  ", outcome.reused)

# %% [markdown]
# The folder holds all there is to a run (`results_schema.md` among the pages describes `results.json`), and
# `outcome.results` is that file as dataclasses.

# %%
results = outcome.results
memory = results.memory
print(f"budget   {memory.budget_tokens:g} tokens of {memory.full_tokens}")
print(f"peak     {memory.peak_tokens} tokens, {memory.peak_bytes / 2**20:.1f} MiB")
for name in ("psnr", "lpips_scenes", "geneval[scenes]"):
    metric = results.metrics[name]
    print(f"{name:16} {metric.value:.4f} {metric.unit}, 95 % interval {metric.ci95}")

# %% [markdown]
# ## The pictures
#
# Above the full cache, below a tenth of it. The contact sheet of the run (`contact_sheet.png`) shows the worst pairs
# first; here are the first six prompts.

# %%
import json
from textwrap import fill

import matplotlib.pyplot as plt
from PIL import Image

reference = outcome.folder.parent / results.reference
records = [json.loads(line) for line in Path(outcome.folder, "samples.jsonl").read_text().splitlines()]

figure, axes = plt.subplots(2, 6, figsize=(12, 4.4), layout="constrained")
for column, record in enumerate(records[:6]):
    for row, folder in enumerate((reference, outcome.folder)):
        axes[row, column].imshow(Image.open(folder / "images" / f"{record['index']:06d}.png"))
        axes[row, column].set(xticks=[], yticks=[])
    axes[0, column].set_title(fill(record["prompt"], 26), fontsize=8)
axes[0, 0].set_ylabel("full cache")
axes[1, 0].set_ylabel("SnapKV, 10 %")
plt.show()

# %% [markdown]
# Next: [a method of your own](02_add_a_method.ipynb), [where heads look](03_where_heads_look.ipynb), [reading many
# results](04_read_results.ipynb).
