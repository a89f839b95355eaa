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
# # 4. Pipeline schedules
# Layers stand on stages, microbatches travel through them, and a schedule says what each stage does when. Here a
# schedule is a table `[tick, stage]`: drawn, timed, checked, and trained with. At the end you write one of your own.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
import numpy as np

from sharded_train import draw
from sharded_train.schedule_report.check import check
from sharded_train.schedules.build import SCHEDULES, make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import in_flight, neighbours
from sharded_train.schedules.table import NONE, Schedule

STAGES, MICROBATCHES = 4, 8

# %% [markdown]
# ## The four
# Forward takes 1, the backward of inputs 1, that of weights 1.

# %%
draw.schedule(make("gpipe", STAGES, MICROBATCHES))

# %%
draw.schedule(make("1f1b", STAGES, MICROBATCHES))

# %%
draw.schedule(make("interleaved", STAGES, MICROBATCHES, 2))

# %%
draw.schedule(make("zero_bubble", STAGES, MICROBATCHES))

# %% [markdown]
# ## Bubble and memory against microbatches
# The bubble is the part of the stages' time in which they have nothing to do. In flight are microbatches that a stage
# has taken forward and not yet backward: it keeps their activations. (With several chunks a stage, whole stages'
# worth of them.)

# %%
numbers = [4, 8, 16, 32, 64]
chunks = {"gpipe": 1, "1f1b": 1, "interleaved": 4, "zero_bubble": 1}


def of(name, m):
    costs = Costs.even(8, chunks[name], 1.0, 1.0, 1.0)
    schedule = make(name, 8, m, chunks[name], costs)
    return neighbours(schedule, costs).bubble, (in_flight(schedule)[0] / schedule.num_chunks).max()


found = {name: [of(name, m) for m in numbers] for name in chunks}
draw.plot(
    {name: [100 * bubble for bubble, _ in each] for name, each in found.items()},
    numbers,
    log="x",
    title="Eight stages: the bubble",
    xlabel="microbatches of a step",
    ylabel="idle time of the stages, %",
)

# %%
draw.plot(
    {name: [held for _, held in each] for name, each in found.items()},
    numbers,
    log="xy",
    title="Eight stages: what the fullest stage keeps",
    xlabel="microbatches of a step",
    ylabel="microbatches in flight",
)

# %% [markdown]
# ## Your own, in ten lines
# 1F1B that starts late: every microbatch waits one more tick at the last stage before it turns back. A worse idea
# than 1F1B, and it must come to the same gradients. `check` proves that nothing is used before it is made.


# %%
def dawdling(p, m, v, costs):
    ticks = m + 2 * p - 1
    forward, backward = np.full((2, ticks, p), NONE, np.int32)
    for stage in range(p):
        for k in range(m):
            forward[stage + k, stage] = k
            backward[p + (p - 1 - stage) + k, stage] = k  # 1f1b has p - 1 here
    held = np.array([[2 * (p - s) for s in range(p)], [0] * p])
    return Schedule("dawdling", p, m, 1, forward, backward, None, np.minimum(held, m))


SCHEDULES["dawdling"] = dawdling
check(make("dawdling", STAGES, MICROBATCHES))
draw.schedule(make("dawdling", STAGES, MICROBATCHES))

# %% [markdown]
# ## Trained with
# One executor runs any table. A step of a small model on 4 stages by your schedule, against one device:

# %%
from sharded_train.equivalence import MODELS, Layout, errors, measure, program

model = MODELS["deep"]
one = measure(program(model, Layout()))
for name in ("1f1b", "dawdling"):
    here = measure(program(model, Layout(pipeline=4, data=2, zero=1, num_microbatches=4, schedule=name)))
    worst = max(errors(here, one).values())
    print(f"{name:10} loss {here.loss:.6f} (one device {one.loss:.6f}), worst error of any gradient {worst:.1e}")
    assert worst < 1e-5
