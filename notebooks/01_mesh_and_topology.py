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
# # 1. Mesh and topology
# A cluster is hosts: within a host NVLink joins the GPUs, between hosts there is a network some ten times slower. A
# *mesh* gives the devices names along axes. Which axis lies inside a host decides how fast everything is.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
import numpy as np

from sharded_train import draw

# %% [markdown]
# 64 H100s on 8 hosts. No GPU is needed: these devices can be compiled for, and nothing else. Axes are given from the
# outside in, so `tensor` is innermost and its eight neighbours share a host.

# %%
mesh = draw.cluster_mesh("h100:8x8", pipeline=2, data=4, tensor=8)
draw.mesh(mesh, groups="tensor")

# %% [markdown]
# The same mesh, coloured by the groups that reduce gradients together: each has one device on each of four hosts, so
# that their traffic crosses the network.

# %%
draw.mesh(mesh, groups="data")

# %% [markdown]
# ## What a wrong mapping costs
# Which mapping minimises the communication bottleneck: everything at random, the pipeline inside a host, data inside
# a host, or tensor inside a host? We compile one train step and read its collectives; what a program sends does not
# depend on where its devices stand, only what that takes does. So one compiled program answers for all four.

# %%
from sharded_train import recipe
from sharded_train.flops import flops_of_step
from sharded_train.rehearse import clusters, hlo, pace, timeline, wires
from sharded_train.rehearse.compile import compile_for
from sharded_train.rehearse.wires_places import Places

cluster = clusters.parse("h100:8x8")
step = recipe.from_dict(
    {
        "model": {
            "vocab_size": 32768,
            "d_model": 4096,
            "num_layers": 8,
            "num_heads": 32,
            "num_kv_heads": 8,
            "d_ff": 14336,
        },
        "mesh": {"pipeline": 2, "data": 4, "tensor": 8},
        "precision": {"recipe": "bf16"},
        "zero": {"stage": 1},
        "train": {"global_batch_size": 64, "sequence_length": 4096, "num_microbatches": 8, "remat": "selective"},
    }
)
compiled = compile_for(step, cluster)
module = hlo.parse(compiled.text)
sizes = dict(compiled.program.mesh.shape)
sizes

# %%
straight = np.arange(64) // 8  # the host of each device


def hosts_with(innermost: str) -> np.ndarray:
    """The host of each device of the mesh, when this axis gets the neighbours within a host."""
    order = [axis for axis in sizes if axis != innermost] + [innermost]
    array = straight.reshape([sizes[axis] for axis in order])
    return np.transpose(array, [order.index(axis) for axis in sizes])


mappings = {
    "tensor in a host": hosts_with("tensor"),
    "data in a host": hosts_with("data"),
    "pipeline in a host": hosts_with("pipeline"),
    "random": np.random.default_rng(0).permutation(straight).reshape(list(sizes.values())),
}
flops = flops_of_step(compiled.program.specs, 64, 4096)
speed = pace.pace_of(compiled.program.pipe, module)
found = {}
for name, hosts in mappings.items():
    collectives, _ = wires.collectives(module, Places(sizes, hosts), speed)
    found[name] = timeline.describe(module, cluster, collectives, flops, "bf16", speed)
    across = sum(each.wire_bytes * each.times for each in collectives if each.link in ("network", "both"))
    print(
        f"{name:20} step at least {1e3 * found[name]['step_seconds']:4.0f} ms, "
        f"{float(across) / 2**30:5.2f} GiB from each device over hosts"
    )

# %%
draw.plot(
    {
        "step": [1e3 * time["step_seconds"] for time in found.values()],
        "of it waiting for communication": [1e3 * timeline.exposed_seconds(time) for time in found.values()],
    },
    list(found),
    kind="bar",
    title="One step of 8 layers on 64 H100s, at best",
    xlabel="what lies inside a host",
    ylabel="time, ms",
)

# %%
best = min(found, key=lambda name: found[name]["step_seconds"])
print("best:", best)
assert best == "tensor in a host"

# %% [markdown]
# Tensor parallelism gathers and scatters activations in every layer, forward and backward, so it belongs on NVLink.
# Data parallelism sends gradients once a step, and much of that hides behind products; the pipeline sends least of
# all. A config that lays tensor over hosts is refused unless `mesh.allow_tensor_across_hosts` says otherwise.
# [docs/measurements.md](../docs/measurements.md) has the same for a 70B.
