"""The properties of sheet 25: gate, kernel distance, what is frozen, what travels, and every ablation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import C, assert_close, assert_same

from fedjax_pfl import losses, models, simulate, trees
from fedjax_pfl.algorithms import fedcp as factory
from fedjax_pfl.algorithms.fedcp import ABLATIONS, Frozen, client_vector, gate, gated, policy_network
from fedjax_pfl.checks import BadInput
from fedjax_pfl.losses import VARIANCES, mmd
from fedjax_pfl.types import State

KEY = jax.random.key(0)
TASK, NORM = toy.task(), toy.task("norm")
_compiled: dict = {}
K = TASK.model.num_features
ALL = jnp.ones(6, bool)
X = jax.random.normal(KEY, (6, *toy.SHAPE))
ONE_STEP = {"epochs": None, "steps": 1}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def start(task=TASK, **options):
    """The variables of client 0 and its frozen parts, with a personal head and an extractor of its own."""
    state = factory(task, **options).init(KEY)
    shifted = lambda tree, seed: jax.tree.map(lambda x: x + 0.3 * normal(seed, *x.shape), tree)
    server, own = state.server, trees.gather(state.clients, 0)
    head = shifted(own["head"], 1)
    variables = {"body": shifted(server["body"], 2), "head": head, "policy": server["policy"]}
    return {**variables, "stats": server["stats"]}, Frozen(server["body"], server["head"], client_vector(head))


def forward(variables, frozen, policy="softmax", without="none", key=KEY, x=X, task=TASK, **cpn):
    off = set(without.split("_"))
    network = None if "cpn" in off else policy_network(task, **cpn)
    return gated(task, network, policy, off)(variables, frozen, x, ALL, False, key)


def train(task=TASK, federation=None, rounds=2, begin=None, **options):
    """(state at the start, state after some rounds, metrics); floats are traced: one compilation serves all values."""
    program = simulate.program(factory, task, options)
    f = toy.federation() if federation is None else federation
    begin = program.init(KEY, program.numbers) if begin is None else begin
    where = (id(task), *((k, v) for k, v in options.items() if not isinstance(v, float)))
    _, step = _compiled.setdefault(where, (task, jax.jit(program.round)))  # holds the task: its id stays its own
    state = begin
    for t in range(rounds):
        state, metrics = step(KEY, program.numbers, f, state, jnp.int32(t), jnp.bool(False))
    return begin, state, metrics


def alone(**options):
    """The toy federation of one client: client 1, with 19 examples."""
    f = toy.federation()
    second = lambda rows: type(rows)(*(x[1:2] for x in rows))
    f = f._replace(train=second(f.train), val=second(f.val), test=second(f.test), class_counts=f.class_counts[1:2])
    return toy.task(sizes=toy.SIZES[1:2], class_counts=TASK.class_counts[1:2], **options), f


# --- the gate


def test_shares_sum_to_one_and_lie_inside():
    a = 2 * normal(3, 6, 2 * K)
    for key in (None, KEY):
        r, s = gate(a, key)
        np.testing.assert_array_equal(r + s, 1)
        assert np.all((r > 0) & (r < 1) & (s > 0))
    soft = jax.nn.softmax(a.reshape(6, 2, K), axis=1)
    np.testing.assert_allclose(gate(a)[0], soft[:, 0], rtol=1e-5)
    np.testing.assert_allclose(gate(a)[1], soft[:, 1], rtol=1e-5, atol=1e-6)


def test_gumbel_noise_belongs_to_its_key():
    w, frozen = start()
    noisy = lambda key: forward(w, frozen, "gumbel", key=key)[2]
    assert_same(noisy(KEY), noisy(KEY))
    assert np.all(noisy(KEY) != noisy(jax.random.key(9)))
    assert_same(forward(w, frozen, key=KEY), forward(w, frozen, key=jax.random.key(9)))
    draws = gate(jnp.zeros((1000, 2 * K)), KEY)[0]  # P(r < x) = P(logistic < logit x) = x
    np.testing.assert_allclose(jnp.mean(draws < 0.25), 0.25, atol=0.02)
    prefix = gate(jnp.zeros((10, 2 * K)), KEY)[0]  # padding does not change a row's noise
    assert_same(prefix, draws[:10])


def test_training_with_gumbel_is_reproducible_and_not_softmax():
    once, again = (train(rounds=1, policy="gumbel")[1] for _ in range(2))
    assert_same(once, again)
    assert trees.sq_dist(once.server["policy"], train(rounds=1)[1].server["policy"]) > 1e-8


@pytest.mark.parametrize("policy", ["softmax", "gumbel"])
def test_equal_heads_see_the_whole_feature(policy):
    w, frozen = start()
    out, h, _, _ = forward(w, frozen._replace(head=w["head"]), policy)
    assert_close(out, h @ w["head"]["kernel"] + 2 * w["head"]["bias"][None], 1e-5)


def test_client_vector_is_the_unit_sum_of_rows():
    head = start()[0]["head"]
    v = np.asarray(head["kernel"]).T.sum(axis=0)  # C x K
    np.testing.assert_allclose(client_vector(head), v / np.linalg.norm(v), rtol=1e-6)
    assert_same(client_vector({"kernel": jnp.zeros((K, C))}), jnp.zeros(K))


def test_policy_gradient_is_the_finite_difference():
    with jax.enable_x64(True):
        w, frozen = jax.tree.map(lambda x: x.astype(jnp.float64), start())
        x = X.astype(jnp.float64)

        def value(theta):
            out = forward({**w, "policy": theta}, frozen, x=x)[0]
            return losses.cross_entropy(out, jnp.arange(6) % C, ALL)

        towards = jax.tree.map(lambda x: normal(5, *x.shape).astype(jnp.float64), w["policy"])
        moved = lambda e: value(jax.tree.map(lambda a, b: a + e * b, w["policy"], towards))
        slope = sum(
            jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), jax.jit(jax.grad(value))(w["policy"]), towards))
        )
        assert abs(slope) > 1e-4
        np.testing.assert_allclose(slope, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6)


# --- the kernel distance


def test_mmd_by_hand():
    h, u = np.asarray(2 * normal(1, 6, K), np.float64), np.asarray(normal(2, 6, K), np.float64)
    mask = np.array([1, 1, 0, 1, 1, 0], bool)
    k = lambda p, q: sum(np.exp(-np.sum((p - q) ** 2) / (2 * a)) for a in (10, 15, 20, 50))
    rows = np.flatnonzero(mask)
    expected = np.mean([k(h[p], h[q]) + k(u[p], u[q]) - 2 * k(h[p], u[q]) for p in rows for q in rows])
    h[~mask] = u[2] = np.nan
    got, gradient = jax.value_and_grad(mmd)(jnp.asarray(h, jnp.float32), jnp.asarray(u, jnp.float32), jnp.asarray(mask))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert np.isfinite(gradient).all() and not gradient[~mask].any() and gradient[mask].any()


def test_mmd_is_a_distance_of_sets():
    h, u = normal(1, 6, K), normal(2, 6, K)
    order = jnp.array([3, 5, 0, 1, 4, 2])
    value, gradient = jax.value_and_grad(mmd)(h, h, ALL)
    assert abs(value) < 1e-6
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    assert mmd(h, u, ALL) > 0
    np.testing.assert_allclose(mmd(u, h, ALL), mmd(h, u, ALL), rtol=1e-5)
    np.testing.assert_allclose(mmd(h[order], u, ALL), mmd(h, u, ALL), rtol=1e-4)


def test_mmd_of_single_rows():
    h, u = normal(1, 1, K), normal(2, 1, K)
    d2 = float(jnp.sum((h - u) ** 2))
    expected = 2 * (4 - sum(np.exp(-d2 / (2 * a)) for a in VARIANCES))
    np.testing.assert_allclose(mmd(h, u, ALL[:1]), expected, rtol=1e-4)


@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_mmd_acts_from_the_second_step_on(net):
    one = toy.task(net, **ONE_STEP)
    (_, free, low), (_, tied, high) = (train(one, lam=lam) for lam in (0.0, 50.0))
    assert_close(free, tied, 2e-6)
    assert_close(low["loss"], high["loss"], 1e-5)
    two = toy.task(net, epochs=None, steps=2)
    free, tied = (train(two, lam=lam, rounds=1)[1] for lam in (0.0, 50.0))
    assert trees.sq_dist(free.server["body"], tied.server["body"]) > 1e-8


# --- a round


def by_hand(task, state, x, y, steps, lam):
    """A client's local work in full batches, written out from the sheet's equations."""
    body, frozen = state.server["body"]["layers"]["0"], state.server["head"]
    start = body["kernel"], body["bias"]
    own = trees.gather(state.clients, 0)["head"]
    v = own["kernel"].sum(1)
    c = v / jnp.sqrt((v * v).sum())
    extract = lambda p, x: jax.nn.relu(x @ p[0] + p[1][None])

    def loss(p):
        body, head, theta = p
        h = extract(body, x)
        fc, ln = theta["layers"]["0"], theta["norm"]
        a = (h * c[None]) @ fc["kernel"] + fc["bias"][None]
        a = (a - a.mean(1, keepdims=True)) / jnp.sqrt(a.var(1, keepdims=True) + 1e-5)
        a = jax.nn.relu(a * ln["scale"][None] + ln["bias"][None])
        r = jnp.exp(a[:, :K]) / (jnp.exp(a[:, :K]) + jnp.exp(a[:, K:]))
        through = lambda w, h: h @ w["kernel"] + w["bias"][None]
        out = jax.nn.log_softmax(through(frozen, r * h) + through(head, (1 - r) * h))
        return -out[jnp.arange(len(y)), y].mean() + lam * mmd(h, extract(start, x), jnp.ones(len(y), bool))

    p = start, own, state.server["policy"]
    for _ in range(steps):
        p = jax.tree.map(lambda w, g: w - task.lr * g, p, jax.grad(loss)(p))
    return p


def test_a_round_is_the_sheets():
    """Among others: nothing frozen moves, and the client's vector stays what it was when training began."""
    task, f = alone(batch_size=19, epochs=3)
    begin, first, _ = train(task, f, rounds=1, lam=3.0)
    begin, state, _ = train(task, f, rounds=1, begin=first, lam=3.0)  # its heads differ
    own = f.train.index[0]
    (kernel, bias), head, policy = by_hand(task, begin, f.examples.x[own], f.examples.y[own], 3, 3.0)
    assert_close(state.server["body"], {"layers": {"0": {"bias": bias, "kernel": kernel}}}, 1e-5)
    assert_close(state.server["policy"], policy, 1e-5)
    assert_close(trees.gather(state.clients["head"], 0), head, 1e-5)


@pytest.mark.parametrize("optimizer", [optax.sgd, lambda lr: optax.adamw(lr, weight_decay=0.5)])
def test_the_midpoint_of_the_heads_travels(optimizer):
    task, f = alone(optimizer=optimizer)
    begin, state, _ = train(task, f, rounds=1)
    own = trees.gather(state.clients["head"], 0)
    assert trees.sq_dist(own, begin.server["head"]) > 0
    assert_same(state.server["head"], jax.tree.map(lambda a, b: 0.5 * (a + b), begin.server["head"], own))


def test_the_global_head_halves_its_way_to_a_fixed_personal_head():
    task, f = alone(optimizer=lambda lr: optax.set_to_zero())
    begin = factory(task).init(KEY)
    own = jax.tree.map(lambda x: x + normal(1, *x.shape), begin.clients["head"])
    begin = State(begin.server, begin.clients | {"head": own})
    apart = lambda state: float(jnp.sqrt(trees.sq_dist(state.server["head"], trees.gather(own, 0))))
    _, state, _ = train(task, f, rounds=3, begin=begin)
    assert_same(state.clients["head"], own)
    np.testing.assert_allclose(apart(state), apart(begin) / 8, rtol=1e-5)


def test_the_personalisation_ratio_is_the_mean_share():
    task, f = alone(batch_size=19, epochs=1)
    begin, _, metrics = train(task, f, rounds=1)
    w = {**begin.server, "head": trees.gather(begin.clients["head"], 0)}
    frozen = Frozen(w["body"], w["head"], client_vector(w["head"]))
    x = f.examples.x[f.train.index[0]]
    s = gated(task, policy_network(task), "softmax", set())(w, frozen, x, jnp.ones(19, bool), True, KEY)[2]
    np.testing.assert_allclose(metrics["pir"], [s.mean()], rtol=1e-5)


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm_moments_follow_the_task(bn_stats):
    begin, state, metrics = train(toy.task("norm", bn_stats=bn_stats), norm="batch", rounds=1)
    count = lambda tree: len(jax.tree.leaves(tree))
    moments = {"aggregate": (4, 0), "local": (0, 4), "batch": (0, 0)}[bn_stats]  # of the extractor and of the CPN
    assert (count(state.server["stats"]), count(state.clients["stats"])) == moments
    for part in (0, 1):
        if moments[part]:
            assert trees.sq_dist(state[part]["stats"], begin[part]["stats"]) > 0
    assert np.isfinite(metrics["loss"]).all()


# --- the policy network


def cnn_task():
    return TASK._replace(model=models.model("cnn", (28, 28, 1), 10), num_classes=10)


@pytest.mark.parametrize("depth, size", [(1, 527_360), (2, 790_016), (3, 1_052_672), (4, 1_315_328)])
def test_size_of_the_policy_network(depth, size):
    shapes = jax.eval_shape(factory(cnn_task(), depth=depth).init, KEY).server
    assert trees.size(shapes["policy"]) == size
    assert trees.size((shapes["body"], shapes["head"])) == 582_026


@pytest.mark.parametrize("norm", ["layer", "batch", "group", "none"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_variants_of_the_policy_network(norm, activation):
    cpn = {"norm": norm, "activation": activation, "depth": 2}
    w, frozen = start(**cpn)
    out, _, s, _ = forward(w, frozen, **cpn)
    assert np.isfinite(out).all() and np.all((s > 0) & (s < 1))
    plain = forward(*start(), depth=1)[2]
    assert np.any(s != plain)


# --- ablations


def shares(without, change_sample=False, change_client=False):
    w, frozen = start(without=without)
    frozen = frozen._replace(context=-frozen.context) if change_client else frozen
    return forward(w, frozen, without=without, x=X[::-1] if change_sample else X)[2]


@pytest.mark.parametrize("without, sample, client", [("none", 1, 1), ("cs", 1, 0), ("ss", 0, 1), ("cs_ss", 0, 0)])
def test_what_the_policy_sees(without, sample, client):
    before = shares(without)
    assert np.any(shares(without, change_sample=True) != before) == bool(sample)
    assert np.any(shares(without, change_client=True) != before) == bool(client)
    assert np.all(before == before[:1]) != bool(sample)
    assert np.any(before != 0.5)


def test_without_mmd_is_lam_zero():
    assert_close(train(without="gfm")[1], train(lam=0.0)[1])


def test_without_a_policy_both_heads_see_everything():
    w, frozen = start(without="cpn")
    out, h, s, _ = forward(w, frozen, without="cpn")
    assert_close(out, TASK.model.head(frozen.head, h) + TASK.model.head(w["head"], h))
    assert s is None and w["policy"] == {}


def test_without_a_global_head_its_bias_goes_too():
    w, frozen = start(without="cpn_gh")
    out, h, _, _ = forward(w, frozen, without="cpn_gh")
    assert frozen.head == ()
    assert_same(out, TASK.model.head(w["head"], h))


@pytest.mark.parametrize("without", ABLATIONS)
def test_what_an_ablation_sends(without):
    body, head, policy = 6 * 8 + 8, 8 * C + C, 8 * 16 + 16 + 2 * 16
    sent = body + head * ("gh" not in without) + policy * ("cpn" not in without)
    method = factory(TASK, without=without)
    shapes = jax.eval_shape(method.init, KEY)
    cohort = type("Cohort", (), {"active": jnp.array([True, False])})()
    traffic = method.traffic(shapes, cohort, {})
    np.testing.assert_array_equal(traffic.down, [sent, 0])
    np.testing.assert_array_equal(traffic.up, [sent, 0])


@pytest.mark.parametrize("without", ["cs", "cpn", "cpn_gfm", "cpn_gh"])
def test_an_ablation_trains(without):
    _, state, metrics = train(without=without)
    _, full, _ = train()
    assert np.isfinite(metrics["loss"]).all() and ("pir" in metrics) == ("cpn" not in without)
    assert trees.sq_dist(state.server["body"], full.server["body"]) > 1e-8


# --- bad input


@pytest.mark.parametrize(
    "options", [{"lam": -1.0}, {"depth": 5}, {"policy": "hard"}, {"without": "gh"}, {"norm": "x"}, {"activation": "x"}]
)
def test_bad_options(options):
    with pytest.raises(BadInput, match=next(iter(options))):
        factory(TASK, **options)


def test_a_head_that_is_not_linear_is_refused():
    model = TASK.model._replace(init=lambda key: {"body": {}, "head": {"w": jnp.zeros(3)}, "stats": {}})
    with pytest.raises(BadInput, match="one linear layer"):
        factory(TASK._replace(model=model)).init(KEY)
