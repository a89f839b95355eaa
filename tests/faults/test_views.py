"""Hosts that see one directory at different times, as on network file systems, which remember what was not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from sharded_train.verbs.launch import free_port

LATE = """
import shutil, sys, threading, time
from pathlib import Path
import jax
where, address, index = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, int(index), heartbeat_timeout_seconds=10)
from benchmarks import checkpoint_child
from sharded_train.checkpoint import checkpointer
choose = checkpointer.Checkpointer.choose

def appears():
    time.sleep(3)
    shutil.copytree(where + "/0/3", where + "/1/copy")
    Path(where + "/1/copy").rename(where + "/1/3")

def chosen(self, resume):
    threading.Thread(target=appears).start()
    return choose(self, resume)

if index == "1":
    checkpointer.Checkpointer.choose = chosen
checkpoint_child.main(f"{where}/{index}", 3)
"""


@pytest.mark.slow  # two processes start JAX, twice: 20 to 40 s
def test_a_host_that_sees_the_newest_checkpoint_late_goes_on_from_it_like_the_others(tmp_path: Path) -> None:
    """The second host's directory is a copy, in which the last step comes to be while the run is resumed."""
    script = str(soak.ROOT / "benchmarks/checkpoint_child.py")
    environ = {**os.environ, "PYTHONPATH": str(soak.ROOT)}

    def both(*commands: list[str]) -> list[tuple[int, str]]:
        started = [
            subprocess.Popen(
                [sys.executable, *command, str(index)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for index, command in enumerate(commands)
        ]  # fmt: skip
        said = [process.communicate(timeout=200)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]

    found = both(*[[script, str(tmp_path / "0"), "3", f"localhost:{free_port()}", "2"]] * 2)
    assert [code for code, _ in found] == [0, 0], found
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1/3")
    found = both(*[["-c", LATE, str(tmp_path), f"localhost:{free_port()}"]] * 2)
    assert [code for code, _ in found] == [0, 0], found
    assert all("resumed 3" in said for _, said in found), found
