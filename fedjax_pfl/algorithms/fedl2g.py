"""FedL2G: the server learns a vector of logits per class that guides the clients'
training, by its effect on examples held out.

Reference: Zhang et al., FedL2G: learning to guide local training in heterogeneous
federated learning (2024), with guidance of the logits; authors' code:
TsingZ0/FedL2G.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import (
    architectures,
    averaging,
    keys,
    local_training,
    losses,
    optimizers,
    traffic,
)
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Method, Own, Stage, State, Task, Update


class Draw(keys.Stream):
    """Streams below a client's key."""

    STUDY = 50, "the batch of the trial step"
    QUIZ = 51, "the batch of examples held out"
    TRIAL = 52, "dropout of the trial step"


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    GUIDE = 50, "the guidance"


@register("fedl2g", several_architectures=True, excludes={"mix": READS_LABELS})
def fedl2g(
    task: Task,
    *,
    server_lr: Annotated[float, Ge(0)] = 0.1,
    warmup: Annotated[int, Interval(ge=0, le=10_000)] = 50,
    quiz: Annotated[float, Interval(ge=0, le=1)] = 0.1,
    clip: Annotated[float, Ge(0)] = 100.0,
) -> Method:
    """Trains each client's own model on CE(z, y) + mean((z - G_y)^2), G [C, C] the
    server's guidance for the logits z.

    A client sends the gradient by G of the loss on held out examples after one trial
    step of its trained model; the server takes a step along the clients' mean for each
    class.

    Args:
      server_lr: step size of G in [0, inf); 0.1 as in the authors' script.
      warmup: first rounds in [0, 10000] in which G is learned and no client trains,
        fewer than those of the run; 50 as in the authors' code.
      quiz: share of a client's examples in [0, 1] that is held out; 0.1. The authors
        hold one batch out.
      clip: largest norm of a gradient in training, and of G's mean gradient, in
        [0, inf); 100 as in the authors' code.

    Note:
      The trial step is plain SGD with the task's rate on one batch. A class counts for
      the clients whose trial batch has it. G begins at random numbers of variance 1. A
      client with one example holds none out, and sends no gradient.
    """
    classes = task.num_classes
    clipped = task._replace(
        optimizer=lambda lr: optax.chain(optimizers.clipped(clip), task.optimizer(lr))
    )
    sgd = local_training.bind(clipped)

    def init(key):
        shape, draw = (classes, classes), keys.fold(key, Start.GUIDE)
        guide = jax.random.normal(draw, shape, jnp.float32)
        server = {"guide": guide, "round": jnp.zeros((), jnp.int32)}
        return State(server, architectures.stack(task, lambda model: model.init(key)))

    def batch_of(key, data):
        # One batch of the data, drawn at random.
        size, length = task.batch_size, data.index.shape[0]
        order = local_training.shuffle(key, length, data.size)
        row = jnp.pad(order, (0, max(0, size - length)))[:size]
        return local_training.take(data, row, jnp.arange(size) < data.size)

    def client(c, server, w):
        guide = server["guide"]
        rest, held = local_training.holdout(c.train, quiz)
        # In the warm-up no client trains.
        size = jnp.where(server["round"] >= warmup, rest.size, 0)

        def guided(w, batch, key, guide=guide):
            z, stats = c.model.apply(w, batch.x, mask=batch.mask, train=True, key=key)
            gap = jnp.mean((z - guide[batch.y]) ** 2, axis=1)
            gap = losses.masked_mean(gap, batch.mask)
            return losses.of(task)(z, batch.y, batch.mask) + gap, stats

        w, value = sgd(c, w, loss=guided, data=rest._replace(size=size))
        study = batch_of(keys.fold(c.key, Draw.STUDY), rest)
        test = batch_of(keys.fold(c.key, Draw.QUIZ), held)

        # The loss on held out examples after a trial step under the guidance.
        def meta(guide):
            def trial(p):
                return guided({**w, **p}, study, keys.fold(c.key, Draw.TRIAL), guide)[0]

            slope = jax.grad(trial)(params(w))
            moved = jax.tree.map(lambda x, g: x - task.lr * g, params(w), slope)
            z = predictor(c.model, {**w, **moved})(test.x, test.mask)
            return losses.cross_entropy(z, test.y, test.mask)

        slope = jax.grad(meta)(guide)
        seen = jax.nn.one_hot(study.y, classes) * study.mask[:, None]
        has = (jnp.sum(seen, axis=0) > 0) & jnp.any(test.mask)
        has = has.astype(jnp.float32)
        upload = {"slope": slope * has[:, None], "has": has}
        return Update(upload, Own(w), predictor(c.model, w), value)

    def update(key, server, mean, mass):
        slope = mean["slope"] / jnp.where(mean["has"] > 0, mean["has"], 1)[:, None]
        step, _ = optimizers.clipped(clip).update(slope, optax.EmptyState())
        guide = server["guide"] - server_lr * step
        moved = server["round"] + (mass > 0).astype(jnp.int32)
        return {"guide": guide.astype(jnp.float32), "round": moved}

    def predict(server, w, c):
        return predictor(c.model, w)

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, classes * classes)

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.trained,
        default=lambda server: {
            "slope": jnp.zeros((classes, classes), jnp.float32),
            "has": jnp.zeros(classes, jnp.float32),
        },
        update=update,
        traffic=sent,
        stages=(Stage(warmup, "no client trains", needed=True),),
    )
