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
# # Where heads look
#
# HeatKV (arXiv:2605.14877) prunes each scale of an image from the heads whose later scales attend to it least. A
# calibration finds these heads: it generates some prompts with the full cache and averages the attention that each head
# pays to each source scale. This notebook shows the calibration for `infinity_tiny` and how HeatKV uses it.

# %%
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.tasks.job import make_job
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.runs.prepare import observe

with hydra_of_kvbench():
    cfg, _ = compose_job(["method=heatkv", "budget=0.1", "prompts.count=16", "calibrate.count=4"])
    job = make_job(cfg, read_settings(cfg))
job.model.load("cpu")
[artifact] = observe(job, [AttentionByScale()])  # a file, made if it is missing

spec = job.model.spec
mass = artifact.tensors["mass"]  # [layers, heads, target scale, source scale]
print(
    f"{spec.layers} layers x {spec.heads} heads, {len(spec.segments)} scales of {list(spec.lengths)} tokens"
)
print(f"attention of a scale to all scales so far sums to {mass.sum(-1).mean():.6f}")

# %% [markdown]
# ## Heads differ
#
# HeatKV's Figure 3 shows attention maps of six heads, token by token. Summed over the tokens of each scale, such a
# map has a row per target scale and a column per source scale. Below are six heads of `infinity_tiny`: those whose
# last scale attends most to the first scale, to coarse ones, and so on. (Scales count from 1, as in the paper.)

# %%
import matplotlib.pyplot as plt
import numpy as np

scales = len(spec.segments)
last = mass[:, :, -1]  # what the last scale attends to, [layers, heads, source scale]
parts = {
    "scale 1": last[..., 0],
    "scales 2 to 4": last[..., 1:4].sum(-1),
    "scales 5 to 7": last[..., 4:7].sum(-1),
    "scale 8": last[..., 7],
    "itself": last[..., 8],
    "scales 1 to 8": last[..., :8].sum(-1),
}
chosen = {name: divmod(int(share.argmax()), spec.heads) for name, share in parts.items()}

figure, axes = plt.subplots(2, 3, figsize=(9.5, 7), layout="constrained")
for axis, (name, (layer, head)) in zip(axes.flat, chosen.items(), strict=True):
    shown = np.ma.masked_where(np.triu(np.ones((scales, scales)), 1) > 0, mass[layer, head].numpy())
    drawn = axis.imshow(shown, vmin=0, vmax=1, cmap="magma", extent=(0.5, scales + 0.5, scales + 0.5, 0.5))
    axis.set_title(f"most from {name}\nlayer {layer + 1}, head {head + 1}", fontsize=9)
    axis.set(xticks=range(1, scales + 1), yticks=range(1, scales + 1))
figure.supxlabel("source scale", fontsize=10)
figure.supylabel("target scale", fontsize=10)
figure.colorbar(drawn, ax=axes, label="share of attention", shrink=0.6)
plt.show()

for name, (layer, head) in chosen.items():
    share = parts[name]
    print(
        f"{name:14} layer {layer + 1} head {head + 1}: {share[layer, head]:.3f}, mean of all {share.mean():.3f}"
    )

# %% [markdown]
# ## S-CAS: attention from later scales, by head
#
# S-CAS (Eq. 2 and 4) is the mean attention that a source scale receives from all later scales. HeatKV compares heads by
# this score, separately for each source scale (the second step of its Figure 2). Rows are heads and columns are source
# scales.

# %%
from kvbench.methods.heatkv.scores import rank_heads, scas

scores = scas(mass)  # [layers, heads, scales]; the last scale has no future
table = scores[..., :-1].reshape(-1, scales - 1).numpy()

figure, axis = plt.subplots(figsize=(5.2, 6.4), layout="constrained")
drawn = axis.imshow(table, aspect="auto", cmap="magma", extent=(0.5, scales - 0.5, len(table), 0))
axis.set(xlabel="source scale", xticks=range(1, scales), ylabel="layer", title="S-CAS of every head")
axis.set_yticks([(layer + 0.5) * spec.heads for layer in range(spec.layers)], range(1, spec.layers + 1))
for layer in range(1, spec.layers):
    axis.axhline(layer * spec.heads, color="white", linewidth=0.8)
figure.colorbar(drawn, label="mean attention from later scales")
plt.show()

spread = table.max(0) / table.min(0)
print("highest S-CAS over lowest, by source scale:", ", ".join(f"{ratio:.0f}" for ratio in spread))

# %% [markdown]
# ## The order in which heads lose a scale
#
# Heads are ranked by S-CAS, and the lowest head loses a source scale first. The paper's Figure 4 shows such an order
# for whole heads (Binary-HeatKV), a square per layer and head. HeatKV has one order per source scale. Below are three.

# %%
from itertools import pairwise

ranks = rank_heads(scores)  # [source scale, layers, heads]: 0 loses the scale first
shown = (scales - 5, scales - 3, scales - 2)

figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
for axis, source in zip(axes, shown, strict=True):
    drawn = axis.imshow(ranks[source], cmap="viridis", vmin=0, vmax=spec.layers * spec.heads - 1)
    axis.set(title=f"source scale {source + 1}", xlabel="head", ylabel="layer")
    axis.set_xticks(range(spec.heads), range(1, spec.heads + 1))
    axis.set_yticks(range(spec.layers), range(1, spec.layers + 1))
figure.colorbar(drawn, ax=axes, label="place in the order of removal")
plt.show()

for one, other in pairwise(shown):
    agreement = np.corrcoef(ranks[one].ravel(), ranks[other].ravel())[0, 1]
    print(f"rank correlation of source scales {one + 1} and {other + 1}: {agreement:.2f}")

# %% [markdown]
# ## The tokens that remain
#
# The schedule depends only on the orders and the budget (Eq. 5, Algorithm 1), so it is known before generation. At
# 10 %, each head holds at the last scale:

# %%
from kvbench.core.budget import Budget

job.method.prepare(spec, Budget.parse(0.1, spec), artifact)
present = ~job.method.schedule.absent[-1]  # [source scale, layers, heads]
held = np.einsum("slh,s->lh", present[:-1], np.array(spec.lengths[:-1]))  # the last scale is never stored

figure, axis = plt.subplots(figsize=(4.6, 3.8), layout="constrained")
drawn = axis.imshow(held, cmap="viridis")
axis.set(title="tokens held at the last scale, budget 10 %", xlabel="head", ylabel="layer")
axis.set_xticks(range(spec.heads), range(1, spec.heads + 1))
axis.set_yticks(range(spec.layers), range(1, spec.layers + 1))
figure.colorbar(drawn, label=f"tokens of {spec.cached_length}")
plt.show()

capacity = float(Budget.parse(0.1, spec).capacity)
print(f"held {held.sum()} of {capacity:g} tokens; a head holds {held.min()} to {held.max()}")
