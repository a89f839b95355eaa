"""A resume on other devices: the batch stays, and no device works on more rows at once than before."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_train import config
from sharded_train.faults.elastic import adapted
from sharded_train.recipe import Recipe, from_dict


def recipe_of(microbatches: int, rows: int = 16, **mesh: int) -> Recipe:
    train = {"global_batch_size": rows, "num_microbatches": microbatches, "num_steps": 10}
    return from_dict({"train": train, "mesh": {"data": -1, **mesh}, "model": {"num_layers": 4}})


def record_of(recipe: Recipe, **mesh: int) -> dict[str, Any]:
    return {"config": config.to_dict(recipe), "mesh": mesh}


@pytest.mark.parametrize(
    ("before", "microbatches", "now", "wanted"),
    [
        (8, 1, 4, 2),  # fewer hosts: two rows a device, as before
        (8, 1, 2, 4),
        (8, 1, 1, 8),
        (4, 2, 8, 2),  # more hosts: as asked, since it fits
        (4, 4, 16, 1),  # one row a device: as many as there can be
        (4, 1, 2, 2),
        (8, 2, 8, 2),
    ],
)
def test_no_device_works_on_more_rows_at_once(before: int, microbatches: int, now: int, wanted: int) -> None:
    asked = recipe_of(microbatches)
    found, words = adapted(asked, record_of(asked, data=before, tensor=1), now)
    assert found.train.num_microbatches == wanted
    assert 16 // (now * wanted) <= 16 // (before * microbatches)
    assert found.train.global_batch_size == 16
    assert (words is None) == (wanted == microbatches)
    if words:
        assert f"{now} data ranks where the checkpoint's run had {before}" in words
        assert f"train.num_microbatches = {wanted} in place of {microbatches}" in words


def test_other_microbatches_on_as_many_ranks_are_somebodys_wish() -> None:
    asked = recipe_of(1)
    assert adapted(asked, record_of(recipe_of(4), data=4), 4) == (asked, None)


def test_groups_of_zero_are_data_ranks_too() -> None:
    asked = recipe_of(1)
    found, _ = adapted(asked, record_of(asked, data=2, replica=4), 4)
    assert found.train.num_microbatches == 2


def test_tensor_takes_devices_from_data() -> None:
    asked = recipe_of(1, tensor=2)
    found, _ = adapted(asked, record_of(asked, data=4, tensor=2), 4)
    assert found.train.num_microbatches == 2


def test_only_what_a_pipeline_can_run_is_chosen() -> None:
    asked = from_dict(
        {
            "train": {"global_batch_size": 48, "num_microbatches": 4, "num_steps": 10},
            "mesh": {"data": -1, "pipeline": 4},
            "model": {"num_layers": 8},
            "pipeline": {"schedule": "interleaved", "num_chunks": 2},
        }
    )
    found, _ = adapted(asked, record_of(asked, data=2, pipeline=4), 4)
    assert found.train.num_microbatches == 8  # six would fit the rows, but not the schedule


def test_a_batch_that_does_not_divide_is_left_to_be_refused() -> None:
    asked = recipe_of(1)
    assert adapted(asked, record_of(asked, data=8), 3) == (asked, None)


@pytest.mark.parametrize("record", [{}, {"config": {}, "mesh": {}}, {"config": None, "mesh": {"data": 1}}])
def test_a_record_that_says_nothing_changes_nothing(record: dict[str, Any]) -> None:
    asked = recipe_of(1)
    assert adapted(asked, record, 4) == (asked, None)
