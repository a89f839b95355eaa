"""The decoder written as naively as it can be, in fp64 on whole arrays: what the real one is compared with.

A Python loop over layers, masks filled entry by entry, whole logits, no operation of the package. It only reads
the names and shapes of `DecoderConfig`, `Batch` and the parameters.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharded_train.equivalence import Measurement
from sharded_train.models.decoder import DecoderConfig, RopeScaling
from sharded_train.params import named_leaves
from sharded_train.step import Batch

Tree = Any


def measure(
    model: DecoderConfig, weights: Tree, batch: Batch, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Measurement:
    """Mean loss over the tokens with a target, gradients of the mean objective and their norm."""
    assert model.dropout == 0
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda w: np.asarray(w, np.float64), weights)
        whole = jax.value_and_grad(lambda w: mean_loss(model, w, batch, label_smoothing, z_loss), has_aux=True)
        (_, nll), grads = jax.jit(whole)(wide)
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(grads, None)}
    norm = math.sqrt(sum(float((g**2).sum()) for g in leaves.values()))
    return Measurement(float(nll), norm, leaves)


def mean_loss(
    model: DecoderConfig, weights: Tree, batch: Batch, label_smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """(objective, negative log-likelihood), each a mean over the tokens with a target."""
    z = logits(model, weights, batch)
    targets = np.asarray(batch.targets)
    right = np.eye(model.vocab_size)[targets]  # -1 picks the last token, and does not count
    log_total = jnp.log(jnp.exp(z).sum(-1))
    log_probabilities = z - log_total[..., None]
    nll = -(right * log_probabilities).sum(-1)
    smooth = -log_probabilities.mean(-1)
    objective = (1 - label_smoothing) * nll + label_smoothing * smooth + z_loss * log_total**2
    mean = lambda losses: (losses * (targets >= 0)).sum() / (targets >= 0).sum()
    return mean(objective), mean(nll)


def logits(model: DecoderConfig, weights: Tree, batch: Batch) -> jax.Array:
    """`[rows, seq, vocab]`."""
    x = weights["embedding"][batch.tokens]
    if model.positions == "learned":
        x = x + weights["positions"][batch.positions]
    masks = [may_see(np.asarray(batch.segments), window or 0) for window in model.layer_windows]
    for i in range(model.num_layers):
        attention, mlp = (jax.tree.map(lambda w, i=i: w[i], weights["layers"][name]) for name in ("attention", "mlp"))
        x = x + attend(
            model,
            normalize(model, x, attention["norm"]),
            attention,
            batch.positions,
            masks[i],
        )
        x = x + feed_forward(model, normalize(model, x, mlp["norm"]), mlp)
    x = normalize(model, x, weights["final_norm"])
    return x @ weights["embedding" if model.tied_embedding else "head"].T


def may_see(segments: np.ndarray, window: int = 0) -> np.ndarray:
    """`[rows, query, key]`: an earlier token, or the same one, of the same document; of the last `window`, if not 0."""
    rows, seq = segments.shape
    mask = np.zeros((rows, seq, seq), bool)
    for row in range(rows):
        for query in range(seq):
            for key in range(query + 1):
                mask[row, query, key] = segments[row, query] == segments[row, key] and not 0 < window <= query - key
    return mask


def attend(model: DecoderConfig, x: jax.Array, w: Tree, positions: np.ndarray, mask: np.ndarray) -> jax.Array:
    def heads_of(name: str, heads: list[int]) -> jax.Array:
        """`[rows, head, seq, head_dim]`."""
        y = x[:, None] @ jnp.swapaxes(w[name], 0, 1)[jnp.array(heads)]
        return y + w[f"{name}_bias"][jnp.array(heads), None] if model.bias else y

    own = list(range(model.num_heads))
    shared = [head // (model.num_heads // model.kv_heads) for head in own]
    q, k, v = heads_of("q", own), heads_of("k", shared), heads_of("v", shared)
    if model.positions == "rope":
        q, k = turn(model, q, positions), turn(model, k, positions)
    scores = jnp.exp(q @ jnp.swapaxes(k, 2, 3) / math.sqrt(model.dim_per_head)) * mask[:, None]
    out = (scores / scores.sum(-1, keepdims=True) @ v @ w["out"]).sum(1)
    return out + w["out_bias"] if model.bias else out


def turn(model: DecoderConfig, x: jax.Array, positions: np.ndarray) -> jax.Array:
    """Rotary embedding of `x [rows, head, seq, head_dim]`: entries i and i + head_dim / 2 as one complex number."""
    half = model.dim_per_head // 2
    frequencies = rotary_frequencies(model.dim_per_head, model.rope_theta, model.rope_scaling)
    angles = np.asarray(positions)[:, None, :, None] * frequencies
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag], -1)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians a position of every pair; stretched wave by wave as the Llama 3.1 reference code does."""
    frequencies = [1 / theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return np.array(frequencies)
    stretched = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            stretched.append(frequency)
        elif wavelength > scaling.original_context / scaling.low_freq_factor:
            stretched.append(frequency / scaling.factor)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / span
            stretched.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return np.array(stretched)


def feed_forward(model: DecoderConfig, x: jax.Array, w: Tree) -> jax.Array:
    up = x @ w["up"] + (w["up_bias"] if model.bias else 0)
    if model.activation == "swiglu":
        gate = x @ w["gate"] + (w["gate_bias"] if model.bias else 0)
        hidden = gate / (1 + jnp.exp(-gate)) * up
    else:
        hidden = up / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return hidden @ w["down"] + (w["down_bias"] if model.bias else 0)


def normalize(model: DecoderConfig, x: jax.Array, w: Tree) -> jax.Array:
    if model.norm == "rmsnorm":
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * w["gain"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + model.norm_eps) * w["gain"] + w["bias"]
