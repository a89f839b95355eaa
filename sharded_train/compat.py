"""Differences between the supported versions of JAX (0.10.2 to 0.12). No other file asks for a version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train.errors import ConfigError


def varying_axes(*values: Any) -> tuple[str, ...]:
    """Mesh axes that any of the values may differ over, inside `jax.shard_map`.

    In one order always: JAX holds sets, whose order differs between processes, which must all compile one program.
    """
    return tuple(sorted(set().union(*(_axes_of_type(jax.typeof(x)) for x in values))))


def _axes_of_type(kind: Any) -> frozenset[str]:
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # type: ignore[no-any-return]  # 0.10, 0.12


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `x` as differing over `axes`; the transpose of this mark is the sum over them."""
    have = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in have)
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros_like(fn: Callable[..., Any], *args: Any) -> Any:
    """Zeros of the shapes, dtypes and varying axes of what `fn(*args)` would return; it is traced and dropped."""
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    zeros = [vary(jnp.zeros(a.shape, a.dtype), sorted(_axes_of_type(a))) for a in jaxpr.out_avals]
    return jax.tree.unflatten(jax.tree.structure(shapes), zeros)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan's equation are constants, and how many, after these, its carry."""
    if "num_consts" in params:  # 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


@contextlib.contextmanager
def cudnn_assumed(version: int = 90800) -> Iterator[None]:
    """Lets cuDNN's attention be traced where there is no cuDNN, for a program that is only compiled.

    JAX asks the installed library for its version before it writes the call, and has no other way to be told one.
    """
    from jax._src.cudnn import fused_attention_stablehlo  # private: imported by those who need it only

    asked = fused_attention_stablehlo.check_cudnn_version
    fused_attention_stablehlo.check_cudnn_version = lambda: version
    try:
        yield
    finally:
        fused_attention_stablehlo.check_cudnn_version = asked


def cudnn_attention(direction: str, operands: Iterable[jax.Array], *, mask_type: str, **settings: Any) -> Any:
    """cuDNN's attention, `direction` "fwd" or "bwd", as JAX writes it for one device.

    Around it JAX has a wrapper for the partitioner, which turns the starts of packed documents from tokens into
    numbers: in 0.10 wrongly where kv heads are fewer than heads (jax-ml/jax#39521).
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # private

    later = {"score_mod_name": None, "score_mod_jaxpr": None} if hasattr(cudnn, "_canonical_bnth_shape") else {}  # 0.12
    call = getattr(cudnn, f"_dot_product_attention_{direction}_p")
    settings |= {"mask_type": cudnn.MaskType[mask_type], "layout": cudnn.AttentionLayout.BTNH.value, **later}
    return call.bind(*operands, **settings)


def compile_only_devices(target: str, hosts: int, devices_per_host: int) -> list[jax.Device]:
    """Devices that programs can be compiled for and nothing else, `process_index` being the host.

    `target` is the text of XLA's `GpuTargetConfigProto`. Needs the CUDA plugin of jax's own version, but no GPU.

    Raises ConfigError where JAX has dropped the plugin, as it does without a GPU unless told to work on the CPU.
    """
    from jax.experimental import topologies

    topology = f"1x{hosts}x{devices_per_host}"  # partitions x hosts x devices
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=topology).devices
    except NotImplementedError as error:
        raise ConfigError(
            "JAX looked for a GPU, found none and dropped the CUDA plugin, which compiles for the cluster: begin with "
            "`sharded_train.launch.virtual_devices(8)`, or set JAX_PLATFORMS=cpu"
        ) from error


def coordination() -> Any:
    """The client of JAX's coordination service, which holds keys and values for all processes; None in one alone.

    Private: the public ways to agree go over the devices, and a save's own thread must not.
    """
    from jax._src import distributed

    return distributed.global_state.client
