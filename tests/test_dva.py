"""FedDVA's losses: closed forms against loops, Monte Carlo and limits; what each phase
moves; the scores."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

from fedjax_pfl import local_training, losses
from fedjax_pfl.algorithms.feddva import dva, phases as dva_phases
from fedjax_pfl.models import vae
from fedjax_pfl.models.vae import Gaussian
from fedjax_pfl.types import Batch, Data, Examples, Network

MASK = jnp.array([True, True, False, True, True, False])
NETS = vae.dual_vae((8, 8, 1), 2, 2, (4, 8), 3)
PLAIN = NETS._replace(head=None)


def gaussian(seed, rows=6, d=3, offset=0.0):
    rng = np.random.default_rng(seed)
    return Gaussian(
        *(jnp.asarray(rng.normal(size=(rows, d)) + o, jnp.float32) for o in (offset, 0))
    )


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        a,
        b,
    )


def log_density(q, row, points):
    """Returns the log density [n] of points [n, d] under one example's Gaussian."""
    q = jax.device_get(q)
    return norm.logpdf(points, q.mean[row], np.exp(q.log_var[row] / 2)).sum(axis=1)


def draws(q, row, n=200_000):
    q = jax.device_get(q)
    return (
        np.random.default_rng(7).normal(size=(n, q.mean.shape[1]))
        * np.exp(q.log_var[row] / 2)
        + q.mean[row]
    )


# --- divergences
# ------------------------------------------------------------------------------------------------------


def test_kl_is_monte_carlos():
    p, q = gaussian(0, 2), gaussian(1, 2)
    for row in range(2):
        points = draws(p, row)
        ratio = log_density(p, row, points) - log_density(q, row, points)
        assert dva.kl(p, q)[row] == pytest.approx(
            ratio.mean(), abs=5 * ratio.std() / len(ratio) ** 0.5
        )


def test_kl_is_not_negative_and_zero_only_where_equal():
    p, q = gaussian(0, 50), gaussian(1, 50)
    assert (dva.kl(p, q) > 0).all() and (dva.kl(p, p) == 0).all()
    close(
        dva.kl_standard(q), dva.kl(q, Gaussian(jnp.zeros((50, 3)), jnp.zeros((50, 3))))
    )


def test_samples_have_the_mean_and_variance():
    q = Gaussian(jnp.full((20_000, 1), 2.0), jnp.full((20_000, 1), jnp.log(9.0)))
    z = dva.sample(jax.random.key(0), q)
    assert z.mean() == pytest.approx(2, abs=0.1) and z.std() == pytest.approx(
        3, abs=0.1
    )
    assert (
        jax.grad(lambda m: dva.sample(jax.random.key(0), q._replace(mean=m)).sum())(
            q.mean
        ).min()
        == 1
    )


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_mixture_bound_is_the_double_loop(offset):
    q = gaussian(0, offset=offset)
    row = lambda i: jax.tree.map(lambda a: a[i], q)
    valid = np.flatnonzero(MASK)
    slow = [np.mean([dva.kl(row(i), row(j)) for j in valid]) for i in range(6)]
    close(dva.mixture_bound(q, MASK)[valid], np.array(slow)[valid], 1e-4)


def test_a_floor_keeps_the_variances_of_equal_posteriors_from_shrinking():
    """Without one the bound is the same for all equal posteriors; with one a client
    that narrows them pays."""
    valid = jnp.ones(6, bool)

    def bound(log_var, floor):
        q = Gaussian(jnp.zeros((6, 2)), jnp.full((6, 2), log_var))
        return dva.mixture_bound(q, valid, floor)[0]

    slopes = [jax.grad(bound)(-6.0, floor) for floor in (0.0, 0.01)]
    close(jnp.stack(slopes), [0.0, np.exp(-6.0) / (np.exp(-6.0) + 0.01) - 1], 1e-4)


def test_mixture_bound_of_one_example_or_equal_ones_is_zero():
    q = gaussian(0)
    assert abs(dva.mixture_bound(q, jnp.arange(6) == 4)[4]) < 1e-6
    equal = jax.tree.map(lambda a: jnp.repeat(a[:1], 6, axis=0), q)
    assert np.abs(dva.mixture_bound(equal, MASK)).max() < 1e-5


def test_mixture_bound_is_the_divergence_from_equal_others():
    """j over equal posteriors q', i another one: the bound is KL(q_i || q') but for the
    pair i = j."""
    q = jax.tree.map(
        lambda a: jnp.concatenate([a[:1], jnp.repeat(a[1:2], 5, axis=0)]), gaussian(0)
    )
    others = jnp.arange(6) > 0
    close(
        dva.mixture_bound(q, others)[0],
        dva.kl(*(jax.tree.map(lambda a, i=i: a[i], q) for i in (0, 1))),
    )


def test_mixture_bound_is_above_the_divergence_from_the_mixture():
    q, every = gaussian(3, 4), jnp.ones(4, bool)
    points = draws(q, 0)
    mixture = np.logaddexp.reduce(
        [log_density(q, j, points) for j in range(4)], axis=0
    ) - np.log(4)
    ratio = log_density(q, 0, points) - mixture
    assert 0.1 < ratio.mean() < dva.mixture_bound(q, every)[0]


def test_the_detached_bound_has_no_gradient_through_the_others():
    q, valid = gaussian(0), jnp.ones(6, bool)
    slope = jax.grad(lambda q: dva.mixture_bound(q, valid)[0])(q)
    assert not np.any(slope.mean[1:]) and not np.any(slope.log_var[1:])
    assert np.abs(slope.mean[0]).min() > 0


# --- regularisers
# -----------------------------------------------------------------------------------------------------


def test_paper_max_is_the_larger_of_both_and_its_limits():
    q = gaussian(0)
    bound, divergence = dva.mixture_bound(q, MASK), dva.kl_standard(q)
    for xi in (-1.0, 0.0, 1.0):
        close(dva.personal_term(q, MASK, xi), jnp.maximum(xi + bound, divergence))
    close(dva.personal_term(q, MASK, -1e4), divergence)
    gradient = lambda f: jax.grad(lambda q: jnp.where(MASK, f(q), 0).sum())(q)
    close(
        gradient(lambda q: dva.personal_term(q, MASK, 1e4)),
        gradient(lambda q: dva.mixture_bound(q, MASK)),
        1e-4,
    )


@pytest.mark.parametrize("xi", [-1e4, 0.5, 30.0])
def test_the_released_regulariser_is_the_plain_loop(xi):
    q, floor = gaussian(0, offset=1.0), 0.01
    m, v = (np.asarray(x, np.float64) for x in (q.mean, np.exp(q.log_var)))
    valid = np.flatnonzero(MASK)
    centre = m[valid].mean(axis=0)
    for i in valid:
        near = 0.5 * np.sum((m[i] - centre) ** 2 + v[i] - np.log(v[i]) - 1)
        far = 0.5 * np.sum(m[i] ** 2 + v[i] - np.log(v[i]) - 1)
        pairs = [
            np.sum(
                ((m[i] - m[j]) ** 2 + v[i]) / (v[j] + floor) - np.log(v[i] / v[j]) - 1
            )
            for j in valid
        ]
        expected = near + max(xi + 0.5 * np.mean(pairs) - far, 0)
        found = dva.gathered_term(q, MASK, xi, floor)[i]
        assert found == pytest.approx(expected, rel=1e-4)


def test_only_the_released_regulariser_moves_equal_posteriors_off_the_origin():
    """Equal ones have A = 0. While B < xi the paper's maximum is constant."""
    q = Gaussian(jnp.full((6, 2), 0.5), jnp.zeros((6, 2)))
    slope = lambda term: jax.grad(
        lambda x: term(q._replace(mean=x), MASK, 8.0)[MASK].sum()
    )(q.mean)[MASK]
    close(slope(dva.personal_term), jnp.zeros((4, 2)))
    close(slope(dva.gathered_term), jnp.full((4, 2), -0.5))
    # it stops once the batch is far enough: B = |mean|^2 / 2 > xi
    q = q._replace(mean=jnp.full((6, 2), 3.0))
    close(slope(dva.gathered_term), jnp.zeros((4, 2)))


@pytest.mark.parametrize("term", [dva.personal_term, dva.gathered_term])
def test_rows_that_do_not_count_change_nothing(term):
    q = gaussian(0)
    other = jax.tree.map(lambda a: jnp.where(MASK[:, None], a, 7.0), q)
    of_valid = lambda q: jnp.where(MASK, term(q, MASK, 1.0), 0)
    close(of_valid(q), of_valid(other), 1e-6)


def test_reconstruction():
    x, mean = (np.random.default_rng(i).uniform(-1, 1, (4, 3, 3, 2)) for i in (0, 1))
    density = norm.pdf(x - mean)
    close(
        dva.reconstruction(x, mean),
        (-np.log(density) - np.log(2 * np.pi) / 2).sum(axis=(1, 2, 3)),
    )


def test_terms_sum_to_the_bound():
    x = jnp.zeros((6, 2, 2, 1))
    t = dva.terms(x, x + 1, gaussian(0), gaussian(1))
    close(t["elbo"], -(2 + dva.kl_standard(gaussian(0)) + dva.kl_standard(gaussian(1))))
    sums = dva_phases.totals(t | {"logits": jnp.zeros((6, 3))}, MASK)
    assert (
        set(sums) == {"reconstruction", "kl_z", "kl_c", "elbo"} and sums["kl_z"][1] == 4
    )
    close(sums["kl_z"][0], np.asarray(t["kl_z"])[np.asarray(MASK)].sum())


# --- phases
# -----------------------------------------------------------------------------------------------------------


def batch(seed=0, rows=6):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.uniform(-1, 1, (rows, 8, 8, 1)), jnp.float32)
    return Batch(
        x, jnp.asarray(rng.integers(0, 3, rows), jnp.int32), MASK, jnp.arange(rows)
    )


MOVES = {
    "personal": [("decoder", "head"), ("z", "c")],
    "shared": [("decoder",), ("z", "c", "head")],
}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["personal", "shared"])
def test_which_parts_move(head):
    """By `local_training.sgd`: every part of the phase moves, the others stay bit for
    bit, running statistics follow."""
    b = batch()
    index = jnp.arange(6)
    data = Data(Examples(b.x, b.y), index, jnp.int32(6), lambda x: x)
    task = type("Task", (), {})()
    task.lr, task.optimizer, task.batch_size, task.epochs, task.steps = (
        1e-2,
        optax.adam,
        4,
        1,
        None,
    )
    task.drop_last, task.augment, task.mix, task.per_example = False, None, None, None
    variables = dva_phases.init(NETS, jax.random.key(0))
    found = dva_phases.phases(NETS, head, xi=1.0)
    assert [phase.parts for phase in found] == MOVES[head]

    @jax.jit
    def run(variables):
        after = [
            local_training.sgd(
                jax.random.key(1), data, p.loss, variables, task, train=p.parts
            )[0]
            for p in found
        ]
        return after

    for phase, after in zip(found, run(variables), strict=True):
        for part in dva_phases.PARTS:
            pairs = zip(
                jax.tree.leaves(variables[part]),
                jax.tree.leaves(after[part]),
                strict=True,
            )
            same = all(np.array_equal(x, y) for x, y in pairs)
            assert same == (part not in phase.parts), (phase.parts, part)
        moved = jax.tree.map(
            lambda x, y: not np.array_equal(x, y), variables["stats"], after["stats"]
        )
        assert all(jax.tree.leaves(moved["z"])) and all(
            jax.tree.leaves(moved["decoder"])
        )


@pytest.mark.slow
def test_the_losses_are_masked():
    variables, b = dva_phases.init(NETS, jax.random.key(0)), batch()
    other = b._replace(
        x=jnp.where(MASK[:, None, None, None], b.x, 9.0), y=jnp.where(MASK, b.y, 2)
    )
    phases = dva_phases.phases(NETS, xi=1.0)

    @jax.jit
    def values(b):
        return [
            jax.value_and_grad(lambda v, p=p: p.loss(v, b, jax.random.key(1))[0])(
                variables
            )
            for p in phases
        ]

    close(values(b), values(other), 1e-4)


def test_the_shared_parts():
    assert (
        dva_phases.shared_parts(NETS)
        == ("z", "c")
        == dva_phases.shared_parts(PLAIN, "shared")
    )
    assert dva_phases.shared_parts(NETS, "shared") == ("z", "c", "head")


@pytest.mark.parametrize("detach", [False, True])
def test_a_detached_z_has_no_gradient_by_c(detach):
    variables, b = dva_phases.init(PLAIN, jax.random.key(0)), batch()

    def c(z):
        given = {**variables, "z": z}
        return jnp.sum(dva_phases.forward(PLAIN, given, b.x, detach=detach).c.mean)

    slopes = jax.tree.leaves(jax.grad(c)(variables["z"]))
    assert any(np.any(slope) for slope in slopes) != detach


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_the_objective_is_the_formula(variant):
    """alpha, beta and the weight of the classification, term by term at one draw."""
    term = dva.gathered_term if variant == "code" else dva.personal_term
    variables, b, key = (
        dva_phases.init(NETS, jax.random.key(0)),
        batch(),
        jax.random.key(1),
    )
    out = dva_phases.forward(NETS, variables, b.x, b.mask, key, train=True)
    logits = NETS.head.apply({"params": variables["head"], "stats": {}}, out.latents)[0]
    expected = losses.masked_mean(
        dva.reconstruction(b.x, out.mean)
        + 2 * dva.kl_standard(out.z)
        + 3 * term(out.c, MASK, 1.5),
        MASK,
    )
    expected += 4 * losses.cross_entropy(logits, b.y, MASK)
    weights = {"alpha": 2.0, "beta": 3.0, "xi": 1.5, "cls": 4.0}
    encoders = dva_phases.phases(NETS, **weights, variant=variant)[1]
    close(encoders.loss(variables, b, key)[0], expected, 1e-4)


@pytest.mark.slow
def test_without_c_it_is_a_plain_vae():
    """beta = 0, alpha = 1 and c fixed to 0: the gradients of reconstruction + KL of an
    ordinary VAE."""
    absent = Gaussian(jnp.zeros((6, 2)), jnp.full((6, 2), -1e3))
    nets = PLAIN._replace(
        c=Network(lambda key: {}, lambda v, x, **kwargs: (absent, {}), {})
    )
    variables = dva_phases.init(PLAIN, jax.random.key(0))
    stats, b, key = variables["stats"], batch(), jax.random.key(1)

    def elbo(params):
        at = lambda name: {"params": params[name], "stats": stats[name]}
        q, _ = nets.z.apply(at("z"), b.x, mask=MASK, train=True)
        z = dva.sample(jax.random.split(key)[0], q)
        mean, _ = nets.decoder.apply(
            at("decoder"), jnp.pad(z, ((0, 0), (0, 2))), mask=MASK, train=True
        )
        square = jnp.sum((b.x - mean) ** 2, axis=(1, 2, 3)) / 2
        divergence = jnp.sum(q.mean**2 + jnp.exp(q.log_var) - q.log_var - 1, axis=1) / 2
        return jnp.sum(jnp.where(MASK, square + divergence, 0)) / 4

    encoders = dva_phases.phases(nets, beta=0.0)[1].loss
    params = {"z": variables["z"], "decoder": variables["decoder"]}
    ours = jax.grad(lambda p: encoders({**p, "c": {}, "stats": stats}, b, key)[0])(
        params
    )
    close(ours, jax.grad(elbo)(params), 1e-4)
