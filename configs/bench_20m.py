"""The model that step times are compared on: 20M parameters, on the CPU.

Command:   python benchmarks/step_time.py
           (to train it: sharded-train train --config=configs/bench_20m.py --workdir=runs/bench_20m --cpu-devices=1)
Hardware:  2 CPU cores, as 1 or 8 devices
Time:      seconds a step; docs/measurements.md has the comparison
Expect:    396 GFLOP a step with causal attention counted whole
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"vocab_size": 8192, "d_model": 384, "num_layers": 6, "num_heads": 6, "d_ff": 1024}
    config.mesh = {"data": -1}
    config.zero = {"stage": 0}
    config.precision = {"recipe": "fp32"}
    config.optimizer = {"type": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
    config.schedule = {"learning_rate": 3e-4}
    config.train = {"num_steps": 1000, "global_batch_size": 8, "sequence_length": 512, "clip_norm": 1.0}
    return config
