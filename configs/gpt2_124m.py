"""GPT-2 small, 124M parameters, with the published dimensions (Radford et al. 2019, table 2, first row).

Command:   sharded-train train --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m
Hardware:  one host of 8 GPUs with 80 GB (H100 or A100); one GPU with --config.train.num_microbatches=32
Time:      not measured
Expect:    not measured. The paper does not publish its learning rate or number of steps; the ones here are those that
           later reproductions on open text use for half a million tokens a step.
Data:      trains a tokenizer of GPT-2's size on Python's standard library; for a real run give text and GPT-2's own
           tokenizer with --config.data.files='/text/*.txt' --config.data.tokenizer=/path/tokenizer.json

The vocabulary of 50257 divides by no tensor size: with tensor > 1 its tables stay whole and are padded inside the step.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 50257,
        "d_model": 768,
        "num_layers": 12,
        "num_heads": 12,
        "d_ff": 3072,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "max_positions": 1024,
        "tied_embedding": True,
        "bias": True,
    }
    config.mesh = {"data": -1}
    config.zero = {"stage": 1}
    config.precision = {"recipe": "bf16"}
    config.optimizer = {"type": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
    config.schedule = {"learning_rate": 6e-4, "warmup_steps": 700}
    config.train = {
        "num_steps": 20_000,  # 10 billion tokens
        "global_batch_size": 512,
        "sequence_length": 1024,
        "num_microbatches": 4,
    }
    config.evaluate = {"every": 500, "num_batches": 20}
    config.checkpoint = {"every": 1000}
    return config
