"""Ditto: FedAvg plus one personal model per client, regularised towards the global
model.

Reference: Li et al., Ditto: fair and robust federated learning through personalization
(ICML 2021), Algorithm 1; authors' code: litian96/ditto.
"""

from typing import Annotated

from annotated_types import Ge, Interval

from fedjax_pfl import averaging, local_training, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import Method, Task, Update


@register("ditto", targets=True)
def ditto(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    personal_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
) -> Method:
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
      and w are trained on the same batches in the same order. The reported loss is that
      of w.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def init(key):
        return split.init(key, lambda w: {"v": w})

    def client(c, server, row):
        # The personal model near w^t: the gradient of Eq. 1.
        anchor = trees.proximal(averaging.params(server), lam)
        v, _ = sgd(c, row["v"], extra=anchor, epochs=personal_epochs)
        # The client's part of the global problem, from w^t.
        w, loss = sgd(c, split.receive(server, row["own"]))
        upload, own = split.send(w)
        predict = averaging.predictor(c.model, v)
        return Update(upload, {"v": v, "own": own}, predict, loss)

    def predict(server, row, c):
        return averaging.predictor(c.model, row["v"])

    # other epochs of v are no count of the task's own local work
    trainings = 2 if personal_epochs is None else 0
    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(
        init, client, predict, averages=averages, trainings=trainings
    )
