"""Client-level differential privacy: sensitivity, noise, and the accountant."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.flatten_util import ravel_pytree
from toy import assert_same

from fedjax_pfl import simulate
from fedjax_pfl.errors import InputError
from fedjax_pfl.privacy import differential_privacy as dp

LARGE = 1e6  # a norm that clips nothing
fedavg = dp.private("fedavg")


def one_round(factory=fedavg, federation=None, **hparams):
    """The server's weights before and after a round as vectors, and its metrics."""
    trained = toy.train(
        factory, toy.task(), rounds=1, federation_=federation, **hparams
    )
    before, after = trained.begin.server.method, trained.state.server.method
    return ravel_pytree(before)[0], ravel_pytree(after)[0], trained.metrics.server


def test_without_noise_and_clipping_it_is_the_plain_run():
    """Bit for bit where all clients have equally many examples."""
    f = toy.federation()
    same = jnp.full(toy.N, 7)
    f = f._replace(train=f.train._replace(size=same))
    plain = toy.train("fedavg", toy.task(), rounds=2, federation_=f)
    private = toy.train(
        fedavg, toy.task(), rounds=2, federation_=f, dp_noise=0.0, dp_clip=LARGE
    )
    assert_same(private.state.server.method, plain.state.server)
    assert_same(private.metrics.post, plain.metrics.post)


def test_one_client_moves_the_sum_by_at_most_the_norm():
    clip, f = 0.01, toy.federation()
    start, everybody, metrics = one_round(dp_noise=0.0, dp_clip=clip)
    assert metrics["dp_clipped"] == 1.0
    assert jnp.linalg.norm(everybody - start) <= clip * (1 + 1e-4)
    # without examples its update is 0
    alone = f._replace(train=f.train._replace(size=f.train.size.at[2].set(0)))
    _, others, _ = one_round(federation=alone, dp_noise=0.0, dp_clip=clip)
    moved = toy.N * jnp.linalg.norm(everybody - others)
    assert abs(moved - clip) <= 1e-3 * clip


def test_noise_on_the_mean_has_its_standard_deviation():
    clip, z = 2.0, 3.0
    program = simulate.program(fedavg, toy.task(), {"dp_clip": clip}, checked=False)
    key, f = jax.random.key(0), toy.federation()
    start = program.init(key, program.traced)

    @jax.jit
    def served(noise):
        traced = program.traced | {"dp_noise": noise}
        run = lambda t: program.round(key, traced, f, start, t, False)[0].server.method
        return jax.lax.map(lambda t: ravel_pytree(run(t))[0], jnp.arange(100))

    draws = (served(z) - served(0.0)) * toy.N / (z * clip)  # [100, Z]
    assert abs(jnp.mean(draws)) < 0.03 and abs(jnp.std(draws) - 1) < 0.03
    # independent between rounds and numbers
    assert jnp.max(jnp.abs(jnp.corrcoef(draws.T) - jnp.eye(draws.shape[1]))) < 0.6


def test_adaptive_clipping_finds_the_median_norm():
    adaptive = dp.private("fedavg", adaptive=True)
    options = {"dp_noise": 0.0, "dp_clip": 100.0, "dp_rate": 1.0}
    found = toy.train(adaptive, toy.task(), rounds=30, **options).metrics.server
    assert found["dp_clip"][0] == 100 and found["dp_clip"][-1] < 5
    assert 0.2 <= np.mean(found["dp_clipped"][-10:]) <= 0.8
    with_noise = toy.train(adaptive, toy.task(), rounds=1, dp_noise=0.1)
    toy.assert_finite(with_noise.state.server)


@pytest.mark.parametrize(
    "method, why",
    [
        ("fedamp", "send nothing through cohort.mean"),
        ("feddf", "depends on clients' data outside the upload"),
        ("fedma", "averages 2 times a round"),
        ("privacy_pfedc", "a client sends 96 numbers, of which cohort.mean averages"),
        ("fedproto", "weights depend on the classes"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(method, why):
    factory = dp.private(toy.METHODS[method])
    with pytest.raises(InputError, match=f"{method}.*{why}"):
        simulate.program(factory, toy.method_task(method))


def test_running_statistics_are_refused():
    with pytest.raises(InputError, match="bn_stats='local'"):
        simulate.program(fedavg, toy.task("norm"))
    simulate.program(fedavg, toy.task("norm", bn_stats="local"))


def test_epsilon_is_the_accountants():
    pytest.importorskip("dp_accounting")
    # MNIST in the tutorial of TensorFlow Privacy: 1.18 by an older conversion
    steps = 15 * 60000 // 250
    options = {"clients": 60000, "cohort": 250, "delta": 1e-5, "sampling": "poisson"}
    assert 0.9 < dp.epsilon(steps, noise=1.3, **options) <= 1.18
    # all clients in each round: T Gaussian mechanisms of twice the sensitivity
    whole = {"clients": 100, "cohort": 100, "delta": 1e-5}
    rho = 10 * 4 / (2 * 20.0**2)
    bound = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert 0.7 * bound < dp.epsilon(10, noise=20.0, **whole) <= bound
    assert dp.epsilon(10, noise=0.0, **whole) == math.inf
    assert dp.epsilon(0, noise=0.0, **whole) == 0
    noise = dp.noise_for(2.0, 10, **whole)
    assert 1.99 < dp.epsilon(10, noise=noise, **whole) <= 2
    # drawn without replacement
    fixed = [dp.epsilon(50, noise=4.0, clients=1000, cohort=m) for m in (100, 1000)]
    assert fixed[0] < fixed[1]
    with pytest.raises(InputError, match="sampling"):
        dp.epsilon(1, noise=1.0, clients=10, cohort=5, sampling="some")


def test_gradients_per_example_are_clipped_and_noisy():
    rule = dp.per_example(clip=1.0, noise=0.0)
    gradients = {"a": jnp.float32([[3, 0], [0, 0.5], [9, 9]]), "b": jnp.zeros((3, 1))}
    mask = jnp.array([True, True, False])
    found = rule(jax.random.key(0), gradients, mask)
    assert_same(found, {"a": jnp.float32([0.5, 0.25]), "b": jnp.zeros(1)})
    many = {"a": jnp.zeros((2, 4000))}
    noisy = dp.per_example(2.0, 3.0)(jax.random.key(1), many, jnp.ones(2, bool))
    assert abs(jnp.std(noisy["a"]) - 3) < 0.15


@pytest.mark.slow
def test_without_clipping_examples_train_as_batches():
    plain = toy.train("ditto", toy.task(), rounds=1)
    alone = toy.task(per_example=dp.per_example(LARGE, 0.0))
    toy.assert_close(toy.train("ditto", alone, rounds=1).state, plain.state, 1e-5)


@pytest.mark.parametrize("method", ["fedproto", "fedala"])
def test_examples_seen_otherwise_are_refused_by_name(method):
    given = toy.task(per_example=dp.per_example(1.0, 1.0))
    with pytest.raises(InputError, match=f"{method} cannot have gradients per example"):
        simulate.program(method, given)
    simulate.program("fedrep", given)


def test_epsilon_of_examples_is_that_of_the_smallest_client():
    pytest.importorskip("dp_accounting")
    given = toy.task(sizes=np.array([40, 400, 4000, 40, 40]), epochs=1)
    options = {"delta": 1e-4, "sampling": "poisson"}
    alone = dp.epsilon(30, noise=2.0, clients=40, cohort=4, **options)
    assert dp.example_epsilon(given, 3, noise=2.0, delta=1e-4) == alone
