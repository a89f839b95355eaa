"""Every kind of damage to every kind of file is found, named and stepped over; what means harm is refused."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import checkpoint_faults
from sharded_train.checkpoint import Checkpointer, DamagedData, Unreadable, record, resuming
from sharded_train.checkpoint.errors import Damage
from sharded_train.errors import ConfigError

FILES = (
    "VERIFIED",
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "orbax.checkpoint",
    "state/_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "state/d/*",
    "state/manifest.ocdbt",
    "state/ocdbt.process_0/d/*",
    "state/ocdbt.process_0/manifest.ocdbt",
)


def state_of(step: int) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    w = put(jax.random.normal(jax.random.key(step), (64, 40)), "data")
    return {"params": {"w": w, "b": put(jnp.ones(3, jnp.bfloat16))}, "step": put(jnp.int32(step))}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with contextlib.closing(Checkpointer(directory)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step), {"step": step})
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Checkpointer:
    return Checkpointer(Path(shutil.copytree(saved, tmp_path / "checkpoints")))


def resume(checkpointer: Checkpointer, how: str = "auto") -> tuple[int, Any]:
    step, state, _ = checkpointer.resume(checkpointer.choose(how), ABSTRACT, lambda path, run: None)
    return step, state


def test_nothing_damaged_the_newest_is_used(copy: Checkpointer) -> None:
    assert set(checkpoint_faults.kinds_of_files(copy.path(2))) == set(FILES)
    assert resume(copy)[0] == 2
    assert copy.remarks == []


@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_found_named_and_stepped_over(saved: Path, tmp_path: Path, name: str) -> None:
    expected = state_of(1)
    for number, kind in enumerate(checkpoint_faults.DAMAGES):
        checkpointer = Checkpointer(Path(shutil.copytree(saved, tmp_path / kind)))
        done = checkpoint_faults.damage(checkpointer.path(2), name, kind, random.Random(number))
        if done is None:
            assert name == "orbax.checkpoint"
            continue
        step, state = resume(checkpointer)
        assert step == 1, done
        jax.tree.map(np.testing.assert_array_equal, state, expected)
        (said,) = checkpointer.remarks
        assert said.startswith(f"{checkpointer.directory}/2 is damaged and set aside as 2.damaged: ")
        assert checkpointer.numbered() == [1]
        assert (checkpointer.directory / "2.damaged").is_dir()


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The record of a checkpoint changed by somebody who can count: its own checksum is right."""
    found = json.loads((path / record.NAME).read_bytes())
    found.pop("sha256")
    change(found)
    (path / record.NAME).write_text(json.dumps({"sha256": record._sum(found), **found}))


def forged(path: Path) -> None:
    """Makes the record agree with the files that there are now: what somebody else's checkpoint may well do."""
    files = {name: [file.num_bytes, file.sha256] for name, file in record.describe_files(path).items()}
    rewritten(path, lambda body: body.update(files=files))


def test_array_data_that_its_files_vouch_for_but_not_its_digest(copy: Checkpointer) -> None:
    """As a fault of memory on the way to the disk would leave it."""
    state = copy.path(2) / "state"
    store = {"driver": "ocdbt", "base": f"file://{state}/", "path": "params.w/"}
    array = ts.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    value = array[7, 5].read().result()
    array[7, 5].write(-value).result()
    forged(copy.path(2))
    step, _ = resume(copy)
    assert step == 1
    assert "params/w in" in copy.remarks[0]
    assert "not what was saved" in copy.remarks[0]


def test_leaves_that_were_exchanged(copy: Checkpointer) -> None:
    def exchange(body: dict[str, Any]) -> None:
        body["leaves"]["params/w"][2], body["leaves"]["params/b"][2] = (
            body["leaves"]["params/b"][2],
            body["leaves"]["params/w"][2],
        )

    rewritten(copy.path(2), exchange)
    assert resume(copy)[0] == 1


def test_a_machine_that_cannot_read_is_no_damage(copy: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    before = sorted(os.listdir(copy.directory))
    monkeypatch.setattr(record, "check_files", fail)
    with pytest.raises(Unreadable, match="could not be read: PermissionError"):
        copy.choose("auto")
    monkeypatch.undo()
    choice = copy.choose("auto")
    monkeypatch.setattr(record, "check_files", fail)
    with pytest.raises(Unreadable, match="could not be read: PermissionError"):
        copy.resume(choice, ABSTRACT, lambda path, run: None)
    assert sorted(os.listdir(copy.directory)) == before


def test_after_everything_was_set_aside_nothing_begins_anew(copy: Checkpointer) -> None:
    for step in (1, 2):
        copy.path(step).rename(copy.directory / f"{step}.damaged")
    with pytest.raises(DamagedData, match=r"set aside as damaged \(1.damaged, 2.damaged\).*--resume=never"):
        copy.choose("auto")
    assert copy.choose("never") == resuming.Choice(anew=True)


# ---- a checkpoint from somebody else ---------------------------------------------------------------------------------


def link(path: Path) -> None:
    (path / "state/_METADATA").unlink()
    (path / "state/_METADATA").symlink_to("/etc/hostname")


def link_to_folder(path: Path) -> None:
    shutil.move(path / "state/d", path.parent / "elsewhere")
    (path / "state/d").symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / "state/_sharding").unlink()
    os.mkfifo(path / "state/_sharding")


def pipe_beside(path: Path) -> None:
    os.mkfifo(path / "state/more")


def pipe_for_a_record(path: Path) -> None:
    (path / record.NAME).unlink()
    os.mkfifo(path / record.NAME)


def deep_folders(path: Path) -> None:
    (path / "/".join(["x"] * 40)).mkdir(parents=True)


def sparse_metadata(path: Path) -> None:
    os.truncate(path / "state/_METADATA", 1 << 40)
    rewritten(path, lambda body: body["files"].update({"state/_METADATA": [1 << 40, None]}))


def sparse_record(path: Path) -> None:
    os.truncate(path / record.NAME, 1 << 40)


def nested_record(path: Path) -> None:
    (path / record.NAME).write_text("[" * 100_000)


def long_number(path: Path) -> None:
    (path / record.NAME).write_text('{"step": ' + "9" * 100_000 + "}")


def file_above(path: Path) -> None:
    rewritten(path, lambda body: body["files"].update({"../1/VERIFIED": [1, "x"]}))


def absolute_file(path: Path) -> None:
    rewritten(path, lambda body: body["files"].update({"/etc/hostname": [1, "x"]}))


def huge_shape(path: Path) -> None:
    rewritten(path, lambda body: body["leaves"].update({"params/w": ["float32", [1 << 40, 1 << 40], "0" * 16]}))


def object_dtype(path: Path) -> None:
    rewritten(path, lambda body: body["leaves"].update({"params/w": ["object", [64, 40], "0" * 16]}))


def array_description(path: Path, **changes: Any) -> None:
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/state/"}).result()
    described = {**json.loads(store.read("params.w/zarr.json").result().value), **changes}
    store.write("params.w/zarr.json", json.dumps(described)).result()
    forged(path)


def huge_chunks(path: Path) -> None:
    array_description(path, chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1 << 40, 1 << 20]}})


def compressed_bomb(path: Path) -> None:
    array_description(path, codecs=[{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 9}}])


def array_of_another_shape(path: Path) -> None:
    array_description(path, shape=[1 << 40, 40])


HARM = {
    harm.__name__: harm
    for harm in (
        *(link, link_to_folder, pipe, pipe_beside, pipe_for_a_record, deep_folders, sparse_metadata, sparse_record),
        *(nested_record, long_number, file_above, absolute_file, object_dtype),
        *(huge_chunks, compressed_bomb, array_of_another_shape),
    )
}


@pytest.mark.parametrize("harm", HARM)
def test_harm_is_refused_before_anything_is_loaded(copy: Checkpointer, tmp_path: Path, harm: str) -> None:
    HARM[harm](copy.path(2))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(Damage):
        resuming.restoring.check(copy.path(2), record.read(copy.path(2), 2), copy.peers)
    assert resume(copy)[0] == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_a_shape_is_compared_before_room_is_made_for_it(copy: Checkpointer) -> None:
    huge_shape(copy.path(2))
    with pytest.raises(ConfigError, match=r"params/w: float32\[1099511627776,1099511627776\] in the checkpoint"):
        resume(copy)


def test_a_step_that_is_a_link_is_no_checkpoint(copy: Checkpointer, tmp_path: Path) -> None:
    copy.path(2).rename(tmp_path / "elsewhere")
    (copy.directory / "2").symlink_to(tmp_path / "elsewhere")
    assert resume(copy)[0] == 1
    assert (tmp_path / "elsewhere/VERIFIED").exists()


def test_names_that_lead_out_of_a_checkpoint_are_refused_by_the_reader(tmp_path: Path) -> None:
    """An index may name any file: TensorStore must not follow it out of the folder."""
    (tmp_path / "secret").write_text("secret")
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/inside/"}).result()
    for name in ("../secret", "a/../../secret"):
        with pytest.raises(ValueError, match="Invalid key"):
            store.read(name).result()
