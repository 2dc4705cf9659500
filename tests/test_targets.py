"""Tasks without one class per example: regression and several labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import evaluation, losses, models, simulate, testing
from fedjax_pfl.algorithms import ALGORITHMS, registry
from fedjax_pfl.data import datasets, federate, partitioners
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets
from fedjax_pfl.testing import synthetic
from fedjax_pfl.types import Client, Data, Examples

D = 3
REGRESSION = jax.ShapeDtypeStruct((synthetic.C,), jnp.float32)
LABELS = jax.ShapeDtypeStruct((synthetic.C,), bool)
CHECKED = ("fedavg", "ditto", "apfl", "pfedme", "per_fedavg", "fedamp", "fedfomo")


def rows(seed=0, n=7):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, D)).astype(np.float32), np.arange(n) < n - 2


def scored(score, outputs, y, mask):
    examples = Examples(jnp.zeros((len(y), 1)), jnp.asarray(y))
    data = Data(examples, jnp.arange(len(y)), jnp.int32(mask.sum()), lambda x: x)
    count = jnp.zeros(D, jnp.int32)
    client = Client(0, None, data, data, data, None, count, None, 0)
    found = score(jnp.asarray(outputs), jnp.asarray(y), jnp.asarray(mask), client)
    return {name: float(evaluation.ratio(*pair)) for name, pair in found.items()}


def test_scores_of_regression_are_their_definitions():
    (outputs, mask), (y, _) = rows(0), rows(1)
    found = scored(evaluation.classification, outputs, y, mask)
    a, b = outputs[mask], y[mask]
    assert found["mse"] == pytest.approx(np.mean((a - b) ** 2), rel=1e-5)
    assert found["mae"] == pytest.approx(np.mean(abs(a - b)), rel=1e-5)
    r2 = 1 - ((a - b) ** 2).sum(0) / ((b - b.mean(0)) ** 2).sum(0)
    assert found["r2"] == pytest.approx(r2.mean(), rel=1e-4)
    assert found["mse_mean"] == pytest.approx(np.mean((b - b.mean(0)) ** 2), rel=1e-4)
    loss = losses.squared_error(jnp.asarray(outputs), jnp.asarray(y), jnp.asarray(mask))
    assert loss == pytest.approx(found["mse"], rel=1e-5)


def test_scores_of_several_labels_are_their_definitions():
    (outputs, mask), (y, _) = rows(0), rows(1)
    found = scored(evaluation.classification, outputs, y > 0, mask)
    a, b = outputs[mask] > 0, y[mask] > 0
    f1 = 2 * (a & b).sum(0) / (a.sum(0) + b.sum(0))
    assert found["f1"] == pytest.approx(f1.mean(), rel=1e-5)
    assert found["exact"] == pytest.approx((a == b).all(1).mean(), rel=1e-5)
    assert found["hamming"] == pytest.approx((a == b).mean(), rel=1e-5)
    loss = losses.binary_cross_entropy(
        jnp.asarray(outputs), jnp.asarray(y > 0), jnp.asarray(mask)
    )
    p = 1 / (1 + np.exp(-outputs[mask]))
    assert loss == pytest.approx(-np.log(np.where(b, p, 1 - p)).mean(), rel=1e-4)


@pytest.mark.parametrize(
    "label",
    [REGRESSION, toy.slow(LABELS)],
    ids=["regression", "labels"],
)
@pytest.mark.parametrize(
    "algo", [name if name == "ditto" else toy.slow(name) for name in CHECKED]
)
def test_the_contract_holds_on_targets(algo, label):
    s = testing.subject(ALGORITHMS[algo], testing.task(label=label))
    for rule in ("padding", "mask", "inactive", "scores"):
        testing.check(rule, s)


@pytest.mark.parametrize("algo", ["fedproto", "fedrod", "fml", "pfedc"])
def test_methods_that_need_classes_say_so(algo):
    task = testing.task(label=REGRESSION)
    task = task._replace(shared=task.models[0])
    with pytest.raises(InputError, match=f"{algo} takes no `label` .* one class per"):
        simulate.program(ALGORITHMS[algo], task)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo", [m for m, why in registry.EXCLUDES.items() if "label" not in why]
)
def test_methods_on_targets_make_a_program(algo):
    task = testing.task(label=REGRESSION)
    small = task.models[0] if algo == "pfedafm" else None
    simulate.program(ALGORITHMS[algo], task._replace(shared=small))


def linear(n=240, seed=0):
    """A linear relation [n, 2], another one for each of three sensors."""
    draw = np.random.default_rng(seed)
    x, sensor = draw.normal(size=(n, 4)), np.arange(n) % 3
    w = draw.normal(size=(3, 4, 2))
    y = np.einsum("ni,nij->nj", x, w[sensor])
    return datasets.from_arrays(x, y, columns={"sensor": sensor})


def test_local_models_learn_the_relations_of_their_clients():
    data = linear()
    p = partitioners.partition(data, "natural:sensor", num_clients=None, seed=0)
    f = federate.federate(data, p)
    model = models.model("linear", (4,), 2)
    task = simulate.task(data, f, model, lr=0.1, batch_size=10, epochs=10)
    program = simulate.program(ALGORITHMS["local"], task)
    *_, last = simulate.rounds(program, jax.random.key(0), f, rounds=3, eval_every=3)
    assert (last.pre["r2"] > 0.99).all() and (last.pre["mse"] < 0.05).all()


def test_several_labels_have_average_precision_on_request():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 4)).astype(np.float32)
    data = datasets.from_arrays(x, x[:, :3] > 0)
    p = partitioners.partition(data, "iid", num_clients=2, seed=0)
    f = federate.federate(data, p)
    assert np.array_equal(f.class_counts[0], data.y[p.train[0]].sum(0))
    net = lambda shape, classes, rngs: nets.linear(shape, classes, rngs)
    model = models.model(net, (4,), 3)
    task = simulate.task(
        data, f, model, lr=1.0, batch_size=10, epochs=10, metrics=("ap",)
    )
    program = simulate.program(ALGORITHMS["fedavg"], task)
    *_, last = simulate.rounds(program, jax.random.key(0), f, rounds=2, eval_every=2)
    assert (last.pre["f1"] > 0.9).all() and (last.pre["ap"] > 0.95).all()
