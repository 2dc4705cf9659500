"""Runs whose data change."""

import jax
import numpy as np
import toy

from fedjax_pfl import simulate
from fedjax_pfl.data import partition
from fedjax_pfl.engine import phases

KEY = jax.random.key(0)
TASK = toy.task("linear")


def relabelled(task, f):
    """The same examples, their labels moved to the next class."""
    examples = f.examples._replace(y=(f.examples.y + 1) % toy.C)
    counts = np.roll(np.asarray(f.class_counts), 1, axis=1)
    f = f._replace(examples=examples, class_counts=jax.numpy.asarray(counts))
    return task._replace(class_counts=counts), f


def test_equal_phases_are_one_run():
    f, program = toy.federation(), toy.program("fedavg", TASK)
    first, last = simulate.phases([program] * 2, KEY, [f, f], rounds=1)
    plain = list(simulate.rounds(program, KEY, f, rounds=2))
    toy.assert_same(last.state, plain[-1].state)
    for scores in last.seen["acc"]:
        toy.assert_same(scores, plain[-1].pre["acc"])
    assert [x.round for x in (*first.results, *last.results)] == [0, 1, 1, 2]
    assert first.seen["acc"].shape == (1, toy.N)


def test_drift_is_scored_on_all_phases_and_compiled_once(monkeypatch):
    calls, compiled = [], phases.compiled
    count = lambda *given, **options: calls.append(1) or compiled(*given, **options)
    monkeypatch.setattr(phases, "compiled", count)
    f = toy.federation()
    task, other = relabelled(TASK, f)
    programs = [toy.program("local", TASK), toy.program("local", task)]
    first, last = simulate.phases(programs, KEY, [f, other], rounds=8)
    before, after = last.seen["acc"].mean(axis=1)
    # the models learn the new labels, and forget those of the first phase
    assert after > 0.7 and before < first.seen["acc"].mean() - 0.4
    assert len(calls) == 1


def test_kept_examples_are_those_of_the_mask():
    rows, sizes = np.array([[3, 1, 0], [2, 4, 5]], np.int32), np.array([2, 3], np.int32)
    test, one = np.array([[6], [7]], np.int32), np.ones(2, np.int32)
    none = np.zeros((2, 0), np.int32), np.zeros(2, np.int32)
    p = partition.Partition(rows, sizes, test, one, *none)
    found = partition.keep(p, np.array([1, 1, 0, 0, 1, 1, 1, 0], bool))
    np.testing.assert_array_equal(found.train, [[1, 0, 0], [4, 5, 0]])
    np.testing.assert_array_equal(found.train_sizes, [1, 2])
    np.testing.assert_array_equal(found.test_sizes, [1, 0])
    assert found.val.shape == (2, 0)
