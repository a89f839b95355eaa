"""The structure of Llama 3 8B, small: the layers, heads and vocabulary divide as there, and it compiles in seconds."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 4096,
        "d_model": 1024,
        "num_layers": 4,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 64,
        "d_ff": 2816,
    }
    config.mesh = {"data": 8, "tensor": 8}
    config.precision = {"recipe": "bf16"}
    config.train = {
        "global_batch_size": 64,
        "sequence_length": 1024,
        "num_microbatches": 4,
        "remat": "selective",
    }
    return config
