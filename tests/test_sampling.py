"""Which clients a round draws."""

import jax
import numpy as np
import pytest
import toy
from scipy import stats

from fedjax_pfl.engine import sampling

DRAWS = 4000


def task(n, low, high):
    return toy.task()._replace(sizes=np.ones(n, np.int32), participation=(low, high))


def drawn(n, low, high):
    """ids [DRAWS, S], active [DRAWS, S]."""
    of = task(n, low, high)
    return map(np.asarray, jax.vmap(lambda key: sampling.sample(key, of))(jax.random.split(jax.random.key(0), DRAWS)))


@pytest.mark.parametrize("share", [0.2, 0.6])  # few of many clients are drawn in another way
def test_every_ordered_draw_of_distinct_clients_is_equally_likely(share):
    n = 10
    ids, active = drawn(n, share, share)
    size = ids.shape[1]
    assert size == share * n and active.all() and ids.min() == 0 and ids.max() == n - 1
    assert all(len(set(row)) == size for row in ids)
    pairs = np.bincount(ids[:, 0] * n + ids[:, 1], minlength=n * n)[~np.eye(n, dtype=bool).ravel()]
    assert stats.chisquare(pairs).pvalue > 0.01
    assert stats.chisquare(np.bincount(ids[:, -1], minlength=n)).pvalue > 0.01


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_programs_of_64_bits_draw_the_same(share):
    single = [np.asarray(x) for x in sampling.sample(jax.random.key(1), task(20, share, share))]
    with jax.enable_x64(True):
        double = sampling.sample(jax.random.key(1), task(20, share, share))
        assert double[0].dtype == "int32"
    toy.assert_same(single, [np.asarray(x) for x in double])


def test_with_a_range_the_number_of_clients_varies_and_whoever_takes_part_is_random():
    ids, active = drawn(20, 0.05, 0.2)
    assert stats.chisquare(np.bincount(active.sum(1), minlength=5)[1:]).pvalue > 0.01
    assert stats.chisquare(np.bincount(ids[active], minlength=20)).pvalue > 0.01


def test_drawing_few_of_many_sorts_only_the_few():
    of = task(1000, 0.02, 0.02)
    text = str(jax.make_jaxpr(lambda key: sampling.sample(key, of))(jax.random.key(0)))
    assert "sort" in text and "[20]" in text and "[1000]" not in text


def test_a_share_that_is_not_a_binary_fraction_is_not_rounded_down():
    assert 0.29 * 100 < 29
    of = task(100, 0.29, 0.29)
    _, active = sampling.sample(jax.random.key(0), of)
    assert max(of.cohort_sizes) == 29 == active.sum()
