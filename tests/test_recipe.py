"""What a recipe must satisfy: every violation in words, what is offered instead works, and the configs hold."""

from __future__ import annotations

import dataclasses
import random
import re
import typing
from typing import Any

import pytest

from sharded_train import recipe as recipes
from sharded_train.config import to_dict
from sharded_train.config.file import CONFIGS
from sharded_train.config.values import groups
from sharded_train.errors import ConfigError
from sharded_train.precision import LossScaleConfig
from sharded_train.recipe import Recipe, check, from_dict, load, warnings_of
from sharded_train.recipe import checks as recipe_checks
from sharded_train.recipe import ranges as recipe_ranges


def changed(*overrides: str) -> Recipe:
    """The default recipe, changed by "key=text"."""
    return from_dict({}, [f"--config.{override}" for override in overrides])


def problems(recipe: Recipe, num_devices: int | None = 8) -> list[str]:
    try:
        check(recipe, num_devices)
    except ConfigError as error:
        return error.problems
    return []


def test_the_default_recipe_is_sound() -> None:
    for num_devices in (1, 2, 8, 32, None):
        assert problems(Recipe(), num_devices) == []
    assert from_dict(to_dict(Recipe())) == Recipe()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_layers=0"], ["model.num_layers = 0: must be at least 1"]),
        (["train.num_steps=-5"], ["train.num_steps = -5: must be at least 1"]),
        (["model.dropout=1"], ["model.dropout = 1.0: must be at least 0 and below 1"]),
        (["train.clip_norm=0"], ["train.clip_norm = 0.0: must be above 0"]),
        (["optimizer.b2=1"], ["optimizer.b2 = 1.0: must be at least 0 and below 1"]),
        (["optimizer.type=sgd", "optimizer.momentum=-1"], ["optimizer.momentum = -1.0"]),
        (["schedule.final_fraction=1.5"], ["schedule.final_fraction = 1.5: must be from 0 to 1"]),
        (["model.rope_scaling.factor=0"], ["model.rope_scaling.factor = 0.0: must be above 0"]),
        (["evaluate.every=-1"], ["evaluate.every = -1: must be at least 0"]),
        (["data.validation_fraction=1"], ["data.validation_fraction"]),
        (["checkpoint.dir="], ["checkpoint.dir = '': it is empty"]),
        (["checkpoint.fallback_dir=gs://bucket/"], ["'gs://bucket/': it names no prefix"]),
        (["checkpoint.dir=gs:/bucket/x"], ["an address of another kind; wanted an absolute path, or gs://"]),
        (["checkpoint.dir=here"], ["'here': a relative path is another place"]),
        (
            ["checkpoint.dir=gs://b/x", "checkpoint.fallback_dir=gs://b/x/"],
            ["checkpoint.dir = checkpoint.fallback_dir = gs://b/x"],
        ),
        (
            ["train.global_batch_size=30", "train.num_microbatches=2", "mesh.tensor=2"],
            [
                "train.global_batch_size = 30 is no multiple of mesh.data 4 x train.num_microbatches 2 = 8",
                "30 = 3 x 8 + 6",
                "nearest that work: train.global_batch_size = 24 or 32",
            ],
        ),
        (
            ["train.global_batch_size=28", "train.num_microbatches=2", "mesh.tensor=2"],
            ["train.global_batch_size = 24 or 32, or train.num_microbatches = 1 or 7, or mesh.tensor = 4"],
        ),
        (
            ["train.global_batch_size=8", "train.num_microbatches=3", "mesh.tensor=2"],
            ["train.global_batch_size = 12, or train.num_microbatches = 2"],
        ),
        (
            ["train.global_batch_size=4", "mesh.data=8"],
            ["train.global_batch_size = 8, or mesh.data = 4 with mesh.tensor = 2"],
        ),
        (
            ["mesh.tensor=8", "model.num_heads=12", "model.d_model=384"],
            [
                "model.num_heads = 12 is no multiple of mesh.tensor = 8",
                "attention's q and out",
                "= 8 or 16",
                "tensor = 4",
            ],
        ),
        (["mesh.tensor=4", "model.d_ff=702"], ["model.d_ff = 702 is no multiple of mesh.tensor = 4", "= 700 or 704"]),
        (
            ["mesh.tensor=4", "train.sequence_length=250"],
            ["train.sequence_length = 250 is no multiple of mesh.tensor = 4", "= 248 or 252", "tensor = 2"],
        ),
        (
            ["mesh.tensor=4", "model.num_heads=12", "model.num_kv_heads=6", "model.head_dim=64"],
            ["model.num_kv_heads = 6 and mesh.tensor = 4: neither divides the other", "= 4 or 12", "tensor = 2"],
        ),
        (
            ["model.num_heads=6", "model.num_kv_heads=4", "model.head_dim=64"],
            ["model.num_heads = 6 is no multiple of model.num_kv_heads = 4", "= 4 or 8", "num_kv_heads = 3 or 6"],
        ),
        (
            ["model.num_heads=5"],
            [
                "model.d_model = 256 is no multiple of model.num_heads = 5",
                "= 255 or 260",
                "num_heads = 4 or 8",
                "head_dim",
            ],
        ),
        (
            ["model.attention_windows=128,256"],
            [
                "model.attention_windows = (128, 256): a window of 256 keys in rows of train.sequence_length = 256",
                "nearest that work: 255, the longest that hides anything, or 0, which is full attention",
            ],
        ),
        (
            ["model.attention_dropout=0.1"],
            ["model.attention_dropout = 0.1: cuDNN takes the seed of its dropout from the compiled program", "use 0"],
        ),
        (["model.attention_windows=-1"], ["a window of -1 keys; must be at least 0"]),
        (["model.attention_windows=()"], ["model.attention_windows = (): wanted at least one number"]),
        (
            ["model.attention_windows=8,8,8,8,0"],
            ["5 numbers for model.num_layers = 4, each layer having one; give at most 4"],
        ),
        (["model.head_dim=33"], ["model.head_dim = 33 is odd", "= 32 or 34"]),
        (["model.num_heads=256"], ["model.head_dim = 1 (d_model / num_heads) is odd"]),
        (["model.positions=learned"], ["needs model.max_positions, at least 256"]),
        (
            ["model.positions=learned", "model.max_positions=128"],
            ["model.max_positions = 128 < train.sequence_length = 256", "set max_positions to 256 or more"],
        ),
        (
            ["model.positions=learned", "model.max_positions=256", "model.rope_scaling.factor=2"],
            ["model.rope_scaling is set, but model.positions = learned"],
        ),
        (["model.rope_scaling.low_freq_factor=5"], ["low_freq_factor = 5.0 must be below high_freq_factor = 4.0"]),
        (["model.attention=cudnn", "precision.recipe=fp32"], ["model.attention = cudnn", "precision.recipe = fp32"]),
        (["schedule.warmup_steps=1001"], ["schedule.warmup_steps = 1001 > train.num_steps = 1000"]),
        (
            ["schedule.warmup_steps=11", "schedule.decay_steps=10"],
            ["schedule.warmup_steps = 11 > schedule.decay_steps = 10"],
        ),
        (["train.stop_at=1001"], ["train.stop_at = 1001: must be from 1 to train.num_steps = 1000"]),
        (["train.stop_at=0"], ["train.stop_at = 0"]),
        (["log.profile_steps=5,5"], ["log.profile_steps = (5, 5)", "0 <= first < last"]),
        (
            ["mesh.sequence=2", "train.sequence_length=258"],
            ["train.sequence_length = 258 is no multiple of 2 x mesh.sequence 2 = 4", "= 256 or 260"],
        ),
        (
            ["mesh.sequence=2", "mesh.tensor=2", "mesh.data=2", "train.sequence_length=258"],
            ["train.sequence_length = 258 is no multiple of mesh.sequence 2 x mesh.tensor 2 = 4", "split over tensor"],
        ),
        (
            ["mesh.sequence=8", "mesh.data=1", "attention.context=ulysses"],
            ["model.num_heads 4 / mesh.tensor 1 = 4 heads do not split over mesh.sequence = 8", "mesh.sequence = 4"],
        ),
        (
            ["mesh.sequence=8", "train.sequence_length=24", "mesh.data=1"],
            ["train.sequence_length = 16 or 32, or mesh.sequence = 4"],
        ),
        (["mesh.data=3", "train.global_batch_size=33"], ["data 3", "the number of devices is 8"]),
        (["mesh.tensor=-1"], ["mesh.data = -1 and mesh.tensor = -1"]),
        (["mesh.tensor=0"], ["mesh.tensor = 0"]),
        (["mesh.sequence=0", "mesh.data=8"], ["mesh.sequence = 0"]),
        (["mesh.order=data,tensor"], ["mesh.order", "pipeline is missing"]),
    ],
)
def test_each_violation_has_its_words(overrides: list[str], words: list[str]) -> None:
    (problem,) = problems(changed(*overrides))
    assert "\n" not in problem
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.tensor=8", "model.num_heads=8", "model.num_kv_heads=2"],  # kv heads fewer than tensor: stored replicated
        ["mesh.tensor=4", "model.vocab_size=50257"],  # left whole over tensor
        ["mesh.tensor=2", "model.d_model=100", "model.head_dim=64"],
        ["train.clip_norm=none", "log.every=0", "checkpoint.every=0"],
        ["train.stop_at=1000", "schedule.warmup_steps=1000"],
        ["mesh.data=2", "mesh.tensor=-1", "model.num_heads=8"],
    ],
)
def test_what_is_allowed(overrides: list[str]) -> None:
    assert problems(changed(*overrides)) == []


def test_all_violations_are_told_at_once() -> None:
    recipe = changed(
        *["mesh.tensor=3", "mesh.pipeline=9", "train.global_batch_size=31", "train.num_microbatches=2", "model.d_ff=0"],
        *["model.num_heads=5", "train.clip_norm=-1", "train.stop_at=0", "model.positions=learned", "optimizer.eps=0"],
    )
    found = problems(recipe)
    starts = [
        *[
            "mesh.data = -1",
            "mesh.pipeline = 9",
            "train.global_batch_size = 31",
            "model.d_ff = 0",
            "model.d_model = 256",
        ],
        *["model.num_heads = 5", "train.sequence_length = 256", "train.clip_norm", "train.stop_at", "optimizer.eps"],
        *["model.positions"],
    ]
    for start in starts:
        assert sum(problem.startswith(start) for problem in found) >= 1, start
    assert len(found) == len(starts)


def test_without_devices_all_that_can_be_told_is_told() -> None:
    assert problems(changed("mesh.tensor=3"), None)  # heads
    assert problems(changed("train.global_batch_size=31", "train.num_microbatches=2"), None)
    assert problems(changed("train.global_batch_size=31"), None) == []  # unknown: how many data ways
    assert problems(changed("train.global_batch_size=31", "mesh.data=2"), None)
    assert problems(changed("mesh.tensor=-1"), None)
    assert problems(changed("mesh.pipeline=-1", "mesh.data=1"), None) == []
    assert problems(changed("mesh.pipeline=-1", "mesh.data=1"), 16)  # more stages than layers


def test_another_sequence_axis_is_offered() -> None:
    (problem,) = problems(changed("mesh.sequence=3", "model.num_heads=12", "model.head_dim=4"), None)
    assert problem.endswith("train.sequence_length = 252 or 258, or mesh.sequence = 2 or 4")
    (problem,) = problems(changed("mesh.sequence=8", "train.sequence_length=100"), None)
    assert problem.endswith("train.sequence_length = 96 or 112, or mesh.sequence = 2")  # not 5, of unknown devices
    (problem,) = problems(changed("mesh.sequence=6", "train.global_batch_size=64"), 24)
    assert problem.endswith("or mesh.sequence = 4 or 8")
    ulysses = ["attention.context=ulysses", "model.num_heads=6", "model.head_dim=4"]
    found = problems(changed("mesh.sequence=3", *ulysses), None)
    assert [problem.rpartition("or ")[2] for problem in found] == ["mesh.sequence = 2"]


def test_what_is_offered_works() -> None:
    """In random recipes, each "KEY = A or B" that a problem offers makes that problem go."""
    rng, offers = random.Random(0), 0
    for _ in range(60):
        settings = {
            "mesh.tensor": rng.choice([1, 2, 3, 4, 6, 8]),
            "mesh.sequence": rng.choice([1, 1, 2, 3]),
            "model.num_heads": rng.randint(1, 24),
            "model.num_kv_heads": rng.randint(1, 12),
            "model.head_dim": rng.randint(2, 9),
            "model.d_ff": rng.randint(1, 99),
            "train.sequence_length": rng.randint(1, 99),
            "train.global_batch_size": rng.randint(1, 99),
            "train.num_microbatches": rng.randint(1, 5),
        }
        if rng.random() < 0.3:
            settings |= {"model.d_model": rng.randint(8, 99)}
            del settings["model.head_dim"]
        recipe = changed(*(f"{key}={value}" for key, value in settings.items()))
        for problem in problems(recipe, 24):
            subject = problem.split(":")[0].split(" is ")[0].rsplit(" = ", 1)[0]
            for key, values in re.findall(r"([a-z_]+\.[a-z_]+) = (\d+(?: or \d+)?)", problem.partition("nearest")[2]):
                for value in values.split(" or "):
                    offers += 1
                    better = changed(*(f"{k}={v}" for k, v in {**settings, key: value}.items()))
                    same = [p for p in problems(better, 24) if p.startswith(subject) and kind(p) == kind(problem)]
                    assert not same, (problem, key, value)
    assert offers > 200


def kind(problem: str) -> str:
    """A problem without its numbers, up to where its suggestions begin."""
    return re.sub(r"\d+", "", problem.partition("(")[0].partition("nearest")[0])


def test_nearest_sizes() -> None:
    assert recipe_checks.nearest_multiples(30, 8) == [24, 32]
    assert recipe_checks.nearest_multiples(3, 8) == [8]
    assert recipe_checks.nearest(5, [1, 2, 4, 8]) == [4, 8]
    assert recipe_checks.nearest(1, [2]) == [2]
    assert recipe_checks.nearest(3, [1, 2]) == [2]


def numbers(cls: type, key: str = "") -> list[str]:
    """Dotted keys of all settings that hold a number."""
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        members = groups(hint)
        for member in members:
            keys += numbers(member, f"{key}{name}.")
        if not members and {int, float} & {hint, *typing.get_args(hint)}:  # log.profile_steps is a pair: in _steps
            keys.append(f"{key}{name}")
    return keys


def test_every_number_has_a_range() -> None:
    ranged = {key for _, keys in recipe_ranges.RANGES.values() for key in keys.split()}
    elsewhere = {
        *("mesh.data", "mesh.tensor", "mesh.pipeline", "mesh.sequence"),  # mesh.resolve_sizes
        *(f"data.{name}" for name in ("max_bytes", "validation_fraction", "num_epochs", "read_threads")),  # DataConfig
        *("train.stop_at", "model.attention_windows"),  # against num_steps and sequence_length
        *("log.precision_every", "precision.fp8.amax_history_length", "precision.fp8.margin"),  # recipe.precision
        *("precision.fp8.bf16_layers.first", "precision.fp8.bf16_layers.last"),
        *(f"precision.fp16.{field.name}" for field in dataclasses.fields(LossScaleConfig)),
    }
    assert set(numbers(Recipe)) == ranged | elsewhere, "a number wants a range, in sharded_train/recipe/ranges.py"
    assert ranged.isdisjoint(elsewhere)


@pytest.mark.parametrize(
    ("overrides", "num_devices", "words"),
    [
        ([], 1, "zero.stage = 1 shards nothing: mesh.data and mesh.sequence are 1"),
        (["mesh.data=2", "mesh.tensor=4", "zero.group_size=1"], 8, "zero.group_size = 1 gives every data rank a copy"),
        (["zero.stage=0", "zero.reduce_dtype=bfloat16"], 1, "zero.reduce_dtype = bfloat16 changes nothing"),
        (["mesh.allow_tensor_across_hosts=true"], 8, "mesh.allow_tensor_across_hosts changes nothing"),
        (["mesh.order=tensor,data,pipeline,sequence"], 8, "mesh.order changes nothing"),
        (
            ["mesh.tensor=4", "model.vocab_size=50257"],
            8,
            "model.vocab_size = 50257 is no multiple of mesh.tensor = 4: embedding and head are stored whole over "
            "tensor and padded to 50260",
        ),
        (["model.positions=learned", "model.rope_theta=5"], 8, "model.rope_theta changes nothing"),
        (["optimizer.type=sgd", "optimizer.nesterov=true"], 8, "optimizer.nesterov changes nothing"),
        (["evaluate.every=1001"], 8, "evaluate.every = 1001 is beyond this run's last step 1000: at its end only"),
        (["checkpoint.every=20", "train.stop_at=10"], 8, "checkpoint.every = 20 is beyond this run's last step 10"),
        (["log.profile_steps=1000,1001"], 8, "begins after this run's last step"),
    ],
)
def test_what_changes_nothing_is_said(overrides: list[str], num_devices: int, words: str) -> None:
    (warning,) = warnings_of(changed(*overrides), num_devices)
    assert words in warning


def test_a_usual_recipe_has_no_warnings() -> None:
    assert warnings_of(changed("mesh.tensor=2"), 8) == []
    assert warnings_of(changed("mesh.tensor=2"), None) == []
    assert warnings_of(changed("mesh.tensor=2", "mesh.order=tensor,data,pipeline,sequence"), None) == []
    stages = ("mesh.data=2", "mesh.tensor=-1", "mesh.pipeline=2", "zero.stage=3", "train.num_microbatches=2")
    assert warnings_of(changed(*stages), None) == []  # of tensor's size, and so of its bytes, nothing is known


CONFIG_FILES: list[tuple[str, list[int], dict[str, Any]]] = [
    ("quickstart", [8, 4], {}),
    ("bench_20m", [1, 8], {}),
    (
        "gpt2_124m",
        [8],
        {"vocab_size": 50257, "d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072, "max_positions": 1024},
    ),
    ("llama3_8b", [8], {"d_model": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336}),
    ("llama3_70b", [256], {"d_model": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "d_ff": 28672}),
    ("llama3_405b", [2048], {"d_model": 16384, "num_layers": 126, "num_heads": 128, "num_kv_heads": 8, "d_ff": 53248}),
]


@pytest.mark.parametrize(("name", "hardware", "published"), CONFIG_FILES)
def test_configs_hold_on_the_hardware_they_state(name: str, hardware: list[int], published: dict[str, Any]) -> None:
    recipe = load(CONFIGS / f"{name}.py")
    assert published.items() <= dataclasses.asdict(recipe.model).items()
    for num_devices in hardware:
        check(recipe, num_devices)
        assert warnings_of(recipe, num_devices) == []
    if name.startswith("llama3"):
        assert (recipe.model.vocab_size, recipe.model.rope_theta, recipe.train.sequence_length) == (
            128256,
            500000,
            8192,
        )
    assert from_dict(to_dict(recipe)) == recipe


def test_configs_run_on_what_else_their_docstrings_say() -> None:
    check(load(CONFIGS / "quickstart.py", ["--config.mesh.tensor=1"]), 1)
    check(load(CONFIGS / "gpt2_124m.py", ["--config.train.num_microbatches=32"]), 1)
    check(load(CONFIGS / "llama3_8b.py", ["--config.train.num_microbatches=2"]), 64)
    check(load(CONFIGS / "llama3_8b.py", ["--config.model.rope_scaling.factor=8"]), 8)


def test_every_config_is_tested_and_says_how_it_is_run() -> None:
    names = {path.stem for path in CONFIGS.glob("*.py")}
    assert names == {name for name, _, _ in CONFIG_FILES}
    for name in names:
        text = (CONFIGS / f"{name}.py").read_text()
        for word in ("Command:", "Hardware:", "Time:", "Expect:", f"--config=configs/{name}.py"):
            assert word in text, (name, word)


def test_load_tells_of_the_file_and_the_overrides() -> None:
    with pytest.raises(ConfigError, match="momentun: no such option"):
        load(CONFIGS / "quickstart.py", ["--config.optimizer.momentun=1"])
    assert recipes.load(str(CONFIGS / "quickstart.py"), ["--config.train.seed=7"]).train.seed == 7


def test_groups_of_zero_divide_data() -> None:
    grouped = load(CONFIGS / "quickstart.py", ["--config.zero.group_size=2"])
    check(grouped, 8)
    assert warnings_of(grouped, 8) == []
    with pytest.raises(ConfigError, match=r"group_size = 3 does not divide mesh.data = 4.*= 2 or 4"):
        check(load(CONFIGS / "quickstart.py", ["--config.zero.group_size=3"]), 8)
    for change in ("--config.zero.stage=0", "--config.zero.group_size=4"):
        recipe = load(CONFIGS / "quickstart.py", ["--config.zero.group_size=2", change])
        assert any("zero.group_size" in warning for warning in warnings_of(recipe, 8))


@pytest.mark.parametrize(
    "change",
    [
        "model.vocab_size=100000000000",
        "model.d_model=99999999999999999999",
        "train.seed=4294967296",
        "model.num_heads=300000001",
        "model.num_layers=2147483647 mesh.pipeline=2",
        "pipeline.num_chunks=2147483648 mesh.pipeline=2 pipeline.schedule=interleaved",
        "mesh.pipeline=2147483648",
    ],
)
def test_absurd_sizes_are_answered_at_once(change: str) -> None:
    with pytest.raises(ConfigError):
        check(load(CONFIGS / "quickstart.py", [f"--config.{key}" for key in change.split()]), 8)


def test_numbers_beyond_fp32_are_refused() -> None:
    with pytest.raises(ConfigError, match="finite in fp32"):
        load(CONFIGS / "quickstart.py", ["--config.schedule.learning_rate=1e39"])


def test_what_is_sharded_over_sequence_is_not_said_to_be_whole() -> None:
    changes = ("mesh.data=1", "mesh.sequence=8", "zero.stage=3", "zero.reduce_dtype=bfloat16")
    assert warnings_of(changed(*changes), 8) == []
