"""Llama 3 70B with the published dimensions (Grattafiori et al. 2024, arXiv:2407.21783, table 3), pre-training at 8k.

Command:   srun -N32 --ntasks-per-node=1 sharded-train train --config=configs/llama3_70b.py --workdir=/shared/70b
Hardware:  32 hosts of 8 H100 with 80 GB: pipeline 4 x data 8 x tensor 8, tensor inside a host; any multiple of 4 works
Time:      not measured
Expect:    not measured
Look:      sharded-train show --config=configs/llama3_70b.py --cluster=32x8

As `llama3_8b.py`, which says where each number is from, but for what follows. The mesh is ours: with 20 layers a stage
ZeRO-1 has room, and gathers and sums once a step what ZeRO-3 does for every microbatch. Without a pipeline:
--config.mesh.pipeline=1 --config.zero.stage=3 --config.train.num_microbatches=16
"""

from ml_collections import ConfigDict

from configs.llama3_8b import get_config as llama3_8b


def get_config() -> ConfigDict:
    config = llama3_8b()
    config.model.update(d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, d_ff=28_672)
    config.mesh.update(pipeline=4, data=-1, tensor=8)
    config.zero.stage = 1
    config.schedule.learning_rate = 1.5e-4
    config.train.update(
        global_batch_size=512,  # 4 million tokens
        num_microbatches=64,  # one row at a time in each tensor group
    )
    return config
