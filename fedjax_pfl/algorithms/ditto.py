"""Ditto: FedAvg, and beside it a personal model a client that is pulled towards the global one.

Reference: Li et al., Ditto: fair and robust federated learning through personalization (ICML 2021), Algorithm 1.
"""

import math

from fedjax_pfl import evaluate, local, losses, traffic, trees
from fedjax_pfl.averaging import BOTH, predictor
from fedjax_pfl.errors import check
from fedjax_pfl.types import Algorithm, Array, Client, Predictor, PyTree, State, Task


def ditto(task: Task, *, lam: float = 1.0, personal_epochs: int | None = None) -> Algorithm:
    """Trains w as FedAvg does and v with the extra gradient lam (v - w^t), w^t the received global model (Eq. 1).

    Args:
      lam: pull towards the global model (λ) in [0, inf); 1 as in the authors' script (their grid: 0.1, 1, 2).
      personal_epochs: E_p in [0, 10000]; default the task's local work.

    Note:
      The global model is averaged by training examples; the authors average uniformly over clients drawn by size.
      Nobody predicts with w, so what becomes of its batch-norm moments shows in the traffic only.
    """
    check("lam", lam, 0, math.inf)
    check("personal_epochs", personal_epochs or 0, 0, 10_000)
    loss = losses.classification(task.model)

    def init(key: Array) -> State:
        w = task.model.init(key)
        return State(w, trees.replicate(w, task.num_clients))

    def round(key: Array, state: State, cohort) -> tuple[State, PyTree]:
        towards = trees.pull({name: state.server[name] for name in BOTH}, lam)

        def client(c: Client, v: PyTree):
            v, _ = local.sgd(c.key, c.train, loss, v, task, extra=towards, epochs=personal_epochs)
            w, value = local.sgd(c.key, c.train, loss, state.server, task)
            return w, v, value, evaluate.post(cohort, c, predictor(task, v))

        w, (v, value, post) = cohort.mean(client, state.clients, weight=cohort.sizes, empty=state.server)
        return State(w, v), {"loss": value, "post": post}

    def predict(server: PyTree, v: PyTree, c: Client) -> Predictor:
        return predictor(task, v)

    def sent(state: State, cohort, metrics: PyTree):
        w = dict(state.server, stats=() if task.bn_stats == "local" else state.server["stats"])
        return traffic.both_ways(cohort, w)

    return Algorithm(init, round, predict, evaluate.classification, sent)
