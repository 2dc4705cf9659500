"""Ditto: FedAvg, and beside it a personal model per client that a proximal term holds
near the global one.

Reference: Li et al., Ditto: fair and robust federated learning through personalization
(ICML 2021), Algorithm 1.
"""

from typing import Annotated

from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, local_training, losses, trees
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
)


def ditto(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    personal_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
) -> Algorithm:
    """Trains w as FedAvg does and v with the extra gradient lam (v - w^t), w^t the
    received global model (Eq. 1).

    Args:
      lam: weight of the proximal term (λ) in [0, inf); 1 as in the authors' script
        (their grid: 0.1, 1, 2).
      personal_epochs: local epochs of v per round in [0, 10000] (the paper counts s
        steps); default: the task's epochs or steps.

    Note:
      The global model is averaged with weights proportional to the training examples;
      the authors average uniformly over clients sampled in proportion to their size. v
      and w see the same batches in the same order, as far as both go:
      `local_training.sgd` is given the same key. The reported loss is that of w.
    """
    # `split.send` divides variables into (what is uploaded, what stays), as bn_stats
    # says; `receive` joins them; what stays is the entry "own" of a client's row,
    # beside v
    loss, split = losses.classification(task.model), averaging.split(task)

    def init(key: Array) -> State:
        return split.init(key, lambda w: {"v": w})

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        proximal = trees.proximal(averaging.params(state.server), lam)

        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            # the personal model near w^t: the gradient of Eq. 1
            v, _ = local_training.sgd(
                c.key,
                c.train,
                loss,
                mine["v"],
                task,
                extra=proximal,
                epochs=personal_epochs,
            )
            # the client's part of the global problem, from w^t
            w = split.receive(state.server, mine["own"])
            w, value = local_training.sgd(c.key, c.train, loss, w, task)
            shared, own = split.send(w)
            return (
                shared,
                {"v": v, "own": own},
                value,
                evaluation.post(cohort, c, averaging.predictor(task.model, v)),
            )

        w, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(w, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return averaging.predictor(task.model, mine["v"])

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        averages=averaging.BODY_AND_HEAD,
    )
