"""Models: a family is one file, a frozen dataclass of its options with what the step asks of it."""

from sharded_train.models.decoder import DecoderConfig

Model = DecoderConfig  # a union of the families; `config.model.type` chooses

__all__ = ["DecoderConfig", "Model"]
