"""What is tried before a run: the form of the convolutions, and where a choice is kept."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from experiments import build, layouts, settings
from fedjax_pfl import models, simulate
from fedjax_pfl.data import federate, partitioners
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.engine import autotune
from fedjax_pfl.models import layers, nets

SHAPE = (8, 8, 1)


class Body(nnx.Module):
    """One convolution, pooled: fused unless the form is "matmul" or "xla"."""

    def __init__(self, rngs):
        self.conv = layers.conv(1, 2, 3, 0, rngs)

    def __call__(self, x):
        return layers.conv_pool(self.conv, x).reshape(len(x), -1)


def tiny(input_shape, num_classes, rngs):
    return nets.Net(Body(rngs), layers.linear(18, num_classes, rngs))


def chosen(net=tiny, shape=SHAPE, clients=6, devices=1, fits=lambda _: True):
    """`choose_form` for a model on random images."""
    model = lambda form: models.model(net, shape, 3, conv=form)
    rng = np.random.default_rng(0)
    prepare = lambda x: x.astype(jnp.float32)
    data = Dataset("random", rng.normal(size=(60, *shape)).astype(np.float32), np.arange(60) % 3, 60, 3, prepare)
    f = federate.federate(data, partitioners.partition(data, "iid", num_clients=6, seed=0))
    task = simulate.task(data, f.class_counts, model("auto"), lr=0.1, batch_size=4, epochs=1)
    return autotune.choose_form(task, model, f, clients, devices, fits)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path))
    return tmp_path / "layout"


@pytest.fixture
def tried(monkeypatch, cache):
    """What was tried, {form: the other arguments}, and the seconds that each is said to take, which a test may set."""
    seen, seconds = [], {"xla": 3.0, "winograd": 2.0, "matmul": 1.0}

    def times(candidates, federation, devices):
        seen.append({form: (*candidate[1:], devices) for form, candidate in candidates.items()})
        return {form: seconds[form] for form in candidates}

    monkeypatch.setattr(autotune, "_times", times)
    return seen, seconds


def test_a_form_is_timed_once_said_and_remembered(cache, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    with caplog.at_level(logging.INFO, autotune.__name__):
        form = chosen(devices=2)
    (said,), (file,) = caplog.messages, cache.iterdir()
    kept = json.loads(file.read_text())
    assert form in kept["seconds_per_step"] and kept["seconds_per_step"].keys() == {"winograd", "matmul"}
    assert all(0 < seconds < 60 for seconds in kept["seconds_per_step"].values())
    assert said.startswith("Convolutions: winograd takes ") and ", matmul takes " in said
    monkeypatch.setattr(autotune, "_times", None)
    for matmul, choice in ((1.0, "matmul"), (3.0, "winograd")):
        file.write_text(json.dumps({"seconds_per_step": {"winograd": 2.0, "matmul": matmul}}))
        assert chosen(devices=2) == choice


def test_what_is_timed_trains(monkeypatch):
    trial = autotune._trial(toy.task(), 2, 3, toy.federation(), None)
    params, stats = trial.run()
    assert trial.steps == 4 * autotune.STEPS and not jax.tree.leaves(stats)
    assert np.isfinite(params["head"]["bias"]).all() and np.all(params["head"]["bias"] != 0)


def test_a_form_must_be_clearly_faster_than_the_usual_one(tried):
    seen, seconds = tried
    seconds["matmul"] = 1.95
    assert chosen() == "winograd"
    seconds["matmul"] = 1.0
    assert chosen() == "winograd" and len(seen) == 1  # remembered
    assert chosen(clients=1, devices=2) == "matmul"  # another layout is another choice
    assert seen == [{"winograd": (1, 1, 1), "matmul": (1, 1, 1)}, {"winograd": (1, 1, 2), "matmul": (1, 1, 2)}]


def test_an_accelerator_tries_more_forms_with_more_clients_at_once(tried, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(clients=20) == "matmul"
    assert chosen(clients=3) == "matmul"  # no wider than there are clients
    assert tried[0] == [dict.fromkeys(("xla", "matmul", "winograd"), (width, width, 1)) for width in (8, 3)]


def test_nothing_is_tried_where_there_is_nothing_to_choose(tried, monkeypatch, caplog):
    assert chosen("mlp") == "winograd"
    assert chosen("lenet_bn", (16, 16, 1)) == "winograd"  # few channels, pooled after the norm: all by matrix products
    assert chosen(fits=lambda width: width > 1) == "winograd"
    monkeypatch.setattr(autotune, "MANY", 1)
    with caplog.at_level(logging.INFO, autotune.__name__):
        assert chosen() == "winograd"
    assert caplog.messages == [
        "Convolutions: winograd, by their shapes; with 1 of them trying takes too long to compile."
    ]
    assert not tried[0]


def test_runs_that_start_together_take_the_times_of_the_first(cache, caplog):
    first, second = {1: 2.0, 4: 1.0}, {1: 1.0, 4: 2.0}
    path = cache / "x.json"
    assert autotune._remembered(path, first) == autotune._remembered(path, second) == first
    path.unlink(), cache.rmdir(), cache.write_text("")  # a cache that cannot be written
    assert autotune._remembered(path, second) == second
    assert "What was tried is not remembered" in caplog.messages[-1]


def test_a_width_pays_for_the_clients_that_wait(cache, monkeypatch, caplog):
    """Each width is timed once; the choice is then that of the clients at hand, and what is said is their time."""
    timed = [{1: 1.0, 2: 0.9, 4: 0.8}]
    monkeypatch.setattr(autotune, "_candidates", lambda clients: (1, 2, 4))
    monkeypatch.setattr(autotune, "_times", lambda *_: timed.pop())
    choose = lambda task: autotune.choose_width(task, toy.federation(), 4)
    with caplog.at_level(logging.INFO, autotune.__name__):
        assert choose(toy.task()) == 1
        assert choose(toy.task(sizes=np.full(5, 8))) == 4
    takes = "Width: 1 takes 1000000 us a client step, 2 takes {} us a client step, 4 takes {} us a client step"
    assert caplog.messages == [takes.format(1080000, 1600000), takes.format(900000, 800000)]


def test_why_nothing_is_tried_is_said(monkeypatch, caplog):
    choose = lambda clients: autotune.choose_width(toy.task(), toy.federation(), clients)
    with caplog.at_level(logging.INFO, autotune.__name__):
        assert choose(1) == 1
        monkeypatch.setattr(autotune, "LARGE", 10)
        assert choose(4) == 1
    assert ["no more clients" in caplog.messages[0], "a CPU is fastest so" in caplog.messages[1]] == [True, True]


def test_the_form_chosen_is_the_form_of_the_run(monkeypatch):
    def program(experiment):
        x = jnp.zeros((2, *experiment.task.input_shape))
        model = experiment.task.model
        return str(jax.make_jaxpr(lambda key: model.apply(model.init(key), x)[0])(experiment.key))

    user = {"algo": "fedavg", "model": "cnn_dropout", "data_fraction": 0.2, "clients": 5, "devices": "1"}
    given = []
    monkeypatch.setattr(layouts, "choose_form", lambda task, model, f, *most: given.append(most[:2]) or "xla")
    experiment = build.prepare(settings.resolve(user))
    assert experiment.conv == "winograd"
    for width in ("2", "9"):
        new, laid = layouts.choose(experiment, width, "2")
        assert new.conv == laid["conv"] == "xla" and laid["memory"]["peak"] > 0
    assert "conv_general_dilated" in program(new) and "conv_general_dilated" not in program(experiment)
    assert given == [(4, 2), (5, 2)]  # clients at once on both devices, at most
    monkeypatch.setattr(layouts, "choose_form", None)
    asked = build.prepare(settings.resolve(user | {"conv": "matmul"}), "matmul")
    same, laid = layouts.choose(asked, "2", "1")
    assert same is asked and laid["conv"] == "matmul"


def test_one_process_tries_for_all_with_its_part(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    experiment = build.prepare(settings.resolve({"algo": "fedavg", "model": "linear", "clients": 5}))
    assert layouts._part(experiment, 4)[:2] == (3, 2)
