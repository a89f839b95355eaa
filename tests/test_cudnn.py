"""What we ask of cuDNN, answered on the CPU by a stand-in that does what cuDNN's manual says and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train import attention_check, compat, launch
from sharded_train.ops import attention, cudnn
from sharded_train.ops.saved import SAVED
from sharded_train.rehearse import clusters
from tests.test_context import PACKED, WHOLE, arrays, on_devices, on_one_device, relative, with_gradients

Call = Callable[..., Any]


def stand_in(direction: str, operands: Sequence[jax.Array], *, mask_type: str, scale: float, **settings: Any) -> Any:
    """All sequences as one row of tokens. What cuDNN leaves unwritten is NaN, and NaN it reads must not matter."""
    q, k, v, bias, *rest = operands
    lengths, offsets = rest[:2], rest[2:4]
    (batch, seq, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
    number, place, count = [], [], batch
    for x, length, offset in zip((q, k), lengths, offsets, strict=True):  # [tokens]: the sequence, the place in it
        tokens = jnp.arange(batch * x.shape[1])
        if offset.size:
            count, starts = length.size, offset.reshape(-1)[: length.size] // (x.shape[2] * dim)
        else:
            starts = jnp.arange(batch) * x.shape[1]
        ends = starts + (length.reshape(-1) if "PADDING" in mask_type else x.shape[1])
        inside = (tokens >= starts[:, None]) & (tokens < ends[:, None])
        number.append(jnp.where(inside.any(0), inside.argmax(0), -1))
        place.append(tokens - starts[number[-1]])
    visible = (number[0][:, None] == number[1]) & (number[0][:, None] >= 0)
    behind = place[0][:, None] - place[1]
    if "CAUSAL" in mask_type:
        visible &= (behind >= 0) & (behind < (settings["sliding_window_length"] or seq))
    flat = lambda x: x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
    wide = lambda x: jnp.repeat(flat(x), heads // kv_heads, axis=1)
    scores = jnp.einsum("thd,shd->hts", flat(q), wide(k)) * scale
    if bias.size:
        dense = jnp.full((batch, seq, batch, keys), -jnp.inf)
        own = jnp.arange(batch)
        scores += dense.at[own, :, own].set(bias[:, 0]).reshape(batch * seq, -1)
    scores = jnp.where(visible, scores, -jnp.inf)
    written, at = number[0] >= 0, (number[0], slice(None), place[0])
    if direction == "fwd":
        lse = jax.nn.logsumexp(scores, -1)
        out = jnp.einsum("hts,shd->thd", jnp.exp(scores - lse[..., None]), wide(v))
        stats = jnp.full((count, heads, seq), jnp.nan).at[at].set(jnp.where(written[:, None], lse.T, jnp.nan))
        return jnp.where(written[:, None, None], out, jnp.nan).reshape(q.shape).astype(q.dtype), stats
    stats, out, d_out = operands[10:]
    p = jnp.where(visible, jnp.exp(scores - stats[at].T[..., None]), 0)
    d_out = jnp.where(written[:, None, None], flat(d_out), 0)
    delta = (jnp.where(written[:, None, None], flat(out), 0) * d_out).sum(-1).T
    d_scores = p * (jnp.einsum("thd,shd->hts", d_out, wide(v)) - delta[..., None]) * scale
    narrow = lambda x, like: (
        x.reshape(-1, kv_heads, heads // kv_heads, dim).sum(2).reshape(like.shape).astype(like.dtype)
    )
    d_q = jnp.einsum("hts,shd->thd", d_scores, wide(k))
    d_k = narrow(jnp.einsum("hts,thd->shd", d_scores, flat(q)), k)
    d_v = narrow(jnp.einsum("hts,thd->shd", p, d_out), v)
    unread = lambda x, of: jnp.where((of >= 0).reshape(*x.shape[:2], 1, 1), x, jnp.nan)
    return unread(d_q.reshape(q.shape).astype(q.dtype), number[0]), unread(d_k, number[1]), unread(d_v, number[1])


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cudnn_attention", stand_in)


def by_cudnn(args: list[Any], **settings: Any) -> list[np.ndarray]:
    fn = lambda q, k, v, segments: attention.attention(q, k, v, segments, "cudnn", **settings)
    return [np.asarray(x) for x in jax.jit(with_gradients(fn))(*args)]


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
    ("segments", "settings"),
    [
        (WHOLE, {"max_documents": 1}),
        (WHOLE, {}),
        (PACKED, {}),
        (PACKED, {"max_documents": 4}),  # 13 runs in 4 rows: the table is of all of them together
        (PACKED, {"window": 5}),
        (WHOLE, {"window": 5, "max_documents": 1}),
    ],
)
@pytest.mark.parametrize("packs", [True, False])
def test_documents_as_starts_and_lengths(
    segments: np.ndarray, settings: dict[str, int], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "packs", lambda: packs)
    args = [*arrays(segments), segments]
    window = settings.get("window")
    given = {"windows": (window,), **{key: n for key, n in settings.items() if key != "window"}}
    for got, want in zip(by_cudnn(args, **given), on_one_device(args, window), strict=True):
        assert relative(got, want) < 2e-6


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("window", [1, 5, 8, 9, 20, 63])
def test_a_window_is_the_chunk_a_rectangle_and_a_corner(window: int) -> None:
    """Of chunks of 8: within one, just one, over several, almost the row; at 1 there is nothing to send."""
    args = [*arrays(PACKED), PACKED]
    for got, want in zip(
        on_devices(4, "ring", args, window=window, kernel="cudnn"), on_one_device(args, window), strict=True
    ):
        assert np.abs(got - want).max() < 2e-6 * max(1, np.abs(want).max())


@pytest.mark.usefixtures("_stand_in")
def test_too_many_documents_are_no_number() -> None:
    """13 runs, padding counted: a table of 3 a row holds 12."""
    args = [*arrays(PACKED), PACKED]
    out, *_ = by_cudnn(args, max_documents=3)
    assert np.isnan(out).all()
    assert np.isfinite(by_cudnn(args, max_documents=4)[0]).all()


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_pairs_of_chunks_are_rectangles(strategy: Any) -> None:
    args = [*arrays(PACKED), PACKED]
    for got, want in zip(on_devices(4, strategy, args, kernel="cudnn"), on_one_device(args), strict=True):
        assert relative(got, want) < 2e-6


def test_starts_count_numbers_and_32_bits_of_them() -> None:
    long = jax.ShapeDtypeStruct((4, 2**17, 32, 128), jnp.bfloat16)
    fn = lambda x, s: attention.attention(x, x, x, s, "cudnn")
    with pytest.raises(ValueError, match=r"4 rows x 131072 tokens x 4096 numbers a token are 2147483648"):
        jax.eval_shape(fn, long, jax.ShapeDtypeStruct(long.shape[:2], jnp.int32))


# The question whether cuDNN can be trusted


@pytest.mark.usefixtures("_stand_in")
def test_the_check_passes_what_is_right() -> None:
    results = attention_check.check(16, jnp.dtype(jnp.bfloat16), window=100, seq=128)
    assert len(results) == 9
    assert all(result.right for result in results)


def forgets_documents(direction: str, operands: Any, *, mask_type: str, **settings: Any) -> Any:
    packed = operands[4].ndim == 2  # [rows, documents] lengths, where a corner has one of each row
    if mask_type == "PADDING_CAUSAL" and direction == "fwd" and packed:
        nothing = operands[3]
        out, lse = stand_in(direction, (*operands[:4], *[nothing] * 4), mask_type="CAUSAL", **settings)
        return out, jnp.repeat(lse, operands[4].shape[1], 0)
    return stand_in(direction, operands, mask_type=mask_type, **settings)


def rounds_the_logsumexp(direction: str, operands: Any, **settings: Any) -> Any:
    result = stand_in(direction, operands, **settings)
    return (result[0], result[1] * 1.01) if direction == "fwd" else result


def reads_the_query_s_heads(direction: str, operands: Any, **settings: Any) -> Any:
    """What JAX 0.10's own wrapper does."""
    operands = list(operands)
    operands[7] = operands[7] * (operands[0].shape[2] // operands[1].shape[2])
    return stand_in(direction, operands, **settings)


def drops_a_gradient(direction: str, operands: Any, **settings: Any) -> Any:
    result = stand_in(direction, operands, **settings)
    return result if direction == "fwd" else (*result[:2], result[2] * 1.05)


def hides_nothing_in_a_corner(direction: str, operands: Any, *, mask_type: str, **settings: Any) -> Any:
    """A causal mask is dropped where there are lengths and no starts."""
    dropped = mask_type == "PADDING_CAUSAL" and not operands[6].size
    return stand_in(direction, operands, mask_type="PADDING" if dropped else mask_type, **settings)


BROKEN = [
    forgets_documents,
    rounds_the_logsumexp,
    reads_the_query_s_heads,
    drops_a_gradient,
    hides_nothing_in_a_corner,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_the_check_finds_what_is_wrong(broken: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cudnn_attention", broken)
    jax.clear_caches()
    with pytest.raises(RuntimeError, match=r"(?s)WRONG.*model\.attention = \"xla\""):
        attention_check.check(16, jnp.dtype(jnp.bfloat16), window=100, seq=128)


# The compiled program


@pytest.mark.skipif(not launch.has_plugin(), reason="JAX's CUDA plugin is not installed: make setup-rehearse")
def test_a_layer_calls_cudnn_once_each_way_without_a_mask() -> None:
    """Under scan, the selective policy and the manual shard_map, documents packed."""
    devices = compat.compile_only_devices(clusters.parse("h100:1x8").target, 1, 8)
    seq = 1024

    def loss(x: jax.Array, segments: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            def block(x: jax.Array) -> jax.Array:
                return x + attention.attention(x, x[:, :, :2], x[:, :, 2:4], segments, "cudnn")

            policy = jax.checkpoint_policies.save_only_these_names(SAVED)
            return jax.checkpoint(block, policy=policy, prevent_cse=False)(x), None

        return jax.lax.psum((jax.lax.scan(layer, x, length=3)[0].astype(jnp.float32) ** 2).sum(), "data")

    mesh, spec = Mesh(np.array(devices), ("data",)), P("data")
    step = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
    text = step.lower(of((8, seq, 8, 64), jnp.bfloat16), of((8, seq), jnp.int32)).compile().as_text() or ""
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    assert text.count('"max_seg_per_batch": 64') == 2
    assert f"{seq},{seq}]" not in text
