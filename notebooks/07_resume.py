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
# # 7. Resume
# Save, kill, resume on the same mesh and on another, and compare: on the same mesh every bit of the weights, on
# another the same samples, and losses to rounding. Each run here is a process of its own, as it would be on a
# cluster.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from sharded_train import draw
from sharded_train import recipe as recipes
from sharded_train.checkpoint import Checkpointer
from sharded_train.mesh import build_mesh
from sharded_train.params import named_leaves

# %%
runs = Path(tempfile.mkdtemp(prefix="resume-"))
STEPS, EVERY = 18, 6
config = runs / "config.py"
config.write_text(f"""
from ml_collections import ConfigDict

def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {{"vocab_size": 512, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 128, "dropout": 0.1}}
    config.mesh = {{"data": 4, "tensor": 2}}
    config.schedule = {{"learning_rate": 3e-3, "warmup_steps": 4}}
    config.data = {{"max_bytes": 300_000}}
    config.train = {{"num_steps": {STEPS}, "global_batch_size": 8, "sequence_length": 64}}
    config.checkpoint = {{"every": {EVERY}}}
    config.log = {{"every": 1, "tensorboard": False}}
    return config
""")


# What one start has compiled the next ones find; a run keeps its programs in its workdir otherwise.
environ = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(runs / "compiled")}


def start(name, *options):
    command = [sys.executable, "-m", "sharded_train", "train", f"--config={config}", f"--workdir={runs / name}"]
    with open(runs / f"{name}.log", "a") as log:
        return subprocess.Popen([*command, "--cpu-devices=8", *options], env=environ, stdout=log, stderr=log)


def losses(name):
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


# %% [markdown]
# ## The run that nothing happens to

# %%
assert start("whole").wait() == 0
print({step: round(loss, 4) for step, loss in losses("whole").items() if step % EVERY == 0})

# %% [markdown]
# ## Killed
# SIGKILL, as when a machine dies, as soon as the first checkpoint is committed: no chance to save.

# %%
process = start("killed")
while not (runs / "killed/checkpoints" / str(EVERY)).is_dir() and process.poll() is None:
    time.sleep(0.02)
process.kill()
print("exit code", process.wait(), "= killed by signal", signal.SIGKILL.value)
print("checkpoints:", sorted(p.name for p in (runs / "killed/checkpoints").iterdir()))
assert process.returncode == -signal.SIGKILL

# %% [markdown]
# ## Resumed
# The same command goes on from the last committed step; a copy of the workdir goes on on another mesh, under another
# ZeRO stage.

# %%
import shutil

shutil.copytree(runs / "killed", runs / "other mesh")
other = ("--config.mesh.data=2", "--config.mesh.tensor=4", "--config.zero.stage=3")
assert start("killed").wait() == 0
assert start("other mesh", *other).wait() == 0

# %%
draw.plot(
    {
        name: [losses(name).get(step, np.nan) for step in range(1, STEPS + 1)]
        for name in ("whole", "killed", "other mesh")
    },
    range(1, STEPS + 1),
    title="Loss of three runs, which lie on one another",
    xlabel="step",
    ylabel="loss, nats per token",
)

# %% [markdown]
# ## Compared
# The weights of the last checkpoints, read back array by array.


# %%
def weights(name):
    recipe = recipes.load(config)
    program = recipes.program_on(recipe, build_mesh(recipe.mesh))
    restored, _ = Checkpointer(runs / name / "checkpoints").restore(STEPS, program.abstract_state)
    return dict(named_leaves(jax.tree.map(np.asarray, restored.params), None))


whole, killed = map(weights, ("whole", "killed"))
same = [np.array_equal(whole[name].view(np.uint32), killed[name].view(np.uint32)) for name in whole]
print(f"same mesh: {sum(same)} of {len(same)} parameters equal bit for bit")
assert all(same)

# %% [markdown]
# On another mesh sums have another order. The first step after the resume has the same weights, samples and dropout, so
# that its loss differs by rounding alone. From there on each step adds its own, and Adam lets it grow: it divides a
# gradient by its own size, however small.

# %%
off = [abs(losses("other mesh")[step] / losses("whole")[step] - 1) for step in range(EVERY + 1, STEPS + 1)]
print(f"other mesh: relative difference of the first loss {off[0]:.1e}, of the worst of {len(off)} {max(off):.1e}")
assert off[0] < 1e-5
assert max(off) < 1e-3

# %%
shutil.rmtree(runs)
