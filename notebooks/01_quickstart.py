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
# The same in Python. Keywords are the keys of the command line. A run shows its memory, its time, and its metrics with
# their 95 % intervals.

# %%
import kvbench

run = kvbench.run("snapkv", budget=0.1, prompts={"count": 16}, eval=["psnr", "lpips_scenes", "geneval"])
print("reused  ", run.reused)
run

# %% [markdown]
# The folder holds everything about a run (`docs/results_schema.md` describes `results.json`). `run.results` is that
# file as dataclasses, and `run.samples` a frame with a row for each image.

# %% [markdown]
# ## The images
#
# The upper row uses the full cache, the lower row a tenth of it. The contact sheet of the run (`contact_sheet.png`)
# shows the worst pairs first. Below are the first six prompts.

# %%
from textwrap import fill

import matplotlib.pyplot as plt
from PIL import Image

figure, axes = plt.subplots(2, 6, figsize=(12, 4.4), layout="constrained")
for index, prompt in run.samples.select("index", "prompt").head(6).rows():
    for row, shown in enumerate((run.reference, run)):
        axes[row, index].imshow(Image.open(shown.find_sample(index)))
        axes[row, index].set(xticks=[], yticks=[])
    axes[0, index].set_title(fill(prompt, 26), fontsize=8)
axes[0, 0].set_ylabel("full cache")
axes[1, 0].set_ylabel("SnapKV, 10 %")
plt.show()

# %% [markdown]
# Next: [a method of your own](02_add_a_method.ipynb), [where heads look](03_where_heads_look.ipynb), [reading many
# results](04_read_results.ipynb).
