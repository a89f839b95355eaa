"""A run that does nothing but change a state and save it at every step: what benchmarks/soak.py kills.

    python benchmarks/checkpoint_child.py DIRECTORY-OR-ADDRESS STEPS [COORDINATOR NUM_PROCESSES PROCESS_ID]

Its state after k steps is a function of k alone, in whole numbers, so that any two runs end bit for bit alike.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train.checkpoint import CheckpointConfig, Checkpointer, SavePolicy


def main(directory: str, num_steps: int) -> None:
    """Resumes, and goes on to the last step."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    state = _initial(mesh)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    advance = jax.jit(_advance, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, state))
    with contextlib.closing(Checkpointer(directory, keep=2, timeout=60)) as checkpointer:
        choice, start = checkpointer.choose("auto"), 0
        if choice.steps:
            start, state, _ = checkpointer.resume(choice, abstract, lambda path, run: None)
        print(f"resumed {start}", flush=True)
        policy = SavePolicy(checkpointer, CheckpointConfig(every=1))
        for step in range(start + 1, num_steps + 1):
            state = jax.block_until_ready(advance(state))
            if policy.due(step):
                policy.save(step, state, {"step": step})
            print(f"step {step}", flush=True)
        if start < num_steps:  # it may have been killed when all was done, but for its exit
            policy.finish(num_steps, lambda: state)
    print("done", flush=True)


def _initial(mesh: Mesh) -> dict[str, Any]:
    put = lambda x, *spec: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, P(*spec)), lambda index: np.asarray(x[index])
    )
    words = np.arange(1 << 19, dtype=np.uint32).reshape(512, 1024)
    return {"w": put(words, "data"), "m": {"v": put(words + 1, None, "data")}, "step": put(np.int32(0))}


def _advance(state: dict[str, Any]) -> dict[str, Any]:
    mixed = jax.tree.map(lambda x: x * jnp.uint32(1664525) + jnp.uint32(1013904223), (state["w"], state["m"]["v"]))
    return {"w": mixed[0], "m": {"v": mixed[1] ^ (mixed[0] >> 16)}, "step": state["step"] + 1}


if __name__ == "__main__":
    where, steps, *others = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if others:
        jax.distributed.initialize(others[0], int(others[1]), int(others[2]), heartbeat_timeout_seconds=10)
    main(where, int(steps))
