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
# # 6. FP8
# Eight bits are enough to multiply with, if numbers are where the format has its own. Here: what the two formats can
# hold, where a model's numbers lie, what is lost with and without scaling, and what that does to training on real
# text. On CPUs FP8 is emulated: rounded to it, multiplied exactly.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import sharded_train
from sharded_train import assemble, draw, recipe
from sharded_train.calibrate import calibrated
from sharded_train.data.loader import Loader
from sharded_train.precision.formats import E4M3, E5M2
from sharded_train.step import Batch

# %% [markdown]
# ## Two formats
# e4m3 has more precision, for weights and activations; e5m2 more range, for gradients.

# %%
for dtype in (E4M3, E5M2):
    info = jnp.finfo(dtype)
    print(
        f"{dtype.name:14} from {float(info.smallest_subnormal):.1e} to {float(info.max):8.0f}, "
        f"steps of {float(info.eps):.3f} relative"
    )

# %% [markdown]
# ## Training on real text, with scaling and without
# The quickstart's model in small, on the source code of Python's own library. `unscaled` is the same program with
# every scale held at 1. All see the same batches in the same order, from the same weights.

# %%
CONFIG = Path(sharded_train.__file__).parents[1] / "configs/quickstart.py"
ROWS, LENGTH, STEPS = 8, 128, 40
text = Path(tempfile.mkdtemp(prefix="fp8-"))
SETTINGS = {
    "mesh.data": 8,
    "mesh.tensor": 1,
    "model.d_model": 128,
    "model.d_ff": 352,
    "model.num_layers": 2,
    "model.vocab_size": 1024,
    "data.max_bytes": 1_000_000,
    "train.num_steps": STEPS,
    "train.global_batch_size": ROWS,
    "train.sequence_length": LENGTH,
    "schedule.warmup_steps": 4,
}


def asked_for(precision):
    return recipe.load(CONFIG, [f"--config.{k}={v}" for k, v in {**SETTINGS, "precision.recipe": precision}.items()])


programs = {name: assemble.program_of(asked_for(name)) for name in ("bf16", "fp8_delayed")}
data = assemble.text_of(asked_for("bf16"), text, lambda words: None)


def trained(program, scaled=True):
    """Losses of all steps, and what the products saw in each."""
    state, losses, seen = program.init(0), [], []
    place = program.batch_sharding
    with Loader(data.train, batch_shape=(ROWS, LENGTH), sharding=place, seed=0, start_step=0) as loader:
        for step in range(STEPS):
            batch = Batch(**next(loader))
            if program.precision.is_fp8 and scaled and step == 0:
                state = calibrated(program, state, batch)
            if not scaled:
                state = state.replace(scaling=jax.tree.map(jnp.ones_like, state.scaling))
            state, metrics = program.train_step(state, batch)
            losses.append(float(metrics["loss"]))
            seen.append({name: np.asarray(x) for name, x in metrics.get("fp8", {}).items()})
    return losses, seen


curves, seen = {}, {}
curves["bf16"], _ = trained(programs["bf16"])
curves["fp8_delayed"], seen["fp8_delayed"] = trained(programs["fp8_delayed"])
curves["unscaled"], seen["unscaled"] = trained(programs["fp8_delayed"], scaled=False)

# %% [markdown]
# ## Where the numbers lie
# amax, the largest magnitude of each tensor, in the last step: of a product's input (x), weight (w) and its output's
# gradient (g). The smallest number of e5m2 is 2^-16; a tensor's smaller numbers lie far below its amax.

# %%
AMAX, SATURATED, LOST, SCALE = range(4)
last = seen["fp8_delayed"][-1]
names = sorted(last, key=lambda name: name.rpartition("/")[2])
draw.plot(
    {f"layer {i}": [float(np.log2(last[name][i, AMAX])) for name in names] for i in range(2)},
    [name.replace("attention", "att") for name in names],
    kind="bar",
    title="The largest number of each tensor",
    xlabel="tensor",
    ylabel="amax, power of two",
)

# %% [markdown]
# ## What is lost
# `lost` is the share of a tensor's numbers that become zero in its format, `saturated` the share that are clipped.

# %%
print(f"{'':22}{'scaled: lost':>14}{'saturated':>11}{'unscaled: lost':>17}{'saturated':>11}")
for name in names:
    cells = [seen[run][-1][name][:, what].max() for run in ("fp8_delayed", "unscaled") for what in (LOST, SATURATED)]
    print(f"{name:22}{cells[0]:>14.1%}{cells[1]:>11.1%}{cells[2]:>17.1%}{cells[3]:>11.1%}")

# %% [markdown]
# ## Scales follow amax
# scale = largest / amax over the last steps: as gradients grow or shrink, their scale goes the other way.

# %%
gradient = next(name for name in names if name.endswith("/g"))
draw.plot(
    {
        what: [float(np.log2(each[gradient][0, i])) for each in seen["fp8_delayed"]]
        for what, i in (("amax", AMAX), ("scale", SCALE))
    },
    range(1, STEPS + 1),
    title=f"{gradient} of layer 0",
    xlabel="step",
    ylabel="power of two",
)

# %% [markdown]
# ## Which of these stabilises FP8: scaling, no dropout, smaller batches, a larger learning rate?

# %%
draw.plot(
    curves,
    range(1, STEPS + 1),
    title="Training in FP8 beside bf16",
    xlabel="step",
    ylabel="loss, nats per token",
)

# %%
ends = {name: float(np.mean(those[-5:])) for name, those in curves.items()}
for name, loss in ends.items():
    print(
        f"{name:12} mean loss of the last five steps {loss:.3f}, {100 * (loss / ends['bf16'] - 1):+.2f} % beside bf16"
    )
assert abs(ends["fp8_delayed"] / ends["bf16"] - 1) < 0.02

# %% [markdown]
# Scaling: it puts each tensor's numbers where the format has its own. [docs/fp8.md](../docs/fp8.md) says how scales
# are kept, and which products of a cluster's program really are FP8; `benchmarks/fp8_training.py` has longer runs.

# %%
shutil.rmtree(text)
