"""Llama 3 405B with the published dimensions (Grattafiori et al. 2024, arXiv:2407.21783, table 3), pre-training at 8k.

Command:   srun -N256 --ntasks-per-node=1 sharded-train train --config=configs/llama3_405b.py --workdir=/shared/405b
Hardware:  256 hosts of 8 H100 with 80 GB: pipeline 16 x data 16 x tensor 8, tensor inside a host. Pipeline and tensor
           are the paper's for 8k tokens; it has 4 and 8 times as many hosts, all of it in data.
Time:      not measured
Expect:    not measured
Look:      sharded-train show --config=configs/llama3_405b.py --cluster=256x8

As `llama3_8b.py`, which says where each number is from, but for what follows. The batch of 16 million tokens is the
one that the paper ends with; it starts with 4 million in rows of 4096 and doubles twice. Chunks are of two layers each;
the two that are missing from 128 leave room for the head. Without a pipeline ZeRO-3 gathers each layer by network:
--config.mesh.pipeline=1 --config.pipeline.schedule=1f1b --config.pipeline.num_chunks=none --config.zero.stage=3
--config.train.num_microbatches=8
"""

from ml_collections import ConfigDict

from configs.llama3_8b import get_config as llama3_8b


def get_config() -> ConfigDict:
    config = llama3_8b()
    config.model.update(d_model=16_384, num_layers=126, num_heads=128, num_kv_heads=8, d_ff=53_248)
    config.mesh.update(pipeline=16, data=-1, tensor=8)
    config.pipeline = {"schedule": "interleaved", "num_chunks": 4}
    config.zero.stage = 1
    config.schedule.learning_rate = 8e-5
    config.train.update(
        global_batch_size=2048,  # 16 million tokens
        num_microbatches=128,  # one row at a time in each tensor group
        remat="full",
    )
    return config
