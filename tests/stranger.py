"""A method as somebody writes it outside of the package: FedAvg, and a personal head that is mixed
with the global one.

Used by test_testing.py; as long as Ditto.
"""

from typing import Annotated

from annotated_types import Interval

from fedjax_pfl import averaging, evaluate, local, losses, trees
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Algorithm, Array, Client, Cohort, Metrics, Predictor, PyTree, State, Task


def mixed(task: Task, *, beta: Annotated[float, Interval(ge=0, le=1)] = 0.3) -> Algorithm:
    """Trains the global model as FedAvg does, and keeps beta v + (1 - beta) w of the heads for
    predictions.

    Args:
      beta: how much of a client's old head v stays, in [0, 1].
    """
    loss, split = losses.classification(task.model), averaging.split(task)

    def init(key: Array) -> State:
        w = task.model.init(key)
        shared, own = split.send(w)
        return State(shared, trees.replicate({"v": w["head"], "own": own}, task.num_clients))

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(c: Client, mine: PyTree):
            w = split.receive(state.server, mine["own"])
            w, value = local.sgd(c.key, c.train, loss, w, task)
            v = trees.lerp(beta, mine["v"], w["head"])
            shared, own = split.send(w)
            post = evaluate.post(cohort, c, predictor(task.model, {**w, "head": v}))
            return shared, {"v": v, "own": own}, value, post

        w, (mine, value, post) = cohort.mean(client, state.clients, weight=cohort.sizes, default=state.server)
        return State(w, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return predictor(task.model, {**split.receive(server, mine["own"]), "head": mine["v"]})

    return Algorithm(init, round, predict, evaluate.classification)
