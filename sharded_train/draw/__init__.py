"""Pictures and tables for notebooks: a mesh, any pytree's sharding, a program's collectives and timeline, schedules.

Everything here takes arrays, meshes and functions of JAX's; none of it needs our models. A result shows itself in a
notebook; `.save(path)` writes it as a page.

Example:
    from sharded_train import draw

    mesh = draw.cluster_mesh("h100:8x8", data=8, tensor=8)
    draw.mesh(mesh, groups="tensor")
    w = jax.ShapeDtypeStruct((8192, 8192), "bfloat16", sharding=NamedSharding(mesh, P("data", "tensor")))
    draw.sharding({"w": w})
    draw.audit(lambda w: w.T @ w, w, cluster="h100:8x8")
"""

from sharded_train.noise import quiet_plugin

with quiet_plugin():
    from sharded_train.draw.display import Html
    from sharded_train.draw.mesh import cluster_mesh, mesh
    from sharded_train.draw.plots import plot
    from sharded_train.draw.program import collectives, comparison, memory, schedule, timeline
    from sharded_train.draw.sharding import sharding
    from sharded_train.rehearse.audit import Audit, audit

__all__ = [
    "Audit",
    "Html",
    "audit",
    "cluster_mesh",
    "collectives",
    "comparison",
    "memory",
    "mesh",
    "plot",
    "schedule",
    "sharding",
    "timeline",
]
