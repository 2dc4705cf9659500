"""FedGH: the server trains a common head on the mean features of the clients' classes.

Reference: Yi et al., FedGH: heterogeneous federated learning with generalized global
header (ACM MM 2023), Algorithm 1; authors' code: LipingYi/FedGH.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, traffic
from fedjax_pfl.algorithms.prototypes import Draw, descend, head_loss
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Algorithm, Metrics, Own, State, Task


@register("fedgh", several_architectures=True)
def fedgh(
    task: Task,
    *,
    server_lr: Annotated[float, Ge(0)] = 0.01,
    server_epochs: Annotated[int, Interval(ge=1, le=10_000)] = 100,
) -> Algorithm:
    """Trains each client's body under the common head, which the server then trains on
    the clients' mean features per class.

    Args:
      server_lr: step size of the head at the server in [0, inf); 0.01 as in HtFLlib.
      server_epochs: passes over the mean features in [1, 10000]; 100 as in HtFLlib, 1
        in PFLlib and the paper.

    Note:
      A client trains body and head, and its head is then replaced by the next common
      one. The server takes batches of the task's batch size in one random order, the
      same in all its epochs. The mean features are those of one more pass after
      training. `post` scores the client's own trained head. All architectures must have
      the same feature width. The authors' server steps an optimizer that holds a
      client's network, so their common head is never trained.
    """
    sgd, split = local_training.bind(task), averaging.split(task, ("body",))
    classes, batch_size = task.num_classes, evaluation.pass_size(task.sizes)
    widths = task.models[0].num_features

    def round(key, state, cohort):
        def client(c, own):
            w, value = sgd(c, split.receive(state.server, own))

            def features(batch):
                return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

            proto = local_training.class_means(c.train, features, classes, batch_size)
            post = evaluation.post(cohort, c, predictor(c.model, w))
            order = keys.fold(c.key, Draw.ORDER)
            draw = jax.random.uniform(order, (classes,), jnp.float32)
            own = split.send(w, c.architecture)[1]
            return Own(own), proto, draw, value, post

        own, proto, draw, value, post = cohort.map(client, state.clients)
        head = descend(
            lambda head, *batch: head_loss(task.models[0], head, *batch),
            state.server["head"],
            proto,
            cohort.class_counts > 0,
            draw,
            epochs=server_epochs,
            batch_size=task.batch_size,
            lr=server_lr,
        )
        return State({**state.server, "head": head}, own), Metrics(value, post)

    def predict(server, own, c):
        return predictor(c.model, split.receive(server, own))

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        down = state.server["head"]
        return traffic.both_ways(cohort, down, widths * own)._replace(ints=own)

    return Algorithm(
        split.init, round, predict, evaluation.classification, traffic=sent
    )
