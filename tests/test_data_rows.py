"""Order and packing: every token is predicted once, within its document, in an order of seed and epoch."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from sharded_train.data.order import shuffled, train_sample
from sharded_train.data.rows import KEYS, ArrayStream, Rows, aligned_starts

END = 0


def packed(documents: list[list[int]], sequence_length: int) -> Rows:
    stream = [token for document in documents for token in (END, *document)] + [END]
    return Rows(ArrayStream(np.array(stream, np.uint16)), sequence_length, END)


def random_documents(seed: int, num_documents: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 50, rng.integers(1, longest + 1)).tolist() for _ in range(num_documents)]


CASES = {
    "many short documents in a row": (random_documents(0, 40, 5), 16),
    "mixed": (random_documents(1, 20, 40), 16),
    "one document longer than everything": ([[1, 2], list(range(1, 200)), [3]], 8),
    "a document that fills its row": ([[1, 2, 3], [4, 5, 6], [7]], 4),
    "one row, mostly padding": ([[5], [6]], 64),
    "rows of one token": (random_documents(2, 5, 6), 1),
}


@pytest.mark.parametrize(("documents", "sequence_length"), CASES.values(), ids=CASES)
def test_every_token_is_predicted_once_and_in_its_own_document(
    documents: list[list[int]], sequence_length: int
) -> None:
    rows = packed(documents, sequence_length)
    # What each place of the stream reads and predicts, told from the documents alone.
    expected = []
    for number, document in enumerate(documents):
        reads, predicts = [END, *document], [*document, END]
        expected += [(number, token, target) for token, target in zip(reads, predicts, strict=True)]
    seen = 0
    for index in range(len(rows)):
        row = rows[index]
        assert all(row[key].shape == (sequence_length,) and row[key].dtype == np.int32 for key in KEYS)
        part = expected[index * sequence_length : (index + 1) * sequence_length]
        seen += len(part)
        numbers, tokens, targets = (list(values) for values in zip(*part, strict=True))
        size = len(part)
        assert row["tokens"][:size].tolist() == tokens
        assert row["targets"][:size].tolist() == targets
        # A segment for each document that is in the row, counted from 1; positions count from 0 in each.
        assert row["segments"][:size].tolist() == [1 + number - numbers[0] for number in numbers]
        assert row["positions"][:size].tolist() == [place - numbers.index(n) for place, n in enumerate(numbers)]
        for key, fill in {"tokens": END, "targets": -1, "segments": 0, "positions": 0}.items():
            assert (row[key][size:] == fill).all()
    assert seen == len(expected) == rows.num_places == sum(len(document) + 1 for document in documents)


def test_only_the_last_row_is_padded_and_there_is_none_beyond_it() -> None:
    rows = packed(random_documents(3, 30, 30), 16)
    assert all((rows[index]["targets"] >= 0).all() for index in range(len(rows) - 1))
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]
    assert (rows.empty()["targets"] == -1).all()
    assert (rows.empty()["segments"] == 0).all()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 16, 17, 63, 100, 1000, 4097])
def test_shuffle_is_a_permutation_for_every_key(length: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert sorted(shuffled(np.arange(length), length, np.uint64(key))) == list(range(length))


def test_shuffle_of_a_huge_range_needs_no_memory_and_stays_inside() -> None:
    length = 3 * 10**12
    places = shuffled(np.arange(1000), length, np.uint64(7))
    assert len(set(places.tolist())) == 1000
    assert places.min() >= 0
    assert length // 2 < places.max() < length


def test_shuffle_mixes() -> None:
    """Neighbours and fixed points are as rare as in a random permutation: one of each is expected."""
    for key in range(20):
        places = shuffled(np.arange(1000), 1000, np.uint64(key))
        assert (places == np.arange(1000)).sum() < 10
        assert (np.diff(places) == 1).sum() < 10
        assert abs(np.corrcoef(np.arange(1000), places)[0, 1]) < 0.15


def test_order_is_frozen() -> None:
    """These numbers may never change: a run that resumes after an update must see the samples it would have seen."""
    assert train_sample(range(10), 0, np.arange(10)).tolist() == [3, 5, 2, 0, 6, 7, 1, 9, 8, 4]
    assert train_sample(range(10), 0, np.arange(10, 20)).tolist() == [0, 1, 3, 6, 8, 9, 2, 7, 4, 5]
    assert train_sample(range(10), 1, np.arange(10)).tolist() == [4, 0, 9, 7, 8, 2, 6, 1, 5, 3]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    length, epochs = 50, 6
    samples = train_sample(range(length), 3, np.arange(length * epochs)).reshape(epochs, length)
    assert (np.sort(samples, axis=1) == np.arange(length)).all()
    assert len({tuple(order) for order in samples.tolist()}) == epochs


def test_no_epoch_of_a_seed_is_an_epoch_of_the_next() -> None:
    orders = {
        tuple(train_sample(range(50), seed, epoch * 50 + np.arange(50)).tolist())
        for seed in (0, 1, 2, 2**32, -1)
        for epoch in range(4)
    }
    assert len(orders) == 20


def test_a_sample_does_not_depend_on_the_others_asked_for() -> None:
    together = train_sample(range(37), 5, np.arange(200))
    assert [int(train_sample(range(37), 5, sample)) for sample in range(200)] == together.tolist()


def test_streams_of_a_weighted_mixture_have_orders_of_their_own() -> None:
    orders = {
        tuple(train_sample(range(50), seed, np.arange(50), stream).tolist()) for seed in (0, 1) for stream in range(4)
    }
    assert len(orders) == 8


MASK = 1 << 15


@pytest.mark.parametrize("sequence_length", [1, 4, 7, 16, 64])
def test_rows_of_prompts_cut_no_document_that_fits(sequence_length: int) -> None:
    rng = np.random.default_rng(5)
    documents = [
        [int(token) | (MASK if place < size // 3 else 0) for place, token in enumerate(rng.integers(1, 50, size))]
        for size in rng.integers(1, 25, 60)
    ]
    rows = dataclasses.replace(packed(documents, sequence_length), mask_bit=MASK)
    rows = dataclasses.replace(rows, starts=np.array(list(aligned_starts(rows)), np.int64))
    spans = [rows.span(index) for index in range(len(rows))]
    assert spans[0][0] == 0
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert spans[-1][1] == rows.num_places
    assert all(0 < stop - start <= sequence_length for start, stop in spans)
    # No row could have held the document that the next one begins with, and only what is too long is cut.
    begins = np.cumsum([0] + [1 + len(document) for document in documents]).tolist()
    for (start, stop), (_, next_stop) in pairwise(spans):
        if stop in begins:
            following = begins[begins.index(stop) + 1]
            assert following - start > sequence_length
        else:
            document = next(begin for begin in reversed(begins) if begin <= stop)
            assert begins[begins.index(document) + 1] - document > sequence_length
            assert next_stop > stop
    predicted = [int(t) for index in range(len(rows)) for t in rows[index]["targets"] if t >= 0]
    wanted = [token for document in documents for token in (*(t for t in document if not t & MASK), END)]
    assert predicted == wanted
    tokens = [
        int(t) for index in range(len(rows)) for t in rows[index]["tokens"][: rows.span(index)[1] - rows.span(index)[0]]
    ]
    assert tokens == [t & ~MASK for document in documents for t in (END, *document)]
