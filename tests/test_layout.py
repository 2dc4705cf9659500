"""The form of the convolutions and the automatic width."""

import jax
import jax.numpy as jnp
import pytest
import toy

from experiments import build, layouts, settings
from fedjax_pfl import models
from fedjax_pfl.engine import placement
from fedjax_pfl.models import layers


def test_the_automatic_width_depends_on_the_model_and_the_platform(monkeypatch):
    convolution = models.model("lenet", (28, 28, 1), toy.C)
    small, large = toy.task("linear"), toy.task(model=convolution)
    width = placement.automatic_width
    assert [width(small, 9), width(large, 9), width(small, 5, 2)] == [4, 1, 3]
    monkeypatch.setattr(placement, "LARGE", 10)
    assert width(small, 9) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [width(large, 100), width(large, 9, 2)] == [placement.WIDTH, 5]


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
    monkeypatch.setattr(layers, "form", lambda form: "xla")
    for width in (2, 9):
        experiment = build.prepare(settings.resolve(user | {"width": str(width)}))
        laid = layouts.choose(experiment, 2)
        assert laid.conv == "xla" and laid.width == min(width, 5)
    monkeypatch.undo()
    assert layouts.program(experiment, laid) is experiment.program(5, 2, "xla")
    assert "conv_general_dilated" in traced(
        experiment, "xla"
    ) and "conv_general_dilated" not in traced(experiment)
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
