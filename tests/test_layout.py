"""The form of the convolutions and the width: a table on a CPU; elsewhere what is
timed, and where it is kept."""

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


def chosen(net=tiny, shape=SHAPE, clients=6, devices=1):
    """`choose_form` for a model on random images."""
    model = lambda form: models.model(net, shape, 3, conv=form)
    rng = np.random.default_rng(0)
    prepare = lambda x: x.astype(jnp.float32)
    data = Dataset(
        "random",
        rng.normal(size=(60, *shape)).astype(np.float32),
        np.arange(60) % 3,
        60,
        3,
        prepare,
    )
    f = federate.federate(
        data, partitioners.partition(data, "iid", num_clients=6, seed=0)
    )
    task = simulate.task(
        data, f.class_counts, model("auto"), lr=0.1, batch_size=4, epochs=1
    )
    return autotune.choose_form(task, model, f, clients, devices)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path))
    return tmp_path / "layout"


@pytest.fixture
def accelerator(monkeypatch):
    """Candidates are timed, as on an accelerator; what runs does so on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def tried(monkeypatch, cache, accelerator):
    """What was tried, {form: the other arguments}, and the seconds that each is said to
    take, which a test may set."""
    seen, seconds = [], {"xla": 3.0, "winograd": 2.0, "matmul": 1.0}

    def times(candidates, federation, devices):
        seen.append(
            {form: (*candidate[1:], devices) for form, candidate in candidates.items()}
        )
        return {form: seconds[form] for form in candidates}

    monkeypatch.setattr(autotune, "_times", times)
    return seen, seconds


@pytest.mark.slow  # its parts are tested below
def test_a_form_is_timed_once_said_and_remembered(
    cache, accelerator, monkeypatch, caplog
):
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    with caplog.at_level(logging.INFO, autotune.__name__):
        form = chosen(devices=2)
    (said,), (file,) = caplog.messages, cache.iterdir()
    kept = json.loads(file.read_text())
    assert form in kept["seconds_per_step"] and kept["seconds_per_step"].keys() == {
        "xla",
        "winograd",
        "matmul",
    }
    assert all(0 < seconds < 60 for seconds in kept["seconds_per_step"].values())
    assert (
        said.startswith("Convolutions: xla takes ")
        and ", matmul takes " in said
        and ", winograd takes " in said
    )
    monkeypatch.setattr(autotune, "_times", None)
    for matmul, choice in ((1.0, "matmul"), (3.0, "xla")):
        file.write_text(
            json.dumps(
                {"seconds_per_step": {"xla": 2.0, "winograd": 2.5, "matmul": matmul}}
            )
        )
        assert chosen(devices=2) == choice


def test_what_is_timed_trains():
    trial = autotune._trial(toy.task(), 2, 3, toy.federation(), None)
    params, stats = trial.run()
    assert trial.steps == 4 * autotune.STEPS and not jax.tree.leaves(stats)
    assert np.isfinite(params["head"]["bias"]).all() and np.all(
        params["head"]["bias"] != 0
    )


def test_a_form_must_be_clearly_faster_than_the_usual_one(tried):
    seen, seconds = tried
    seconds |= {"matmul": 2.9, "winograd": 2.8}
    assert chosen() == "xla"
    seconds["matmul"] = 1.0
    assert chosen() == "xla" and len(seen) == 1  # remembered
    assert chosen(devices=2) == "matmul"  # another layout is another choice


def test_forms_are_tried_with_as_many_clients_at_once_as_there_are(tried):
    assert [chosen(clients=20), chosen(clients=3), chosen(clients=6, devices=2)] == [
        "matmul"
    ] * 3
    layouts = [(8, 8, 1), (3, 3, 1), (3, 3, 2)]  # width, clients, devices
    assert tried[0] == [
        dict.fromkeys(("xla", "matmul", "winograd"), each) for each in layouts
    ]


def test_what_cannot_be_compiled_is_left_out(tried, monkeypatch, caplog):
    def refused(*_):
        raise jax.errors.JaxRuntimeError("no room\nand more")

    trial = lambda task, *_: autotune._Trial(
        refused if task == "large" else lambda: jnp.zeros(1), 1
    )
    monkeypatch.undo()
    monkeypatch.setattr(autotune, "_trial", trial)
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    with caplog.at_level(logging.INFO, autotune.__name__):
        assert autotune._times(
            {8: ("small", 8, 8), 32: ("large", 32, 32)}, None, 1
        ).keys() == {8}
    assert caplog.messages == ["32 is left out: no room"]


def test_nothing_is_tried_where_there_is_nothing_to_choose(tried, monkeypatch):
    assert chosen("mlp") == "xla"
    monkeypatch.setattr(autotune, "MANY", 1)
    assert chosen() == "xla"
    assert not tried[0]


def test_on_a_cpu_nothing_is_timed(monkeypatch):
    """The form goes by the shapes; only a small network without convolutions trains
    several clients at once."""
    monkeypatch.setattr(autotune, "_times", None)
    assert chosen() == chosen("lenet_bn", (16, 16, 1)) == "winograd"
    choose = lambda task, clients: autotune.choose_width(
        task, toy.federation(), clients, 2
    )
    assert [choose(toy.task(), clients) for clients in (1, 3, 100)] == [1, 2, 4]
    images = toy.task(
        model=models.model(tiny, SHAPE, 3),
        input=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
    )
    assert choose(images, 100) == 1
    monkeypatch.setattr(autotune, "LARGE", 10)
    assert choose(toy.task(), 100) == 1


def test_runs_that_start_together_take_the_times_of_the_first(cache, caplog):
    first, second = {1: 2.0, 4: 1.0}, {1: 1.0, 4: 2.0}
    path = cache / "x.json"
    assert (
        autotune._remembered(path, first) == autotune._remembered(path, second) == first
    )
    path.unlink(), cache.rmdir(), cache.write_text("")  # a cache that cannot be written
    assert autotune._remembered(path, second) == second
    assert "What was tried is not remembered" in caplog.messages[-1]


def test_a_width_pays_for_the_clients_that_wait(
    cache, accelerator, monkeypatch, caplog
):
    """Each width is timed once; the choice is then that of the clients at hand, and
    what is said is their time."""
    timed = [{1: 1.0, 2: 0.9, 4: 0.8}]
    monkeypatch.setattr(autotune, "_candidates", lambda clients: (1, 2, 4))
    monkeypatch.setattr(autotune, "_times", lambda *_: timed.pop())
    choose = lambda task: autotune.choose_width(task, toy.federation(), 4)
    with caplog.at_level(logging.INFO, autotune.__name__):
        assert choose(toy.task()) == 1
        assert choose(toy.task(sizes=np.full(5, 8))) == 4
    takes = (
        "Width: 1 takes 1000000 us a client step, 2 takes {} us a client step, 4 takes "
        "{} us a client step"
    )
    assert caplog.messages == [
        takes.format(1080000, 1600000),
        takes.format(900000, 800000),
    ]


@pytest.mark.slow
def test_the_form_chosen_is_the_form_of_the_run(monkeypatch):
    def traced(experiment, conv="auto"):
        task = experiment.in_form(experiment.task, conv)
        x, model = jnp.zeros((2, *task.input.shape)), task.model
        return str(
            jax.make_jaxpr(lambda key: model.apply(model.init(key), x)[0])(
                experiment.key
            )
        )

    user = {
        "algo": "fedavg",
        "model": "cnn_dropout",
        "data_fraction": 0.2,
        "clients": 5,
        "devices": "1",
    }
    given = []
    monkeypatch.setattr(
        layouts,
        "choose_form",
        lambda task, model, f, *most: given.append(most[:2]) or "xla",
    )
    for width in (2, 9):
        experiment = build.prepare(settings.resolve(user | {"width": str(width)}))
        laid = layouts.choose(experiment, 2)
        assert laid.conv == "xla" and laid.width == min(width, 5)
    assert layouts.program(experiment, laid) is experiment.program(5, 2, "xla")
    assert "conv_general_dilated" in traced(
        experiment, "xla"
    ) and "conv_general_dilated" not in traced(experiment)
    assert given == [(4, 2), (5, 2)]  # clients at once on both devices, at most
    monkeypatch.setattr(layouts, "choose_form", None)
    asked = build.prepare(settings.resolve(user | {"conv": "matmul", "width": "2"}))
    assert (
        layouts.choose(asked, 1).conv == "matmul"
        and asked.in_form(asked.task, "matmul") is asked.task
    )
    recorded = layouts.choose(asked, 1)._replace(width=1, conv="fused")
    assert layouts.choose(asked, 1, recorded).conv == "matmul"  # what is named counts
    assert (
        layouts.choose(build.prepare(settings.resolve(user)), 1, recorded) == recorded
    )


def test_one_process_tries_for_all_with_its_part(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    experiment = build.prepare(
        settings.resolve({"algo": "fedavg", "model": "linear", "clients": 5})
    )
    assert layouts._part(experiment, 4) == (3, 2)
