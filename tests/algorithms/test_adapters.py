"""Methods of adapters: HetLoRA with one rank is FedAvg, FLoRA's mean is exact, pFedLoRA
without its adapter is Local, and what they send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import traverse_util

from fedjax_pfl import averaging, models, simulate
from fedjax_pfl.algorithms import ALGORITHMS, fedsa_lora, flora, hetlora, pfedlora
from fedjax_pfl.algorithms.hetlora import _layers
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import low_rank
from fedjax_pfl.models.adapted import A, B, shifted
from fedjax_pfl.types import Metrics

TASK = toy.task("lora")
RANK = 3


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def close(a, b, tolerance=1e-5):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def alone(made, state):
    """The server after a round of each client by itself."""
    ids, found = np.arange(toy.N), []
    for i in ids:
        one = toy.cohort(TASK, ids, active=ids == i)
        key = jax.random.key(1)
        found.append(toy.one_round(made, key, state, one)[0].server)
    return found


def test_hetlora_with_one_rank_is_fedavg():
    plain = {"rank_min": RANK, "gamma": 1.0, "lam": 0.0, "by_norm": False}
    found, wanted = toy.train("hetlora", TASK, **plain), toy.train("fedavg", TASK)
    close(found.state.server, wanted.state.server)


def test_fedsa_lora_averages_a_and_keeps_b_and_the_head():
    """In the first round clients train what Local trains."""
    found, alone = (
        toy.train(name, TASK, rounds=1).state for name in ("fedsa_lora", "local")
    )
    own, trained = found.clients, alone.clients
    close(own["head"], trained["head"])
    sizes = np.asarray(TASK.sizes, np.float32)
    flat, kept, shared = (
        traverse_util.flatten_dict(x["body"]) for x in (trained, own, found.server)
    )
    kept, shared = (
        {path: x for path, x in tree.items() if x is not None}
        for tree in (kept, shared)
    )
    assert {path[-1] for path in kept} == {B} and all(A in path for path in shared)
    close({path: flat[path] for path in kept}, kept)
    mean = {path: np.tensordot(sizes / sizes.sum(), flat[path], 1) for path in shared}
    close(mean, shared)


def test_hetlora_truncates_and_prunes():
    free = toy.train("hetlora", TASK, gamma=1.0)
    ranks = np.asarray(free.state.clients["rank"])
    assert ranks.min() >= 1 and ranks.max() <= RANK and len(set(ranks)) > 1
    # a strong regulariser shrinks what pruning would remove
    pruned = toy.train("hetlora", TASK, gamma=0.5, lam=1.0, rank_min=1)
    after = np.asarray(pruned.state.clients["rank"])
    assert (after <= ranks).all() and (after < ranks).any() and after.min() >= 1


def test_hetlora_weighs_by_the_norms_of_the_products():
    made = hetlora(TASK, gamma=1.0)
    state = made.init(jax.random.key(0))
    ids = np.arange(toy.N)
    cohort = toy.cohort(TASK, ids)
    new, _ = toy.one_round(made, jax.random.key(1), state, cohort)
    # each client alone gives its own A and B
    own = [server["body"] for server in alone(made, state)]
    norms = []
    for body in own:
        products = [np.linalg.norm(a @ b) for a, b in _layers(body)]
        norms.append(np.sqrt(np.sum(np.square(products))))
    weights = np.array(norms) / np.sum(norms)
    mean = jax.tree.map(
        lambda *x: sum(w * y for w, y in zip(weights, x, strict=True)), *own
    )
    close(new.server["body"], mean, 1e-4)


def test_hetlora_counts_the_columns_of_a_clients_rank():
    made = hetlora(TASK, gamma=1.0, by_norm=False)
    state = made.init(jax.random.key(0))
    cohort = toy.cohort(TASK, np.arange(toy.N))
    ranks = state.clients["rank"]
    metrics = Metrics(clients={"rank": ranks.astype(jnp.float32)})
    found = made.traffic(state, cohort, metrics)
    body, head = (
        sum(x.size for x in leaves(state.server[k])) for k in ("body", "head")
    )
    np.testing.assert_array_equal(found.up, head + body // RANK * np.asarray(ranks))
    np.testing.assert_array_equal(found.down, found.up)


def test_masks_cut_columns_of_a_and_rows_of_b():
    body = hetlora(TASK).init(jax.random.key(0)).server["body"]
    ones = jax.tree.map(jnp.ones_like, body)
    ((a, b),) = _layers(low_rank.masked(ones, jnp.arange(RANK) < 1))
    assert a.shape == (6, RANK) and b.shape == (RANK, 8)
    assert a[:, 0].all() and not a[:, 1:].any() and b[0].all() and not b[1:].any()


@pytest.mark.parametrize("rank_min", [1, toy.slow(None)])
def test_flora_adds_the_weighted_mean_of_the_products(rank_min):
    made = flora(TASK, rank_min=rank_min)
    state = made.init(jax.random.key(0))
    ids, p = np.arange(toy.N), TASK.sizes / TASK.sizes.sum()
    cohort = toy.cohort(TASK, ids)
    new, _ = toy.one_round(made, jax.random.key(1), state, cohort)
    own = [server["delta"] for server in alone(made, state)]
    mean = jax.tree.map(
        lambda *x: sum(w * np.asarray(y) for w, y in zip(p, x, strict=True)), *own
    )
    close(new.server["delta"], mean, 1e-6)
    # clients of lower rank send products of that rank
    found = np.array([np.linalg.matrix_rank(leaves(x)[0], tol=1e-5) for x in own])
    ranks = np.asarray(state.clients["rank"])
    assert (found <= ranks).all() and found.max() > 1
    assert rank_min or (ranks == RANK).all()


def test_stacked_matrices_have_the_mean_of_the_products():
    """The product of the means of A and B differs from it."""
    rng, p = np.random.default_rng(0), jnp.array([0.5, 0.0, 0.2, 0.3])
    a, b = rng.normal(size=(4, 2, 5, 3)), rng.normal(size=(4, 3, 7))
    a[1] = np.nan
    bodies = {"one": {A: {"kernel": jnp.float32(a)}, B: jnp.float32(b)}}
    found = low_rank.products(low_rank.stacked(bodies, p))["one"]["kernel"]
    each, p = (
        np.einsum("k...ir,kro->k...io", a, b)[[0, 2, 3]],
        np.array([0.5, 0.2, 0.3]),
    )
    mean = np.tensordot(p, each, 1)
    np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-6)
    a, b = (np.tensordot(p, x[[0, 2, 3]], 1) for x in (a, b))
    assert np.linalg.norm(a @ b - mean) > 0.1 * np.linalg.norm(mean)


@pytest.mark.parametrize("method", ["fedavg", toy.slow("hetlora")])
def test_the_error_of_averaging_a_and_b_is_a_metric(method):
    """It is that of the clients' own results."""
    task = TASK._replace(metrics=("lora_error",))
    given = {"gamma": 1.0} if method == "hetlora" else {}
    made = ALGORITHMS[method](task, **given)
    state, ids = made.init(jax.random.key(0)), np.arange(toy.N)
    cohort = toy.cohort(task, ids)
    _, metrics = toy.one_round(made, jax.random.key(1), state, cohort)
    own = [_layers(server["body"])[0] for server in alone(made, state)]
    (a, b), p = zip(*own, strict=True), TASK.sizes
    if method == "hetlora":
        p = np.linalg.norm([x @ y for x, y in zip(a, b, strict=True)], axis=(1, 2))
    a, b, p = np.stack(a), np.stack(b), p / p.sum()
    exact = np.einsum("k,kir,kro->io", p, a, b)
    error = exact - np.tensordot(p, a, 1) @ np.tensordot(p, b, 1)
    wanted = np.linalg.norm(error) / np.linalg.norm(exact)
    assert wanted > 0.01
    np.testing.assert_allclose(metrics.server["lora_error"], wanted, rtol=1e-3)


def test_the_error_is_refused_where_nobody_averages_both():
    task = TASK._replace(metrics=("lora_error",))
    with pytest.raises(InputError, match="fedsa_lora: the metric lora_error needs"):
        simulate.program("fedsa_lora", task)
    found = toy.one_round(
        flora(task),
        jax.random.key(1),
        flora(task).init(jax.random.key(0)),
        toy.cohort(task, np.arange(toy.N)),
    )[1].server
    assert float(found["lora_error"]) == 0


def test_flora_predicts_with_the_products_in_the_base():
    """So do the merged weights, and a warm start counts its adapters once."""
    made, key = flora(TASK), jax.random.key(0)
    warm = TASK.model.init(key)
    warm = warm | {"body": jax.tree.map(lambda x: x + 0.1, warm["body"])}
    model = TASK.model._replace(init=lambda key: warm)
    server = flora(TASK._replace(models=(model,))).init(key).server
    x = jax.random.normal(key, (7, *toy.SHAPE))
    wanted = model.apply(warm, x)[0]
    here = shifted(TASK.model, server["delta"])
    w = {"body": server["adapter"], "head": server["head"], "stats": {}}
    close(here.apply(w, x)[0], wanted)
    close(models.merged(here, w), models.merged(model, warm))
    # without `delta` the base predicts otherwise
    assert not np.allclose(TASK.model.apply(w, x)[0], wanted, atol=1e-3)
    assert not leaves(made.init(key).server["delta"])[0].any()


def test_flora_counts_the_columns_that_a_client_missed():
    made = flora(TASK, rank_min=1)
    state = made.init(jax.random.key(0))
    state.server["columns"] = jnp.int32(7)
    state.clients["columns"] = jnp.array([7, 6, 5, 4, 0], jnp.int32)
    found = made.traffic(state, toy.cohort(TASK, np.arange(toy.N)), Metrics())
    head = sum(x.size for x in leaves(state.server["head"]))
    # of 6 + 8 scalars, at most the 6 x 8 of their sum
    np.testing.assert_array_equal(found.down, head + np.array([0, 14, 28, 42, 48]))
    ranks = np.asarray(state.clients["rank"])
    np.testing.assert_array_equal(found.up, head + 14 * ranks)


def test_flora_needs_lora():
    with pytest.raises(InputError, match="flora needs a model whose body is LoRA"):
        flora(toy.task())


def test_fedsa_lora_needs_lora():
    with pytest.raises(InputError, match="fedsa_lora needs a model whose A is trained"):
        fedsa_lora(toy.task())
    how = models.lora(
        2, where="dense", train="b"
    )  # A is frozen: nothing would be shared
    frozen = models.adapted(toy.tiny_mlp, how, toy.SHAPE, toy.C)
    with pytest.raises(InputError, match="whose A is trained"):
        fedsa_lora(TASK._replace(models=(frozen,)))


def test_hetlora_needs_lora():
    with pytest.raises(InputError, match="LoRA alone"):
        hetlora(toy.task())


def test_pfedlora_without_its_adapter_is_local():
    alone = toy.train("local", toy.task())
    found = toy.train("pfedlora", toy.task(), mu=0.0, adapter_epochs=0)
    own = averaging.params(found.state.clients["w"])
    close(own, averaging.params(alone.state.clients), 1e-6)
    start = pfedlora(toy.task()).init(jax.random.key(0)).server["adapter"]
    assert not found.state.server["adapter"]["b"].any() and not start["b"].any()


def test_pfedloras_parts_are_trained_in_turns():
    """In the first round the own models do not depend on the adapter's training."""
    one = lambda epochs: toy.train(
        "pfedlora", toy.task(), rounds=1, adapter_epochs=epochs
    )
    still, moved = one(0), one(1)
    close(still.state.clients["w"], moved.state.clients["w"], 1e-7)
    assert moved.state.server["adapter"]["b"].any()


def test_pfedlora_needs_one_feature_width():
    small = toy.task().shared
    task = toy.task()._replace(
        models=(toy.task().model, small), architecture=np.arange(toy.N) % 2
    )
    with pytest.raises(InputError, match="one feature width"):
        pfedlora(task)
