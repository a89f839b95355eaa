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
# # 5. Long context
# Rows too long for one device are split over the axis `sequence`. Only attention looks across: here is who has which
# tokens, who works when, that the result is exact, and what each way costs in bytes and memory on H100s.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import draw
from sharded_train.ops import zigzag
from sharded_train.ops.attention import attention
from sharded_train.ops.context import context_attention

S = 8  # devices along sequence

# %% [markdown]
# ## Who works when
# Causal attention gives late tokens more to do. Split a row in order and the last device does fifteen times what the
# first does. The zigzag gives device i the chunks i and 2 S - 1 - i.

# %%
chunks = np.arange(2 * S)
in_order = chunks.reshape(S, 2)
zigzagged = zigzag.arrange(chunks, S, dim=0).reshape(S, 2)
print("device: chunks in order, in the zigzag")
for device in range(S):
    print(f"{device:6}: {in_order[device]!s:9} {zigzagged[device]}")


def work(owned):
    """Chunk pairs that each device computes, the causal one on the diagonal counting half."""
    return [sum(query + 0.5 for query in mine) for mine in owned.tolist()]


draw.plot(
    {"in order": work(in_order), "zigzag": work(zigzagged)},
    list(range(S)),
    kind="bar",
    title="Work of each device in one attention layer",
    xlabel="device",
    ylabel="pairs of chunks (query, key)",
)

# %% [markdown]
# In the ring, keys and values travel from device to device. In every turn each device has exactly two pairs of chunks
# to compute, whichever keys it has just then: no device waits for another, and no mask is needed but the local one.

# %%
for turn in range(S):
    pairs = [sum(bool(key < query) for query in zigzagged[i] for key in zigzagged[(i - turn) % S]) for i in range(S)]
    print(f"turn {turn}: whole pairs of each device {pairs}" + ("  and two causal ones each" if turn == 0 else ""))
    assert pairs == [2 if turn else 1] * S

# %% [markdown]
# ## It is exact
# All three ways against one device, on 8 virtual devices in fp32, packed documents and grouped kv heads included.

# %%
mesh = Mesh(np.array(jax.devices()), ("sequence",))
B, T, H, K, D = 1, 64 * S, 8, 4, 16
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, D)), jnp.float32) for n in (H, K, K))
segments = jnp.asarray(np.sort(rng.integers(1, 5, (B, T)), axis=1), jnp.int32)
want = attention(q, k, v, segments, "xla")


def split(strategy, mesh, implementation):
    fn = functools.partial(context_attention, implementation=implementation, strategy=strategy, max_documents=1)
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(None, "sequence"),) * 4, out_specs=P(None, "sequence"))


for strategy in ("ring", "all_gather", "ulysses"):
    arranged = (zigzag.arrange(x, S) for x in (q, k, v, segments))
    got = zigzag.undo(jax.jit(split(strategy, mesh, "xla"))(*arranged), S)
    print(f"{strategy:11} largest difference {float(jnp.abs(got - want).max()):.1e}")
    assert jnp.allclose(got, want, atol=1e-5)

# %% [markdown]
# ## Memory and bytes against length
# One attention layer, forward and backward, with cuDNN in bf16, audited for 8 H100s: 32 heads, 8 kv heads of 128.

# %%
there = draw.cluster_mesh("h100:1x8", sequence=8)


def gradients(strategy):
    def loss(q, k, v, segments):
        return jnp.sum(split(strategy, there, "cudnn")(q, k, v, segments).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2))


def arrays(length):
    place = NamedSharding(there, P(None, "sequence"))
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    each = [array((1, length, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)]
    return (*each, array((1, length), jnp.int32))


lengths = [2**14, 2**17]
found = {
    strategy: [draw.audit(gradients(strategy), *arrays(n), cluster="h100:1x8") for n in lengths]
    for strategy in ("ring", "all_gather", "ulysses")
}
names = [f"{n // 1024}k" for n in lengths]
draw.plot(
    {name: [each.facts["memory"]["total_bytes"] / 2**30 for each in those] for name, those in found.items()},
    names,
    kind="bar",
    title="One attention layer, forward and backward, on each of 8 H100s",
    xlabel="tokens of a row",
    ylabel="memory, GiB",
)

# %%
for name, those in found.items():
    for n, each in zip(names, those, strict=True):
        sent = sum(row["wire_bytes"] for row in each.facts["wires"]["totals"])
        time = each.facts["time"]
        waits = sum(row["exposed"] for row in time["exposed"])
        print(
            f"{name:11} {n:>5}: {sent / 2**30:5.2f} GiB sent, at least {1e3 * time['step_seconds']:6.2f} ms, "
            f"{1e3 * waits:5.2f} of it waiting"
        )

# %% [markdown]
# The ring computes one pair while the next keys travel:

# %%
draw.timeline(found["ring"][-1])
