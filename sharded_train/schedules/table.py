"""A pipeline schedule as a table: what every stage does in every tick.

**Stages and chunks.** There are `p` stages (devices along the pipeline axis), each with `v` chunks of layers. Chunk
`c` of stage `s` is *virtual stage* `c p + s`: the model goes round the ring of stages `v` times, so that what a stage
makes always goes to the next stage of the ring (from the last to the first, where the next chunk is), and cotangents
to the one before.

**Items.** Work is numbered: item `microbatch * v + chunk`, -1 for none; `Schedule.microbatch` and `Schedule.chunk`
take it apart.

**A tick** of stage `s` is, in this order:

1. receive: what the neighbours sent at the end of the tick before is put where `slots.Slots` says;
2. `forward[tick, s]`: forward of an item;
3. `backward[tick, s]`: backward of an item: of inputs and weights, or where there is a table `weights` of inputs only;
4. `weights[tick, s]`: backward of an item's weights;
5. one send each way: the output of 2 to stage s + 1, the cotangent of 3 to stage s - 1 (both mod p).

Step 2 may be used by 3 and 3 by 4 within a tick; another stage's work can be used from the next tick on, also where
there is only one stage, which sends to itself. The output of the last virtual stage and the cotangent of the first go
nowhere.

Example, two stages and three microbatches, 1F1B (rows are ticks)::

    forward   [[ 0 -1]     backward  [[-1 -1]
               [ 1  0]                [-1  0]
               [ 2  1]                [ 0  1]
               [-1  2]                [ 1  2]
               [-1 -1]]               [ 2 -1]]
"""

from __future__ import annotations

import dataclasses

import numpy as np

NONE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Items `[tick, stage]` of int32; `weights` is None where the backward of an item is done in one go.

    `claimed` `[2, stage]`: no stage holds more items from forward to backward, and from backward to weights.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray | None
    claimed: np.ndarray

    @property
    def num_ticks(self) -> int:
        return len(self.forward)

    @property
    def num_items(self) -> int:
        """Items of each stage in each direction."""
        return self.num_microbatches * self.num_chunks

    def microbatch(self, items: np.ndarray) -> np.ndarray:
        """The microbatch of each item; -1 where there is none."""
        return np.asarray(items) // self.num_chunks

    def chunk(self, items: np.ndarray) -> np.ndarray:
        """The chunk of each item; where there is none a valid index that means nothing."""
        return np.asarray(items) % self.num_chunks

    def is_first(self, items: np.ndarray) -> np.ndarray:
        """Whether items `[tick, stage]` are of the first virtual stage, which embeds."""
        return (items != NONE) & (self.chunk(items) == 0) & (np.arange(self.num_stages) == 0)

    def is_last(self, items: np.ndarray) -> np.ndarray:
        """Whether items `[tick, stage]` are of the last virtual stage, which has the loss."""
        last = self.num_chunks - 1
        return (items != NONE) & (self.chunk(items) == last) & (np.arange(self.num_stages) == self.num_stages - 1)

    def arriving_inputs(self) -> np.ndarray:
        """Items `[tick, stage]` whose input the stage receives at the start of the tick; -1: nothing of use arrives."""
        sent = np.where(self.is_last(self.forward), NONE, self.forward)
        return self._received(sent, towards=1)

    def arriving_cotangents(self) -> np.ndarray:
        """Items `[tick, stage]` whose output's cotangent the stage receives at the start of the tick, or -1."""
        sent = np.where(self.is_first(self.backward), NONE, self.backward)
        return self._received(sent, towards=-1)

    def _received(self, sent: np.ndarray, towards: int) -> np.ndarray:
        """A tick later at the neighbour; round the end of the ring it belongs to the next chunk, or the one before."""
        arrived = np.roll(sent, towards, axis=1)
        edge = 0 if towards == 1 else self.num_stages - 1
        arrived[:, edge] += np.where(arrived[:, edge] == NONE, 0, towards)
        return np.concatenate([np.full_like(sent[:1], NONE), arrived[:-1]])


def when(schedule: Schedule, items: np.ndarray) -> np.ndarray:
    """The tick in which each item is done, `[item, stage]`; -1: never. Of an item that is done twice, the last."""
    ticks = np.full((schedule.num_items, schedule.num_stages), NONE, np.int32)
    tick, stage = np.nonzero(items != NONE)
    ticks[items[tick, stage], stage] = tick
    return ticks
