"""sharded_train: training of transformer language models on JAX, sharded over a named device mesh."""

__version__ = "0.1.0"
