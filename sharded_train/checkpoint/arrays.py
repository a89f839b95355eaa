"""Arrays on disk: the only module that knows Orbax, whose API still renames things, and TensorStore beneath it.

Arrays are stored under their names in the run (`params/...`), so that Orbax alone can read a checkpoint too. What is
read back to be verified is read by TensorStore, part by part, on the host: the devices have no room for a second state.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from sharded_train.checkpoint import cloud, digest, files, leaves
from sharded_train.checkpoint.digest import Digest
from sharded_train.checkpoint.errors import Damage

_STATE = "state"
_OWNER = "sharded_train"  # the run's record in Orbax's metadata
_CHUNK_BYTES = 64 << 20  # of the pieces that an array is stored in, and is read back by
_CODECS = {
    "sharding_indexed",
    "bytes",
    "crc32c",
}  # compression would save 7 % and halve the speed
_READERS = min(4, os.cpu_count() or 1)  # threads, each with two pieces in memory
_MOST_METADATA = 1 << 20  # bytes, of one array
_MOST_SHARDINGS = 64 << 20

Part = tuple[slice, ...]
Response = Any  # of Orbax: result(timeout=None)


def save_async(path: Path, state: Mapping[str, jax.Array], run: Mapping[str, Any], timeout: float) -> Response:
    """Begins to write leaves and the run's record to `path`; the leaves may be donated as soon as this returns.

    Every process calls it. `timeout` (seconds) is how long processes wait for each other.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.asynchronous.timeout_secs = int(timeout)
    with context:
        return ocp.save_async(
            path, leaves.nested(state), checkpointable_name=_STATE, custom_metadata={_OWNER: dict(run)}
        )


def load(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The leaves of `wanted` at `path`, placed as it says. Every process calls it and reads what its devices hold.

    What else there is at `path` is not looked at: names are compared before.
    """
    # Under a mesh context Orbax would resolve shardings against that mesh instead of the leaves' own.
    assert jax.sharding.get_abstract_mesh().empty, "restore outside of jax.set_mesh"
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return leaves.by_name(ocp.load(path, leaves.nested(wanted), checkpointable_name=_STATE))


def own_parts(state: Mapping[str, jax.Array]) -> dict[str, list[Part]]:
    """Which parts of each leaf this process answers for: over all processes, each element once."""
    return {name: [shard.index for shard in x.addressable_shards if shard.replica_id == 0] for name, x in state.items()}


def digests_on_disk(
    path: Path,
    stored: Mapping[str, Any],
    parts: Mapping[str, list[Part]] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Digest]:
    """The digests of what is on disk of each leaf, or of `parts` of it. Raises Damage where it cannot be read."""

    def one(name: str) -> Digest:
        found = _read_back(path, name, stored[name], None if parts is None else parts[name])
        progress(leaves.num_bytes(stored[name]))
        return found

    with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as readers:
        return dict(zip(stored, readers.map(one, stored), strict=True))


def _read_back(path: Path, name: str, leaf: Any, parts: list[Part] | None) -> Digest:
    found: Digest = (0, 0)
    for start, values in pieces(path, name, leaf, parts):
        found = digest.added(found, digest.on_host(values, start))
    return found


def pieces(
    path: Path, name: str, leaf: Any, parts: list[Part] | None = None
) -> Iterator[tuple[tuple[int, ...], npt.NDArray[Any]]]:
    """What is on disk of a leaf, or of `parts` of it, piece by piece: the index of its first element, and the values.

    The next piece is read while one is worked on. Raises Damage where it cannot be read.
    """
    array = _opened(path, name, leaf)
    chunk = array.chunk_layout.read_chunk.shape or ()  # None of a number
    wanted = parts if parts is not None else [(slice(None),) * array.ndim]
    reading: list[tuple[tuple[int, ...], Any]] = []
    for piece in itertools.chain.from_iterable(_cut(part, leaf.shape, chunk) for part in wanted):
        reading.append((tuple(s.start for s in piece), array[piece].read()))
        if len(reading) > 1:
            start, future = reading.pop(0)
            yield start, _waited(future, path, name)
    for start, future in reading:
        yield start, _waited(future, path, name)


def shardings(path: Path) -> dict[str, str]:
    """How leaves were placed when they were saved, in words, as far as Orbax has noted it."""
    try:
        noted = json.loads(files.read(path / _STATE / "_sharding", _MOST_SHARDINGS))
        placed = {base64.b64decode(name).decode(): json.loads(text) for name, text in noted.items()}
        return {
            name.replace(".", "/"): _placement(x)
            for name, x in placed.items()
            if x.get("sharding_type") == "NamedSharding"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _placement(noted: Mapping[str, Any]) -> str:
    """Each dim's axes, then the mesh, such as "data+pipeline · over pipeline 2 × data 2"."""
    dims = ["+".join([dim] if isinstance(dim, str) else dim or "·") for dim in noted["partition_spec"]]
    sizes = zip(noted["axis_names"], noted["shape"], strict=True)
    return f"{' '.join(dims) or 'whole'} over {' × '.join(f'{axis} {n}' for axis, n in sizes if n != 1) or '1 device'}"


def check_layout(path: Path, stored: Mapping[str, Any]) -> None:
    """Raises Damage unless every leaf is stored as this package stores them.

    Read before anything is loaded: a shape, or a chunk, of another size than the record's would be made room for.
    """
    try:
        store = ts.KvStore.open(_kvstore(path)).result()
    except ValueError as error:
        raise Damage(f"{path / _STATE} cannot be opened: {_first_line(error)}") from None
    for name, leaf in stored.items():
        try:
            read = store.read(f"{_key(name)}zarr.json").result()
            if read.state != "value" or len(read.value) > _MOST_METADATA:
                raise ValueError("its description is missing")
            _check_array(json.loads(read.value), leaf)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise Damage(f"{path / _STATE}: {name} is not stored as it was saved: {_first_line(error)}") from None


def _check_array(described: dict[str, Any], leaf: Any) -> None:
    shape, chunk = list(leaf.shape), described["chunk_grid"]["configuration"]["chunk_shape"]
    if described["shape"] != shape or described["data_type"] != np.dtype(leaf.dtype).name:
        raise ValueError(f"{described['data_type']}{described['shape']}, not {leaves.describe(leaf)}")
    codecs = list(described["codecs"])
    for codec in codecs:
        if codec["name"] not in _CODECS:
            raise ValueError(f"the codec {codec['name']!r:.40}")
        inner = codec.get("configuration", {})
        codecs += [*inner.get("codecs", []), *inner.get("index_codecs", [])]
        chunks = [chunk, inner["chunk_shape"]] if "chunk_shape" in inner else [chunk]
        if any(len(sizes) != len(shape) for sizes in chunks):
            raise ValueError(f"chunks {chunks}")
        for sizes in chunks:
            if any(not 0 < size <= max(1, whole) for size, whole in zip(sizes, shape, strict=True)):
                raise ValueError(f"chunks of {sizes}")


def _opened(path: Path, name: str, leaf: Any) -> Any:
    spec = {"driver": "zarr3", "kvstore": {**_kvstore(path), "path": _key(name)}}
    try:
        array = ts.open(spec, open=True, read=True, context=_context()).result()
    except ValueError as error:
        raise Damage(f"{path / _STATE}: {name} cannot be read: {_first_line(error)}") from None
    if tuple(array.shape) != tuple(leaf.shape) or array.dtype.numpy_dtype != np.dtype(leaf.dtype):
        raise Damage(f"{path / _STATE}: {name} is {array.dtype.name}{list(array.shape)}, not {leaves.describe(leaf)}")
    return array


def _kvstore(path: Path) -> dict[str, Any]:
    if cloud.is_address(path):
        return {"driver": "ocdbt", "base": cloud.kvstore(path / _STATE)}
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path.resolve() / _STATE}/"}}


def _context() -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def _key(name: str) -> str:
    return name.replace("/", ".") + "/"


def _waited(future: Any, path: Path, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(future.result())
    except ValueError as error:
        raise Damage(f"{path / _STATE}: {name} cannot be read: {_first_line(error)}") from None


def _cut(part: Part, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Part]:
    """The parts of `part` that lie in one chunk each."""
    ranges = []
    for bounds, size, length in zip(part, shape, chunk, strict=True):
        first, stop, _ = bounds.indices(size)
        cuts = [first, *range((first // length + 1) * length, stop, length), stop]
        ranges.append([slice(a, b) for a, b in itertools.pairwise(cuts) if a < b])
    assert math.prod(map(len, ranges)) < 1 << 24
    yield from itertools.product(*ranges)


def _first_line(error: BaseException) -> str:
    return str(error).split(" [")[0].splitlines()[0][:300] if str(error) else type(error).__name__
