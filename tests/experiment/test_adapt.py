"""Adapters of a run's network on the command line."""

import importlib
import json

import jax
import numpy as np
import pytest

from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import results
from fedjax_pfl.experiment.build import _known, base_of, build
from fedjax_pfl.experiment.config import Config, resolve
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.train import execute

CONFIG = Config(
    algo="fedavg",
    clients=4,
    partition="iid",
    data_fraction=0.2,
    model="mlp",
    lr=0.05,
    width="2",
    devices="1",
    rounds=2,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "base"
    execute([RunDirectory(path)], [CONFIG])
    return path


def last(path):
    return list(RunDirectory(path).rows("metrics.jsonl"))[-1]["pre/acc"]


def test_a_run_adapts_the_network_of_another(base, tmp_path):
    config = CONFIG.replace(base=str(base), adapt="lora:2:dense", rounds=1)
    path = tmp_path / "lora"
    execute([RunDirectory(path)], [config])
    # the start is the base, with its head
    assert next(RunDirectory(path).rows("metrics.jsonl"))["pre/acc"] == last(base)
    e = build(config)
    sizes = [
        sum(x.size for x in jax.tree.leaves(t))
        for t in (e.state_shapes(), e.federation.frozen)
    ]
    assert sizes[0] < sizes[1]
    hashes = json.loads((path / "partition.json").read_text())
    assert len(hashes["base"]) == 64
    state = results.load(path).state()  # the base is in no checkpoint
    with pytest.MonkeyPatch.context() as patch:  # nor is its data set needed
        patch.setattr(results, "rebuilt", None)
        module = importlib.import_module("fedjax_pfl.experiment.build")
        patch.setattr(module, "_load", None)
        for cached in (base_of, _known):
            cached.cache_clear()
        x = np.zeros((2, *e.dataset.x.shape[1:]), e.dataset.x.dtype)
        assert results.load(path).predictor(1)(x).shape == (2, 10)
    assert sum(x.size for x in jax.tree.leaves(state)) == sizes[0]


def test_cached_features_give_the_same_run(base, tmp_path):
    config = CONFIG.replace(base=str(base), adapt="head", rounds=2)
    paths = [tmp_path / name for name in "ab"]
    execute([RunDirectory(paths[0])], [config])
    execute([RunDirectory(paths[1])], [config.replace(feature_cache="float32")])
    rows = [list(RunDirectory(path).rows("metrics.jsonl")) for path in paths]
    for a, b in zip(*rows, strict=True):
        np.testing.assert_allclose(a["pre/acc"], b["pre/acc"], atol=1e-6)


def test_settings_that_need_each_other():
    for given, words in (
        ({"base": "x"}, "--base needs --adapt"),
        ({"adapt": "bias", "feature_cache": "float32"}, "needs --adapt=head"),
        ({"adapt": "lora:0"}, "`rank` must be in"),
        ({"adapt": "prompt"}, "must have TOKENS"),
        ({"adapt": "lora:2:where"}, "where"),
    ):
        with pytest.raises(InputError, match=words):
            resolve({"algo": "fedavg", **given})


def test_a_base_without_a_shared_body(tmp_path):
    path = tmp_path / "local"
    execute([RunDirectory(path)], [CONFIG.replace(algo="local", rounds=1)])
    with pytest.raises(InputError, match="no model that its clients shared"):
        build(CONFIG.replace(adapt="head", base=str(path)))
