"""Arrivals of an asynchronous run, and simulated time."""

import jax
import numpy as np
import pytest
import toy

from fedjax_pfl import clock, keys
from fedjax_pfl.engine import sampling, schedule
from fedjax_pfl.errors import InputError

KEY = jax.random.key(5)


def task(n=12, share=0.5, size=1):
    sizes = np.full(n, size, np.int32)
    return toy.task()._replace(sizes=sizes, participation=(share, share))


def arrivals(given, rounds=40, buffer=2, seconds=None, key=KEY):
    return schedule.arrivals(given, key, rounds=rounds, buffer=buffer, seconds=seconds)


def lognormal(seed, n=12):
    return np.exp(np.random.default_rng(seed).normal(size=n))


def test_three_clients_by_hand():
    """At 1, 2 and 3 seconds a round: 0 arrives at 1, 2, 3, 4; 1 at 2, 4; 2 at 3."""
    s = arrivals(task(3, 1.0), 6, 1, np.array([1.0, 2.0, 3.0]))
    assert s.seconds.tolist() == [1, 2, 2, 3, 3, 4]
    # of one time the client comes first that started first
    assert s.ids[:, 0].tolist() == [0, 1, 0, 2, 0, 1]
    assert s.started[:, 0].tolist() == [0, 0, 1, 0, 3, 3]


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_equal_clocks_and_a_full_buffer_are_synchronous_rounds(share):
    given = task(20, share)
    size = max(given.cohort_sizes)
    s = arrivals(given, 5, size)
    assert s.slots == 1 and s.seconds.tolist() == [1, 2, 3, 4, 5]
    for t in range(5):
        stream = keys.fold(keys.round_key(KEY, t), keys.Round.SAMPLING)
        ids, _ = sampling.sample(stream, given, t)
        assert set(s.ids[t]) == set(np.asarray(ids)) and set(s.started[t]) == {t}


@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_is_possible(seed):
    """Clients train one model at a time, from versions that exist, and each takes its
    time; no more train at once than a round has."""
    rng = np.random.default_rng(seed)
    given = task(12, rng.choice([0.25, 0.5, 1.0]))
    times, buffer = lognormal(seed), int(rng.integers(1, 6))
    s = arrivals(given, 40, buffer, times)
    ends = np.append(0.0, s.seconds)
    assert np.all(np.diff(s.seconds) >= 0)
    versions = np.arange(40)[:, None]
    assert np.all((s.started >= 0) & (s.started <= versions))
    # a client that started from a version ends after that version's time and its own
    arrived = ends[s.started] + times[s.ids]
    assert np.all(arrived <= s.seconds[:, None] * (1 + 1e-12))
    for row in s.ids:
        assert len(set(row)) == buffer
    for id in range(12):
        at = np.flatnonzero((s.ids == id).any(axis=1))
        first = s.started[at][s.ids[at] == id]
        assert np.all(first[1:] > at[:-1])  # after its last arrival was used


@pytest.mark.parametrize("seed", range(4))
def test_versions_are_kept_until_their_last_client_arrives(seed):
    s = arrivals(task(12, 0.5), 60, 2, lognormal(seed))
    room = np.full(s.slots, -1)
    for t in range(60):
        room[s.slot[t]] = t
        np.testing.assert_array_equal(room[s.source[t]], s.started[t])
    assert s.slots <= 7  # those of 6 clients and the present one


def test_a_longer_schedule_begins_with_the_shorter():
    times = lognormal(1)
    short, long = (arrivals(task(), rounds, 2, times) for rounds in (30, 90))
    for name in ("ids", "started", "seconds", "slot", "source"):
        begin = getattr(long, name)[:30]
        np.testing.assert_array_equal(getattr(short, name), begin)
    assert short.slots == 1 + long.slot[:30].max()


def test_clients_without_examples_never_start():
    given = task(6, 1.0)._replace(sizes=np.array([0, 3, 0, 2, 1, 4], np.int32))
    s = arrivals(given, 10, 2)
    assert set(s.ids.ravel()) == {1, 3, 4, 5}
    with pytest.raises(InputError, match=r"`buffer` must be in \[1, 4\], got 5"):
        arrivals(given, 10, 5)


def test_what_is_refused():
    with pytest.raises(InputError, match="fixed number of clients uniformly"):
        arrivals(task()._replace(participation=(0.1, 0.5)))
    with pytest.raises(InputError, match=r"`seconds` must be \[12\]"):
        arrivals(task(), seconds=np.ones(3))


def test_speeds_by_name():
    assert clock.speeds("50", 3, 0).tolist() == [50, 50, 50]
    low = clock.speeds("uniform:50:200", 1000, 0)
    assert 50 <= low.min() < 60 and 190 < low.max() <= 200
    found = clock.speeds("lognormal:100:0.5", 20_000, 1)
    np.testing.assert_allclose(np.median(found), 100, rtol=0.02)
    np.testing.assert_allclose(np.log(found).std(), 0.5, rtol=0.02)
    assert np.any(found[:9] != clock.speeds("lognormal:100:0.5", 9, 1, "bandwidths"))


def test_speeds_of_files(tmp_path):
    (tmp_path / "speeds.txt").write_text("10 20\n30\n")
    assert clock.speeds(f"file:{tmp_path}/speeds.txt", 3, 0).tolist() == [10, 20, 30]
    (tmp_path / "own_speeds.py").write_text("def fast(id):\n    return 10 * (1 + id)\n")
    own = clock.speeds(f"{tmp_path}/own_speeds.py:fast", 3, 0)
    assert own.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fast", "Unknown speeds 'fast'"),
        ("lognormal:1", "must have MEDIAN:SIGMA, got 1"),
        ("-3", r"`value` must be in \(0, inf\), got -3"),
        ("nan", "got nan"),
        ("uniform:200:20", "`low` must be at most high=20, got 200"),
        ("file:/nowhere", "cannot be read"),
    ],
)
def test_speeds_that_are_none(spec, message):
    with pytest.raises(InputError, match=message):
        clock.speeds(spec, 4, 0)


def test_seconds_by_hand():
    """100 examples at 50 a second, and 2 MB at 8 Mbit/s, which is 1 MB/s."""
    clients = clock.clients("50", "8", 2, 0)
    found = clock.seconds(clients, np.array([100, 200]), 2e6)
    assert found.tolist() == [4, 6]
    assert clock.seconds(clock.Clients(), np.array([100, 200]), 2e6).tolist() == [0, 0]
