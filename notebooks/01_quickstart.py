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
# An autoregressive model stores a key and a value for every token that it has generated. In this notebook, one such
# model generates the same images twice, once with all keys and values and once with a tenth of them. You need no GPU
# and no downloads.
#
# A run is one command. It first generates its reference, the run with the full cache, if that is missing. (Progress
# bars go to a file here.)

# %%
# %env COLUMNS=110
# !kvbench method=snapkv budget=0.1 prompts.count=16 "eval=[psnr,lpips_scenes,geneval]" 2> progress.txt

# %% [markdown]
# Each metric has a 95 % interval. `psnr` and `lpips_scenes` compare every image with the one from the full cache and
# the same noise. `geneval[scenes]` checks whether the image shows the objects that the prompt names. If you run the
# command again, it finds the finished run and exits at once.
#
# The same in Python: compose a configuration from the command's arguments, build a job from it, and run the job.

# %%
from pathlib import Path

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.tasks.job import make_job
from kvbench.runs.execute import run

words = ["method=snapkv", "budget=0.1", "prompts.count=16", "eval=[psnr,lpips_scenes,geneval]"]
with hydra_of_kvbench():
    cfg, _ = compose_job(words)
    outcome = run(make_job(cfg, read_settings(cfg)))

print("folder  ", outcome.folder)
print("reused  ", outcome.reused)

# %% [markdown]
# The folder holds everything about a run (`docs/results_schema.md` describes `results.json`). `outcome.results` is
# that file as dataclasses.

# %%
results = outcome.results
memory = results.memory
print(f"budget   {memory.budget_tokens:g} tokens of {memory.full_tokens}")
print(f"peak     {memory.peak_tokens} tokens, {memory.peak_bytes / 2**20:.1f} MiB")
for name in ("psnr", "lpips_scenes", "geneval[scenes]"):
    metric = results.metrics[name]
    print(f"{name:16} {metric.value:.4f} {metric.unit}, 95 % interval {metric.ci95}")

# %% [markdown]
# ## The images
#
# The upper row uses the full cache, the lower row a tenth of it. The contact sheet of the run (`contact_sheet.png`)
# shows the worst pairs first. Below are the first six prompts.

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
