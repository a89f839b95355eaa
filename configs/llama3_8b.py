"""Llama 3 8B with the published dimensions (Grattafiori et al. 2024, arXiv:2407.21783, table 3), pre-training at 8k.

Command:   sharded-train train --config=configs/llama3_8b.py --workdir=runs/llama3_8b
Hardware:  one host of 8 H100 with 80 GB; 64 of them, started by srun, with --config.train.num_microbatches=2
Time:      not measured
Expect:    not measured
Look:      sharded-train show --config=configs/llama3_8b.py --cluster=1x8
Data:      without your own it is Python's standard library, far too little: give text and Llama 3's tokenizer with
           --config.data.files='/text/*.txt' --config.data.tokenizer=/path/tokenizer.json

From the paper: shape, activation, rope theta, peak learning rate, context of 8192. The vocabulary is that of the
released weights, 128,000 tokens and 256 special ones. Warm-up and cosine down to 1 % are the paper's for 405B; batch
size and steps are ours, the paper gives none for this size. Llama 3.1's longer context stretches the rotary
frequencies: --config.model.rope_scaling.factor=8
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 128_256,
        "d_model": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_ff": 14_336,
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "activation": "swiglu",
        "positions": "rope",
        "rope_theta": 500_000.0,
    }
    config.mesh = {"data": -1, "tensor": 1}
    config.zero = {"stage": 3}
    config.precision = {"recipe": "bf16"}
    config.optimizer = {"type": "adamw", "weight_decay": 0.1}
    config.schedule = {"learning_rate": 3e-4, "warmup_steps": 8000, "final_fraction": 0.01}
    config.train = {
        "num_steps": 1_200_000,
        "global_batch_size": 128,  # a million tokens
        "sequence_length": 8192,
        "num_microbatches": 16,  # one row at a time on each of 8 devices
        "remat": "selective",
    }
    config.evaluate = {"every": 1000, "num_batches": 8}
    config.checkpoint = {"every": 500}
    return config
