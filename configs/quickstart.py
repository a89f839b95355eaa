"""The quickstart: a small Llama on the source code of Python's own standard library; downloads nothing.

Command:   make train
           (sharded-train train --config=configs/quickstart.py --workdir=runs/quickstart --cpu-devices=8)
Try it:    in under a minute, with another --workdir and --config.train.num_steps=6 --config.schedule.warmup_steps=2
           (the warm-up, 20 steps, must end within the run)
Hardware:  2 CPU cores as 8 virtual devices (data 4 x tensor 2); 2, 4 or 8 GPUs; one GPU with --config.mesh.tensor=1
Time:      about 4 minutes on 2 cores; 14 s to the first step, 10 at the second start
Expect:    a falling loss, and validation bits per byte below those of a byte-bigram model of the same text
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 4096,
        "d_model": 256,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "d_ff": 704,
        "tied_embedding": True,
    }
    config.mesh = {"data": -1, "tensor": 2}
    config.zero = {"stage": 1}
    config.precision = {"recipe": "fp32"}
    config.optimizer = {"type": "adamw"}
    config.schedule = {"learning_rate": 2e-3, "warmup_steps": 20}
    config.data = {"max_bytes": 4_000_000, "validation_fraction": 0.05}
    config.train = {"num_steps": 150, "global_batch_size": 16, "sequence_length": 256}
    config.evaluate = {"every": 50}
    config.checkpoint = {"every": 50}
    return config
