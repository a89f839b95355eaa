"""Collectives in branches that only some stages take, on real GPUs: a pipeline's gradients against one device's.

    python benchmarks/gpu_branches.py [--json OUT]

A stage of a pipeline does its tensor, data and sequence collectives inside a loop of one turn or none, which the
devices of the other stages may be passing over. XLA's CPU back end is held to it by the tests; with NCCL it was never
run. Here every layout that the GPUs allow is measured by the equivalence library, in fp32, against one of them. Exit
code 1 if an error is above 1e-4 (sums of GPUs have another order), 2 if there are fewer than two devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax

from sharded_train.equivalence import MODELS, Layout, errors, measure, program

LAYOUTS = (
    Layout(pipeline=2, num_microbatches=4),
    Layout(pipeline=2, tensor=2, num_microbatches=4),
    Layout(pipeline=2, data=2, zero=3, num_microbatches=4),
    Layout(pipeline=2, sequence=2, strategy="ring", num_microbatches=4),
    Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4, schedule="interleaved", chunks=2),
    Layout(pipeline=4, tensor=2, num_microbatches=8, schedule="zero_bubble", chunks=1),
)
LIMIT = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the errors here too")
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    fits = [layout for layout in LAYOUTS if layout.num_devices <= jax.device_count()]
    if not fits:
        print(f"{jax.device_count()} device: a pipeline needs two")
        return 2
    alone, found = measure(program(MODELS["deep"], Layout())), {}
    for layout in fits:
        found[str(layout)] = max(errors(measure(program(MODELS["deep"], layout)), alone).values())
        print(f"{found[str(layout)]:.1e}  {layout}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(max(found.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
