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
# # 2. Sharding by hand
# A weight, its logical axes, the mesh axes that these become, and the shards on the devices. Then Megatron's two
# products by hand, against the library's, and what sequence parallelism changes.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import draw
from sharded_train.equivalence import SMALL, Layout, program
from sharded_train.params import named_leaves
from sharded_train.sharding import is_placement

# %% [markdown]
# ## From logical axes to shards
# A parameter is declared once: `ParamSpec(shape, axes, init)`. `tensor` splits the axes named heads, mlp and vocab;
# ZeRO splits one more dim over `data`. The plan says how each parameter is stored, and how it is gathered to multiply
# with.

# %%
small = program(SMALL, Layout(data=2, tensor=4, zero=1))
for name, placement in named_leaves(small.plan.placements, is_placement):
    if name.startswith("layers/mlp"):
        print(f"{name:20} {' '.join(placement.spec.axes):18} stored {placement.stored}  gathered {placement.gathered}")

# %% [markdown]
# Drawn, one layer's three matrices as they are stored (numbers are devices):

# %%
mlp = small.abstract_state.params["layers"]["mlp"]
draw.sharding({name: mlp[name] for name in ("gate", "up", "down")})

# %% [markdown]
# ## Column- and row-parallel products, by hand
# An MLP is `down(silu(gate x) * up x)`. Split `gate` and `up` by columns and each device computes a part of the
# hidden dim by itself; split `down` by rows and each device has a partial sum of the result. One sum over `tensor` at
# the end is all the communication there is.

# %%
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
rng = np.random.default_rng(0)
B, T, D, F = 4, 16, 64, 256


def put(shape, *spec):
    return jax.device_put(jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32), NamedSharding(mesh, P(*spec)))


x = put((B, T, D), "data")
gate, up, down = put((D, F), None, "tensor"), put((D, F), None, "tensor"), put((F, D), "tensor", None)


def by_hand(x, gate, up, down):
    def local(x, gate, up, down):
        hidden = jax.nn.silu(x @ gate) * (x @ up)  # [B / 2, T, F / 4]: a part of the hidden dim
        return jax.lax.psum(hidden @ down, "tensor")  # partial sums -> the sum

    specs = (P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor", None))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))(x, gate, up, down)


whole = jax.nn.silu(np.asarray(x) @ np.asarray(gate)) * (np.asarray(x) @ np.asarray(up)) @ np.asarray(down)
print("largest difference from one device:", float(jnp.abs(by_hand(x, gate, up, down) - whole).max()))

# %% [markdown]
# ## Sequence parallelism: the same with the library's names
# Between the blocks the library splits tokens over `tensor` too, so that norms and dropout are not done eight times:
# a gather before the columns, a reduce-scatter after the rows. `TensorParallel` is those two borders, `linear` the
# product.

# %%
from sharded_train.collectives import TensorParallel
from sharded_train.ops.linear import linear

tp = TensorParallel()


def by_library(x, gate, up, down):
    def local(x, gate, up, down):
        x = tp.enter(x)  # [B / 2, T / 4, D] -> [B / 2, T, D]
        rows = x.reshape(-1, D)
        hidden = jax.nn.silu(linear(rows, gate)) * linear(rows, up)
        return tp.leave(linear(hidden, down).reshape(x.shape))  # the sum, each device its own tokens

    specs = (P("data", "tensor"), P(None, "tensor"), P(None, "tensor"), P("tensor", None))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data", "tensor"))(x, gate, up, down)


x_by_tokens = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
print("largest difference from one device:", float(jnp.abs(by_library(x_by_tokens, gate, up, down) - whole).max()))
draw.sharding({"x, sequence parallel": x_by_tokens, "x": x})

# %% [markdown]
# ## What it costs on the wire
# `audit` compiles any function for a cluster that is not there. An all-reduce is a reduce-scatter and an all-gather,
# so sequence parallelism sends no more, and holds a quarter of the activations between blocks.

# %%
for name, fn, given in (("all-reduce", by_hand, x), ("sequence parallel", by_library, x_by_tokens)):
    found = draw.audit(fn, given, gate, up, down, cluster="h100:1x8")
    sent = {row["op"]: row["wire_bytes"] for row in found.facts["wires"]["totals"]}
    print(f"{name:18}", {op: f"{n:,.0f} bytes" for op, n in sent.items()}, "together", f"{sum(sent.values()):,.0f}")

# %%
draw.collectives(found)
