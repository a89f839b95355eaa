"""Any function of JAX's, lowered for a cluster that is not there in place of the devices that it was written on.

`jax.export` traces it for GPUs where it stands and keeps it by the numbers of its devices. It is then called on a mesh
of the cluster's, with the same axes; a device keeps its place: number k of the function's devices, by process and id,
becomes number k of the cluster's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharded_train import compat
from sharded_train.errors import ConfigError
from sharded_train.rehearse.clusters import Cluster

# Calls that XLA may change from version to version, which matters to nothing that is compiled at once.
CALLS = (
    *("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "__cudnn$fmhaScaleBiasSoftmax"),
    *("__cudnn$fmhaScaleBiasSoftmaxBackward", "__cudnn$blockScaledDot", "__cublas$lt$matmul$f8"),
)
UNCHECKED = tuple(map(export.DisabledSafetyCheck.custom_call, CALLS))


@dataclasses.dataclass(frozen=True)
class Transplanted:
    """A function lowered for a cluster: its mesh there, and each array that goes in, by name, as placed there."""

    lowered: jax.stages.Lowered
    mesh: Mesh
    arguments: Mapping[str, jax.ShapeDtypeStruct]
    donated: int  # bytes on a device of the arrays that are given away
    remarks: tuple[str, ...]


def transplant(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], cluster: Cluster
) -> Transplanted:
    """Trace `fn(*args, **kwargs)` and lower it for the cluster. Arrays may be `jax.ShapeDtypeStruct`s with a sharding.

    Raises ConfigError: no mesh is to be found, or one has not as many devices as the cluster.
    """
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    structure: Any = jax.tree.structure((tuple(args), dict(kwargs)))
    named = jax.tree_util.tree_leaves_with_path((tuple(args), dict(kwargs)))
    with compat.cudnn_assumed():
        traced = jitted.trace(*args, **kwargs)
        swap = _Swap(cluster, [*map(_mesh_of, (leaf for _, leaf in named)), *_meshes(traced.jaxpr)])
        exported = export.export(jitted, platforms=["cuda"], disabled_checks=UNCHECKED)(*args, **kwargs)
    asked = exported.in_shardings_jax(swap.mesh)
    placed, remarks = _placed(fn, named, asked, swap)
    given = jax.tree.leaves(traced.args_info)
    gone = [each for each, info in zip(placed.values(), given, strict=True) if info.donated]

    @functools.wraps(fn)  # so that arguments keep their names
    def there(*args: Any, **kwargs: Any) -> Any:
        return exported.call(*args, **kwargs)

    there.__name__ = name_of_function(fn)

    new_args, new_kwargs = jax.tree.unflatten(structure, placed.values())
    each_donated = jax.tree.unflatten(structure, [info.donated for info in given])[0]
    donated = [i for i, flags in enumerate(each_donated) if (leaves := jax.tree.leaves(flags)) and all(leaves)]
    lowered = jax.jit(there, donate_argnums=donated).lower(*new_args, **new_kwargs)
    return Transplanted(lowered, swap.mesh, placed, sum(map(bytes_on_device, gone)), tuple(remarks))


def bytes_on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes that each device holds of a placed array."""
    assert leaf.sharding is not None
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize


def _placed(
    fn: Callable[..., Any], named: Sequence[tuple[Any, Any]], asked: Sequence[Any], swap: _Swap
) -> tuple[dict[str, jax.ShapeDtypeStruct], list[str]]:
    """Each argument's array by name, placed on the cluster; and which are taken as whole on every device.

    An array's own sharding counts, else what the function's `jax.jit` asks for (`asked`, on the cluster already).
    """
    placed, whole = {}, []
    for (path, leaf), wanted in zip(named, asked, strict=True):
        name, found = name_of(fn, path), getattr(leaf, "sharding", None)
        if isinstance(found, NamedSharding):
            there = NamedSharding(swap.of(found.mesh), found.spec)
        else:
            there = wanted or NamedSharding(swap.mesh, PartitionSpec())
            whole += [name] if wanted is None and swap.mesh.size > 1 and np.ndim(leaf) else []
        kind = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
        placed[name] = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=there)
    words = f"Without a sharding, so taken as whole on every device: {', '.join(whole)}."
    return placed, [words] if whole else []


def name_of_function(fn: Callable[..., Any]) -> str:
    """A function's name, of a `functools.partial` that of what it binds."""
    return getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)


def name_of(fn: Callable[..., Any], path: Sequence[Any]) -> str:
    """An argument's array as one would write it: "params['up']" of the path (0, 0, 'up')."""
    which, place, *rest = path
    if which.idx == 1:
        name = str(place.key)
    else:
        try:
            names = list(inspect.signature(fn).parameters)
        except (TypeError, ValueError):
            names = []
        name = names[place.idx] if place.idx < len(names) else f"args[{place.idx}]"
    return name + jax.tree_util.keystr(tuple(rest))


def _mesh_of(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _meshes(value: Any) -> Iterator[Any]:
    """All meshes within a jaxpr or what an equation is given, in order."""
    if isinstance(value, Mesh | AbstractMesh):
        yield value
    elif isinstance(value, NamedSharding):
        yield value.mesh
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _meshes(each)
    elif hasattr(value, "eqns"):  # a jaxpr, closed or not
        for eqn in value.eqns:
            for each in eqn.params.values():
                yield from _meshes(each)


class _Swap:
    """Exchanges meshes for those of the cluster."""

    def __init__(self, cluster: Cluster, meshes: Sequence[Any]) -> None:
        self._devices = compat.compile_only_devices(cluster.target, cluster.num_hosts, cluster.devices_per_host)
        found = [mesh for mesh in meshes if mesh is not None and mesh.axis_names]
        if not found and len(self._devices) > 1:
            raise ConfigError(
                f"audit on {cluster.words}: no argument has a NamedSharding and the function names no mesh, so nothing "
                "tells how it is split; place the arguments, or audit it on one device (such as h100:1x1)"
            )
        for mesh in found:
            if mesh.size != len(self._devices):
                sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
                raise ConfigError(
                    f"audit: the mesh {sizes} = {mesh.size} devices, but {cluster.words} has {len(self._devices)}; "
                    "make a mesh for it with sharded_train.draw.cluster_mesh, or choose another cluster"
                )
        self.mesh = self.of(found[0]) if found else Mesh(np.array(self._devices), ("device",))

    def of(self, mesh: Any) -> Mesh:
        """The mesh on the cluster."""
        shape = tuple(mesh.shape.values())
        if isinstance(mesh, AbstractMesh):
            places = np.arange(mesh.size)
        else:
            order = sorted(range(mesh.size), key=lambda i: _place(mesh.devices.flat[i]))
            places = np.empty(mesh.size, dtype=int)
            places[order] = np.arange(mesh.size)
        return Mesh(np.array(self._devices, dtype=object)[places].reshape(shape), mesh.axis_names)


def _place(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id
