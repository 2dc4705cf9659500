"""Differential privacy: sensitivity, noise, what reaches whom, and the accountant."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.flatten_util import ravel_pytree
from toy import assert_same

from fedjax_pfl import local_training, simulate, testing, trees, uploads
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context, Examples, Method, Upload
from fedjax_pfl.uploads import privacy

LARGE = 1e6  # a norm that clips nothing
KEY = jax.random.key(0)


def private(**values):
    return {"uploads": uploads.chain(uploads.private(**values))}


def one_round(federation=None, **values):
    """The server's weights before and after a round as vectors, and its metrics."""
    trained = toy.train(
        "fedavg",
        toy.task(),
        rounds=1,
        federation_=federation,
        options=private(**values),
    )
    before, after = trained.begin.server, trained.state.server
    return ravel_pytree(before)[0], ravel_pytree(after)[0], trained.metrics.server


def test_without_noise_and_clipping_it_is_the_plain_run():
    """To rounding where all clients have equally many examples."""
    f = toy.federation()
    same = jnp.full(toy.N, 7)
    f = f._replace(train=f.train._replace(size=same))
    plain = toy.train("fedavg", toy.task(), rounds=2, federation_=f)
    options = private(noise=0.0, clip=LARGE)
    found = toy.train("fedavg", toy.task(), rounds=2, federation_=f, options=options)
    toy.assert_close(found.state.server, plain.state.server, 1e-6)
    toy.assert_close(found.metrics.post, plain.metrics.post, 1e-6)


def test_one_client_moves_the_sum_by_at_most_the_norm():
    clip, f = 0.01, toy.federation()
    start, everybody, metrics = one_round(noise=0.0, clip=clip)
    assert metrics["dp_clipped"] == 1.0
    assert jnp.linalg.norm(everybody - start) <= clip * (1 + 1e-4)
    # without examples its update is 0
    alone = f._replace(train=f.train._replace(size=f.train.size.at[2].set(0)))
    _, others, _ = one_round(federation=alone, noise=0.0, clip=clip)
    moved = toy.N * jnp.linalg.norm(everybody - others)
    assert abs(moved - clip) <= 1e-3 * clip


def test_noise_on_the_mean_has_its_standard_deviation():
    clip, z = 2.0, 3.0
    program = simulate.program(
        "fedavg", toy.task(), checked=False, **private(clip=clip)
    )
    f, start = toy.federation(), program.init(KEY, program.traced)

    @jax.jit
    def served(noise):
        traced = program.traced | {"private.noise": noise}
        run = lambda t: (
            program.round(Context(KEY, traced, f, t), start, False)[0].server
        )
        return jax.lax.map(lambda t: ravel_pytree(run(t))[0], jnp.arange(100))

    draws = (served(z) - served(0.0)) * toy.N / (z * clip)  # [100, Z]
    assert abs(jnp.mean(draws)) < 0.03 and abs(jnp.std(draws) - 1) < 0.03
    # independent between rounds and numbers
    assert jnp.max(jnp.abs(jnp.corrcoef(draws.T) - jnp.eye(draws.shape[1]))) < 0.6


def test_adaptive_clipping_finds_the_median_norm():
    options = private(noise=0.0, clip=100.0, rate=1.0, adaptive=True)
    found = toy.train("fedavg", toy.task(), rounds=30, options=options).metrics.server
    assert found["dp_clip"][0] == 100 and found["dp_clip"][-1] < 5
    assert 0.2 <= np.mean(found["dp_clipped"][-10:]) <= 0.8
    options = private(noise=0.1, adaptive=True)
    noisy = toy.train("fedavg", toy.task(), rounds=1, options=options)
    toy.assert_finite(noisy.state.server)


SILENT = Upload(
    lambda like: ((), ()),
    lambda c, update, server, row: (jax.tree.map(jnp.zeros_like, update), row, ()),
    weight=lambda weight, active: active,
)


def accepted():
    """Methods that client-level privacy accepts."""
    found = []
    for name in toy.METHODS:
        made = toy.METHODS[name](toy.method_task(name))
        try:
            simulate.program(
                toy.METHODS[name],
                toy.method_task(name),
                uploads=uploads.chain(SILENT),
                checked=False,
            )
        except InputError:
            continue
        assert isinstance(made, Method) and made.start is None and made.finish is None
        found.append(name)
    return found


ACCEPTED = (
    *("fedavg", "fedavg_ft", "fedprox", "scaffold", "per_fedavg", "pfedme", "fedper"),
    *("fedrep", "lg_fedavg", "fedbabu", "fedrod", "ditto", "apfl", "fedphp", "fedala"),
    *("fml", "fedkd", "fedem", "fedcp", "feddva", "pfedafm", "moon", "feddyn"),
    *("fedlc", "fedntd", "feddbe", "knn_per", "fedadmm", "fedas", "gpfl", "fedmrl"),
    *("fedgen", "fedl2g", "fedsr", "pfl_da", "fednova", "fedbn", "pfedlora"),
    *("pfedfda", "flute", "fedsa_lora"),
)


@pytest.mark.slow
def test_the_accepted_methods_are_the_listed_ones():
    assert set(accepted()) == set(ACCEPTED)


@pytest.mark.parametrize(
    "method", [x if x in ("ditto", "fedas") else toy.slow(x) for x in ACCEPTED]
)
def test_other_clients_data_reach_nobody_but_by_the_mean(method):
    """With updates of zeros, all other rows and the server are the same bit for bit."""
    s = testing.subject(
        toy.METHODS[method], toy.method_task(method), uploads=uploads.chain(SILENT)
    )
    f = s.federation
    x = np.array(f.examples.x)
    x[np.asarray(f.train.index)[0]] *= -1
    other = f._replace(examples=f.examples._replace(x=jnp.asarray(x)))
    ids = np.arange(toy.N, dtype=np.int32)
    given = {"ids": ids, "active": np.ones(toy.N, bool)}
    (one, _), (two, _) = (
        testing.run(s, federation=each, **given) for each in (f, other)
    )
    assert_same(one.server, two.server)
    assert_same(*(toy.rows(state.clients, ids[1:]) for state in (one, two)))


@pytest.mark.parametrize("lr", [0.1, jnp.float32(0.1)], ids=["number", "array"])
@pytest.mark.parametrize(
    "method, why",
    [
        ("fedamp", "takes no options on uploads"),
        ("fedma", "takes no options on uploads"),
        ("local", "clients send nothing"),
        ("feddf", "reads more of a client than the mean"),
        ("fedcac", "reads more of a client than the mean"),
        ("pfedsim", "reads more of a client than the mean"),
        ("fedap", "reads more of a client than the mean"),
        ("floco", "reads more of a client than the mean"),
        ("privacy_pfedc", "reads more of a client than the mean"),
        ("fedproto", "weights are more than one number"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(method, why, lr):
    task = toy.method_task(method)._replace(lr=lr)
    with pytest.raises(InputError, match=f"{method}.*{why}"):
        simulate.program(toy.METHODS[method], task, **private())


def test_what_changes_the_sampling_or_the_sum_is_refused():
    with pytest.raises(InputError, match="bn_stats='local'"):
        simulate.program("fedavg", toy.task("norm"), **private())
    simulate.program("fedavg", toy.task("norm", bn_stats="local"), **private())
    by_size = toy.task(sampling=lambda key, t, history: jnp.ones(toy.N))
    with pytest.raises(InputError, match="uniform `sampling`"):
        simulate.program("fedavg", by_size, **private())
    with pytest.raises(InputError, match="last option"):
        uploads.chain(uploads.private(), uploads.top_k(0.1))
    with pytest.raises(InputError, match="robust rule"):
        uploads.chain(uploads.robust("median"), uploads.private())


def test_adaptive_clipping_needs_a_cohort():
    few = toy.task(participation=(0.2, 1.0))
    with pytest.raises(InputError, match=r"below a tenth .* 1 at least, got 0\.2"):
        simulate.program(
            "fedavg", few, uploads=uploads.private(noise=0.2, adaptive=True)
        )


@pytest.mark.slow
def test_fedas_is_private():
    options = private(noise=1.0)
    found = toy.train("fedas", toy.task(), rounds=1, options=options)
    toy.assert_finite(found.state.server)


def test_epsilon_is_the_accountants():
    pytest.importorskip("dp_accounting")
    # all clients in each round: T Gaussian mechanisms of twice the sensitivity
    task = toy.task()._replace(sizes=np.ones(100, int))
    whole = functools.partial(privacy.of_clients, task, delta=1e-5)
    rho = 10 * 4 / (2 * 20.0**2)
    bound = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert 0.7 * bound < whole(10, noise=20.0).epsilon <= bound
    assert whole(10, noise=0.0).epsilon == math.inf
    assert whole(0, noise=0.0).epsilon == 0
    with pytest.raises(InputError, match="cannot be reached with delta 1e-09"):
        privacy.noise_for(0.01, task, 10, delta=1e-9)
    noise = privacy.noise_for(2.0, task, 10, delta=1e-5)
    assert 1.99 < whole(10, noise=noise).epsilon <= 2
    # MNIST in the tutorial of TensorFlow Privacy: 1.18 by an older conversion
    many = task._replace(
        sizes=np.ones(60000, int), participation=(250 / 60000, 250 / 60000)
    )
    found = privacy.of_clients(
        many, 15 * 240, noise=1.3, delta=1e-5, sampling="poisson"
    )
    assert 0.9 < found.epsilon <= 1.18


def test_a_guarantee_is_of_a_checked_program():
    pytest.importorskip("dp_accounting")
    program = simulate.program("ditto", toy.task(participation=(0.2, 0.6)), **private())
    found = privacy.guarantee(program, 5)
    wanted = privacy.of_clients(program.task, 5, noise=1.0)
    assert found == wanted and max(program.task.cohort_sizes) == 3
    assert str(found).startswith("epsilon ") and "of clients, delta" in str(found)
    with pytest.raises(InputError, match="no differential privacy"):
        privacy.guarantee(simulate.program("fedavg", toy.task()), 5)


def zeros(key, gradients, mask):
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), gradients)


DECLARED = [
    name
    for name in toy.METHODS
    if getattr(toy.METHODS[name](toy.method_task(name)), "trainings", 0)
]


@pytest.mark.parametrize(
    "method", [x if x == "ditto" else toy.slow(x) for x in DECLARED]
)
def test_examples_reach_the_server_through_gradients_alone(method):
    """With gradients of zeros, a poisoned example moves no bit of the server."""
    task = toy.method_task(method)._replace(per_example=zeros, bn_stats="local")
    s = testing.subject(toy.METHODS[method], task)
    f = s.federation
    x = np.array(f.examples.x)
    x[np.asarray(f.train.index)[0, 0]] += 3
    other = f._replace(examples=f.examples._replace(x=jnp.asarray(x)))
    one, two = (testing.run(s, federation=each)[0] for each in (f, other))
    assert_same(one.server, two.server)


def others_alone(key, gradients, mask):
    """Leaves out examples whose gradients are not finite."""
    finite = trees.finite(gradients, len(mask)) & mask
    mean = lambda x: jnp.mean(jnp.where(trees.expand(finite, x.ndim), x, 0), axis=0)
    return jax.tree.map(mean, gradients)


@pytest.mark.parametrize(
    "method", [x if x == "ditto" else toy.slow(x) for x in DECLARED]
)
def test_an_example_enters_no_other_examples_gradient(method):
    """A poisoned example has no gradient of its own: its label, which the class counts
    also hold, moves no bit of the server or of a row in two rounds."""
    task = toy.method_task(method)._replace(per_example=others_alone, bn_stats="local")
    f = toy.federation()
    at, examples = f.train.index[1, 2], f.examples

    def labelled(y):
        counts = f.class_counts.at[1, examples.y[at]].add(-1).at[1, y].add(1)
        x, y = examples.x.at[at].set(jnp.nan), examples.y.at[at].set(y)
        return f._replace(examples=Examples(x, y), class_counts=counts)

    one, two = (
        toy.train(method, task, rounds=2, federation_=labelled(y)).state.method
        for y in (0, 3)
    )
    toy.assert_finite(one)
    assert_same(one, two)


@pytest.mark.parametrize(
    "method", [x if x == "ditto" else toy.slow(x) for x in DECLARED]
)
def test_a_round_takes_the_declared_number_of_gradients(method):
    """Counts the gradients of a round, of which epsilon is computed."""
    counts = []

    def counted(key, gradients, mask):
        jax.debug.callback(counts.append, jnp.sum(mask))
        return zeros(key, gradients, mask)

    task = toy.method_task(method)._replace(per_example=counted, bn_stats="local")
    factory, ids = toy.METHODS[method], np.arange(len(testing.task().sizes))
    s = testing.subject(factory, task)
    jax.effects_barrier()
    counts.clear()
    testing.run(s, ids=ids.astype(np.int32), active=np.ones(len(ids), bool))
    jax.effects_barrier()
    _, planned = local_training.planned(task, s.task.sizes)
    assert sum(map(int, counts)) == factory(task).trainings * planned.sum()


def test_examples_are_counted_once_for_each_training():
    pytest.importorskip("dp_accounting")
    task = toy.task(per_example=privacy.per_example(1.0, 1.0))
    once, twice = (
        privacy.guarantee(simulate.program(name, task), 3)
        for name in ("fedavg", "ditto")
    )
    assert once.unit == "examples" and twice.epsilon > once.epsilon
    for method, hparams in (("fedrep", {}), ("ditto", {"personal_epochs": 50})):
        with pytest.raises(InputError, match="does not declare"):
            simulate.program(method, task, hparams)
    mixed = task._replace(mix=lambda key, x, y, mask: (x, y))
    with pytest.raises(InputError, match="`mix`"):
        simulate.program("fedavg", mixed)


def test_a_clipped_step_by_hand():
    rule = privacy.per_example(0.5, 0.0)
    gradients = {"w": jnp.float32([[3.0, 4.0], [0.3, 0.4], [9.0, 9.0]])}
    found = rule(KEY, gradients, jnp.array([True, True, False]))
    wanted = (np.float32([0.3, 0.4]) + np.float32([0.3, 0.4])) / 2
    np.testing.assert_allclose(found["w"], wanted, rtol=1e-5)
