"""Pipeline schedules: the work that each does on virtual devices, and what each holds and takes on a cluster, compiled.

    python benchmarks/pipeline.py cpu [--schedules gpipe 1f1b interleaved] [--windows 7] [--steps 3] [--json OUT]
    python benchmarks/pipeline.py compiled [--config FILE] [--cluster h100:8x8] [--pipeline 8] [--tensor 8]
        [--schedules gpipe 1f1b interleaved:2] [--microbatches 8 16 32 64] [--json OUT] [--config.key=value ...]

A schedule may have its number of chunks after a colon.

`cpu`: a small model on 8 virtual CPU devices, pipeline 4 x data 2. The devices share the cores, so that the CPU time of
a step is the work of all stages, and the waiting of threads for each other, tick by tick. What is work is counted by
itself: how often a matrix product and a send ran in one profiled step, on all devices together; a schedule that did
something twice would show. Each schedule is a process of its own; windows of steps run in turn, and what counts is the
median of the ratios to the first one's window of the same round.

`compiled`: the train step is compiled for the cluster (the CUDA plugin of jax's version is needed, a GPU is not) and
read: bytes of temporaries; sums over data (or over pipeline, of what belongs to no stage) and whether all stand outside
of the loop over ticks; whether every send goes to a neighbour; the least time of a step and the MFU, from
`sharded_train.rehearse`. Of the microbatches only their number changes, not their size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
FEW = 65536  # bytes: sums of single numbers, and of the gains of norms
SMALL = {
    "model": {"vocab_size": 512, "d_model": 256, "num_layers": 8, "num_heads": 4, "d_ff": 1024},
    "mesh": {"pipeline": 4, "data": 2},
    "train": {"global_batch_size": 32, "sequence_length": 256, "num_microbatches": 8, "remat": "selective"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "compiled"])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved:2"], metavar="NAME[:CHUNKS]")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps in a window")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "llama3_8b.py")
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--pipeline", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--worker", metavar="NAME[:CHUNKS]", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.worker:
        work(args.worker, args.steps)
        return
    rows = cpu(args) if args.what == "cpu" else compiled(args, overrides)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def chosen(schedule: str) -> dict[str, str]:
    """The settings that "NAME:CHUNKS" stands for."""
    name, _, chunks = schedule.partition(":")
    return {"pipeline.schedule": name, **({"pipeline.num_chunks": chunks} if chunks else {})}


# ---- the work ---------------------------------------------------------------------------------------------------


def cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each schedule, printed as they are known."""
    workers = {schedule: start(schedule, args.steps) for schedule in args.schedules}
    begun = {schedule: ask(worker) for schedule, worker in workers.items()}
    seconds: dict[str, list[float]] = {schedule: [] for schedule in args.schedules}
    for window in range(args.windows):
        for schedule in args.schedules if window % 2 else reversed(args.schedules):
            seconds[schedule].append(ask(workers[schedule])["cpu"])
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    first = np.array(seconds[args.schedules[0]])
    first_one = args.schedules[0]
    print(f"| schedule | ticks | products | sends | CPU s a step | of {first_one}'s [90 %] | simulated time, of its |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for schedule in args.schedules:
        ratios = np.array(seconds[schedule]) / first
        resampled = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.percentile(resampled, [5, 95])
        row = {"schedule": schedule, **begun[schedule], "cpu": float(np.median(seconds[schedule]))}
        rows.append({**row, "ratio": float(np.median(ratios)), "interval": [low, high]})
        simulated = row["time"] / begun[first_one]["time"]
        ratio = f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
        counts = f"{row['products']:,} | {row['sends']:,}"
        print(f"| {schedule} | {row['ticks']} | {counts} | {row['cpu']:.3f} | {ratio} | {simulated:.3f} |")
    return rows


def start(schedule: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "cpu", "--worker", schedule, "--steps", str(steps)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The worker's next answer: first of its schedule, then of one window for each line sent."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    answer: dict[str, Any] = json.loads(worker.stdout.readline())
    return answer


def work(schedule: str, steps: int) -> None:
    """One schedule: a warm-up at the first line, then a window for each line."""
    sys.stdin.readline()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from sharded_train import assemble, recipe
    from sharded_train.schedules.simulate import neighbours
    from sharded_train.step import Batch

    changes = [f"--config.{key}={value}" for key, value in chosen(schedule).items()]
    program = assemble.program_of(recipe.from_dict(SMALL, changes))
    pipe, state = program.pipe, program.init(0)
    assert pipe is not None
    rows, seq = program.train.global_batch_size, program.train.sequence_length
    tokens = np.random.default_rng(0).integers(0, program.model.vocab_size, (rows, seq + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(seq, dtype=np.int32), (rows, seq))
    segments = np.ones((rows, seq), np.int32)
    batch = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], segments, positions), program.batch_sharding)
    for _ in range(2):
        state, metrics = program.train_step(state, batch)
        float(metrics["loss"])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, metrics = program.train_step(state, batch)
            float(metrics["loss"])
        counts = ran(Path(folder))
    timing = neighbours(pipe.schedule, pipe.costs)
    print(json.dumps({"ticks": pipe.schedule.num_ticks, "time": timing.time, **counts}), flush=True)
    for _ in sys.stdin:
        begun = time.process_time()
        for _ in range(steps):
            state, metrics = program.train_step(state, batch)
            float(metrics["loss"])
        print(json.dumps({"cpu": (time.process_time() - begun) / steps}), flush=True)


def ran(profile: Path) -> dict[str, int]:
    """How often matrix products and sends ran in a profiled step."""
    from jax.profiler import ProfileData

    found = next(profile.rglob("*.xplane.pb"))
    names = [
        str(dict(event.stats).get("hlo_op", ""))
        for plane in ProfileData.from_file(str(found)).planes
        for line in plane.lines
        for event in line.events
    ]
    return {
        "products": sum(name.startswith(("ynn", "dot", "custom-call")) for name in names),
        "sends": sum(name.startswith(("ppermute", "collective-permute")) for name in names),
    }


# ---- the compiled program ---------------------------------------------------------------------------------------


def compiled(args: argparse.Namespace, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each schedule and number of microbatches, printed as they are known."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    print(
        "| schedule | microbatches | temporaries, GiB | with the state | sums over data or pipeline | of them in ticks "
        "| sends | to neighbours | bubble | step, ms | MFU | tokens/s/GPU | compiled in, s |\n|" + "---|" * 13
    )
    rows = []
    for schedule in args.schedules:
        for m in args.microbatches:
            rows.append(one(args, overrides, schedule, m))
            print(in_words(rows[-1]), flush=True)
    return rows


def one(args: argparse.Namespace, overrides: Sequence[str], schedule: str, m: int) -> dict[str, Any]:
    """One compiled step, read."""
    from sharded_train import recipe
    from sharded_train.flops import flops_of
    from sharded_train.rehearse import clusters, hlo, timeline
    from sharded_train.rehearse.compile import compile_for
    from sharded_train.rehearse.pace import pace_of
    from sharded_train.rehearse.wires import collectives
    from sharded_train.rehearse.wires_places import Places
    from sharded_train.schedules.simulate import in_flight, neighbours

    cluster = clusters.parse(args.cluster)
    data = cluster.num_devices // (args.pipeline * args.tensor)
    settings = {
        "mesh.pipeline": args.pipeline,
        "mesh.tensor": args.tensor,
        "mesh.data": data,
        "zero.stage": 1,
        "train.num_microbatches": m,
        "train.global_batch_size": m * data,
        **chosen(schedule),
    }
    changes = [f"--config.{key}={value}" for key, value in settings.items()]
    done = compile_for(recipe.load(args.config, [*changes, *overrides]), cluster)
    module, program = hlo.parse(done.text), done.program
    found, unknown = collectives(module, Places.of(program.mesh))
    assert not unknown, unknown
    assert program.pipe is not None
    flops = flops_of(program)
    spent = timeline.describe(module, cluster, found, flops, "bf16", pace_of(program.pipe, module))
    plan, costs = program.pipe.schedule, program.pipe.costs
    return {
        "schedule": schedule,
        "microbatches": m,
        "temporaries": done.memory.temp_size_in_bytes,
        "arguments": done.memory.argument_size_in_bytes,
        **sums(found),
        **sends(module, program.mesh, plan.num_chunks > 1),
        "bubble": neighbours(plan, costs).bubble,
        "in_flight": (in_flight(plan)[0] / plan.num_chunks).tolist(),
        "step_seconds": spent["step_seconds"],
        "mfu": spent["mfu"],
        "tokens": spent["tokens_per_second_per_device"],
        "seconds": sum(done.seconds.values()),
    }


def sums(collectives: Sequence[Any]) -> dict[str, Any]:
    """Reductions of more than a few numbers over data, pipeline or both: how many a step, bytes, how many in a loop."""
    reductions = [
        each
        for each in collectives
        if each.op in ("all-reduce", "reduce-scatter") and "tensor" not in each.axes and each.payload_bytes > FEW
    ]
    return {
        "reductions": sum(each.times for each in reductions),
        "reduced_bytes": sum(each.times * each.payload_bytes for each in reductions),
        "reductions_in_ticks": sum(bool(each.loops) for each in reductions),
    }


def sends(module: Any, mesh: Any, ring: bool) -> dict[str, Any]:
    """Sends over pipeline a step, and whether each goes from a stage to its neighbour (round the ring, if it may)."""
    from sharded_train.rehearse.hlo_groups import pairs_of
    from sharded_train.rehearse.hlo_walk import walk

    stage = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), mesh.axis_names.index("pipeline"), 0)
    p = len(stage)
    where = np.empty((mesh.size, 2), int)  # stage, and place beside it
    where[stage.reshape(p, -1)] = np.stack(np.broadcast_arrays(np.arange(p)[:, None], np.arange(mesh.size // p)), -1)
    times, near = 0, True
    for run in walk(module):
        if run.instruction.opcode not in ("collective-permute", "collective-permute-start"):
            continue
        ends = where[pairs_of(run.instruction)]
        by = ends[:, 1, 0] - ends[:, 0, 0]
        one_on = np.isin(by % p, [1, p - 1]) if ring else abs(by) == 1
        near &= bool(one_on.all() and (ends[:, 0, 1] == ends[:, 1, 1]).all())
        times += run.times
    return {"sends": times, "to_neighbours": near}


def in_words(row: Mapping[str, Any]) -> str:
    cells = [
        row["schedule"],
        str(row["microbatches"]),
        f"{row['temporaries'] / 2**30:.2f}",
        f"{(row['temporaries'] + row['arguments']) / 2**30:.1f}",
        f"{row['reductions']}, {row['reduced_bytes'] / 2**20:,.0f} MiB",
        str(row["reductions_in_ticks"]),
        str(row["sends"]),
        "all" if row["to_neighbours"] else "NOT ALL",
        f"{row['bubble']:.1%}",
        f"{1e3 * row['step_seconds']:,.0f}",
        f"{row['mfu']:.1%}",
        f"{row['tokens']:,.0f}",
        f"{row['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
