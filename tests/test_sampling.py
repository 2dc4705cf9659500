"""Which clients a round draws."""

import jax
import numpy as np
import pytest
import toy
from scipy import stats

from fedjax_pfl import keys
from fedjax_pfl.engine import sampling

DRAWS = 4000


def task(n, low, high):
    return toy.task()._replace(sizes=np.ones(n, np.int32), participation=(low, high))


def drawn(n, low, high):
    """ids [DRAWS, S], active [DRAWS, S]."""
    of = task(n, low, high)
    return map(
        np.asarray,
        jax.vmap(lambda key: sampling.sample(key, of))(
            jax.random.split(jax.random.key(0), DRAWS)
        ),
    )


# few of many clients are drawn in another way
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_every_ordered_draw_of_distinct_clients_is_equally_likely(share):
    n = 10
    ids, active = drawn(n, share, share)
    size = ids.shape[1]
    assert size == share * n and active.all() and ids.min() == 0 and ids.max() == n - 1
    assert all(len(set(row)) == size for row in ids)
    pairs = np.bincount(ids[:, 0] * n + ids[:, 1], minlength=n * n)[
        ~np.eye(n, dtype=bool).ravel()
    ]
    assert stats.chisquare(pairs).pvalue > 0.01
    assert stats.chisquare(np.bincount(ids[:, -1], minlength=n)).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_programs_of_64_bits_draw_the_same(share):
    single = [
        np.asarray(x)
        for x in sampling.sample(jax.random.key(1), task(20, share, share))
    ]
    with jax.enable_x64(True):
        double = sampling.sample(jax.random.key(1), task(20, share, share))
        assert double[0].dtype == "int32"
    toy.assert_same(single, [np.asarray(x) for x in double])


def test_with_a_range_the_number_of_clients_varies_and_whoever_takes_part_is_random():
    ids, active = drawn(20, 0.05, 0.2)
    assert stats.chisquare(np.bincount(active.sum(1), minlength=5)[1:]).pvalue > 0.01
    assert stats.chisquare(np.bincount(ids[active], minlength=20)).pvalue > 0.01


def test_a_share_that_is_not_a_binary_fraction_is_not_rounded_down():
    assert 0.29 * 100 < 29
    of = task(100, 0.29, 0.29)
    _, active = sampling.sample(jax.random.key(0), of)
    assert max(of.cohort_sizes) == 29 == active.sum()


def test_draws_are_as_recorded():
    """They are part of every result."""
    few, many = (
        sampling.sample(jax.random.key(3), task(20, 0.1, high)) for high in (0.2, 0.6)
    )
    assert (few[0].tolist(), int(few[1].sum())) == ([17, 6, 1, 0], 3)
    assert (many[0].tolist(), int(many[1].sum())) == (
        [12, 6, 14, 7, 2, 5, 17, 19, 3, 18, 0, 13],
        10,
    )


def test_the_numbers_of_the_streams_are_as_recorded():
    """They are part of every result, and a number that is given stays."""
    found = {
        kind.__name__: {stream.name: stream.number for stream in kind}
        for kind in keys.Stream.__subclasses__()
        if kind.__module__ == keys.__name__
    }
    assert found == STREAMS


CLIENT = {
    "SHUFFLE": 1,
    "STEP": 2,
    "HEAD_PHASE": 11,
    "FINE_TUNE": 12,
    "SELECT": 31,
    "SUBSET": 31,
    "BLEND": 32,
}
CLIENT |= {
    "SECOND_PHASE": 41,
    "TRANSFER": 42,
    "WARM_UP": 43,
}
CLIENT |= {"EXTRACTOR": 45, "ATTACK": 0x6E03, "COMPRESS": 0x6E05, "OPTION": 0x6E10}
STREAMS = {
    "Run": {"INIT": 0, "ROUND": 1},
    "Round": {"SAMPLING": 2, "SERVER": 3, "CLIENTS": 4},
    "Server": {
        **{"PUBLIC": 40, "STUDENT": 41, "NOISE": 0x6E01, "QUANTILE": 0x6E02},
        "OPTION": 0x6E10,
    },
    "Cohort": {"ORDER": 0x5CA4},
    "Client": CLIENT,
    "Step": {"LOSS": 3, "AUGMENT": 4, "MIX": 9},
    "Loss": {"GUMBEL": 21, "SHARED": 22, "INNER": 23, "NOISE": 0x6E04},
    "Init": {"POLICY": 22, "REJECT": 31, "MAP": 40, "EXTRACTOR": 45},
}
