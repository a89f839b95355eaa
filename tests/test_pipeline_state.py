"""State over a pipeline: checkpoints have the model's order, whatever stages made them or take them up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharded_train import equivalence
from sharded_train.checkpoint import Checkpointer
from sharded_train.equivalence import MODELS, Layout, hard_batch
from sharded_train.generate import Sampling, sample_tokens
from sharded_train.optimizer import Adafactor, AdamW, Muon, Optimizer
from sharded_train.params import named_leaves
from sharded_train.step import Program, TrainState

DEEP = MODELS["deep"]
INTERLEAVED = Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4, schedule="interleaved", chunks=3)
UNEVEN = Layout(pipeline=4, tensor=2, num_microbatches=2, layers=(1, 2, 3, 1))
PLAIN = Layout(data=2, zero=3)


def program(layout: Layout, optimizer: Optimizer = AdamW()) -> Program:  # noqa: B008
    p = equivalence.program(DEEP, layout, ema_decay=0.9)
    return dataclasses.replace(p, optimizer=optimizer)


def started(p: Program) -> TrainState:
    """After one step, so that no leaf is zero."""
    state, _ = p.train_step(p.init(3), jax.device_put(hard_batch(DEEP), p.batch_sharding))
    return state  # type: ignore[no-any-return]


def named(tree: object) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree, None)}


def test_initial_weights_are_those_of_one_device() -> None:
    alone = named(program(Layout()).init(3).params)
    for layout in (INTERLEAVED, UNEVEN):
        p = program(layout)
        staged = p.init(3)
        assert {name: leaf.tobytes() for name, leaf in named(p.to_checkpoint(staged).params).items()} == {
            name: leaf.tobytes() for name, leaf in alone.items()
        }


@pytest.mark.parametrize("optimizer", [AdamW(), Adafactor(momentum=0.5), Muon()], ids=lambda o: type(o).__name__)
def test_a_state_goes_from_mesh_to_mesh_unchanged(optimizer: Optimizer, tmp_path: Path) -> None:
    """Saved over three chunks a stage; taken up by uneven stages, then by no pipeline at all: the same bits."""
    first, second, third = (program(layout, optimizer) for layout in (INTERLEAVED, UNEVEN, PLAIN))
    state = started(first)
    saved = first.to_checkpoint(state)
    wanted = named(saved)
    assert {leaf.shape[:1] for name, leaf in wanted.items() if "/layers/" in name} == {(7,)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, saved, {})
    for step, p in ((1, second), (2, third)):
        checkpointer.wait()
        taken_up = p.from_checkpoint(checkpointer.restore(step, p.abstract_checkpoint)[0])
        assert jax.tree.map(lambda x: x.sharding, taken_up) == jax.tree.map(lambda x: x.sharding, p.abstract_state)
        again = p.to_checkpoint(taken_up)
        assert {name: leaf.tobytes() for name, leaf in named(again).items()} == {
            name: leaf.tobytes() for name, leaf in wanted.items()
        }
        checkpointer.save(step + 1, again, {})
    checkpointer.close()


def test_scales_of_fp8_follow_their_layers(tmp_path: Path) -> None:
    """CASES 16, 25: each layer's are its number, wherever stages have it."""
    first, second, third = (equivalence.program(DEEP, at, recipe="fp8_delayed") for at in (INTERLEAVED, UNEVEN, PLAIN))
    assert first.pipe is not None
    state, order = first.init(3), jnp.asarray(first.pipe.order, jnp.float32)
    numbered = lambda x: jax.device_put(jnp.broadcast_to(order.reshape(-1, *[1] * (x.ndim - 1)), x.shape), x.sharding)
    saved = first.to_checkpoint(state.replace(scaling=jax.tree.map(numbered, state.scaling)))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, saved, {})
    checkpointer.wait()
    for p in (second, third):
        taken_up = p.from_checkpoint(checkpointer.restore(1, p.abstract_checkpoint)[0])
        places = np.arange(DEEP.num_layers) if p.pipe is None else p.pipe.places
        for name, x in named(taken_up.scaling).items():
            assert (x[places].reshape(DEEP.num_layers, -1) == np.arange(DEEP.num_layers)[:, None]).all(), name
            assert name.endswith(("/scale", "/history"))
    checkpointer.close()


def test_padding_is_zero_and_stays_so() -> None:
    p = program(UNEVEN)
    assert p.pipe is not None
    padding = p.pipe.order < 0
    assert padding.sum() == 4 * 3 - 7
    for tree in (started(p).params, started(p).opt_state):
        for name, leaf in named(tree["layers"]).items():
            assert not leaf[padding].any(), name
            assert leaf[~padding].any(), name


def test_no_device_holds_more_than_its_share_of_a_checkpoint() -> None:
    """Seven layers do not divide over four stages: what the stages no longer split lies split over another dim."""
    p = program(dataclasses.replace(UNEVEN, data=1))
    for name, leaf in named_leaves(p.abstract_checkpoint.params["layers"], None):
        if min(leaf.shape[1:], default=0) >= 4 and len(leaf.shape) > 2:
            assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 <= np.prod(leaf.shape), name


def test_evaluation_and_generation_are_those_of_one_device() -> None:
    alone = equivalence.program(DEEP, Layout())
    token_bytes = jnp.ones(DEEP.vocab_size, jnp.int32)
    sampling, prompt = Sampling(max_tokens=6, temperature=0), [3, 1, 4]

    def both(p: Program) -> tuple[float, list[list[int]]]:
        weights = equivalence.weights(p)
        loss, _ = p.eval_step(weights, equivalence.placed(p, hard_batch(DEEP)), token_bytes)
        mean = float(loss.nll / loss.num_tokens)  # virtual devices run one program at a time
        return mean, sample_tokens(p, weights, prompt, sampling, 2, limit=DEEP.vocab_size).tolist()

    loss, tokens = both(alone)
    for layout in (INTERLEAVED, UNEVEN, Layout(sequence=2, pipeline=2, tensor=2, num_microbatches=2)):
        found, same = both(equivalence.program(DEEP, layout))
        assert found == pytest.approx(loss, rel=1e-6)
        assert same == tokens


def test_schedules_of_one_order_of_sums_are_bitwise_equal() -> None:
    layout = Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4, schedule="gpipe")
    gpipe = equivalence.measure(equivalence.program(DEEP, layout))
    other = equivalence.measure(equivalence.program(DEEP, dataclasses.replace(layout, schedule="1f1b")))
    assert other.loss == gpipe.loss
    assert {n: g.tobytes() for n, g in other.grads.items()} == {n: g.tobytes() for n, g in gpipe.grads.items()}
