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
# # 3. The four stages of ZeRO
# In data parallelism every device has the same weights, gradients and optimizer state: most of it many times over.
# ZeRO splits stage by stage: 1 the optimizer's state, 2 gradients too, 3 parameters too. Here are the bytes of each
# against the formulae, and the collectives in the program that 8 H100s would run.

# %%
from sharded_train.launch import virtual_devices

virtual_devices(8)

# %%
from sharded_train import draw, recipe
from sharded_train.params import count
from sharded_train.rehearse import clusters
from sharded_train.rehearse.compile import compile_for
from sharded_train.rehearse.run import Rehearsal, facts_of

# %%
MODEL = {"vocab_size": 32768, "d_model": 1024, "num_layers": 6, "num_heads": 16, "num_kv_heads": 8, "d_ff": 4096}
TRAIN = {"global_batch_size": 32, "sequence_length": 2048, "num_microbatches": 2, "remat": "selective"}
cluster = clusters.parse("h100:1x8")
compiled = {
    stage: compile_for(
        recipe.from_dict(
            {
                "model": MODEL,
                "mesh": {"data": 8},
                "zero": {"stage": stage},
                "precision": {"recipe": "bf16"},
                "train": TRAIN,
            }
        ),
        cluster,
    )
    for stage in range(4)
}
stages = {f"ZeRO {stage}": Rehearsal(facts_of(each), each.text) for stage, each in compiled.items()}
N, n = count(compiled[0].program.specs), 8
print(f"{N:,} parameters on {n} devices")

# %% [markdown]
# ## Bytes against the formulae
# Adam on fp32 master weights: 12 bytes a parameter between steps (4 master, 8 moments), of which stages 1 to 3 keep
# 1/n. (The paper stores weights in 16 bits beside the master; here the bf16 copy exists only inside the step.)

# %%
for stage, (name, found) in enumerate(stages.items()):
    held = sum(part["bytes"] for part in found.facts["memory"]["parts"] if part["what"] == "state")
    formula = 12 * N / (1 if stage == 0 else n)
    print(f"{name}: state {held / 2**20:8.2f} MiB, 12 N / {1 if stage == 0 else n} = {formula / 2**20:8.2f} MiB")
    assert abs(held / formula - 1) < 0.01

# %%
kinds = list(dict.fromkeys(part["name"] for found in stages.values() for part in found.facts["memory"]["parts"]))
bytes_of = {
    name: {part["name"]: part["bytes"] for part in found.facts["memory"]["parts"]} for name, found in stages.items()
}
large = [kind for kind in kinds if max(each.get(kind, 0) for each in bytes_of.values()) > 2**24]
draw.plot(
    {kind: [each.get(kind, 0) / 2**20 for each in bytes_of.values()] for kind in large},
    list(stages),
    kind="bar",
    title="One device at the fullest moment of a step",
    xlabel="stage",
    ylabel="memory, MiB",
)

# %% [markdown]
# ## Which two collectives aggregate and shard the gradients under ZeRO-1?
# All-gather and broadcast; broadcast and reduce; scatter and all-reduce; reduce-scatter and all-gather? Read it from
# the compiled programs.

# %%
print(f"{'':8}{'all-reduce':>16}{'reduce-scatter':>16}{'all-gather':>16}   MiB sent by each device, and how often")
for name, found in stages.items():
    cells = []
    for op in ("all-reduce", "reduce-scatter", "all-gather"):
        rows = [row for row in found.facts["wires"]["totals"] if row["op"] == op and row["wire_bytes"] > 2**16]
        cells.append(
            f"{sum(r['wire_bytes'] for r in rows) / 2**20:.0f} / {sum(r['runs'] for r in rows):.0f}" if rows else "-"
        )
    print(f"{name:8}" + "".join(f"{cell:>16}" for cell in cells))

# %% [markdown]
# Reduce-scatter and all-gather: under stage 1 once a step each. Gradients are summed in fp32 and weights travel in
# bf16, so the gather has half the bytes. Stage 2 reduce-scatters every microbatch; stage 3 gathers every layer again,
# forward and backward. In detail, for stage 1 and stage 3:

# %%
draw.collectives(stages["ZeRO 1"])

# %%
draw.collectives(stages["ZeRO 3"])

# %% [markdown]
# ## When
# In ZeRO-3 the next layer's weights arrive while this one's are multiplied with: solid bars below, striped where the
# device waits.

# %%
draw.timeline(stages["ZeRO 3"])

# %%
draw.comparison(stages)
