"""Several rounds given to the devices at once: the same experiment, in as few words."""

import jax
import numpy as np
import pytest
import toy
from test_devices import collectives, on_host, program_of
from toy import assert_close

from fedjax_pfl import simulate
from fedjax_pfl.engine import rounds
from fedjax_pfl.types import Context

KEY = jax.random.key(3)
ROUNDS = 8
# other methods are in test_fuzz, whose rounds go to the devices together, too
QUICK = [
    ("ditto", 3, (0.3, 0.7)),
    toy.slow("privacy_pfedc", 1, (0.6, 0.6)),
    toy.slow("pfedma", 2, (1, 1)),
    toy.slow("pfedhn", 2, (0.6, 0.6)),
]


@pytest.fixture(autouse=True)
def never_too_long(monkeypatch):
    monkeypatch.setattr(rounds, "SECONDS", 1e9)


def run(program, **options):
    copied = lambda result: result._replace(
        state=result.state and on_host(program, result.state)
    )
    return [
        copied(r)
        for r in simulate.rounds(
            program, KEY, toy.federation(), rounds=ROUNDS, **options
        )
    ]


def plain(metrics):
    """Without the sizes of ciphertexts, which are random."""
    if metrics is None:
        return None
    kept = {
        name: x
        for name, x in metrics.clients.items()
        if not name.startswith("encrypted")
    }
    return metrics._replace(
        clients=kept, traffic=metrics.traffic._replace(encrypted=None)
    )


@pytest.mark.parametrize("method, devices, participation", QUICK)
def test_rounds_together_are_the_rounds_one_by_one(method, devices, participation):
    """Metrics, scores and states; after the first round, whose time is measured, 1 to
    4, 5, 6 and 7."""
    program = program_of(method, devices, participation)
    alone = run(program, eval_every=5)
    together = run(program, eval_every=5, state_every=6)
    assert (
        [r.round for r in together]
        == [r.round for r in alone]
        == list(range(ROUNDS + 1))
    )
    assert [r.round for r in together if r.state is None] == [1, 2, 3]
    for a, b in zip(together, alone, strict=True):
        assert_close(plain(a.metrics), plain(b.metrics), 1e-5)
        assert_close(a.pre, b.pre, 1e-5)
        if a.state is not None:
            assert_close(a.state, b.state, 1e-5)


@pytest.mark.parametrize(
    "t, eval_every, state_every, count",
    [
        (0, 5, 6, 5),  # round 5 is evaluated
        (5, 5, 6, 1),  # the state after round 5 is the sixth
        (6, 0, 100, 14),
        (6, 100, 100, 13),  # the last round is evaluated
        (19, 100, 100, 1),
        (18, 100, 19, 1),
        (7, 1, 100, 1),
    ],
)
def test_rounds_to_the_next_that_is_asked_about(t, eval_every, state_every, count):
    assert rounds._free(t, 20, eval_every, state_every) == count


@pytest.mark.slow
def test_what_diverges_among_them_is_not_given_out():
    program = program_of("fedavg", 1, (1.0, 1.0))
    program = program._replace(traced=program.traced | {"lr": 1e-9, "lr_decay": 1e3})
    got, options = [], {"rounds": 12, "eval_every": 0, "state_every": 12}
    with pytest.raises(simulate.DivergenceError) as error:
        for result in simulate.rounds(program, KEY, toy.federation(), **options):
            got.append(result)
    assert f"not finite in round {len(got)}:" in str(error.value) and len(got) > 2
    assert got[2].state is None  # it was among those that went together
    assert all(np.isfinite(r.metrics.loss).all() for r in got)


@pytest.mark.slow  # compiles one round and several for eight devices
def test_the_devices_say_no_more_to_each_other_than_in_one_round():
    program = program_of("ditto", 8, (0.5, 0.5))
    f = jax.device_put(toy.federation(), jax.NamedSharding(program.mesh, jax.P()))
    args = (
        Context(KEY, program.traced, f, np.int32(0)),
        program.init(KEY, program.traced),
        np.bool_(False),
    )
    lowered = (
        jax.jit(program.round).lower(*args),
        jax.jit(rounds._several(program)).lower(*args, np.int32(3)),
    )
    one, several = (collectives(made.compile()) for made in lowered)
    assert one.keys() == several.keys() and all(
        len(one[kind]) == len(several[kind]) for kind in one
    )
