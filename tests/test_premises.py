"""The numbers of a method's mechanism, on planted states."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from benchmarks import latents, premises
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.types import State


def run_of(server=(), clients=(), scores=None, **config):
    task = SimpleNamespace(num_clients=4, class_counts=np.eye(4)[[0, 1, 0, 2]])
    return SimpleNamespace(
        config=config,
        state=lambda: State(server, clients),
        summary={"scores": scores},
        experiment=SimpleNamespace(task=task),
    )


@pytest.mark.parametrize("shift, same", [("label_offset:0,5", 0.5), (None, 1.0)])
def test_uniform_coefficients_have_the_share_of_a_concept(shift, same):
    a = np.full((4, 4), 0.25)
    found = premises.coefficients(run_of({"coefficients": a}, shift=shift))
    assert found == {
        "own_concept": same,
        "uniform": same,
        "self": 0.25,
        "farthest": 0.0,
        "common": 0.25,
        "disjoint": 0.25,
    }


def test_coefficients_on_the_own_concept():
    a = np.array([[0.6, 0, 0.4, 0], [0, 0.5, 0, 0.5]] * 2)
    found = premises.coefficients(run_of({"coefficients": a}, shift="label_offset:0,5"))
    assert found["own_concept"] == 1 and found["uniform"] == 0.5
    assert found["farthest"] == pytest.approx(0.35)
    assert found["common"] == pytest.approx(0.5)
    assert found["disjoint"] == pytest.approx(0.1)


def test_a_mixture_is_compared_with_its_parts():
    scores = {"post/acc": 0.8, "post/large_acc": 0.5, "post/small_acc": 0.9}
    found = premises.mixture(run_of(clients={"alpha": np.eye(2)}, scores=scores))
    expected = {"alpha": 0.5, "alpha_std": 0.5, "mixed": 0.8, "own": 0.5, "shared": 0.9}
    assert found == expected


def test_tasks_in_conflict(tmp_path):
    """Two tasks at equal heads want the opposite of the features of either's images."""
    settings = {"algo": "pfedc", "model": "mlp", "clients": 3, "data_fraction": 0.3}
    e = build(Config(**settings, partition="iid", devices="1"))
    state = e.alone.unplace(e.alone.init(e.key, e.traced))
    head = jax.tree.map(jnp.zeros_like, state.server["head"])
    head["kernel"] = head["kernel"].at[:, ::2].set(1e-3).at[:, 1::2].set(-1e-3)
    server = {**state.server, "head": head}
    run = run_of(server, **e.config.flat())
    run.experiment = e
    # most images are "no" for both of two tasks, whose logits have opposite signs
    found = premises.conflict(run)
    assert 0.5 < found["negative"] < 0.6 and found["norms"] >= 1
    head["kernel"] = jnp.abs(head["kernel"])
    assert premises.conflict(run)["cosine"] > 0.5


def test_a_policy_is_worth_nothing_where_it_is_constant():
    settings = {"algo": "fedcp", "model": "mlp", "clients": 3, "data_fraction": 0.3}
    e = build(Config(**settings, partition="dirichlet", devices="1"))
    state = e.alone.unplace(e.alone.init(e.key, e.traced))
    theta = jax.tree.map(jnp.zeros_like, state.server["policy"])
    run = run_of(**e.config.flat())
    run.experiment = e
    run.state = lambda: State({**state.server, "policy": theta}, state.clients)
    found = premises.policy(run)
    assert found["ratio"] == 0.5 and found["entropy"] == pytest.approx(1)
    assert found["by_sample"] == found["by_client"] == 0
    assert found["own"] == found["mean"] and found["own_rare"] == found["mean_rare"]
    run.state = lambda: state
    assert premises.policy(run)["by_sample"] > 0


def planted(of_kind, of_client, noise, seed=0):
    """Returns images' latents of 8 clients, clients k and k + 4 having kind k."""
    rng = np.random.default_rng(seed)
    kinds, clients = rng.normal(size=(4, 3)), rng.normal(size=(8, 3))
    rows = [
        {"client": k, "kind": str(k % 4), "c": of_kind * kinds[k % 4] + x}
        for k in range(8)
        for x in of_client * clients[k] + noise * rng.normal(size=(30, 3))
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "given, kind, client, bits",
    [
        ((10, 0, 0.1), (1.0, 1.0), (0.0, 0.7), (1.8, 2.0)),  # the kind alone
        ((0, 10, 0.1), (0.0, 0.8), (0.95, 1.0), (-1e9, 1.5)),  # the client alone
        ((0, 0, 1.0), (0.1, 0.4), (0.0, 0.3), (-0.2, 0.1)),  # noise
    ],
)
def test_a_probe_with_the_client_held_out_tells_kinds_from_clients(
    monkeypatch, given, kind, client, bits
):
    monkeypatch.setattr(latents, "views", lambda run: planted(*given))
    found = premises.personal_latent(run_of())
    assert found["kind_chance"] == 0.25 and found["client_chance"] == 0.125
    for name, (low, high) in (("kind", kind), ("client", client), ("bits", bits)):
        assert low <= found[name] <= high, (name, found)


def test_a_constant_latent_has_no_spread_within_clients(monkeypatch):
    monkeypatch.setattr(latents, "views", lambda run: planted(1, 1, 1e-4))
    assert premises.personal_latent(run_of())["spread"] < 1e-3
