"""The ranges of the numbers in a recipe: those that are wrong by themselves."""

from __future__ import annotations

from collections.abc import Callable

MOST_LAYERS = 2**12  # every way to share them out over a pipeline is looked at

RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "at least 1": (
        lambda x: x >= 1,
        "model.vocab_size model.d_model model.num_layers model.num_heads model.num_kv_heads model.head_dim model.d_ff "
        "model.max_positions model.rope_scaling.original_context schedule.decay_steps schedule.timescale "
        "train.num_steps train.global_batch_size train.sequence_length train.num_microbatches evaluate.num_batches "
        "checkpoint.keep checkpoint.keep_every checkpoint.max_failures zero.group_size optimizer.num_iterations "
        "faults.max_rollbacks "
        "distributed.heartbeat_seconds distributed.initialization_seconds distributed.shutdown_seconds "
        "attention.max_documents pipeline.num_chunks",
    ),
    "at least 0": (
        lambda x: x >= 0,
        "checkpoint.every evaluate.every log.every optimizer.weight_decay schedule.warmup_steps train.seed "
        "train.z_loss watchdog.startup watchdog.compile watchdog.step watchdog.save watchdog.restore "
        "faults.max_skipped faults.spike_window faults.check_every",
    ),
    "above 0": (
        lambda x: x > 0,
        "faults.spike_zscore "
        "model.norm_eps model.rope_theta model.init_std model.rope_scaling.factor model.rope_scaling.low_freq_factor "
        "model.rope_scaling.high_freq_factor optimizer.eps schedule.learning_rate train.clip_norm "
        "optimizer.decay_exponent optimizer.clip_threshold optimizer.min_scale optimizer.update_rms "
        "checkpoint.every_minutes checkpoint.retry_seconds checkpoint.timeout_minutes",
    ),
    "at least 0 and below 1": (
        lambda x: 0 <= x < 1,
        "model.dropout model.attention_dropout optimizer.b1 optimizer.b2 optimizer.momentum train.ema_decay "
        "train.label_smoothing",
    ),
    f"at most 2^24 = {2**24}": (lambda x: x <= 2**24, "model.vocab_size train.sequence_length train.global_batch_size"),
    f"at most {MOST_LAYERS}": (lambda x: x <= MOST_LAYERS, "model.num_layers pipeline.num_chunks"),
    f"below 2^31 = {2**31}": (
        lambda x: x < 2**31,
        "model.d_model model.num_heads model.num_kv_heads model.head_dim model.d_ff model.max_positions",
    ),
    f"below 2^32 = {2**32}": (lambda x: x < 2**32, "train.seed"),
    "from 0 to 1": (lambda x: 0 <= x <= 1, "schedule.final_fraction schedule.decay_fraction"),
}
