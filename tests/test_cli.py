"""The command: its verbs, exit codes and messages, and how a process joins others."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sharded_train import launch
from sharded_train.__main__ import main
from sharded_train.checkpoint import CheckpointError, DamagedData
from sharded_train.commands import VERBS
from sharded_train.config import to_dict
from sharded_train.config.file import CONFIGS
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit, Unanswered
from sharded_train.faults.config import DistributedConfig
from sharded_train.initial_weights import InitialWeights
from sharded_train.recipe import Recipe

QUICKSTART = f"--config={CONFIGS / 'quickstart.py'}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around the tests themselves."""
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What the verbs' functions were called with; they return 7."""
    made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for verb in VERBS:
        in_its_own = importlib.util.find_spec(f"sharded_train.verbs.{verb}") is not None
        module = types.ModuleType(f"sharded_train.{'verbs.' * in_its_own}{verb}")

        def function(*args: Any, _verb: str = verb, **options: Any) -> int:
            made.append((_verb, args, options))
            return 7

        setattr(module, verb, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The problems of a command that is refused with code 2."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


AS_USUAL = {"accept_config_change": False, "resume": "auto", "initial": None}


def test_train(calls: list[Any], tmp_path: Path) -> None:
    assert (
        main(["train", QUICKSTART, f"--workdir={tmp_path}", "--config.train.seed=3", "--config.zero.stage", "2"]) == 7
    )
    ((verb, (recipe, workdir), options),) = calls
    assert (verb, workdir, options) == ("train", tmp_path, {**AS_USUAL, "accept_config_change": False})
    assert (recipe.train.seed, recipe.zero.stage, recipe.model.vocab_size) == (3, 2, 4096)
    main(["train", QUICKSTART, "--workdir", str(tmp_path), "--accept-config-change", "--resume=040"])
    assert calls[1][2] == {**AS_USUAL, "accept_config_change": True, "resume": "40"}
    main(["train", QUICKSTART, f"--workdir={tmp_path}", "--init-from=other", "--init-only=layers/*,norm"])
    assert calls[2][2]["initial"] == InitialWeights(Path("other"), ("layers/*", "norm"), None)
    assert main(["train", QUICKSTART, f"--workdir={tmp_path}", "--resume=latest"]) == 2
    assert main(["train", QUICKSTART, "--workdir=gs://bucket/run"]) == 2
    assert main(["train", QUICKSTART, f"--workdir={tmp_path}", "--init-only=layers/*"]) == 2


def test_the_config_of_a_run_is_that_of_its_workdir(calls: list[Any], tmp_path: Path) -> None:
    run = Recipe()
    (tmp_path / "config.json").write_text(json.dumps(to_dict(run)))
    assert main(["evaluate", f"--workdir={tmp_path}", "--config.mesh.tensor=2", "--json"]) == 7
    assert main(["generate", f"--workdir={tmp_path}", "--prompt=a b", "--top-k=5", "--temperature=0"]) == 7
    assert main(["show", f"--workdir={tmp_path}", "--cluster=2x8"]) == 7
    (evaluate, generate, show) = calls
    assert evaluate[1][0].mesh.tensor == 2
    assert (evaluate[1][1], evaluate[2]) == (tmp_path, {"json": True})
    assert generate[1] == (run, tmp_path)
    assert generate[2] == {
        "prompt": "a b",
        "max_tokens": 100,
        "temperature": 0.0,
        "top_k": 5,
        "num_samples": 1,
        "seed": 0,
        "json": False,
    }
    assert (show[1], show[2]) == ((run,), {"cluster": "2x8", "json": False})


def test_a_config_goes_before_that_of_the_workdir(calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_dict(Recipe())))
    main(["evaluate", QUICKSTART, f"--workdir={tmp_path}"])
    assert calls[0][1][0].mesh.tensor == 2


def test_a_workdir_without_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (problem,) = refused(capsys, "evaluate", f"--workdir={tmp_path}")
    assert "holds no run" in problem
    (tmp_path / "config.json").write_text('{"model": ')
    (problem,) = refused(capsys, "evaluate", f"--workdir={tmp_path}")
    assert str(tmp_path / "config.json") in problem


def test_all_violations_one_to_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    wrong = ["--config.train.global_batch_size=15", "--config.train.num_microbatches=4", "--config.train.stop_at=0"]
    problems = refused(capsys, "train", QUICKSTART, f"--workdir={workdir}", *wrong)
    assert [problem.split(" = ")[0] for problem in problems] == ["train.stop_at", "train.global_batch_size"]
    problems = refused(
        capsys, "train", QUICKSTART, f"--workdir={workdir}", "--config.zero.stag=1", "--config.mesh.tensor=x"
    )
    assert [problem.split(":")[0] for problem in problems] == ["config.mesh.tensor", "config.zero.stag"]
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("verb", "more"), [("train", ["--workdir=run", "--cpu-devices=8"]), ("show", ["--cluster=1x8"])]
)
def test_a_mesh_for_more_devices_than_were_asked_for(
    capsys: pytest.CaptureFixture[str], verb: str, more: list[str]
) -> None:
    """It is not hidden by what does not split over the mesh."""
    model, mesh = refused(capsys, verb, QUICKSTART, "--config.mesh.tensor=16", *more)[::-1]
    assert "model.num_heads = 4 is no multiple of mesh.tensor = 16" in model
    assert "number of devices 8 / (pipeline 1 × sequence 1 × tensor 16) = 0.5" in mesh


def test_a_key_that_does_not_exist_hides_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """But for what it seems to mean: without num_heads the default would be at odds with the width."""
    wrong = ["--config.model.num_headz=5", "--config.model.d_model=130", "--config.train.stop_at=0"]
    problems = refused(capsys, "train", QUICKSTART, f"--workdir={tmp_path / 'run'}", *wrong)
    assert [problem.split(" = ")[0].split(":")[0] for problem in problems] == [
        "config.model.num_headz",
        "train.stop_at",
    ]
    assert "did you mean num_heads?" in problems[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", ["which verb? One of train, generate, evaluate, show"]),
        ("trian", ["trian: no such verb; did you mean train? The verbs are train, generate, evaluate, show"]),
        ("--config=x.py train", ["--config=x.py: the verb comes first"]),
        ("train", ["train needs --config and --workdir; for example: sharded-train train"]),
        ("show", ["show needs --config or --workdir"]),
        ("generate --workdir=w", ["generate needs --prompt"]),
        ("launch --processes=2 train --config=c.py", ["launch: the command that it starts stands after --, as in: "]),
        ("evaluate w", ["w: not expected here", "evaluate needs --workdir"]),
        ("evaluate --workdri w", ["--workdri: no such option; did you mean --workdir?", "evaluate needs --workdir"]),
        (
            "evaluate --workdir=w --train.seed=1",
            ["--train.seed=1: no such option; options of the config are written --config."],
        ),
        (
            "evaluate --workdir=w config.a=1",
            ["config.a=1: not expected here; options of the config are written --config."],
        ),
        ("evaluate --work=w", ["--work=w: no such option; did you mean --workdir?", "evaluate needs --workdir"]),
        ("generate --max-tokens=0", ["--max-tokens: wanted int of at least 1, got '0'"]),
        ("generate --temperature=nan", ["--temperature: wanted float of at least 0, got 'nan'"]),
        ("evaluate --workdir=w --cpu-devices=0", ["--cpu-devices=0: must be at least 1"]),
        ("evaluate --workdir=w --num-processes=2", ["--num-processes without --coordinator, --process-id"]),
        ("show --config=no_such_file.py", ["no_such_file.py: no such config file"]),
        ("show --config=x.py --config.a", ["x.py: no such config file"]),
    ],
)
def test_what_is_asked_wrongly(capsys: pytest.CaptureFixture[str], argv: str, words: list[str]) -> None:
    problems = refused(capsys, *argv.split())
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


def test_what_goes_on_as_asked_is_nearer_than_what_ends_so(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = refused(capsys, "show", QUICKSTART, "--config.precision.recipe=fp8")
    assert problem.endswith("got 'fp8'; did you mean fp8_delayed?")


def test_an_override_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = refused(capsys, "show", QUICKSTART, "--config.train.seed", "--json")
    assert problem == "--config.train.seed: has no value; write --config.train.seed=VALUE"


def test_a_key_given_twice_is_noted(capsys: pytest.CaptureFixture[str], calls: list[Any]) -> None:
    main(["show", QUICKSTART, "--config.train.seed=1", "--config.train.seed=2"])
    assert "note: --config.train.seed is given 2 times (1, 2): the last one counts" in capsys.readouterr().err
    assert calls[0][1][0].train.seed == 2


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["sharded_train.show"], "show", fail)
    with pytest.raises(ZeroDivisionError):
        main(["show", QUICKSTART])


def test_config_errors_of_a_verb_are_told_the_same_way(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise ConfigError(["one", "two"])

    monkeypatch.setattr(sys.modules["sharded_train.show"], "show", fail)
    assert refused(capsys, "show", QUICKSTART) == ["one", "two"]


@pytest.mark.parametrize(
    ("error", "code", "more"),
    [
        (Unanswered("gs://bucket/x: no route"), Exit.RETRYABLE, [Unanswered.ADVICE]),
        (CheckpointError("gs://bucket/x: no route"), Exit.FAILED, []),
        (DamagedData("gs://bucket/x: no route"), Exit.DAMAGED, []),
    ],
)
def test_what_a_verb_cannot_go_on_for_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Any],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: Exit,
    more: list[str],
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["sharded_train.show"], "show", fails)
    assert main(["show", QUICKSTART]) == code
    assert capsys.readouterr().err.splitlines() == ["error: gs://bucket/x: no route", *more]


def test_control_c(monkeypatch: pytest.MonkeyPatch, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["sharded_train.show"], "show", interrupt)
    assert main(["show", QUICKSTART]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"Example:\n  sharded-train {verb} " in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_examples_are_commands(verb: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shlex

    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "config.json").write_text(json.dumps(to_dict(Recipe())))
    (tmp_path / "configs").symlink_to(CONFIGS)
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(VERBS[verb].example)
    assert argv[0] == "sharded-train"
    assert main([a for a in argv[1:] if not a.startswith("--cpu-devices")]) == 7
    assert calls[0][0] == verb


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONFIGS.parent, check=True)
    return done.stdout.strip()


def test_help_and_errors_of_the_command_line_do_not_wait_for_jax() -> None:
    run_python(
        "import sys; from sharded_train.__main__ import main\n"
        "assert main(['train', '--config=x.py']) == 2\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules"
    )


def test_cpu_devices_are_virtual_devices_of_the_cpu() -> None:
    code = (
        "import sys, types\nshow = types.ModuleType('sharded_train.show')\n"
        "import jax\nshow.show = lambda *_, **__: print(jax.default_backend(), jax.device_count()) or 0\n"
        "sys.modules['sharded_train.show'] = show\nfrom sharded_train.__main__ import main\n"
        f"sys.exit(main(['show', '{QUICKSTART}', '--cpu-devices=3']))"
    )
    assert run_python(code) == "cpu 3"


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.add_options(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", []),
        ("--cpu-devices=8 --distributed", []),
        ("--coordinator=node0:1234 --num-processes=2 --process-id=1", []),
        ("--coordinator=node0:1234", ["without --num-processes, --process-id"]),
        ("--coordinator=node0 --num-processes=2 --process-id=1", ["--coordinator=node0: wanted HOST:PORT"]),
        ("--coordinator=n:1 --num-processes=2 --process-id=2", ["--process-id=2: must be from 0 to"]),
        ("--coordinator=n:1 --num-processes=1 --process-id=0 --distributed", ["--coordinator and --distributed"]),
    ],
)
def test_how_processes_are_told_of_each_other(argv: str, words: list[str]) -> None:
    problems = launch.problems(options(*argv.split()))
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, "one of 4 that srun started (SLURM_STEP_NUM_TASKS)"),
        ({"SLURM_NTASKS": "4"}, None),  # a batch script, which runs once
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell inside an allocation
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "one of 2 that Open MPI started (OMPI_COMM_WORLD_SIZE)"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_launchers_are_recognised(environ: dict[str, str], words: str | None) -> None:
    assert launch.launched_by(environ) == words


def test_a_batch_script_is_told_that_it_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    launch.launched_by({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert "4 tasks, but srun did not start this one: it runs alone" in capsys.readouterr().err


WAITS = DistributedConfig(heartbeat_seconds=7)


class Joined(list[tuple[Any, ...]]):
    """Stands in for jax.distributed."""

    def initialize(self, *arguments: Any, **waits: int) -> None:
        assert waits == {
            "heartbeat_timeout_seconds": 7,
            "initialization_timeout": 300,
            "shutdown_timeout_seconds": 300,
        }
        self.append(arguments)


def test_processes_join(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    joined = Joined()
    monkeypatch.setattr("jax.distributed", joined)
    launch.start(options(), WAITS, {})
    assert joined == []
    launch.start(
        options("--coordinator=n:1", "--num-processes=2", "--process-id=1"), WAITS, {"OMPI_COMM_WORLD_SIZE": "2"}
    )
    assert joined == [("n:1", 2, 1)]
    launch.start(options(), WAITS, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"})
    assert joined[1:] == [()]
    assert "note: joining the other processes: one of 2 that srun started" in capsys.readouterr().err
    launch.start(options("--distributed"), WAITS, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert joined[2:] == [()]
    assert capsys.readouterr().err == ""  # process 0 says it for all


def test_distributed_without_a_launcher_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def initialize(self, **waits: int) -> None:
            raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed", Lost())
    with pytest.raises(ConfigError, match="give --coordinator, --num-processes and --process-id"):
        launch.start(options("--distributed"), WAITS, {})


def test_an_empty_workdir_is_not_this_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config=configs/quickstart.py", "--workdir="]) == 2
    assert "it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seed=4294967296", "--temperature=inf", "--temperature=nan"])
def test_sampling_options_have_bounds(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--workdir=runs/none", "--prompt=a", option]) == 2
    assert option.partition("=")[2] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["launch", "--", "train"], "launch needs --processes"),
        (["launch", "--processes=2"], "launch needs a command after --"),
        (["launch", "--processes=2", "--", "evaluate", "--workdir=w"], "launch supervises train, not evaluate"),
        (["launch", "--processes=2", "--", "train", "--config=c.py"], "needs --workdir=DIR"),
        (["launch", "--processes=2", "--", "train", "--workdir=w", "--workdir=gs://b/w"], "gs://b/w is an address"),
        (["launch", "--processes=2", "--", "train", "--workdir=w", "--process-id=1"], "--process-id=1 after --"),
        (["launch", "--processes=1", "--hosts=2", "--", "train", "--workdir", "w"], "needs --coordinator=HOST:PORT"),
        (
            [
                "launch",
                "--processes=1",
                "--hosts=2",
                "--host-index=2",
                "--coordinator=a:1",
                "--",
                "train",
                "--workdir=w",
            ],
            "must be from 0 to --hosts - 1 = 1",
        ),
        (["train", QUICKSTART, "--workdir=w", "--", "x"], "train: takes no command after --"),
    ],
)
def test_what_launch_refuses(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in "\n".join(refused(capsys, *argv))


def test_launch_tells_processes_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines: list[list[list[str]]] = []

    def run(self: Any) -> int:
        lines.append([list(line)[3:] for line in self._command(1)])
        return 0

    monkeypatch.setattr("sharded_train.faults.supervisor.Supervisor.run", run)
    command = ["--", "train", "--config=c.py", "--config.train.seed=1", f"--workdir={tmp_path}"]
    assert main(["launch", "--processes=1", *command]) == 0
    assert lines[0] == [command[1:]]
    assert main(["launch", "--processes=2", *command]) == 0
    port = lines[1][0][4].rpartition(":")[2]
    assert lines[1] == [
        [*command[1:], f"--coordinator=localhost:{port}", "--num-processes=2", f"--process-id={i}"] for i in range(2)
    ]
    assert main(["launch", "--processes=2", "--hosts=3", "--host-index=1", "--coordinator=h0:99", *command]) == 0
    assert [line[4:] for line in lines[2]] == [
        ["--coordinator=h0:99", "--num-processes=6", f"--process-id={i}"] for i in (2, 3)
    ]
