"""Options of a task on the command line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import task_options
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.config import resolve

OWN = """
import jax.numpy as jnp
import optax

optimizer = lambda lr: optax.sgd(lr / 2)
schedule = lambda t: 1.0 / (1 + t)
loss = lambda logits, y, mask: jnp.sum(logits * mask[:, None])
mix = lambda key, x, labels, mask: (x, labels)
sampling = lambda key, t, history: jnp.ones(5)
"""

GIVEN = {"algo": "fedavg", "clients": 5, "model": "linear", "partition": "iid"}


def make(**given):
    return build(resolve(GIVEN | given))


def test_the_default_sets_nothing():
    task = make().task
    found = (task.loss, task.mix, task.schedule, task.sampling, task.metrics)
    assert found == (None, None, None, None, ())


def test_names_with_values():
    task = make(loss="focal:0", mix="mixup", schedule="cosine", metrics="acc,auc").task
    z, y = jnp.eye(10)[:4], jnp.arange(4)
    plain = jnp.mean(-jax.nn.log_softmax(z)[y, y])
    np.testing.assert_allclose(task.loss(z, y, jnp.ones(4, bool)), plain, rtol=1e-6)
    assert task.metrics == ("auc",) and task.mix is not None


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cosine", [1, 0.5 * (1 + 0.5**0.5), 0.5]),
        ("step", [1, 1, 0.1]),
        ("warmup_cosine", [0.5, 0.5 * (1 + np.cos(np.pi / 6)), np.nan]),
    ],
)
def test_schedules(name, wanted):
    """At the start, and after a quarter and a half of the rounds."""
    rounds = {"cosine": 8, "step": 4, "warmup_cosine": 20}[name]
    made = task_options.SCHEDULES.read(name)(rounds=rounds)
    found = [float(made(jnp.asarray(t))) for t in (0, rounds // 4, rounds // 2)]
    here = np.isfinite(wanted)
    np.testing.assert_allclose(np.array(found)[here], np.array(wanted)[here], rtol=1e-5)


def test_functions_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    names = ("optimizer", "schedule", "loss", "mix", "sampling")
    given = {name: f"{tmp_path}/mine.py:{name}" for name in names}
    task = make(**given).task
    updates, _ = task.optimizer(1.0).update(1.0, task.optimizer(1.0).init(1.0))
    assert updates == -0.5 and task.schedule(1) == 0.5
    assert task.sampling(None, 0, None).shape == (5,)


def test_sizes_are_those_of_the_clients_that_train():
    e = make(sampling="size", unseen=0.4)
    np.testing.assert_array_equal(e.task.sampling(None, 0, None), e.task.sizes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "hinge"}, "Unknown loss 'hinge'"),
        ({"mix": "mixup:x"}, "--mix=mixup:x: `alpha` must be a number, got 'x'"),
        ({"schedule": "linear"}, "Unknown schedule 'linear'"),
        ({"sampling": "loss"}, "Unknown sampling 'loss'"),
        ({"sampling": "power_of_choice:2.5"}, "`candidates` must be an integer"),
        ({"sampling": "power_of_choice:9"}, r"`candidates` must be in \[5, 5\], got 9"),
        ({"metrics": "acc,roc"}, "Unknown metric 'roc'"),
        ({"algo": "pfedc", "loss": "focal"}, "pfedc takes no `loss` of this kind"),
        ({"algo": "scaffold", "momentum": 0.9}, "scaffold takes no `optimizer`"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(InputError, match=message):
        make(**given)
