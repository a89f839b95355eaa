"""The operations, each against numbers or against a formula written another way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train import compat
from sharded_train.collectives import TensorParallel, all_reduce
from sharded_train.equivalence import MODELS, SEQ
from sharded_train.models import decoder
from sharded_train.models.block import block_of
from sharded_train.ops import attention, cudnn, dropout, loss, rope, tiles
from sharded_train.ops.dot import dot
from sharded_train.ops.embedding import lookup, own_rows, take
from sharded_train.ops.linear import linear
from sharded_train.params import tree_map
from sharded_train.sharding import ZeroConfig, plan_of
from tests import oracle


def on_mesh(sizes: dict[str, int], fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn` on every device of a mesh; as in `Program`, an axis of one device is in no spec."""
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(*sizes.values())
    keep = lambda spec: P(*(axis if sizes.get(axis, 1) > 1 else None for axis in spec))
    clean = lambda specs: jax.tree.map(keep, specs, is_leaf=lambda s: isinstance(s, P))
    mesh = Mesh(devices, tuple(sizes))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=clean(in_specs), out_specs=clean(out_specs)))


def vary(x: Any, **sizes: int) -> Any:
    return jax.tree.map(lambda a: compat.vary(a, [axis for axis, size in sizes.items() if size > 1]), x)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape)


def relative(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# Cross-entropy


def cross_entropy(
    tensor: int,
    x: Any,
    head: Any,
    targets: Any,
    smoothing: float = 0,
    z_loss: float = 0,
    scales: tuple[float, ...] = (1,),
) -> list[Any]:
    """Objective, negative log-likelihood, and for each scale the gradients of scale x objective by x and whole head.

    A head that `tensor` does not divide is stored whole, as in the model.
    """
    vocab = head.shape[0]

    def sums(x: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, rows = vary(x, tensor=tensor), own_rows(vary(head, tensor=tensor), vocab)
        return loss.cross_entropy(x, rows, jnp.asarray(targets), vocab, smoothing, z_loss)

    def local(x: jax.Array, head: jax.Array) -> list[jax.Array]:
        out, pullback = jax.vjp(sums, x, head)
        return [*out, *(grad for scale in scales for grad in pullback((jnp.float32(scale), jnp.float32(1))))]

    spec = P() if vocab % tensor else P("tensor")
    run = on_mesh({"tensor": tensor}, local, (P(), spec), [P(), P(), *[P(), spec] * len(scales)])
    return [np.asarray(value) for value in run(x, head)]


def plain_cross_entropy(
    x: Any, head: Any, targets: Any, smoothing: float = 0, z_loss: float = 0
) -> tuple[float, float, np.ndarray, np.ndarray]:
    x, head = np.asarray(x, np.float64), np.asarray(head, np.float64)
    exps = np.exp(x @ head.T)
    lse = np.log(exps.sum(1, keepdims=True))
    log_p = x @ head.T - lse
    counts = (targets >= 0)[:, None]
    right = np.eye(len(head))[targets]
    wanted = (1 - smoothing) * right + smoothing / len(head)
    d = counts * (np.exp(log_p) * (1 + 2 * z_loss * lse) - wanted)
    objective = counts * (z_loss * lse**2 - (wanted * log_p).sum(1, keepdims=True))
    return float(objective.sum()), float(-(counts * right * log_p).sum()), d @ head, d.T @ x


def test_cross_entropy_of_four_logits() -> None:
    """CASES 4: logits [0, 1, 2, 3] and label 3 over tensor = 2."""
    head = np.arange(4, dtype=np.float32)[:, None]
    objective, nll, _, _ = cross_entropy(2, np.ones((1, 1), np.float32), head, np.array([3]))
    assert objective == nll == pytest.approx(0.44018970, abs=1e-6)


@pytest.mark.parametrize(
    ("tensor", "vocab", "chunk"),
    [(1, 12, 2**22), (1, 12, 60), (2, 12, 30), (4, 12, 2**22), (2, 97, 200), (4, 97, 2**22)],
)
def test_cross_entropy_is_that_of_the_whole_vocabulary(
    tensor: int, vocab: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one chunk or several that do not divide the tokens, and CASES 5: a prime vocabulary, padded inside."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk)
    x, head, targets = normal(23, 8), normal(vocab, 8, seed=1), integers(0, vocab, 23)
    targets[:5] = -1, vocab - 1, -1, -1, 0
    got = cross_entropy(tensor, x, head, targets, smoothing=0.3, z_loss=0.1)
    want = plain_cross_entropy(x, head, targets, smoothing=0.3, z_loss=0.1)
    assert np.array(got[:2]) == pytest.approx(np.array(want[:2]), rel=1e-6)
    assert relative(got[2], want[2]) < 1e-6
    assert relative(got[3], want[3]) < 1e-6
    assert not got[2][targets < 0].any()


def test_gradient_of_twice_the_loss_is_twice_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x, head, targets = normal(16, 8), normal(12, 8, seed=1), integers(0, 12, 16)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 30)
    _, _, *once, twice_x, twice_head = cross_entropy(2, x, head, targets, 0.1, 0.1, scales=(1, 2))
    for one, two in zip(once, (twice_x, twice_head), strict=True):
        assert one.any()
        assert (two == 2 * one).all()


def test_gradient_of_a_bf16_head_survives_a_thousand_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 1)  # a chunk a token
    x, head = jnp.asarray(1 + normal(1024, 4) / 10, jnp.bfloat16), jnp.asarray(normal(6, 4, seed=1), jnp.bfloat16)
    targets = np.full(1024, 2)  # every chunk pulls the same way: a bf16 sum would stop growing after 256 of them
    _, _, d_x, d_head = cross_entropy(1, x, head, targets)
    _, _, want_x, want_head = plain_cross_entropy(x, head, targets)
    assert d_head.dtype == jnp.bfloat16
    assert relative(d_head, want_head) < 4e-3
    assert relative(d_x, want_x) < 8e-3


def test_padding_of_the_vocabulary_has_no_gradient() -> None:
    targets = jnp.asarray(integers(0, 97, 20))

    def local(x: jax.Array, table: jax.Array) -> jax.Array:
        x, rows = vary(x, tensor=4), own_rows(vary(table, tensor=4), 97)
        return jax.grad(lambda rows: loss.cross_entropy(x, rows, targets, 97, 0.2, 0.1)[0])(rows)

    run = on_mesh({"tensor": 4}, local, (P(), P()), P("tensor"))
    grad = np.asarray(run(normal(20, 8), normal(97, 8, seed=1)))
    assert grad.shape == (100, 8)
    assert not grad[97:].any()
    assert grad[:97].any(1).all()


# Embedding


@pytest.mark.parametrize(("tensor", "vocab"), [(1, 12), (2, 12), (4, 13)])
def test_lookup_summed_over_tensor_is_the_embedding(tensor: int, vocab: int) -> None:
    table, ids, d_out = normal(vocab, 3), integers(0, vocab, 2, 9), normal(2, 9, 3)
    ids[0, :3] = 0, vocab - 1, vocab - 1
    spec = P() if vocab % tensor else P("tensor")

    def local(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        def embed(table: jax.Array) -> jax.Array:
            return all_reduce(lookup(own_rows(vary(table, tensor=tensor), vocab), jnp.asarray(ids)), "tensor")

        out, pullback = jax.vjp(embed, table)
        return out, pullback(jnp.asarray(d_out))[0]

    out, d_table = on_mesh({"tensor": tensor}, local, spec, (P(), spec))(table)
    assert (np.asarray(out) == table[ids]).all()
    want = np.zeros_like(table)
    np.add.at(want, ids, d_out)
    assert relative(d_table, want) < 1e-6


def test_gradient_of_an_often_repeated_token_is_summed_in_fp32() -> None:
    """CASES 2: 1e-3 added 1024 times in bf16 gives 0.5."""
    ids = jnp.asarray([1] * 1024 + [2])
    small = jnp.full((1025, 2), 1e-3, jnp.bfloat16)
    (grad,) = jax.vjp(lambda table: take(table, ids), jnp.zeros((4, 2), jnp.bfloat16))[1](small)
    assert grad.dtype == jnp.bfloat16
    unit = float(small[0, 0])
    assert np.asarray(grad, np.float32)[:, 0] == pytest.approx([0, 1024 * unit, unit, 0], rel=2**-8)


# Rotary embedding


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    x, positions = normal(2, 5, 3, 8), integers(0, 50, 2, 5)
    got = rope.rotate(jnp.asarray(x), rope.tables(jnp.asarray(positions), rope.frequencies(8, 100.0)))
    angles = positions[..., None] / 100.0 ** np.array([0, 1 / 4, 2 / 4, 3 / 4])
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None]
    assert relative(got, np.concatenate([turned.real, turned.imag], -1)) < 1e-6


def test_stretched_frequencies_of_llama_3() -> None:
    """The published numbers: factor 8, low 1, high 4, 8192 tokens, theta 500000, heads of 128."""
    scaling = decoder.RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = rope.frequencies(128, 500_000.0)
    got = rope.stretched(plain, 8.0, 1.0, 4.0, 8192)
    assert got == pytest.approx(oracle.rotary_frequencies(128, 500_000.0, scaling), rel=1e-12)
    waves = 2 * np.pi / plain
    short, long = waves < 8192 / 4, waves > 8192
    between = ~short & ~long
    assert (got[short] == plain[short]).all()
    assert (got[long] == plain[long] / 8).all()
    assert ((got < plain) & (got > plain / 8))[between].all()
    assert (short.sum(), between.sum(), long.sum()) == (29, 6, 29)


# Attention

SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3], [1, 2, 2, 2, 2, 0, 0]])


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        shared = h // (q.shape[2] // k.shape[2])
        seen = [s for s in range(k.shape[1]) if visible[b, t, s]]
        scores = np.exp([q[b, t, h] @ k[b, s, shared] / np.sqrt(q.shape[3]) for s in seen])
        out[b, t, h] = scores / scores.sum() @ v[b, seen, shared]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_plain_formula(kv_heads: int) -> None:
    q, k, v = normal(2, 7, 4, 8), normal(2, 7, kv_heads, 8, seed=1), normal(2, 7, kv_heads, 8, seed=2)
    got = attention.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(SEGMENTS), "xla")
    assert relative(got, plain_attention(q, k, v, oracle.may_see(SEGMENTS))) < 1e-6


def test_attention_to_a_cache_is_the_plain_formula() -> None:
    q, k, v = normal(2, 2, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    visible = np.arange(9) <= np.array([[3, 4], [6, 7]])[..., None]
    got = tiles.attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(visible))
    assert relative(got, plain_attention(q, k, v, visible)) < 1e-6


@pytest.mark.parametrize(("seq", "num_tiles"), [(96, 1), (384, 3), (250, 1)])
def test_attention_in_tiles_is_attention_at_once(seq: int, num_tiles: int) -> None:
    """Output and gradients, documents that cross the tiles included, against autodiff of the plain formula."""
    cut = list(tiles.causal_tiles(seq))
    assert len(cut) == num_tiles
    assert [rows.stop for rows, _ in cut] == [keys.stop for _, keys in cut]
    assert cut[-1][0].stop == seq
    q, k, v, d_out = (jnp.asarray(normal(2, seq, n, 8, seed=i)) for i, n in enumerate((4, 2, 2, 4)))
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (2, seq)), axis=1))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8)
        visible = jnp.asarray(oracle.may_see(np.asarray(segments)))
        p = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    out, back = jax.vjp(lambda q, k, v: attention.attention(q, k, v, segments, "xla"), q, k, v)
    want, want_back = jax.vjp(plain, q, k, v)
    assert relative(out, want) < 1e-6
    for got, expected in zip(back(d_out), want_back(d_out), strict=True):
        assert relative(got, expected) < 2e-6


def test_gradients_of_attention_are_zero_exactly_where_nothing_is_seen() -> None:
    q, k, v = (jnp.asarray(normal(2, 7, n, 4, seed=seed)) for seed, n in enumerate((2, 1, 1)))
    segments = jnp.asarray(SEGMENTS)
    want = oracle.may_see(SEGMENTS)
    assert (np.asarray(tiles.within_documents(segments, segments)) == want).all()
    by_k, by_v = jax.jit(jax.jacrev(lambda k, v: attention.attention(q, k, v, segments, "xla"), (0, 1)))(k, v)
    # [row, query, head, dim, row, key, head, dim] -> [row, query, row, key]
    by_k, by_v = (np.abs(np.asarray(jacobian)).sum((2, 3, 6, 7)) for jacobian in (by_k, by_v))
    alone = want.sum(-1, keepdims=True) == 1  # alone in its softmax, a key's score changes nothing but by rounding
    for size, expected in ((by_k, want & ~alone), (by_v, want)):
        assert ((size[[0, 1], :, [0, 1]] > 1e-5) == expected).all()
        assert not size[[0, 1], :, [0, 1]][~want].any()
        assert not size[[0, 1], :, [1, 0]].any()


@pytest.mark.parametrize(("transpose_a", "transpose_b"), list(itertools.product([False, True], repeat=2)))
def test_products_in_bf16_are_summed_in_fp32(transpose_a: bool, transpose_b: bool) -> None:
    a, b = (jnp.asarray(x).astype(jnp.bfloat16) for x in (normal(3, 4, 2000), normal(3, 2000, 5, seed=1)))
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    a, b = (x.mT if transposed else x for x, transposed in ((a, transpose_a), (b, transpose_b)))
    run = jax.jit(
        lambda a, b, t: dot(a, b, transpose_a=transpose_a, transpose_b=transpose_b, out_dtype=t), static_argnums=2
    )
    assert relative(run(a, b, jnp.dtype(jnp.float32)), want) < 1e-5
    narrow = run(a, b, jnp.dtype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    assert relative(narrow, want) < 2**-8


def test_linear_takes_the_dims_of_a_weight_together() -> None:
    x, w, bias = normal(6, 8), normal(8, 3, 4, seed=1), normal(3, 4, seed=2)
    assert (
        relative(linear(jnp.asarray(x), jnp.asarray(w), jnp.asarray(bias)), x @ w.reshape(8, 12) + bias.reshape(12))
        < 1e-6
    )
    y, out = normal(6, 12), normal(3, 4, 8, seed=3)
    assert relative(linear(jnp.asarray(y), jnp.asarray(out)), y @ out.reshape(12, 8)) < 1e-6


def test_cudnn_is_chosen_where_it_is_exact() -> None:
    bf16, fp32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    assert attention.choose("auto", "gpu", 128, bf16) == "cudnn"
    for unfit in (("cpu", 128, bf16), ("gpu", 128, fp32), ("gpu", 136, bf16), ("gpu", 60, bf16)):
        assert attention.choose("auto", *unfit) == "xla"
    assert attention.choose("cudnn", "gpu", 256, bf16) == "cudnn"
    assert attention.choose("xla", "gpu", 128, bf16) == "xla"


@pytest.mark.parametrize(
    ("capability", "chosen"), [("7.5", "xla"), ("8.0", "cudnn"), ("10.3", "cudnn"), ("gfx942", "xla")]
)
def test_gpus_without_cudnns_attention_do_without(
    capability: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 is for GPUs before Ampere, on which cuDNN's attention does not run; AMD's have no cuDNN at all."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert attention.choose("auto", "gpu", 64, jnp.dtype(jnp.float16)) == chosen
    assert cudnn.packs() == (capability == "10.3")


# Dropout

RATE = 0.25
NUMBERS = np.arange(8 * SEQ).reshape(8, SEQ)


@functools.partial(jax.jit, static_argnums=2)
def dropped(x: jax.Array, numbers: jax.Array, seed: int) -> jax.Array:
    return dropout.dropout(x, jax.random.key(seed), numbers, RATE)


def mask(numbers: np.ndarray, seed: int) -> np.ndarray:
    values = np.asarray(dropped(jnp.ones((*numbers.shape, 64)), jnp.asarray(numbers), seed))
    assert set(np.unique(values)) == {np.float32(0), np.float32(1) / np.float32(1 - RATE)}
    return values > 0


def assert_unrelated(masks: list[np.ndarray]) -> None:
    """Each two agree where chance has them agree, rate^2 + (1 - rate)^2 of the entries, within six sigma."""
    chance = RATE**2 + (1 - RATE) ** 2
    for a, b in itertools.combinations(masks, 2):
        assert abs((a == b).mean() - chance) < 6 * (chance * (1 - chance) / a.size) ** 0.5


def test_a_mask_belongs_to_the_number_of_its_token() -> None:
    whole = mask(NUMBERS, 1)
    assert abs(whole.mean() - (1 - RATE)) < 6 * (RATE * (1 - RATE) / whole.size) ** 0.5
    assert (mask(NUMBERS[3:5, 8:], 1) == whole[3:5, 8:]).all()  # wherever its shard lies
    flat = whole.reshape(-1, 64)
    assert len(np.unique(flat, axis=0)) == len(flat)
    assert_unrelated([whole, mask(NUMBERS, 2), np.roll(whole, 1, 0), np.roll(whole, 1, 1)])


def test_dropout_keeps_the_mean_and_passes_gradients_through_its_mask() -> None:
    x = jnp.asarray(3 + normal(8, SEQ, 64))
    y, pullback = jax.vjp(lambda x: dropped(x, jnp.asarray(NUMBERS), 1), x)
    assert float(y.mean()) == pytest.approx(float(x.mean()), rel=0.03)
    assert ((np.asarray(pullback(jnp.ones_like(y))[0]) > 0) == (np.asarray(y) != 0)).all()
    assert dropout.dropout(x, jax.random.key(1), jnp.asarray(NUMBERS), 0.0) is x


@functools.cache
def masks_of_the_model(data: int, tensor: int) -> list[np.ndarray]:
    """Masks after the embedding and in both branches of two layers, read off a model that is nothing but biases."""
    config = dataclasses.replace(MODELS["gpt2"], num_layers=1, dropout=RATE)
    sizes = {"data": data, "tensor": tensor}
    specs = config.param_specs()
    weights = tree_map(lambda spec: np.zeros(spec.shape, np.float32), specs)
    weights["positions"] += 1
    weights["layers"]["attention"]["out_bias"] += 1
    weights["layers"]["mlp"]["down_bias"] += 10

    def local(weights: Any, numbers: jax.Array) -> Any:
        weights = vary(weights, **sizes)
        positions, tp = numbers % SEQ, TensorParallel()
        ctx = config.context(positions, jnp.ones_like(numbers), numbers, jax.random.key(3), tp)
        x = config.embed(weights, jnp.zeros_like(numbers), positions, ctx, tp)
        layer = jax.tree.map(lambda w: w[0], weights["layers"])
        attend = lambda q, k, v, segments, layer: attention.attention(q, k, v, segments, "xla", layer=layer)
        block = block_of(config.branches(attend, tp))
        return x, *(block(x, layer, ctx, jnp.int32(i), None) - x for i in range(2))

    stored = plan_of(specs, {**sizes, "sequence": 1, "pipeline": 1}, ZeroConfig(0)).stored
    out = (P("data", "tensor"),) * 3
    embedded, *branches = on_mesh(sizes, local, (stored, P("data")), out)(weights, NUMBERS)
    added = [np.round(np.asarray(branch) * (1 - RATE)) for branch in branches]
    return [np.asarray(embedded) > 0, *(a % 10 == 1 for a in added), *(a >= 10 for a in added)]


def test_every_place_of_the_model_has_masks_of_its_own() -> None:
    assert_unrelated(masks_of_the_model(1, 1))


def test_masks_are_the_same_on_a_mesh() -> None:
    for one, many in zip(masks_of_the_model(1, 1), masks_of_the_model(2, 2), strict=True):
        assert (one == many).all()
