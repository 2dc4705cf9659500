"""The properties of sheet 25: gate, kernel distance, what is frozen, what travels, and
every ablation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import toy
from toy import C, assert_close, assert_same, each_bn_stats

from fedjax_pfl import evaluation, losses, models, simulate, testing, trees
from fedjax_pfl.algorithms import fedcp as factory
from fedjax_pfl.algorithms.fedcp import (
    Frozen,
    Parts,
    client_vector,
    gate,
    gated,
    objective,
    policy_network,
)
from fedjax_pfl.errors import InputError
from fedjax_pfl.keys import clients_key
from fedjax_pfl.losses import VARIANCES, mmd
from fedjax_pfl.types import Batch, Context, RunState, State

KEY = jax.random.key(0)
TASK, NORM = toy.task(epochs=1), toy.task("norm", epochs=1)
K = TASK.model.num_features
ALL = np.ones(6, bool)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = normal(0, 6, *toy.SHAPE)


def sq_dist(a, b):
    """Computes trees.sq_dist on the host."""
    return sum(
        np.sum((np.asarray(x) - np.asarray(y)) ** 2)
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


@functools.cache
def start(**options):
    """The variables of client 0 and its frozen parts, with a personal head and an
    extractor of its own."""
    state = factory(TASK, **options).init(KEY)
    shifted = lambda tree, seed: jax.tree.map(
        lambda x: np.asarray(x) + np.float32(0.3) * normal(seed, *x.shape), tree
    )
    server, own = state.server, toy.rows(state.clients, 0)
    head = shifted(own["head"], 1)
    variables = {
        "body": shifted(server["body"], 2),
        "head": head,
        "policy": server["policy"],
    }
    frozen = Frozen(server["body"], server["head"], jax.jit(client_vector)(head))
    return {**variables, "stats": server["stats"]}, frozen


WHOLE = Parts()


@functools.cache
def compiled_forward(policy, on, **cpn):
    network = policy_network(TASK, **cpn) if on.cpn else None
    model = gated(TASK, network, policy, on)
    return jax.jit(
        lambda variables, frozen, x, key: model(
            variables, frozen, x, jnp.ones(len(x), bool), False, key
        )
    )


def forward(variables, frozen, policy="softmax", on=WHOLE, key=KEY, x=X, **cpn):
    return compiled_forward(policy, on, **cpn)(variables, frozen, x, key)


_compiled: dict = {}
DEFAULTS = simulate.hyperparameters(factory)


def train(task=TASK, federation=None, rounds=2, begin=None, lr=0.1, **options):
    """(state at the start, state after some rounds, metrics); floats are traced: one
    compilation serves all values."""
    program = toy.program(factory, task, options)
    f = toy.federation() if federation is None else federation
    where = (
        id(task),
        *(
            (k, v)
            for k, v in options.items()
            if not isinstance(v, float) and v != DEFAULTS[k]
        ),
    )
    if where not in _compiled:
        step = jax.jit(lambda *args: program.round(*args, jnp.bool(False)))
        # holds the task: its id stays its own
        _compiled[where] = task, program.init, step
    _, init, step = _compiled[where]
    numbers = program.traced | {"lr": lr}
    begin = init(KEY, numbers) if begin is None else begin
    state = begin
    for t in range(rounds):
        state, metrics = step(Context(KEY, numbers, f, jnp.int32(t)), state)
    return begin, state, metrics


def alone(size=19):
    """The toy federation in which only client 1 has examples."""
    f = toy.federation()
    return f._replace(
        train=f.train._replace(
            size=np.where(np.arange(toy.N) == 1, size, 0).astype(np.int32)
        )
    )


# --- the gate


def test_shares_sum_to_one_and_lie_inside():
    a = 2 * normal(3, 6, 2 * K)
    shares, noisy = jax.jit(lambda a: (gate(a), gate(a, KEY)))(a)
    for r, s in (shares, noisy):
        np.testing.assert_array_equal(r + s, 1)
        assert np.all((r > 0) & (r < 1) & (s > 0))
    soft = np.exp(a.reshape(6, 2, K).astype(np.float64))
    soft = soft / soft.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares[0], soft[:, 0], rtol=1e-5)
    np.testing.assert_allclose(shares[1], soft[:, 1], rtol=1e-5, atol=1e-6)


def test_gumbel_noise_belongs_to_its_key():
    w, frozen = start()
    noisy = lambda key: np.asarray(forward(w, frozen, "gumbel", key=key)[2])
    assert np.all(noisy(KEY) != noisy(jax.random.key(9)))
    assert_same(forward(w, frozen, key=KEY), forward(w, frozen, key=jax.random.key(9)))
    noise = jax.jit(lambda a: gate(a, KEY)[0])
    # P(r < x) = P(logistic < logit x) = x
    draws = np.asarray(noise(np.zeros((1000, 2 * K), np.float32)))
    np.testing.assert_allclose(np.mean(draws < 0.25), 0.25, atol=0.02)
    # padding does not change a row's noise
    assert_same(noise(np.zeros((10, 2 * K), np.float32)), draws[:10])


def test_both_extractors_drop_the_same_features():
    """The distance of equal extractors is 0."""
    task = toy.task("dropout")
    w = factory(task).init(KEY).server
    frozen = Frozen(w["body"], w["head"], client_vector(w["head"]))
    apply, batch = (
        gated(task, policy_network(task), "softmax", Parts()),
        Batch(X, np.arange(6) % C, ALL, np.arange(6)),
    )
    value = jax.jit(lambda lam: objective(task, apply, frozen, lam)(w, batch, KEY)[0])
    np.testing.assert_allclose(value(50.0), value(0.0), rtol=1e-5)


@pytest.mark.parametrize("policy", ["softmax", "gumbel"])
def test_equal_heads_see_the_whole_feature(policy):
    w, frozen = start()
    out, h, _, _ = forward(w, frozen._replace(head=w["head"]), policy)
    assert_close(out, np.asarray(h) @ w["head"]["kernel"] + 2 * w["head"]["bias"], 1e-5)


def test_client_vector_is_the_unit_sum_of_rows():
    head = start()[0]["head"]
    v = np.asarray(head["kernel"]).T.sum(axis=0)  # C x K
    vector = jax.jit(client_vector)
    np.testing.assert_allclose(vector(head), v / np.linalg.norm(v), rtol=1e-6)
    assert_same(vector(jax.tree.map(np.zeros_like, head)), np.zeros(K))


def test_policy_gradient_is_the_finite_difference():
    with jax.enable_x64(True):
        double = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
        w, frozen = double(start())

        @jax.jit
        def value(theta):
            out = forward({**w, "policy": theta}, frozen, x=double(X))[0]
            return losses.cross_entropy(out, jnp.arange(6) % C, jnp.ones(6, bool))

        towards = double(jax.tree.map(lambda x: normal(5, *x.shape), w["policy"]))
        moved = lambda e: value(
            jax.tree.map(lambda a, b: a + e * b, w["policy"], towards)
        )
        by = jax.jit(jax.grad(value))(w["policy"])
        slope = sum(
            np.sum(a * b)
            for a, b in zip(*map(jax.tree.leaves, (by, towards)), strict=True)
        )
        assert abs(slope) > 1e-4
        np.testing.assert_allclose(
            slope, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6
        )


# --- the kernel distance


MMD = jax.jit(jax.value_and_grad(mmd))


def test_mmd_by_hand():
    h, u = 2 * normal(1, 6, K).astype(np.float64), normal(2, 6, K).astype(np.float64)
    mask = np.array([1, 1, 0, 1, 1, 0], bool)
    k = lambda p, q: sum(
        np.exp(-np.sum((p - q) ** 2) / (2 * a)) for a in (10, 15, 20, 50)
    )
    rows = np.flatnonzero(mask)
    expected = np.mean(
        [k(h[p], h[q]) + k(u[p], u[q]) - 2 * k(h[p], u[q]) for p in rows for q in rows]
    )
    h[~mask] = u[2] = np.nan
    got, gradient = MMD(h.astype(np.float32), u.astype(np.float32), mask)
    gradient = np.asarray(gradient)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert (
        np.isfinite(gradient).all()
        and not gradient[~mask].any()
        and gradient[mask].any()
    )


def test_mmd_is_a_distance_of_sets():
    h, u = normal(1, 6, K), normal(2, 6, K)
    order = np.array([3, 5, 0, 1, 4, 2])
    value, gradient = MMD(h, h, ALL)
    assert abs(value) < 1e-6
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    between, back, reordered = (
        MMD(*sets, ALL)[0] for sets in ((h, u), (u, h), (h[order], u))
    )
    assert between > 0
    np.testing.assert_allclose(back, between, rtol=1e-5)
    np.testing.assert_allclose(reordered, between, rtol=1e-4)


@pytest.mark.parametrize("far", [100.0, 1e4])
def test_mmd_does_not_depend_on_where_the_features_are(far):
    h, u = normal(1, 6, K), normal(2, 6, K)
    (value, gradient), (there, slope) = MMD(h, u, ALL), MMD(h + far, u + far, ALL)
    np.testing.assert_allclose(there, value, rtol=1e-6 * far)
    np.testing.assert_allclose(
        slope, gradient, atol=1e-5 * far * np.abs(gradient).max()
    )


def test_mmd_of_single_rows():
    h, u = normal(1, 1, K), normal(2, 1, K)
    d2 = np.sum((h - u).astype(np.float64) ** 2)
    expected = 2 * (4 - sum(np.exp(-d2 / (2 * a)) for a in VARIANCES))
    np.testing.assert_allclose(MMD(h, u, ALL[:1])[0], expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, cpn", [(TASK, {}), toy.slow(NORM, {"norm": "batch"})], ids=["mlp", "norm"]
)
def test_mmd_acts_from_the_second_step_on(task, cpn):
    f = toy.federation()
    size, batch = np.asarray(f.train.size), task.batch_size
    one_batch = f._replace(train=f.train._replace(size=np.minimum(size, batch)))
    (_, free, low), (_, tied, high) = (
        train(task, one_batch, lam=lam, **cpn) for lam in (0.0, 50.0)
    )
    assert_close(free, tied, 2e-6)
    assert_close(low.loss, high.loss, 1e-5)
    two_batches = f._replace(train=f.train._replace(size=np.minimum(size, 2 * batch)))
    free, tied = (
        train(task, two_batches, lam=lam, rounds=1, **cpn)[1] for lam in (0.0, 50.0)
    )
    assert sq_dist(free.server["body"], tied.server["body"]) > 1e-8


# --- a round


def by_hand(task, state, batches, lam):
    """The local work of client 1, written out from the sheet's equations."""
    body, frozen = state.server["body"]["layers"]["0"], state.server["head"]
    start = body["kernel"], body["bias"]
    own = toy.rows(state.clients, 1)["head"]
    v = own["kernel"].sum(1)
    c = v / np.sqrt((v * v).sum())
    extract = lambda p, x: jax.nn.relu(x @ p[0] + p[1][None])

    @jax.jit
    @jax.grad
    def slope(p, x, y):
        body, head, theta = p
        h = extract(body, x)
        fc, ln = theta["layers"]["0"], theta["norm"]
        a = (h * c[None]) @ fc["kernel"] + fc["bias"][None]
        a = (a - a.mean(1, keepdims=True)) / jnp.sqrt(a.var(1, keepdims=True) + 1e-5)
        a = jax.nn.relu(a * ln["scale"][None] + ln["bias"][None])
        r = jnp.exp(a[:, :K]) / (jnp.exp(a[:, :K]) + jnp.exp(a[:, K:]))
        through = lambda w, h: h @ w["kernel"] + w["bias"][None]
        out = jax.nn.log_softmax(through(frozen, r * h) + through(head, (1 - r) * h))
        return -out[jnp.arange(len(y)), y].mean() + lam * mmd(
            h, extract(start, x), jnp.ones(len(y), bool)
        )

    p = start, own, state.server["policy"]
    for x, y in batches:
        p = jax.tree.map(
            lambda w, g: np.asarray(w) - task.lr * np.asarray(g),
            p,
            slope(p, x.astype(np.float32), y),
        )
    return p


def test_a_round_is_the_sheets():
    """Among others: nothing frozen moves, and the client's vector stays what it was
    when training began."""
    f, key = alone(), clients_key(KEY, 0)
    begin, first, _ = train(TASK, f, rounds=1, lam=3.0)
    begin, state, _ = train(TASK, f, rounds=1, begin=first, lam=3.0)  # its heads differ
    batches = [pair for (pair,) in oracle.batches(f, 1, key, TASK)]
    (kernel, bias), head, policy = by_hand(TASK, begin, batches, 3.0)
    assert_close(
        state.server["body"], {"layers": {"0": {"bias": bias, "kernel": kernel}}}, 1e-5
    )
    assert_close(state.server["policy"], policy, 1e-5)
    assert_close(toy.rows(state.clients["head"], 1), head, 1e-5)


DECAYED = toy.task(epochs=1, optimizer=lambda lr: optax.adamw(lr, weight_decay=0.5))


@pytest.mark.parametrize("task", [TASK, toy.slow(DECAYED)], ids=["sgd", "adamw"])
def test_the_midpoint_of_the_heads_travels(task):
    begin, state, _ = train(task, alone(), rounds=1)
    own, head = (
        toy.rows(state.clients["head"], 1),
        jax.tree.map(np.asarray, begin.server["head"]),
    )
    assert sq_dist(own, head) > 0
    assert_same(
        state.server["head"],
        jax.tree.map(lambda a, b: np.float32(0.5) * (a + b), head, own),
    )


def test_the_global_head_halves_its_way_to_a_fixed_personal_head():
    f = alone()
    begin, _, _ = train(TASK, f, rounds=1)
    own = jax.tree.map(
        lambda x: np.asarray(x) + normal(1, *x.shape), begin.clients["head"]
    )
    begin = RunState(State(begin.server, begin.clients | {"head": own}))
    apart = lambda state: np.sqrt(sq_dist(state.server["head"], toy.rows(own, 1)))
    _, state, _ = train(TASK, f, rounds=3, begin=begin, lr=0.0)
    assert_same(state.clients["head"], own)
    np.testing.assert_allclose(apart(state), apart(begin) / 8, rtol=1e-5)


def test_the_personalisation_ratio_is_the_mean_share():
    f = alone(4 * TASK.batch_size)  # a mean over equal batches
    begin, _, metrics = train(TASK, f, rounds=1, lr=0.0)
    w = {**begin.server, "head": toy.rows(begin.clients["head"], 1)}
    frozen = Frozen(w["body"], w["head"], jax.jit(client_vector)(w["head"]))
    x, mask = toy.rows(f.examples.x, f.train.index[1][:16]), np.ones(16, bool)
    shares = jax.jit(
        lambda w: gated(TASK, policy_network(TASK), "softmax", Parts())(
            w, frozen, x, mask, True, KEY
        )[2]
    )
    np.testing.assert_allclose(metrics.clients["pir"][1], np.mean(shares(w)), rtol=1e-5)


@pytest.mark.slow  # the contract has the layer norm
def test_the_policy_networks_batch_norm_counts_no_padding():
    testing.check(
        "mask",
        testing.subject(functools.partial(factory, norm="batch"), testing.task()),
    )


@each_bn_stats
def test_batch_norm_moments_follow_the_task(bn_stats):
    task = (
        NORM
        if bn_stats == "aggregate"
        else toy.task("norm", epochs=1, bn_stats=bn_stats)
    )
    begin, state, metrics = train(task, norm="batch", rounds=1)
    count = lambda tree: len(jax.tree.leaves(tree))
    # of the extractor and of the CPN
    moments = {"aggregate": (4, 0), "local": (0, 4), "batch": (0, 0)}[bn_stats]
    stats = lambda state: (state.server["stats"], state.clients["own"]["stats"])
    assert tuple(map(count, stats(state))) == moments
    for part in (0, 1):
        if moments[part]:
            assert sq_dist(stats(state)[part], stats(begin)[part]) > 0
    assert np.isfinite(metrics.loss).all()


# --- the policy network


def cnn_task():
    return TASK._replace(models=(models.model("cnn", (28, 28, 1), 10),), num_classes=10)


@pytest.mark.parametrize(
    "depth, size", [(1, 527_360), (2, 790_016), (3, 1_052_672), (4, 1_315_328)]
)
def test_size_of_the_policy_network(depth, size):
    shapes = jax.eval_shape(factory(cnn_task(), depth=depth).init, KEY).server
    assert trees.size(shapes["policy"]) == size
    assert trees.size((shapes["body"], shapes["head"])) == 582_026


def policy_by_hand(policy, x, norm, activation):
    """In NumPy; a batch norm's moments are those of its start."""
    act = {
        "relu": lambda x: np.maximum(x, 0),
        "tanh": np.tanh,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    }[activation]
    first, last = (policy["layers"][i] for i in "01")
    x = act(x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]
    if norm == "batch":
        x = x / np.sqrt(1 + 1e-5)
    elif norm != "none":
        parts = x.reshape(len(x), {"layer": 1, "group": 2}[norm], -1)
        parts = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(
            parts.var(-1, keepdims=True) + 1e-5
        )
        x = parts.reshape(x.shape)
    return act(
        x if norm == "none" else x * policy["norm"]["scale"] + policy["norm"]["bias"]
    )


@pytest.mark.parametrize("norm", ["layer", "batch", "group", "none"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_variants_of_the_policy_network(norm, activation):
    (w, frozen), network = (
        start(),
        policy_network(TASK, depth=2, norm=norm, activation=activation),
    )
    shapes = jax.eval_shape(network.init, KEY)
    rng = np.random.default_rng(4)
    policy = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), shapes["params"]
    )
    stats = jax.tree_util.tree_map_with_path(
        lambda path, x: np.full(x.shape, path[-1].key == "var", x.dtype),
        shapes["stats"],
    )
    variables = {
        **w,
        "policy": policy,
        "stats": {"model": w["stats"]["model"], "policy": stats},
    }
    run = jax.jit(
        lambda w: gated(TASK, network, "softmax", Parts())(
            w, frozen, X, jnp.asarray(ALL), False, KEY
        )
    )
    s = np.asarray(run(variables)[2])
    h, _ = oracle.forward(oracle.variables(w), X.astype(np.float64))
    first, second = np.split(
        policy_by_hand(policy, h * np.asarray(frozen.vector), norm, activation),
        2,
        axis=1,
    )
    np.testing.assert_allclose(
        s, 1 / (1 + np.exp(first - second)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("policy", ["softmax", toy.slow("gumbel")])
def test_a_prediction_is_the_personal_models(policy):
    """Under the received extractor and policy network, the vector of the client's head
    and both heads."""
    _, state, _ = train(policy=policy)
    f, program = toy.federation(), toy.program(factory, TASK, {"policy": policy})
    key = clients_key(KEY, 2)
    # of the client's main stream
    key = jax.random.fold_in(jax.random.fold_in(key, 0), 1)
    server, own = state.server, toy.rows(state.clients["head"], 1)
    w = {
        "body": server["body"],
        "head": own,
        "policy": server["policy"],
        "stats": server["stats"],
    }
    frozen = Frozen(server["body"], server["head"], jax.jit(client_vector)(own))
    x = f.examples.x[:6]
    got = jax.jit(program.predict)(
        Context(KEY, program.traced, f, jnp.int32(2)), state, 1, x
    )
    got, *alone = np.moveaxis(np.asarray(got), -1, 0)
    assert_close(got, forward(w, frozen, policy, key=key, x=x)[0])
    assert_close(sum(alone), got)  # the heads are linear, each with its bias
    others = toy.rows(state.clients["head"], 0)
    assert (
        np.abs(
            np.asarray(got)
            - forward({**w, "head": others}, frozen, policy, key=key, x=x)[0]
        ).max()
        > 1e-2
    )


# --- ablations

# the columns of Table 1
ABLATIONS = [
    (),
    ("cs",),
    ("ss",),
    ("cs", "ss"),
    ("gfm",),
    ("cpn",),
    ("cpn", "gfm"),
    ("cpn", "gh"),
    ("cpn", "gfm", "gh"),
]


def shares(on, change_sample=False, change_client=False):
    w, frozen = start(**on._asdict())
    frozen = (
        frozen._replace(vector=-np.asarray(frozen.vector)) if change_client else frozen
    )
    return np.asarray(forward(w, frozen, on=on, x=X[::-1] if change_sample else X)[2])


@pytest.mark.parametrize(
    "ss, cs", [(True, True), (True, False), (False, True), (False, False)]
)
def test_what_the_policy_sees(ss, cs):
    without, sample, client = Parts(ss=ss, cs=cs), ss, cs
    before = shares(without)
    assert np.any(shares(without, change_sample=True) != before) == bool(sample)
    assert np.any(shares(without, change_client=True) != before) == bool(client)
    assert np.all(before == before[:1]) != bool(sample)
    assert np.any(before != 0.5)


@pytest.mark.slow
def test_without_mmd_is_lam_zero():
    assert_close(train(gfm=False)[1], train(lam=0.0)[1])


def test_without_a_policy_both_heads_see_everything():
    w, frozen = start(cpn=False)
    out, h, s, _ = forward(w, frozen, on=Parts(cpn=False))
    both = jax.jit(
        lambda h: TASK.model.head(frozen.head, h) + TASK.model.head(w["head"], h)
    )
    assert_close(out, both(h))
    assert s is None and w["policy"] == {}


def test_without_a_global_head_its_bias_goes_too():
    w, frozen = start(cpn=False, gh=False)
    out, h, _, _ = forward(w, frozen, on=Parts(cpn=False, gh=False))
    assert frozen.head == ()
    assert_same(out, jax.jit(TASK.model.head)(w["head"], h))


@pytest.mark.parametrize("without", ABLATIONS)
def test_what_an_ablation_sends(without):
    body, head, policy = 6 * 8 + 8, 8 * C + C, 8 * 16 + 16 + 2 * 16
    sent = body + head * ("gh" not in without) + policy * ("cpn" not in without)
    method = factory(TASK, **dict.fromkeys(without, False))
    traffic = toy.sent(method, toy.cohort(TASK, [0, 1], [True, False]))
    np.testing.assert_array_equal(traffic.down, [sent, 0])
    np.testing.assert_array_equal(traffic.up, [sent, 0])


# --- bad input


def test_a_head_that_is_not_linear_is_refused():
    model = TASK.model._replace(
        init=lambda key: {"body": {}, "head": {"w": jnp.zeros(3)}, "stats": {}}
    )
    with pytest.raises(InputError, match="one linear layer"):
        factory(TASK._replace(models=(model,))).init(KEY)


@pytest.mark.slow
def test_after_training_the_vector_is_still_that_of_the_head_before(monkeypatch):
    """Plain SGD leaves it anyway: the gradients of a cross entropy by the logits sum to
    0 over the classes."""
    monkeypatch.setattr(
        evaluation,
        "post",
        lambda cohort, c, predictor, score: {"acc": predictor(X, ALL)[0, 0, 0]},
    )
    # compiled anew
    begin, state, metrics = train(DECAYED._replace(), alone(), rounds=1)
    trained, before = (toy.rows(s.clients["head"], 1) for s in (state, begin))
    w = {**state.server, "head": trained}
    logit = lambda head: forward(
        w, Frozen(w["body"], begin.server["head"], jax.jit(client_vector)(head))
    )[0][0, 0]
    np.testing.assert_allclose(metrics.post["acc"][1], logit(before), rtol=1e-5)
    assert abs(logit(before) - logit(trained)) > 1e-3


def test_an_extractor_as_it_was_received_has_no_distance():
    """Both normalise by the batch, whatever the running statistics are."""
    v = NORM.model.init(KEY)
    stats = {"model": jax.tree.map(lambda x: x + 1, v["stats"]), "policy": {}}
    variables = {"body": v["body"], "head": v["head"], "policy": {}, "stats": stats}
    frozen = Frozen(v["body"], v["head"], client_vector(v["head"]))
    batch = Batch(X, np.arange(6) % C, np.arange(6) < 5, np.arange(6))
    value = lambda lam: objective(
        NORM, gated(NORM, None, "softmax", Parts(cpn=False)), frozen, lam
    )(variables, batch, KEY)[0]
    assert_close(*jax.jit(lambda: (value(50.0), value(0.0)))(), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, one",
    [
        (
            lambda lr: optax.chain(
                optax.add_decayed_weights(0.01), optax.sgd(lr, momentum=0.9)
            ),
            True,
        ),
        toy.slow(optax.adam, False),
    ],
)
def test_under_sgd_all_clients_keep_one_vector(rule, one):
    got = toy.train("fedcp", toy.task(optimizer=rule), rounds=2)
    vectors, begin = (
        np.asarray(jax.vmap(client_vector)(s.clients["head"]))
        for s in (got.state, got.begin)
    )
    assert np.allclose(vectors, begin, atol=1e-5) == one
    kernels = got.state.clients["head"]["kernel"]
    assert np.abs(kernels - kernels[:1]).max() > 0.1
