"""The measuring stick: a train step of configs/bench_20m.py written by hand for speed, without this project.

Plain `jit`, the partitioner left to place collectives (weights split over data and tensor where sharded), products
flattened to matrices and the loss one row at a time: what a good engineer writes in an afternoon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, D, LAYERS, HEADS, F, SEQ, ROWS = 8192, 384, 6, 6, 1024, 512, 8
HEAD_DIM = D // HEADS
COLUMN, ROW = P(None, "data", "tensor"), P(None, "tensor", "data")
SPECS = {
    "embedding": P("tensor", "data"),
    "head": P("data", "tensor"),
    "norm": P(),
    "layers": {
        **dict.fromkeys(("norm1", "norm2"), P()),
        **dict.fromkeys(("q", "k", "v", "gate", "up"), COLUMN),
        **dict.fromkeys(("out", "down"), ROW),
    },
}


def train_step(dtype: Any, data: int, tensor: int) -> tuple[Callable[..., Any], Any, Callable[[np.ndarray], Any]]:
    """(step, state, put): `state, loss = step(state, put(tokens))`, tokens `[ROWS, SEQ + 1]`."""
    mesh = Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))
    sharded = data * tensor > 1
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), SPECS, is_leaf=lambda s: isinstance(s, P))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1))
    loss = _loss(dtype, (lambda x, *s: _constrain(x, mesh, s)) if sharded else (lambda x, *s: x))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments = state
        value, grads = jax.value_and_grad(loss)(weights, tokens)
        updates, moments = tx.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    weights = jax.jit(_init, out_shardings=shardings)(jax.random.key(0))
    like = jax.eval_shape(tx.init, weights)
    placed = optax.tree_map_params(
        tx, lambda _, s: s, like, shardings, transform_non_params=lambda _: NamedSharding(mesh, P())
    )
    state = (weights, jax.jit(tx.init, out_shardings=placed)(weights))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=((shardings, placed), None))
    return jitted, state, lambda tokens: jax.device_put(tokens, NamedSharding(mesh, P("data")))


def _constrain(x: jax.Array, mesh: Mesh, spec: tuple[Any, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def _init(key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 9))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape, jnp.float32)
    layers = {name: normal(LAYERS, D, D) for name in ("q", "k", "v", "out")}
    layers |= {"gate": normal(LAYERS, D, F), "up": normal(LAYERS, D, F), "down": normal(LAYERS, F, D)}
    layers |= {"norm1": jnp.ones((LAYERS, D)), "norm2": jnp.ones((LAYERS, D))}
    return {"embedding": normal(VOCAB, D), "head": normal(D, VOCAB), "norm": jnp.ones(D), "layers": layers}


def _loss(dtype: Any, constrain: Callable[..., jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    angles = np.arange(SEQ)[:, None] / 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (jnp.asarray(f(angles)[:, None], dtype) for f in (np.cos, np.sin))
    mask = np.tril(np.ones((SEQ, SEQ), bool))

    def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + 1e-5) * gain).astype(dtype)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = {name: leaf if name.startswith("norm") else leaf.astype(dtype) for name, leaf in w.items()}
        h = norm(x, w["norm1"])
        heads = (product(h, w[name]).reshape(x.shape[0], SEQ, HEADS, HEAD_DIM) for name in "qkv")
        q, k, v = (constrain(head, "data", None, "tensor") for head in heads)
        scores = jnp.einsum("bthd,bshd->bhts", rotate(q), rotate(k), preferred_element_type=jnp.float32)
        p = jax.nn.softmax(jnp.where(mask, scores * HEAD_DIM**-0.5, -1e30), -1).astype(dtype)
        a = jnp.einsum("bhts,bshd->bthd", p, v).reshape(x.shape)
        x = constrain(x + product(a, w["out"]), "data")
        h = norm(x, w["norm2"])
        y = jax.nn.silu(product(h, w["gate"])) * product(h, w["up"])
        return constrain(x + product(y, w["down"]), "data"), None

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        x = constrain(weights["embedding"].astype(dtype)[tokens[:, :-1]], "data")
        x, _ = jax.lax.scan(layer, x, weights["layers"])
        head = weights["head"].astype(dtype)

        def row(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            logits = (args[0] @ head).astype(jnp.float32)
            target = jnp.take_along_axis(logits, args[1][:, None], -1)[:, 0]
            return (jax.nn.logsumexp(logits, -1) - target).mean()

        return jax.lax.map(jax.checkpoint(row), (norm(x, weights["norm"]), tokens[:, 1:])).mean()

    return loss
