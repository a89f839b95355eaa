"""What there is after tokenizing: documents, tokens, lengths and duplicates, from the notes of the shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharded_train.data.prepare import TextData
from sharded_train.data.shards import SIDES, Shard

_HASHES_AT_ONCE = 1 << 22  # in memory while duplicates are counted


def statistics(data: TextData) -> dict[str, Any]:
    """By source, and for all together under "total".

    `lengths` counts the documents of at most so many tokens, each in the smallest of the powers of two less one.
    A duplicate is a document whose text was there before; in the total, in any source.
    """
    found = {name: _of_shards(data, shards) for name, shards in data.shards.items()}
    for member, share in zip(data.train.members, data.train.shares, strict=True):
        found[member.name] |= {"train_rows": len(member.rows), "share": share}
    every = [shard for shards in data.shards.values() for shard in shards]
    return {"sources": found, "total": _of_shards(data, every), "vocab_size": data.tokenizer.vocab_size}


def num_duplicates(paths: Sequence[Path], hashes_at_once: int = _HASHES_AT_ONCE) -> int:
    """How many hashes in these files, each of sorted uint64, were there before; a part of their range at a time."""
    total = sum(path.stat().st_size for path in paths) // 8
    edges = [2**64 * part // -(-total // hashes_at_once) for part in range(1, -(-total // hashes_at_once))]
    places = [0] * len(paths)
    duplicates = 0
    for edge in [*edges, None]:
        parts = []
        for number, path in enumerate(paths):
            if not path.stat().st_size:
                continue
            hashes = np.memmap(path, "<u8", mode="r")
            stop = len(hashes) if edge is None else int(np.searchsorted(hashes, np.uint64(edge)))
            parts.append(np.array(hashes[places[number] : stop]))
            places[number] = stop
        together = np.concatenate(parts) if parts else np.array([], "<u8")
        duplicates += len(together) - len(np.unique(together))
    return duplicates


def _of_shards(data: TextData, shards: Sequence[Shard]) -> dict[str, Any]:
    notes = [data.notes[shard.key][side] for shard in shards for side in SIDES]
    lengths: dict[int, int] = {}
    for note in notes:
        for digits, count in note["lengths"].items():
            longest = (1 << int(digits)) - 1
            lengths[longest] = lengths.get(longest, 0) + count
    sums = {key: sum(note[key] for note in notes) for key in ("num_documents", "num_bytes", "num_tokens", "num_masked")}
    return {
        **sums,
        "num_validation_documents": sum(data.notes[shard.key]["validation"]["num_documents"] for shard in shards),
        "num_duplicates": num_duplicates([shard.path("hashes") for shard in shards]),
        "bytes_per_token": sums["num_bytes"] / max(1, sums["num_tokens"]),
        "tokens_per_document": sums["num_tokens"] / max(1, sums["num_documents"]),
        "lengths": {str(longest): lengths[longest] for longest in sorted(lengths)},
        "num_shards": len(shards),
    }
