"""`draw` and `audit`: any function, any pytree, any mesh; what they show is what the program does."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import compat, draw
from sharded_train.errors import ConfigError
from sharded_train.rehearse import scopes
from sharded_train.rehearse.compile import check_plugin
from sharded_train.schedules.build import make

ROWS, INNER, COLUMNS = 512, 1024, 2048


@pytest.fixture(autouse=True)
def _needs_the_plugin() -> None:
    try:
        check_plugin()
    except ConfigError as error:
        pytest.skip(str(error))


def cpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))


def column_then_sum(mesh: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    """A row-parallel product by shard_map: partial products, reduce-scattered over tensor."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("down"):
            return jax.lax.psum_scatter(x @ w, "tensor", scatter_dimension=0, tiled=True)

    specs = (P("tensor", None), P("data", "tensor"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(("data", "tensor"), None))(w, x)


def arrays(mesh: Any) -> tuple[Any, Any]:
    array = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
    return array((INNER, COLUMNS), "tensor", None), array((ROWS, INNER), "data", "tensor")


@functools.cache
def audited() -> draw.Audit:
    """The function as written on eight CPU devices, audited for eight H100s."""
    mesh = cpu_mesh()
    return draw.audit(functools.partial(column_then_sum, mesh), *arrays(mesh), cluster="h100:1x8")


def gspmd_gradients(mesh: Mesh) -> Any:
    """The gradient of a loss under GSPMD, w donated for it."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))
        return jnp.sum(jnp.square(y).astype(jnp.float32))

    return jax.jit(jax.grad(loss), donate_argnums=0, out_shardings=NamedSharding(mesh, P("tensor", None)))


def sent(found: draw.Audit) -> dict[tuple[str, ...], float]:
    return {(row["op"], *row["axes"], row["link"]): row["wire_bytes"] for row in found.facts["wires"]["totals"]}


def test_an_audit_counts_what_the_function_sends() -> None:
    """3/4 of the whole partial product, in bf16; XLA may sum in fp32 first, which the dtype would show."""
    found = audited()
    (row,) = found.facts["wires"]["totals"]
    assert (row["op"], row["axes"], row["link"]) == ("reduce-scatter", ["tensor"], "NVLink")
    size = {"bf16": 2, "f32": 4}[row["dtype"]]
    assert row["wire_bytes"] == 3 / 4 * (ROWS / 2) * COLUMNS * size
    assert found.facts["computed"]["products"] == 2 * (ROWS / 2) * (INNER / 4) * COLUMNS
    (collective,) = found.facts["wires"]["collectives"]
    assert collective["place"] == "down"  # the user's own scope


def test_memory_of_an_audit_is_a_sum() -> None:
    section = audited().facts["memory"]
    arguments = 2 * (INNER / 4 * COLUMNS + ROWS / 2 * INNER / 4)
    assert section["parts"][0] == {"name": "arguments", "bytes": arguments, "what": "arguments"}
    assert sum(part["bytes"] for part in section["parts"]) == section["total_bytes"]


def test_gspmd_is_read_alike_and_what_is_donated_is_used_again() -> None:
    mesh = cpu_mesh()
    found = draw.audit(gspmd_gradients(mesh), *arrays(mesh), cluster="h100:1x8")
    assert {key[1] for key in sent(found)} == {"data", "tensor"}  # the sum forward, and that of gradients over data
    assert "results, in memory of their own" not in {part["name"] for part in found.facts["memory"]["parts"]}
    assert any("up, backward" in row["part"] for row in found.facts["computed"]["by_part"])


def test_a_mesh_keeps_its_devices_places() -> None:
    """The same function over a mesh whose tensor groups lie across hosts says so."""
    straight, mixed = np.array(jax.devices()).reshape(2, 4), np.array(jax.devices()).reshape(4, 2).T
    links = []
    for devices in (straight, mixed):
        mesh = Mesh(devices, ("data", "tensor"))
        found = draw.audit(functools.partial(column_then_sum, mesh), *arrays(mesh), cluster="h100:2x4")
        links.append({key[-1] for key in sent(found)})
    assert links == [{"NVLink"}, {"both"}]


def test_an_abstract_mesh_will_do() -> None:
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = AbstractMesh((8, 8), ("data", "tensor"), axis_types=axis_types)
    found = draw.audit(functools.partial(column_then_sum, mesh), *arrays(mesh), cluster="h100:8x8")
    assert found.facts["mesh"]["sizes"] == {"data": 8, "tensor": 8}
    assert {key[:2] for key in sent(found)} == {("reduce-scatter", "tensor")}


def test_what_cannot_be_audited_is_told() -> None:
    mesh = cpu_mesh()
    with pytest.raises(ConfigError, match=r"data 2 × tensor 4 = 8 devices, but .*16"):
        draw.audit(functools.partial(column_then_sum, mesh), *arrays(mesh), cluster="h100:2x8")
    with pytest.raises(ConfigError, match="no argument has a NamedSharding"):
        draw.audit(lambda x: x + 1, np.ones(8), cluster="h100:1x8")
    with pytest.raises(ConfigError, match=r"data 3 × tensor 8 = 24 devices, but h100:2x8 has 16"):
        draw.cluster_mesh("h100:2x8", data=3, tensor=8)


def test_arguments_without_a_sharding_are_named() -> None:
    mesh = cpu_mesh()
    w, _ = arrays(mesh)
    found = draw.audit(lambda w, x: x @ w, w, np.ones((ROWS, INNER), jnp.bfloat16), cluster="h100:1x8")
    assert "Without a sharding, so taken as whole on every device: x." in found.facts["warnings"]


def test_an_audit_shows_itself(tmp_path: Path) -> None:
    found = audited()
    assert "Does it fit?" in str(found)
    assert "1024×2048" in str(found)
    shown = found._repr_html_()
    assert "Audit: column_then_sum" in shown
    found.save(tmp_path / "audit.html")
    assert "<!doctype html>" in (tmp_path / "audit.html").read_text()
    for picture in (draw.collectives(found), draw.memory(found), draw.timeline(found)):
        assert 'class="sharded-train"' in picture._repr_html_()


def test_the_timeline_refuses_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="the step has"):
        draw.timeline(audited(), start=1e3)


def test_the_mesh_is_drawn_with_every_device() -> None:
    shown = draw.mesh(cpu_mesh(), groups="data")
    places = re.findall(r">(d\d t\d)</text>", shown.body)
    assert len(places) == len(set(places)) == 8
    colours = re.findall(r'fill="(#\w+)"', shown.body)
    assert len(set(colours)) == 4  # groups over data
    assert "shared memory" in shown.body
    with pytest.raises(ConfigError, match="no axis of the mesh"):
        draw.mesh(cpu_mesh(), groups="dat")


def test_a_cluster_is_drawn_by_hosts() -> None:
    shown = draw.mesh(draw.cluster_mesh("h100:16x8", data=16, tensor=8))
    assert shown.body.count(">host ") == 8
    assert "8 more hosts" in shown.body
    assert "NVLink: 8 devices of one host" in shown.body


def test_every_piece_is_drawn_with_its_devices() -> None:
    mesh = cpu_mesh()
    place = lambda shape, *spec: jax.device_put(jnp.zeros(shape), NamedSharding(mesh, P(*spec)))
    tree = {"w": place((8, 4), "tensor"), "x": place((2, 3, 8), "data", None, "tensor"), "s": place(())}
    shown = draw.sharding(tree)
    drawn = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", shown.body)]
    titles = [[title.text for title in svg.iter("title")] for svg in drawn]
    assert titles[0] == [f"devices {i}, {i + 4}" for i in range(4)]  # w: each quarter on two
    assert titles[1] == [f"devices {i}" for i in range(8)]  # x: each piece on one
    assert "1×3×2" in shown.text


def test_shardings_must_be_named() -> None:
    with pytest.raises(ConfigError, match="no NamedSharding"):
        draw.sharding({"w": jnp.zeros(8)})


def test_a_schedule_is_drawn_in_a_notebook() -> None:
    shown = draw.schedule(make("1f1b", 4, 8))
    assert shown.text.startswith("1f1b: 4 stages, 8 microbatches, bubble")
    assert shown.body.count("<title>") == 2 * 4 * 8


def test_plots_have_what_they_are_given() -> None:
    pytest.importorskip("matplotlib")
    figure = draw.plot({"a": [1, 2], "b": [2, 3]}, [1, 2], title="t", xlabel="x, s", ylabel="y, GiB")
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    with pytest.raises(ConfigError, match="'a' has 1 values, x has 2"):
        draw.plot({"a": [1]}, [1, 2], title="", xlabel="", ylabel="")


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("jit(f)/call_exported/jit(f)/shard_map/block/while/body/closed_call/up/dot_general", "block/up"),
        ("jit(f)/call_exported/jit(f)/transpose(jvp(up))/dot_general", "up, backward"),
        ("jit(f)/call_exported/jit(f)/dot_general", "f"),
        ("jit(_train_step)/shard_map/gather_weights/all_gather", "step"),
        ("jit(_train_step)/shard_map/jvp(mlp)/dot_general", "mlp, forward"),
    ],
)
def test_scopes_in_words(scope: str, words: str) -> None:
    assert scopes.words_of(scope) == words


def test_a_plugin_that_jax_has_dropped_is_told_of_with_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(ConfigError, match=r"virtual_devices\(8\)`, or set JAX_PLATFORMS=cpu"):
        compat.compile_only_devices("", 1, 8)
