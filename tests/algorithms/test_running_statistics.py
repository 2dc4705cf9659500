"""Running statistics of batch norm: kept at the server, by each client or not at all."""

import jax
import pytest
import toy

CASES = [
    ("apfl", {}),
    ("feddf", {}),
    ("fedem", {"components": 2}),
    ("fedfomo", {}),
    ("fedphp", {}),
    ("fedrod", {}),
    ("mnfl", {"coef_lr": 1.0}),
    ("per_fedavg", {}),
    ("pfedc", {"download": "stale"}),
    ("pfedhn", {}),
    ("pfedme", {}),
    ("scaffold", {}),
    *(("fedala", {"blended": blended}) for blended in ("all", "head", "none")),
]


# the contract has a round with local statistics
@pytest.mark.slow
@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
@pytest.mark.parametrize("method, hparams", CASES)
def test_clients_keep_local_statistics_only(method, hparams, bn_stats):
    got = toy.train(method, toy.task("norm", bn_stats=bn_stats), 2, **hparams)
    toy.assert_finite((got.state, got.metrics.loss, got.outputs()))
    kept = got.state.clients
    own = jax.tree.leaves(kept.get("own", kept) if isinstance(kept, dict) else kept)
    assert bool(own) == (bn_stats == "local")
    # all began alike: each has seen its own batches since
    assert all((x[0] != x[1]).any() for x in own)
