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
# # 8. Rehearse a cluster
# A 70B model on 64 H100s, from a laptop: does it fit, what crosses which wire, how long at best? The train step is
# compiled for the cluster, by the compiler that would compile it there, and the program is read.
#
# The mesh is smaller than the config's own (256 GPUs): two pipeline stages of 40 layers, data 4, tensor 8 inside a
# host.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
from pathlib import Path

import sharded_train
from sharded_train import draw, recipe
from sharded_train.rehearse import clusters
from sharded_train.rehearse.run import rehearse

CONFIG = Path(sharded_train.__file__).parents[1] / "configs/llama3_70b.py"

cluster = clusters.parse("h100:8x8")
overrides = [
    "--config.mesh.pipeline=2",
    "--config.zero.stage=1",
    "--config.train.global_batch_size=128",
    "--config.train.num_microbatches=32",
]
asked = recipe.load(CONFIG, overrides)
asked.mesh

# %%
draw.mesh(draw.cluster_mesh("h100:8x8", pipeline=2, data=4, tensor=8), groups="data")

# %%
first = rehearse(asked, cluster)
print(first.facts["memory"]["words"])
for remedy in first.facts["memory"]["remedies"]:
    print("-", remedy)

# %% [markdown]
# Not as it stands. We take the first remedy, and pay with computing the forward pass again:

# %%
found = rehearse(recipe.load(CONFIG, [*overrides, "--config.train.remat=full"]), cluster)
print(found.facts["memory"]["words"])
assert found.facts["memory"]["verdict"] == "fits"
{phase: round(seconds, 1) for phase, seconds in found.facts["compile"]["seconds"].items()}

# %% [markdown]
# ## Does it fit?

# %%
draw.memory(found)

# %% [markdown]
# ## What crosses which wire?

# %%
draw.collectives(found)

# %% [markdown]
# ## How long, at best?
# A lower bound: kernels and links at what their data sheets say. It is good for comparing, and for seeing what waits
# for what.

# %%
draw.timeline(found)

# %%
print(found.facts["verdict"]["words"])
for each in found.facts["verdict"]["tries"]:
    print(f"- {each['what']}: at most {1e3 * each['seconds']:.0f} ms ({each['why']})")

# %% [markdown]
# The same from the command line, with a page that holds all of it: `sharded-train rehearse
# --config=configs/llama3_70b.py --cluster=h100:8x8 --config.mesh.pipeline=2 ... --html=70b.html`. `--compare="... |
# ..."` puts variants side by side; [docs/rehearse.md](../docs/rehearse.md) says how to read it.
