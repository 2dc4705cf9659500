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
    evaluation,
    hyperparameters,
    keys,
    local_training,
    losses,
)
from fedjax_pfl.algorithms import public_data
from fedjax_pfl.algorithms.knowledge_transfer import mixtures
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.optimizers import clipped
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    Own,
    Predictor,
    PyTree,
    State,
    Task,
)


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
      patience: passes without a better one after which a student stops, in [1, 10000],
        and its best pass is kept (the authors wait for 1000 steps); default: it does
        not stop, and its last pass is kept, as in KT-pFL.
      held_out: share of the round's public examples in (0, 1) that, with patience, a
        student is only validated on, by the divergence from its teachers; 0.1 is our
        choice.
    """

    passes: Annotated[int, Interval(ge=0, le=10_000)] = 1
    public_size: Annotated[int, Ge(1)] = 3000
    public_batch: Annotated[int, Ge(1)] = 256
    student_lr: Annotated[float, Ge(0)] = 0.001
    student_optimizer: Literal["adam", "sgd"] = "adam"
    clip: Annotated[float, Gt(0)] = 5.0
    temperature: Annotated[float, Gt(0)] = 1.0
    patience: Annotated[int, Interval(ge=1, le=10_000)] | None = None
    held_out: Annotated[float, Interval(gt=0, lt=1)] = 0.1


@register("feddf", several_architectures=True)
@hyperparameters.shared(Students)
def feddf(task: Task, *, on: Students) -> Algorithm:
    """Averages the models within each architecture and distils the mean logits of all
    clients' models into each mean.

    Note:
      A client's model is its architecture's, which `pre` scores as fused; `post` scores
      it after local training. The teachers' logits are averaged uniformly over the
      round's clients of all architectures; an architecture without a client in the
      round learns from them, too. The server has no labelled examples, by which the
      authors' stops. With bn_stats=local running statistics are not sent: teachers have
      their own, students those of each batch, of the validation, too.
    """
    rule = {"adam": optax.adam, "sgd": optax.sgd}[on.student_optimizer]
    drawn = public_data.count(task, on.public_size)
    rows = drawn - (
        0 if on.patience is None else local_training.held_out(drawn, on.held_out)
    )
    steps, decay = (
        on.passes * -(-rows // on.public_batch),
        optax.cosine_decay_schedule(1.0, 1),
    )
    # rate and share may be traced
    decayed = lambda t: on.student_lr * decay(t / jnp.maximum(steps, 1))
    optimizer = optax.chain(clipped(on.clip), rule(decayed))
    server_task = task._replace(
        optimizer=lambda lr: optimizer,
        batch_size=on.public_batch,
        drop_last=False,
        augment=None,
    )
    split = averaging.split(task)

    def start(key: Array) -> list[tuple[PyTree, PyTree]]:
        return [
            split.send(model.init(key), group)
            for group, model in enumerate(task.models)
        ]

    def init(key: Array) -> State:
        starts = start(key)
        own = iter([own for _, own in starts])
        return State(
            architectures.grouped([shared for shared, _ in starts]),
            architectures.stack(task, lambda _: next(own)),
        )

    divergence = functools.partial(mixtures.divergence, temperature=on.temperature)

    @jax.named_scope(local_training.ON_SERVER)
    def distil(
        key: Array, fused: PyTree, cohort: Cohort, index: Array, target: Array
    ) -> tuple[PyTree, Array]:
        data, students, gaps = (
            public_data.subset(cohort.public, index, jnp.any(cohort.trained)),
            [],
            [],
        )
        for group, (_, own) in enumerate(start(key)):
            w = split.receive(architectures.select(fused, group), own)
            loss = functools.partial(
                public_data.distillation, task.models[group], distance=divergence
            )
            # the same batches for every student
            stream = keys.fold(key, keys.Server.STUDENT)
            if on.patience is None:
                w, gap = local_training.sgd(
                    stream, data, loss(target=target), w, server_task, epochs=on.passes
                )
            else:
                part = public_data.validation(data, target, on.held_out)
                w, gap = public_data.early_stopped(
                    stream, part, loss, target, w, server_task, on.passes, on.patience
                )
            students.append(split.send(w, group)[0])
            gaps.append(gap)
        return architectures.grouped(students), jnp.mean(jnp.stack(gaps))

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        index = public_data.draw(key, task, on.public_size)
        if on.patience is not None:  # the last of them are for validation
            index = jax.random.permutation(keys.fold(key, keys.Server.HELD_OUT), index)

        def client(
            c: Client, own: PyTree
        ) -> tuple[Own, Own, Array, Array, dict[str, Array]]:
            w = split.receive(architectures.select(state.server, c.architecture), own)
            w, value = local_training.sgd(
                c.key, c.train, losses.classification(c.model), w, task
            )
            shared, own = split.send(w, c.architecture)
            data = public_data.subset(c.public, index, c.train.size > 0)
            # it has the models, and they are its teachers
            with jax.named_scope(local_training.ON_SERVER):
                z = public_data.logits(
                    c.model, w, data, task.num_classes, on.public_batch
                )
            return (
                Own(shared),
                Own(own),
                z,
                value,
                evaluation.post(cohort, c, averaging.predictor(c.model, w)),
            )

        fused, (own, z, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        teachers = public_data.gathered(cohort, z)
        uniform = mixtures.normalised(jnp.ones(len(teachers.ids)), teachers.here)
        target = jax.nn.softmax(mixtures.mean(uniform, teachers) / on.temperature)
        students, gap = distil(key, fused, cohort, index, target)
        return State(students, own), Metrics(
            value, post, server={"distillation_loss": gap}
        )

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        return averaging.predictor(
            c.model, split.receive(architectures.select(server, c.architecture), own)
        )

    return Algorithm(init, round, predict, evaluation.classification)


@register("pfeddf", several_architectures=True)
@hyperparameters.shared(Students)
def pfeddf(
    task: Task,
    *,
    on: Students,
    fine_tune_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
) -> Algorithm:
    """FedDF whose fused model each client fine-tunes before it predicts; the fine-tuned
    copy is discarded (KT-pFL).

    Args:
      fine_tune_epochs: E_ft in [0, 10000]; default the task's local work, as KT-pFL
        says "several epochs".
    """
    tuned = averaging.Phase(epochs=fine_tune_epochs)
    averaged = averaging.partial_averaging(task, averaging.split(task), fine_tune=tuned)

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        return averaged.predict(architectures.select(server, c.architecture), own, c)

    return feddf(task, **on._asdict())._replace(predict=predict)
