"""Checkpoints at gs://, against the stand-in of gcs_stand_in.py: saved, read, kept, put aside, damaged, killed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    DamagedData,
    Unreadable,
    cloud,
    files,
    record,
)
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit, Unanswered
from sharded_train.verbs.checkpoints import checkpoints
from sharded_train.verbs.launch import free_port
from tests.gcs_stand_in import Bucket, serving

needs_gcsfs = pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="needs the extra gcs")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    """One for all tests: TensorStore reads its address once."""
    with serving() as (bucket, environ), pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield bucket


@pytest.fixture(scope="module")
def three(server: Bucket) -> dict[str, tuple[int, bytes]]:
    """What is in the bucket when steps 1, 2 and 3 are saved."""
    saves(1, 2, 3)
    return dict(server.objects)


@pytest.fixture
def bucket(server: Bucket, three: dict[str, tuple[int, bytes]]) -> Iterator[Bucket]:
    """With steps 1, 2 and 3 in it."""
    server.objects = dict(three)
    yield server
    server.refuse = lambda method, name: None
    assert not server.unknown


DIRECTORY = "gs://bucket/runs/one/checkpoints"
HERE = DIRECTORY.removeprefix("gs://")
SETTINGS: dict[str, Any] = {
    "model": {"vocab_size": 300, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64},
    "mesh": {"data": 8},
    "data": {"files": ["*.txt"]},
    "train": {"num_steps": 4, "global_batch_size": 8, "sequence_length": 32},
    "evaluate": {"num_batches": 1},
    "log": {"every": 1, "tensorboard": False},
}


def state_of(step: int, num_devices: int = 8) -> Any:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    w = put(jax.random.normal(jax.random.key(step), (64, 32)), "data")
    return {"params": {"w": w, "b": put(jnp.full(3, step, jnp.bfloat16))}, "step": put(jnp.int32(step))}


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def saves(*steps: int, **options: Any) -> None:
    with contextlib.closing(Checkpointer(DIRECTORY, **options)) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), {"step": step})
        checkpointer.wait()


def resumed(checkpointer: Checkpointer, resume: str = "auto") -> int:
    """The step that a run would go on from; its state must be that which was saved."""
    wanted = abstract(state_of(0))
    step, state, record = checkpointer.resume(checkpointer.choose(resume), wanted, lambda path, run: None)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    assert record == {"step": step}
    return step


def folders(bucket: Bucket) -> set[str]:
    return {name.removeprefix(f"{HERE}/").partition("/")[0] for name in bucket.names(HERE)}


@needs_gcsfs
def test_saved_kept_and_read_back_on_another_mesh(bucket: Bucket) -> None:
    saves(4, keep=2, keep_every=1 << 10)
    assert folders(bucket) == {"3", "4"}
    checkpointer = Checkpointer(DIRECTORY)
    assert checkpointer.steps() == [3, 4]
    assert resumed(checkpointer) == 4
    restored, _ = checkpointer.restore(3, abstract(state_of(0, num_devices=2)))
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(3, num_devices=2))


@needs_gcsfs
def test_the_record_is_written_last(bucket: Bucket) -> None:
    bucket.requests.clear()
    saves(7)
    written = [name for method, name in bucket.requests if method in ("POST", "PUT") and f"{HERE}/7/" in f"{name}/"]
    assert written.index(f"{HERE}/7/VERIFIED") == len(written) - 1
    everything = [name for method, name in bucket.requests if method in ("POST", "PUT") and ".probe" not in name]
    assert everything[0] == f"{HERE}/7.saving"


@needs_gcsfs
@pytest.mark.parametrize("left", [r"state/", r"VERIFIED"])
def test_what_a_kill_leaves_is_no_checkpoint_and_goes_at_the_next_save(bucket: Bucket, left: str) -> None:
    """In a save nothing but the record may be missing; in a deletion the record goes first."""
    for name in bucket.names(f"{HERE}/3/"):
        if left not in name:
            del bucket.objects[name]
    bucket.objects[f"{HERE}/3.{'saving' if left == 'state/' else 'deleting'}"] = (0, b"")
    checkpointer = Checkpointer(DIRECTORY)
    assert checkpointer.numbered() == [1, 2]
    assert resumed(checkpointer) == 2
    saves(3)
    assert folders(bucket) == {"1", "2", "3"}
    assert resumed(Checkpointer(DIRECTORY)) == 3


def flipped(bucket: Bucket, name: str) -> None:
    bucket.flip(name, len(bucket.objects[name][1]) // 2)


def cut(bucket: Bucket, name: str) -> None:
    generation, data = bucket.objects[name]
    bucket.objects[name] = generation, data[: len(data) // 2]


def lost(bucket: Bucket, name: str) -> None:
    del bucket.objects[name]


KINDS = ("VERIFIED", "/d/", "manifest.ocdbt", "_METADATA", "commit_success.txt")
QUICK = {(flipped, "/d/"), (cut, "manifest.ocdbt"), (lost, "VERIFIED")}  # the others take as long, and show as much


@needs_gcsfs
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        pytest.param(damage, kind, marks=() if (damage, kind) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for damage in (flipped, cut, lost)
    ],
)
def test_damage_is_named_set_aside_and_stepped_over(
    bucket: Bucket, kind: str, damage: Callable[[Bucket, str], None]
) -> None:
    name = next(name for name in bucket.names(f"{HERE}/3/") if kind in name)
    damage(bucket, name)
    before = {name: data for name, (_, data) in bucket.objects.items() if name.startswith(f"{HERE}/3/")}
    checkpointer = Checkpointer(DIRECTORY)
    assert resumed(checkpointer) == 2
    assert [f"{DIRECTORY}/3 is damaged and set aside as 3.damaged" in remark for remark in checkpointer.remarks] == [
        True
    ]
    assert folders(bucket) == {"1", "2", "3.damaged"}
    aside = {name: data for name, (_, data) in bucket.objects.items() if name.startswith(f"{HERE}/3.damaged/")}
    assert aside == {name.replace("/3/", "/3.damaged/"): data for name, data in before.items()}


@needs_gcsfs
def test_where_all_are_damaged_nothing_is_changed(bucket: Bucket) -> None:
    for step in (1, 2, 3):
        flipped(bucket, f"{HERE}/{step}/VERIFIED")
    before = dict(bucket.objects)
    with pytest.raises(DamagedData, match="no checkpoint can be used"):
        resumed(Checkpointer(DIRECTORY))
    assert bucket.objects == before


@needs_gcsfs
def test_a_store_that_does_not_answer_is_no_damage(bucket: Bucket) -> None:
    before = dict(bucket.objects)
    bucket.refuse = lambda method, name: 403 if "/3/" in name else None
    with pytest.raises(Unreadable, match=r"could not be read.*orbidden"):
        resumed(Checkpointer(DIRECTORY))
    bucket.refuse = lambda method, name: 403 if "/3/state/d/" in name else None
    with pytest.raises((CheckpointError, OSError)):
        resumed(Checkpointer(DIRECTORY))
    assert bucket.objects == before
    bucket.refuse = lambda method, name: None
    assert resumed(Checkpointer(DIRECTORY)) == 3


@needs_gcsfs
def test_a_save_that_fails_is_told_and_the_next_one_counts(bucket: Bucket) -> None:
    with contextlib.closing(Checkpointer(DIRECTORY)) as checkpointer:
        bucket.refuse = lambda method, name: 403 if method == "POST" and "/4/state" in name else None
        checkpointer.save(4, state_of(4), {"step": 4})
        with pytest.raises(CheckpointError, match=f"step 4 was not written to {DIRECTORY}/4"):
            checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        bucket.refuse = lambda method, name: 403 if method == "POST" else None
        with pytest.raises(CheckpointError, match=f"{DIRECTORY} cannot be written: .*orbidden"):
            checkpointer.save(5, state_of(5), {"step": 5})
        bucket.refuse = lambda method, name: None
        checkpointer.save(4, state_of(4), {"step": 4})
        checkpointer.wait()
        assert resumed(checkpointer) == 4


@needs_gcsfs
def test_roll_back_and_begin_anew(bucket: Bucket) -> None:
    assert resumed(Checkpointer(DIRECTORY), "1") == 1
    assert folders(bucket) == {"1", "2.rolled_back", "3.rolled_back"}
    saves(2)
    checkpointer = Checkpointer(DIRECTORY)
    assert checkpointer.choose("never").anew
    checkpointer.begin_anew()
    assert Checkpointer(f"{DIRECTORY}.before").steps() == [1, 2]
    assert checkpointer.numbered() == []
    assert Checkpointer(DIRECTORY).choose("auto").steps == ()


@needs_gcsfs
@pytest.mark.slow  # reads nine checkpoints
def test_the_verb(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sharded_train import config, recipe
    from sharded_train import workdir as layout

    values = config.to_dict(recipe.from_dict({**SETTINGS, "checkpoint": {"dir": DIRECTORY}}))
    (tmp_path / layout.CONFIG).write_text(json.dumps(values))

    def told(action: str, *steps: str, **options: Any) -> tuple[int, Any]:
        code = checkpoints(action, list(steps), tmp_path, json=True, **options)
        return code, json.loads(capsys.readouterr().out)

    _, found = told("list")
    assert [(row["step"], row["verified"]) for row in found["checkpoints"]] == [(1, True), (2, True), (3, True)]
    assert told("verify")[0] == Exit.DONE
    assert told("show")[1]["path"] == f"{DIRECTORY}/3"
    assert told("diff", "1", f"{DIRECTORY}/2")[1]["leaves"]["step"]["differing"] == 1
    flipped(bucket, next(name for name in bucket.names(f"{HERE}/3/state/") if "/d/" in name))
    assert told("verify")[0] == Exit.DAMAGED
    assert told("rollback", "2")[1]["set_aside"] == [f"{DIRECTORY}/3.rolled_back"]
    _, found = told("prune", keep=1, set_aside=True)
    assert found["deleted"] == [f"{DIRECTORY}/1", f"{DIRECTORY}/3.rolled_back"]
    assert found["num_bytes"] > 2 * 64 * 32 * 4
    assert folders(bucket) == {"2"}


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://bucket/runs", "an address that begins with gs://"),
        ("gs://", "names no bucket"),
        ("gs://bucket/", "names no prefix in the bucket"),
    ],
)
def test_other_addresses_are_refused(address: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=words):
        Checkpointer(address)


def test_without_gcsfs_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"sharded-train\[gcs\]"):
        Checkpointer(DIRECTORY)


@needs_gcsfs
@pytest.mark.parametrize(("status", "words"), [(403, "orbidden"), (404, "FileNotFoundError")])
def test_a_bucket_that_cannot_be_written_is_refused_at_the_start(bucket: Bucket, status: int, words: str) -> None:
    bucket.refuse = lambda method, name: status
    with pytest.raises(ConfigError, match=f"{DIRECTORY} cannot be written from here: .*{words}"):
        Checkpointer(DIRECTORY).check_place(files.place(DIRECTORY))


@needs_gcsfs
def test_a_bucket_that_may_answer_later_is_told_of_and_no_refusal(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under `launch`, which then starts the run again."""
    monkeypatch.setattr(cloud, "_SILENCE", 0.2)
    bucket.refuse = lambda method, name: time.sleep(0.5)
    Checkpointer(DIRECTORY).check_place(files.place(DIRECTORY))
    assert f"/checkpoints/.probe-0-{os.getpid()}: no answer for 0.2 s; it is asked again" in capsys.readouterr().err

    class Down:
        def pipe_file(self, *_: Any) -> None:
            raise HttpError({"code": 503, "message": "busy"})

    from gcsfs.retry import HttpError

    monkeypatch.setattr(cloud, "_store", Down)
    with pytest.raises(Unanswered, match="busy, 503"):
        Checkpointer(DIRECTORY).check_place(files.place(DIRECTORY))


def children(num_processes: int, num_steps: int) -> list[subprocess.Popen[bytes]]:
    """A run that only saves, step after step."""
    script = Path(__file__).parents[2] / "benchmarks/checkpoint_child.py"
    others = [f"localhost:{free_port()}", str(num_processes)] if num_processes > 1 else []
    words = [sys.executable, str(script), DIRECTORY, str(num_steps), *others]
    path = os.pathsep.join(filter(None, [str(script.parents[1]), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    quiet = subprocess.DEVNULL
    return [
        subprocess.Popen([*words, *([str(i)] if others else [])], env=environ, stdout=quiet, stderr=quiet)
        for i in range(num_processes)
    ]


@needs_gcsfs
@pytest.mark.slow  # eight starts of JAX, and 12 saves: about a minute
@pytest.mark.parametrize("num_processes", [1, 2])
def test_kill_9_at_random_moments(bucket: Bucket, num_processes: int) -> None:
    """After each kill all that was verified counts; the last state has the digests of an undisturbed run's."""
    rng = random.Random(num_processes)
    bucket.objects.clear()
    assert [child.wait(300) for child in children(num_processes, 6)] == [0] * num_processes
    expected = record.read(files.place(DIRECTORY) / "6", 6).leaves
    bucket.objects.clear()
    bucket.requests.clear()
    verified, kills = 0, 0
    while kills < 6:
        started = children(num_processes, 6)
        until = len(bucket.requests) + rng.randrange(20, 300)
        while len(bucket.requests) < until and all(child.poll() is None for child in started):
            time.sleep(0.001)
        done = any(child.poll() == 0 for child in started)
        if not done:
            for child in rng.sample(started, num_processes):
                child.kill()
                child.wait()
            kills += 1
        there = Checkpointer(DIRECTORY).numbered()
        for step in there:
            record.check_files(
                files.place(DIRECTORY) / str(step), record.read(files.place(DIRECTORY) / str(step), step)
            )
        assert max(there, default=0) >= verified
        verified = max(there, default=0)
        if done:
            assert [child.wait(60) for child in started] == [0] * num_processes
            break
    if kills == 6:
        assert [child.wait(300) for child in children(num_processes, 6)] == [0] * num_processes
    assert kills >= 2
    assert record.read(files.place(DIRECTORY) / "6", 6).leaves == expected
    assert folders(bucket) == {"5", "6"}


@needs_gcsfs
@pytest.mark.slow  # compiles a run
@pytest.mark.usefixtures("compiled_once")
def test_a_run_keeps_its_checkpoints_there_and_goes_on_from_them_elsewhere(
    bucket: Bucket, text: Path, tmp_path: Path
) -> None:
    """One start of a run, and another in a new workdir: 10 to 20 s."""
    from sharded_train import recipe as recipes
    from sharded_train.train import train

    bucket.objects.clear()
    recipe = lambda stop_at: recipes.from_dict(
        {
            **SETTINGS,
            "data": {"files": [f"{text}/*.txt"], "validation_fraction": 0.2},
            "checkpoint": {"dir": DIRECTORY},
            "train": {**SETTINGS["train"], "stop_at": stop_at},
        }
    )
    assert train(recipe(2), tmp_path / "one") == Exit.DONE
    assert not (tmp_path / "one/checkpoints").exists()
    assert train(recipe(3), tmp_path / "two") == Exit.DONE
    lines = (tmp_path / "two/metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {3}
    assert folders(bucket) == {"2", "3", "OWNER"}
    with pytest.raises(ConfigError, match=f"{DIRECTORY} is that of the run in {tmp_path}/two, started by process"):
        train(recipe(3), tmp_path / "one")
    elsewhere = dataclasses.replace(recipe(3), checkpoint=CheckpointConfig())
    with pytest.raises(ConfigError, match=r"config\.checkpoint\.dir"):
        train(elsewhere, tmp_path / "two")
