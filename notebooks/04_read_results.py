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
# # Read results
#
# Two functions return results as polars frames: `kvbench.runs_df` has a row for each run, `kvbench.samples_df` one for
# each image or text. (`.to_pandas()` makes a pandas frame of any of them.) First generate some runs, three methods at
# two budgets. Finished runs are not repeated.

# %%
import kvbench

shared = {"prompts": {"count": 16}, "eval": ["psnr", "lpips_scenes", "geneval"]}
made = [
    kvbench.run(method, budget=budget, **shared)
    for method in ("random", "streaming_llm", "snapkv")
    for budget in (0.1, 0.3)
]
folders = [run.folder for run in made]

# %% [markdown]
# ## Runs

# %%
import polars as pl

runs = kvbench.runs_df("runs").filter(
    pl.col("folder").is_in([f"{one.parent.name}/{one.name}" for one in folders])
)
print(f"{len(runs)} runs, {len(runs.columns)} columns")
runs.select("method", "budget", "peak", "psnr", "psnr.low", "psnr.high", "lpips_scenes").sort(
    "budget", "method"
)

# %% [markdown]
# `budget` is the fraction of the full cache that a run may hold, and `peak` the most that it held. `psnr.low` and
# `psnr.high` are the ends of the 95 % interval of the mean over prompts.
#
# ## Samples
#
# `samples` has a row per image; `folder` joins it to its run. These prompts lose most under every method:

# %%
samples = kvbench.samples_df(folders).join(runs.select("folder", "method", "budget"), on="folder")
print(f"{len(samples)} pictures")
tenth = samples.filter(pl.col("budget") < 0.2)
tenth.group_by("prompt").agg(pl.col("psnr").mean(), worst=pl.col("method").sort_by("psnr").first()).sort(
    "psnr"
).head(5)

# %% [markdown]
# ## Paired differences
#
# Runs of one model share prompts and noise. The paired difference of two methods therefore varies far less than either
# value. Both standard deviations, in dB:

# %%
wide = tenth.pivot("method", index="index", values="psnr").sort("index")
difference = wide["random"] - wide["streaming_llm"]
print(f"spread of random           {wide['random'].std():.2f} dB")
print(f"spread of streaming_llm    {wide['streaming_llm'].std():.2f} dB")
print(f"spread of their difference {difference.std():.2f} dB, mean {difference.mean():+.2f} dB")

# %% [markdown]
# `kvbench.compare` does this for every metric and adds the interval, by bootstrap over prompts. `task=report
# against=...` prints its result.

# %%
found = kvbench.compare(made, to="streaming_llm").frame
for row in found.filter(method="random", budget=0.1).rows(named=True):
    if row["metric"] in ("psnr", "lpips_scenes"):
        interval = f"[{row['low']:+.4f}, {row['high']:+.4f}], n = {row['n']}"
        print(f"random - streaming_llm, {row['metric']}: {row['difference']:+.4f} {interval}")

# %% [markdown]
# ## Quality against memory
#
# A run is on the front if no other run is better at the same memory or less. Bars are 95 % intervals. Where intervals
# overlap, the order of runs is uncertain.

# %%
import matplotlib.pyplot as plt

from kvbench.report.figures.method_styles import choose_styles

styles = choose_styles(runs["method"].unique().to_list())  # those of reports and the dashboard
ordered = runs.sort("peak", "psnr", descending=[False, True])
front = ordered.filter(pl.col("psnr") > pl.col("psnr").cum_max().shift(1).fill_null(float("-inf")))

figure, axis = plt.subplots(figsize=(6.2, 4), layout="constrained")
groups = zip((-0.3, 0, 0.3), runs.sort("method").group_by("method", maintain_order=True), strict=True)
for aside, ((method,), rows) in groups:  # a little aside, so that bars do not hide each other
    colour, marker, _ = styles[method]
    ends = [rows["psnr"] - rows["psnr.low"], rows["psnr.high"] - rows["psnr"]]
    axis.errorbar(
        100 * rows["peak"] + aside, rows["psnr"], yerr=ends, fmt=marker, color=colour, capsize=3, label=method
    )
axis.plot(100 * front["peak"], front["psnr"], color="0.6", linestyle="--", zorder=0, label="front")
axis.set(xlabel="most tokens held, % of the full cache", ylabel="PSNR to the full cache, dB")
axis.legend(frameon=False)
plt.show()

print(
    "front:",
    ", ".join(f"{method} at {budget:g}" for method, budget in front.select("method", "budget").rows()),
)
