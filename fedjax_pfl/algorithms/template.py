"""A method to copy and change: clients average the body, each keeps a head that an L2
term holds small.

It is not in `ALGORITHMS`. Copy it to a file of your own, say own.py;
`--algo=own.py:small_head` runs the copy, and `testing.check_algorithm(own.small_head)`
checks it.
"""

from typing import Annotated

import optax
from annotated_types import Ge

from fedjax_pfl import averaging, evaluation, local_training, losses
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
)


def small_head(task: Task, *, mu: Annotated[float, Ge(0)] = 0.01) -> Algorithm:
    """Averages the body; each head stays with its client, under the penalty mu/2
    ||head||^2.

    Args:
      mu: weight of the penalty in [0, inf).
    """
    split, plain = averaging.split(task, ("head",)), losses.classification(task.model)

    def loss(w: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        value, stats = plain(w, batch, key)
        return value + mu / 2 * optax.tree.norm(w["head"], squared=True), stats

    def init(key: Array) -> State:
        return split.init(key)  # what the server holds; a row for each client

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, own: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            w, value = local_training.sgd(
                c.key, c.train, loss, split.receive(state.server, own), task
            )
            body, own = split.send(w)
            return (
                body,
                own,
                value,
                evaluation.post(cohort, c, averaging.predictor(task.model, w)),
            )

        body, (own, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(body, own), Metrics(value, post)

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        return averaging.predictor(task.model, split.receive(server, own))

    return Algorithm(
        init, round, predict, evaluation.classification, averages=("body",)
    )
