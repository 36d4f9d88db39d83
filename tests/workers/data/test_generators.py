"""Generators that several iterators share, or that workers read unequally."""

import itertools

import keras
import numpy as np
import pytest

from tf_optimizers.workers.data import generators


@pytest.fixture
def peeked():
    """Return batches of a generator, and a factory of peeked iterators."""

    def peek(generator):
        batches = list(itertools.islice(generator, 2))
        return batches, lambda: itertools.chain(batches, generator)

    def of(generator):
        _, iterate = generators.peek_at_generator(peek, generator)
        return generators.take_generator(), iterate

    return of


def others_are_ahead(monkeypatch, by):
    """Return a list of the numbers of batches that this worker has drawn."""
    counts = []

    def gather(strategy, subject, count, hint):
        counts.append(count)
        return [count + by, count]

    monkeypatch.setattr(generators, "gather_statements", gather)
    return counts


def test_iterator_continues_after_other_workers_reads(peeked, monkeypatch):
    others_are_ahead(monkeypatch, 3)
    shared, iterate = peeked(number for number in range(100))
    shared.begin(None)
    first = iterate()
    assert list(itertools.islice(first, 5)) == [0, 1, 2, 3, 4]
    shared.begin(None)
    assert list(itertools.islice(iterate(), 4)) == [0, 1, 8, 9]
    assert list(first) == []  # No other iterator may draw.


def test_reused_generator_starts_as_on_other_workers(peeked, monkeypatch):
    """Keras has peeked at it before workers could compare."""
    numbers = (number for number in range(100))
    shared, iterate = peeked(numbers)
    shared.begin(None)
    assert list(itertools.islice(iterate(), 3)) == [0, 1, 2]
    others_are_ahead(monkeypatch, 4)
    shared, iterate = peeked(numbers)  # These are the draws 3 and 4.
    shared.begin(None)
    assert list(itertools.islice(iterate(), 3)) == [9, 10, 11]


def test_generator_may_end_before(peeked, monkeypatch):
    others_are_ahead(monkeypatch, 9)
    shared, iterate = peeked(number for number in range(4))
    shared.begin(None)
    assert list(itertools.islice(iterate(), 3)) == [0, 1, 2]
    shared.begin(None)
    assert list(iterate()) == [0, 1]


def test_generator_read_equally_loses_nothing(peeked, monkeypatch):
    others_are_ahead(monkeypatch, 0)
    numbers = (number for number in range(100))
    peeked(numbers)
    shared, iterate = peeked(numbers)
    shared.begin(None)
    assert list(itertools.islice(iterate(), 3)) == [2, 3, 4]
    assert generators.take_generator() is None


def test_generator_that_was_read_elsewhere_is_forgotten():
    """A model without a strategy reads it, and never distributes it."""
    _, iterate = generators.peek_at_generator(
        lambda shared: ([], lambda: iter(shared)), (row for row in range(9))
    )
    assert list(iterate()) == list(range(9))
    assert generators.take_generator() is None


def test_fit_starts_at_the_batches_of_other_workers(ours, monkeypatch):
    """The second `fit` does, since the first may have read ahead."""
    counts = others_are_ahead(monkeypatch, 2)
    trained = []

    class Noting(keras.Model):
        def train_step(self, data):
            trained.append(int(data[0][0, 0]))
            return {"loss": 0.0}

    with ours.scope():
        model = Noting()
        model.compile("sgd", run_eagerly=True)
    data = ((np.full((2, 1), number),) for number in itertools.count())
    for _ in range(2):
        model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
    (count,) = counts
    assert {*trained} == {0, count + 2}
