"""The files of launch/: they are valid, use what exists, pass everything on, and end as the run did."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sharded_train.__main__ import _parsers
from sharded_train.exits import FINAL, Exit

FOLDER = Path(__file__).parent.parent / "launch"
SCRIPTS = ("slurm.sbatch", "openmpi.sh")
RETRIED = {Exit.PREEMPTED, Exit.WATCHDOG, Exit.RETRYABLE, 134, 137}  # saved, or cured by a restart: of a host too

# Stand-ins for what is not installed here: each does to our command what the real one would on the second of two hosts.
STANDS_IN = {
    "sharded-train": 'printf "%s\\n" "$@" > "$OUT"; trap "exit 75" TERM; [[ -z ${WAIT:-} ]] || { sleep 60 & wait; }; '
    "exit ${CODE:-0}",
    "srun": 'while [[ $1 == -* ]]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "scontrol": '[[ $1 == show ]] && printf "%s\\n" n1 n2 || echo "$2" > "$OUT.requeued"',
    "mpirun": 'while [[ $1 != *openmpi.sh ]]; do shift; done; OMPI_COMM_WORLD_RANK=1 exec "$@"',
    "sleep": "exec /bin/sleep $(($1 > 30 ? $1 : 0))",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, body in STANDS_IN.items():
        (binaries / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (binaries / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    return {**os.environ, **slurm, "PATH": f"{binaries}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}


def command(script: str, tmp_path: Path, hosts: int = 2) -> list[str]:
    if script == "slurm.sbatch":
        return ["bash", str(FOLDER / script)]
    (tmp_path / "hosts").write_text("# ours\nn1 slots=8\n\nn2\n" if hosts == 2 else "n1\n")
    return ["bash", str(FOLDER / script), str(tmp_path / "hosts")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True)


def refusals(given: list[str]) -> list[str]:
    """What our parsers do not know of `launch ... -- train ...`."""
    own, of_train = given[: given.index("--")], given[given.index("--") + 1 :]
    unknown = []
    for arguments in (own, of_train):
        arguments = [each for each in arguments if not each.startswith("--config.")]
        unknown += _parsers()[0].parse_known_args(arguments)[1]
    return unknown


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_arrives_and_is_known(script: str, tmp_path: Path, environ: dict[str, str]) -> None:
    asked = ["--config=a b.py", "--workdir=/shared/run", "--config.train.seed=1"]
    done = subprocess.run([*command(script, tmp_path), *asked], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = Path(environ["OUT"]).read_text().splitlines()
    assert given[0] == "launch"
    assert given[given.index("--") :] == ["--", "train", *asked]
    assert {"--processes=1", "--hosts=2", "--host-index=1"} < set(given)
    (coordinator,) = (each for each in given if each.startswith("--coordinator"))
    assert re.fullmatch(r"--coordinator=n1:\d+", coordinator)
    assert not refusals(given)


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_host_needs_no_coordinator(script: str, tmp_path: Path, environ: dict[str, str]) -> None:
    environ["SLURM_JOB_NUM_NODES"] = "1"
    asked = ["--config=c.py", "--workdir=w"]
    subprocess.run([*command(script, tmp_path, hosts=1), *asked], env=environ, check=True)
    given = Path(environ["OUT"]).read_text().splitlines()
    assert not any(each.startswith(("--coordinator", "--hosts")) for each in given)


@pytest.mark.parametrize("code", sorted({*map(int, Exit), 134, 137}))
def test_slurm_runs_again_what_a_restart_can_go_on_with(code: int, tmp_path: Path, environ: dict[str, str]) -> None:
    environ["CODE"] = str(code)
    done = subprocess.run([*command("slurm.sbatch", tmp_path), "--config=c", "--workdir=w"], env=environ)
    assert done.returncode == code
    assert Path(f"{environ['OUT']}.requeued").is_file() == (code in RETRIED)
    assert code == Exit.PREEMPTED or (code in RETRIED) != (code in FINAL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_reaches_the_run_and_its_code_comes_back(script: str, tmp_path: Path, environ: dict[str, str]) -> None:
    environ["WAIT"] = "1"
    started = subprocess.Popen([*command(script, tmp_path), "--config=c", "--workdir=w"], env=environ)
    deadline = time.monotonic() + 60
    while not Path(environ["OUT"]).is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # until its trap is set
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == Exit.PREEMPTED


def manifest() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())


# By hand from the published types of JobSet (jobset.x-k8s.io/v1alpha2, api/jobset/v1alpha2/jobset_types.go) and of
# Kubernetes' Job and Pod: of the fields that the manifest uses, all types, enums and which are required (a star). The
# whole schema is in the cluster: `kubectl apply --dry-run=server`; it was run against the published CRD, too.
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")  # JobSet refuses others, such as with a hyphen
ACTIONS = {"FailJobSet", *(f"Restart{what}{how}" for what in ("JobSet", "Job") for how in ("", "AndIgnoreMaxRestarts"))}
REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
POD = {
    "restartPolicy*": {"Never", "OnFailure"},
    "terminationGracePeriodSeconds": int,
    "containers*": [
        {
            "name*": NAME,
            "image*": str,
            "command": [str],
            "args": [str],
            "resources": {"limits": {"nvidia.com/gpu": int}},
            "volumeMounts": [{"name*": NAME, "mountPath*": str}],
        }
    ],
    "volumes": [
        {"name*": NAME, "persistentVolumeClaim": {"claimName*": str}, "emptyDir": {"medium": {"", "Memory"}}},
    ],
}
JOB = {
    "completionMode": {"Indexed", "NonIndexed"},
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules*": [
            {
                "action*": {"FailJob", "FailIndex", "Ignore", "Count"},
                "onExitCodes": {"containerName": NAME, "operator*": {"In", "NotIn"}, "values*": [int]},
            }
        ]
    },
    "template*": {"spec*": POD},
}
JOB_SET = {
    "apiVersion*": {"jobset.x-k8s.io/v1alpha2"},
    "kind*": {"JobSet"},
    "metadata*": {"name*": NAME},
    "spec*": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name*": RULE, "action*": ACTIONS, "onJobFailureReasons": [REASONS]}],
        },
        "replicatedJobs*": [{"name*": NAME, "replicas": int, "template*": {"spec*": JOB}}],
    },
}


def misfits(value: Any, shape: Any, where: str = "") -> list[str]:
    """What of a manifest is not of a shape: a type, a set of choices, a pattern, a list of one, a dict by names."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no group"]
        inner = {name.rstrip("*"): each for name, each in shape.items()}
        missing = [name for name in shape if name.endswith("*") and name.rstrip("*") not in value]
        found = [f"{where}.{name.rstrip('*')}: missing" for name in missing]
        for name, each in value.items():
            unknown = [f"{where}.{name}: unknown"]
            found += misfits(each, inner[name], f"{where}.{name}") if name in inner else unknown
        return found
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [words for i, each in enumerate(value) for words in misfits(each, shape[0], f"{where}[{i}]")]
    if isinstance(shape, set):
        fits = value in shape
    elif isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None and len(value) <= 63
    else:
        fits = type(value) is shape
    return [] if fits else [f"{where}: {value!r}"]


def test_the_manifest_is_a_jobset() -> None:
    found = manifest()
    assert misfits(found, JOB_SET) == []
    found["spec"]["failurePolicy"]["rules"][0]["action"] = "FailJob"
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backofLimit"] = job.pop("backoffLimit")
    job["completions"] = "8"
    del job["template"]["spec"]["restartPolicy"]
    assert len(misfits(found, JOB_SET)) == 4


def test_the_manifest_counts_hosts_alike_and_uses_what_exists() -> None:
    found = manifest()
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (hosts,) = found["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    given = [*container["command"][1:], *container["args"]]
    assert job["parallelism"] == job["completions"]
    assert f"--hosts={job['completions']}" in given
    name = found["metadata"]["name"]
    assert f"--coordinator={name}-{hosts['name']}-0-0.{name}:8476" in given  # JobSet's names of pods
    assert not refusals([each.replace("$(JOB_COMPLETION_INDEX)", "0") for each in given])  # Kubernetes fills it in
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


def test_the_manifest_gives_up_where_a_restart_would_come_to_the_same() -> None:
    job = manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    wanted = {int(code) for code in FINAL} - {Exit.DONE, Exit.PREEMPTED, Exit.INTERRUPTED}
    assert set(rule["onExitCodes"]["values"]) == wanted
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
