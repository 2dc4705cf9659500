"""FedDF: the server averages the models of each architecture, then trains them on what
all clients' models predict.

Reference: Lin et al., Ensemble distillation for robust model fusion in federated
learning (NeurIPS 2020), Algorithm 3.
"""

import functools
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import (
    architectures,
    averaging,
    hyperparameters,
    keys,
    local_training,
)
from fedjax_pfl.algorithms import public_data
from fedjax_pfl.algorithms.registry import ROW_TARGETS, register
from fedjax_pfl.optimizers import clipped
from fedjax_pfl.types import Method, Metrics, Own, State, Task, Update


class Students(NamedTuple):
    """How the server trains the fused models.

    Args:
      passes: over the public examples in each round, in [0, 10000]; 1 as KT-pFL runs it
        (12 steps; the authors take up to 10000 with early stopping).
      public_size: public examples per round in [1, inf), at most the pool; 3000 as in
        KT-pFL.
      public_batch: their batch size in [1, inf); 256 as in KT-pFL (the authors take
        128).
      student_lr: the server's learning rate in [0, inf), decaying to 0 along a cosine;
        0.001 as in the authors' code.
      student_optimizer: the server's, one of adam (the authors' choice), sgd.
      clip: greatest norm in (0, inf) of the server's gradients; 5 as in the authors'
        code.
      temperature: of the softmax, in (0, inf); 1 as in the authors' code.
    """

    passes: Annotated[int, Interval(ge=0, le=10_000)] = 1
    public_size: Annotated[int, Ge(1)] = 3000
    public_batch: Annotated[int, Ge(1)] = 256
    student_lr: Annotated[float, Ge(0)] = 0.001
    student_optimizer: Literal["adam", "sgd"] = "adam"
    clip: Annotated[float, Gt(0)] = 5.0
    temperature: Annotated[float, Gt(0)] = 1.0


@register(
    "feddf",
    several_architectures=True,
    excludes={"mix": ROW_TARGETS, "positions": ROW_TARGETS},
)
@hyperparameters.shared(Students)
def feddf(task: Task, *, on: Students) -> Method:
    """Averages the models within each architecture and distils the mean logits of all
    clients' models into each mean.

    Note:
      A client's model is its architecture's, which `pre` scores as fused; `post` scores
      it after local training. The teachers' logits are averaged uniformly over the
      round's clients of all architectures; an architecture without a client in the
      round learns from them, too. The authors' server stops early by
      labelled examples, which it does not have here. With bn_stats=local running
      statistics are not sent: teachers have their own, students those of each batch.
    """
    rule = {"adam": optax.adam, "sgd": optax.sgd}[on.student_optimizer]
    drawn = public_data.count(task, on.public_size)
    steps = on.passes * -(-drawn // on.public_batch)
    decay = optax.cosine_decay_schedule(1.0, 1)
    # the rate may be traced
    decayed = lambda t: on.student_lr * decay(t / max(steps, 1))
    optimizer = optax.chain(clipped(on.clip), rule(decayed))
    server_task = task._replace(
        optimizer=lambda lr: optimizer,
        batch_size=on.public_batch,
        drop_last=False,
        augment=None,
    )
    split, sgd = averaging.split(task), local_training.bind(task)

    def start(key):
        # Per architecture, what is sent and what is kept.
        return [split.send(model.init(key), g) for g, model in enumerate(task.models)]

    def init(key):
        shared, own = zip(*start(key), strict=True)
        rows = iter(own)
        server = architectures.grouped(list(shared))
        return State(server, architectures.stack(task, lambda _: next(rows)))

    divergence = functools.partial(public_data.divergence, temperature=on.temperature)

    @jax.named_scope(local_training.ON_SERVER)
    def distil(key, fused, cohort, index, target):
        data = public_data.subset(cohort.public, index, jnp.any(cohort.trained))
        # the same batches for every student
        stream, students, gaps = keys.fold(key, keys.Server.STUDENT), [], []
        for group, (_, own) in enumerate(start(key)):
            w = split.receive(architectures.select(fused, group), own)
            loss = public_data.distillation(task.models[group], target, divergence)
            w, gap = local_training.sgd(
                stream, data, loss, w, server_task, epochs=on.passes
            )
            students.append(split.send(w, group)[0])
            gaps.append(gap)
        return architectures.grouped(students), jnp.mean(jnp.stack(gaps))

    def draw(key, server, cohort):
        return public_data.draw(key, task, on.public_size), ()

    def client(c, server, own, index, _):
        w = split.receive(architectures.select(server, c.architecture), own)
        w, value = sgd(c, w)
        shared, own = split.send(w, c.architecture)
        data = public_data.subset(c.public, index, c.train.size > 0)
        # The server has the clients' models, its teachers.
        with jax.named_scope(local_training.ON_SERVER):
            z = public_data.logits(c.model, w, data, task.num_classes, on.public_batch)
        predict = averaging.predictor(c.model, w)
        # Models are averaged within each architecture.
        return Update(Own(shared), Own(own), predict, value, sent=z)

    def finish(key, server, fused, z, old, rows, cohort):
        # Each mean learns from the mean logits of all models.
        index, _ = draw(key, server, cohort)
        teachers = public_data.gathered(cohort, z)
        weight = public_data.normalised(jnp.ones(len(teachers.ids)), teachers.here)
        target = jax.nn.softmax(public_data.mean(weight, teachers) / on.temperature)
        students, gap = distil(key, fused, cohort, index, target)
        return State(students, rows), Metrics(server={"distillation_loss": gap})

    def predict(server, own, c):
        server = architectures.select(server, c.architecture)
        return averaging.predictor(c.model, split.receive(server, own))

    return averaging.from_client(init, client, predict, start=draw, finish=finish)


@register(
    "pfeddf",
    several_architectures=True,
    excludes={"mix": ROW_TARGETS, "positions": ROW_TARGETS},
)
@hyperparameters.shared(Students)
def pfeddf(
    task: Task,
    *,
    on: Students,
    fine_tune_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
) -> Method:
    """FedDF whose fused model each client fine-tunes before it predicts; the fine-tuned
    copy is discarded (KT-pFL).

    Args:
      fine_tune_epochs: E_ft in [0, 10000]; default the task's local work, as KT-pFL
        says "several epochs".
    """
    tuned = averaging.Phase(epochs=fine_tune_epochs)
    averaged = averaging.partial_averaging(task, averaging.split(task), fine_tune=tuned)

    def predict(server, own, c):
        return averaged.predict(architectures.select(server, c.architecture), own, c)

    return feddf(task, **on._asdict())._replace(predict=predict)
