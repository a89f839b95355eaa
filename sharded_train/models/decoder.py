"""The decoder-only transformer: GPT-2, Llama-3 and what lies between.

Functions on this device's shards. Between the blocks activations are split over `tensor` along the sequence; inside a
block every device works on its own heads and its own part of the MLP.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name

from sharded_train.collectives import TensorParallel, axis_index, axis_size
from sharded_train.models.block import Attend, Branch, Products
from sharded_train.ops import rope
from sharded_train.ops.dropout import dropout
from sharded_train.ops.embedding import lookup, own_rows, take
from sharded_train.ops.fp8 import Observed
from sharded_train.ops.linear import Deferred, Input, entered, linear, linears, plus
from sharded_train.ops.norm import layer_norm, rms_norm
from sharded_train.ops.saved import SAVED
from sharded_train.params import ParamSpec, Tree, normal, ones, zeros


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretch of the rotary frequencies to longer contexts (Llama 3.1 reference code)."""

    factor: float = 8.0  # how many times longer than original_context rows may get
    low_freq_factor: float = 1.0  # waves longer than original_context / this are stretched by the factor
    high_freq_factor: float = 4.0  # waves shorter than original_context / this stay as they are
    original_context: int = 8192  # tokens that the model was trained on before


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Defaults are a small Llama; `configs/` holds published ones."""

    vocab_size: int = 4096  # rows of the embedding; a tokenizer may have fewer
    d_model: int = 256  # width of the residual stream, and of every token between layers
    num_layers: int = 4  # each attention and an MLP
    num_heads: int = 4  # of the queries
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: d_model / num_heads
    d_ff: int = 704  # width within the MLP
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # before each branch and the head
    norm_eps: float = 1e-5  # added to the mean square or the variance
    activation: Literal["swiglu", "gelu"] = "swiglu"  # of the MLP: gated (silu(gate) * up), or GELU in its tanh form
    positions: Literal["rope", "learned"] = "rope"  # rotations of queries and keys, or a learned table
    max_positions: int | None = None  # rows of the table of learned positions; the longest context to generate
    rope_theta: float = 10000.0  # base of the rotations' wavelengths
    rope_scaling: RopeScaling | None = None
    tied_embedding: bool = False  # the head is the embedding
    bias: bool = False  # on every product of a layer
    dropout: float = 0.0  # of the embedding and of both residual branches
    attention_dropout: float = 0.0  # of attention's probabilities: above 0 it is refused, as no kernel has it
    init_std: float = 0.02  # of the initial weights; branches end with it / sqrt(2 num_layers)
    attention: Literal["auto", "xla", "cudnn"] = "auto"  # auto: cudnn on GPUs where it can, else xla
    attention_windows: tuple[int, ...] = (0,)  # last keys that a query sees, of the layers in turn, repeated; 0: all

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ups(self) -> tuple[str, ...]:
        """Weights that the MLP begins with."""
        return ("up", "gate") if self.activation == "swiglu" else ("up",)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As `ops.attention` has them."""
        return tuple(window or None for window in self.attention_windows)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One for each layer."""
        return tuple(self.windows[i % len(self.windows)] for i in range(self.num_layers))

    @property
    def dim_per_head(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    # ---- what the step asks of a model ---------------------------------------------------------------------------

    def param_specs(self) -> Tree:
        """Every parameter; those of the layers stacked `[num_layers, ...]`."""
        d, f, heads, kv, dh = self.d_model, self.d_ff, self.num_heads, self.kv_heads, self.dim_per_head
        init = normal(self.init_std)
        branch_end = normal(self.init_std * (2 * self.num_layers) ** -0.5)  # GPT-2: residual sums keep their variance

        def layer(axes: str, *shape: int, init: Any) -> ParamSpec:
            return ParamSpec((self.num_layers, *shape), ("layers", *axes.split()), init)

        def norm(stacked: bool) -> Tree:
            make = layer if stacked else lambda axes, *shape, init: ParamSpec(shape, tuple(axes.split()), init)
            both = {"gain": make("embed", d, init=ones), "bias": make("embed", d, init=zeros)}
            return both if self.norm == "layernorm" else {"gain": both["gain"]}

        attention = {
            "norm": norm(True),
            "q": layer("embed heads head_dim", d, heads, dh, init=init),
            "k": layer("embed kv_heads head_dim", d, kv, dh, init=init),
            "v": layer("embed kv_heads head_dim", d, kv, dh, init=init),
            "out": layer("heads head_dim embed", heads, dh, d, init=branch_end),
        }
        mlp = {
            "norm": norm(True),
            "up": layer("embed mlp", d, f, init=init),
            "down": layer("mlp embed", f, d, init=branch_end),
        }
        if self.activation == "swiglu":
            mlp["gate"] = layer("embed mlp", d, f, init=init)
        if self.bias:
            attention |= {
                "q_bias": layer("heads head_dim", heads, dh, init=zeros),
                "k_bias": layer("kv_heads head_dim", kv, dh, init=zeros),
                "v_bias": layer("kv_heads head_dim", kv, dh, init=zeros),
                "out_bias": layer("embed", d, init=zeros),
            }
            mlp |= {"up_bias": layer("mlp", f, init=zeros), "down_bias": layer("embed", d, init=zeros)}
            if self.activation == "swiglu":
                mlp["gate_bias"] = layer("mlp", f, init=zeros)
        specs = {
            "embedding": ParamSpec((self.vocab_size, d), ("vocab", "embed"), init),
            "layers": {"attention": attention, "mlp": mlp},
            "final_norm": norm(False),
        }
        if self.positions == "learned":
            assert self.max_positions is not None
            specs["positions"] = ParamSpec((self.max_positions, d), ("position", "embed"), init)
        if not self.tied_embedding:
            specs["head"] = ParamSpec((self.vocab_size, d), ("vocab", "embed"), init)
        return specs

    def context(
        self, positions: jax.Array, segments: jax.Array, numbers: jax.Array, key: jax.Array | None, tp: TensorParallel
    ) -> Context:
        """What the layers see of a pass over tokens `[batch, seq]`: `numbers` of each in the global batch, all int32.

        Without a key nothing is dropped.
        """
        numbers = tp.own_tokens(numbers)
        return Context(rotary(self, positions), segments, numbers, key if self.dropout else None)

    def embed(
        self, weights: Tree, tokens: jax.Array, positions: jax.Array, ctx: Context, tp: TensorParallel
    ) -> jax.Array:
        """Tokens and positions `[batch, seq]` -> activations `[batch, seq between blocks, embed]`."""
        x = tp.leave(lookup(own_rows(weights["embedding"], self.vocab_size), tokens))
        if self.positions == "learned":
            x = x + take(weights["positions"], tp.own_tokens(positions))
        return _dropped(self, x, ctx, 0)

    def branches(self, attend: Attend, tp: TensorParallel) -> tuple[Branch, ...]:
        """A layer: attention, then the MLP, each normalised before and added to the residual stream."""

        def branch(name: str, inputs: tuple[str, ...], last: str, site: int, begin: Any, end: Any) -> Branch:
            def leave(x: jax.Array, y: jax.Array, weights: Tree, ctx: Context, layer: jax.Array) -> jax.Array:
                y = plus(tp.leave(y), weights[name].get(f"{last}_bias"))
                return checkpoint_name(x + _dropped(self, y, ctx, 2 * layer + site), SAVED)

            scoped: Any = jax.named_scope(name)
            return Branch(
                scoped(lambda x, weights: norm(self, x, weights[name]["norm"])),
                scoped(lambda n, weights: entered(n, [weights[name][w] for w in inputs], tp)),
                scoped(lambda h, weights, ctx: begin(h, weights[name], ctx)),
                scoped(lambda mid, weights, ctx, layer: end(mid, weights[name], ctx, layer)),
                scoped(leave),
            )

        project = lambda h, w, ctx: projections(self, h, w, ctx.rope)
        attended = lambda qkv, w, ctx, layer: attention_out(self, attend(*qkv, ctx.segments, layer), w)
        up, down = lambda h, w, _: mlp_up(self, h, w), lambda ups, w, *_: mlp_down(self, ups, w)
        return (
            branch("attention", ("q", "k", "v"), "out", 1, project, attended),
            branch("mlp", self.ups, "down", 2, up, down),
        )

    def final(self, x: jax.Array, weights: Tree, tp: TensorParallel) -> jax.Array:
        """The last norm: activations between blocks -> `[batch, seq, embed]`, ready for the head."""
        return tp.enter(norm(self, x, weights["final_norm"]))

    def head(self, weights: Tree) -> jax.Array:
        """This device's rows of the output table, `[vocab / tensor, embed]`."""
        return own_rows(weights["embedding" if self.tied_embedding else "head"], self.vocab_size)

    @property
    def products(self) -> Products:
        """The layer's weights that multiply activations: groups of one input, by where they stand."""
        return (("attention", ("q", "k", "v")), ("attention", ("out",)), ("mlp", self.ups), ("mlp", ("down",)))

    def products_as_stored(self) -> Products:
        """Those that multiply by all of what a device has; not so kv heads that several devices of tensor share."""
        shared = self.kv_heads % axis_size("tensor") != 0
        (branch, qkv), *others = self.products
        return ((branch, ("q",) if shared else qkv), *others)


class Context(flax.struct.PyTreeNode):
    """What every layer of one forward pass sees beside its weights; nothing here is differentiated by."""

    rope: tuple[jax.Array, jax.Array] | None  # cos and sin, see `rope.tables`
    segments: jax.Array  # [batch, seq]: which document each token belongs to
    token_numbers: jax.Array  # [batch, seq between blocks] of the global batch: what dropout masks are keyed by
    dropout_key: jax.Array | None


def rotary(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """The rotary tables of tokens at `positions [batch, seq]`, None for a model that does not rotate."""
    if config.positions != "rope":
        return None
    freq = rope.frequencies(config.dim_per_head, config.rope_theta)
    if s := config.rope_scaling:
        freq = rope.stretched(freq, s.factor, s.low_freq_factor, s.high_freq_factor, s.original_context)
    return rope.tables(positions, freq)


def projections(
    config: DecoderConfig, x: Input, w: Tree, rotations: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of this device's heads: each `[batch, seq, heads, head_dim]`, rotated."""
    kv = {name: _own_kv_heads(config, w[name]) for name in ("k", "v", "k_bias", "v_bias") if name in w}
    ys = _of_one_input(config, x, w | kv, "q", "k", "v")
    q, k, v = (y.reshape(*x.shape[:2], -1, config.dim_per_head) for y in ys)
    return (q, k, v) if rotations is None else (rope.rotate(q, rotations), rope.rotate(k, rotations), v)


def _own_kv_heads(config: DecoderConfig, w: Any) -> Any:
    """The kv heads that this device's queries attend to: its shard, or its one head of weights stored whole.

    With fewer kv heads than `tensor` has devices, several devices share one.
    """
    if isinstance(w, Deferred):
        return w
    if isinstance(w, Observed):
        return w.each(lambda w: _own_kv_heads(config, w))
    ways, local = axis_size("tensor"), w.shape[-2]
    if ways == 1 or local < config.kv_heads:
        return w
    return jax.lax.dynamic_slice_in_dim(w, axis_index("tensor") * config.kv_heads // ways, 1, w.ndim - 2)


def attention_out(config: DecoderConfig, a: jax.Array, w: Tree) -> jax.Array:
    """The row-parallel product after attention: `[batch, seq, heads, head_dim]` -> partial sums like the residual."""
    return linear(a.reshape(-1, a.shape[2] * a.shape[3]), w["out"]).reshape(*a.shape[:2], config.d_model)


def mlp_up(config: DecoderConfig, x: Input, w: Tree) -> tuple[jax.Array, ...]:
    """Column-parallel products: up, and gate where there is one, `[batch, seq, mlp]`."""
    return tuple(up.reshape(*x.shape[:2], -1) for up in _of_one_input(config, x, w, *config.ups))


def _of_one_input(config: DecoderConfig, x: Input, w: Tree, *names: str) -> list[jax.Array]:
    """Products of activations `[batch, seq, embed]` by the weights of these names, `[batch * seq, out]` each."""
    rows = x.reshape(-1, config.d_model)
    ys = linears(rows, [w[name] for name in names], [w.get(f"{name}_bias") for name in names])
    return [checkpoint_name(y, SAVED) for y in ys]


def mlp_down(config: DecoderConfig, ups: tuple[jax.Array, ...], w: Tree) -> jax.Array:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU's tanh form, then the row-parallel product to partial sums."""
    up, *gate = ups
    h = jax.nn.silu(gate[0]) * up if config.activation == "swiglu" else jax.nn.gelu(up, approximate=True)
    return linear(h.reshape(-1, h.shape[-1]), w["down"]).reshape(*h.shape[:2], config.d_model)


def norm(config: DecoderConfig, x: jax.Array, w: Tree) -> jax.Array:
    if config.norm == "rmsnorm":
        return rms_norm(x, w["gain"], config.norm_eps)
    return layer_norm(x, w["gain"], w["bias"], config.norm_eps)


def _dropped(config: DecoderConfig, x: jax.Array, ctx: Context, site: jax.Array | int) -> jax.Array:
    """Dropout at one of the model's sites: 0 after the embedding, then two a layer."""
    if ctx.dropout_key is None:
        return x
    return dropout(x, jax.random.fold_in(ctx.dropout_key, site), ctx.token_numbers, config.dropout)
