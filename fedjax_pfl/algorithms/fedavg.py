"""FedAvg: one global model, the mean of the clients' locally trained copies; FedProx
holds the copies near it.

References: McMahan et al., Communication-efficient learning of deep networks from
decentralized data (AISTATS 2017); Li et al., Federated optimization in heterogeneous
networks (MLSys 2020).
"""

from typing import Annotated, Literal

from annotated_types import Ge, Interval

from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import FINE_TUNED, Phase, partial_averaging, split
from fedjax_pfl.types import Method, Task


@register("fedavg", targets=True, trainings=1)
def fedavg(task: Task) -> Method:
    """Averages the clients' models weighted by their numbers of training examples
    (Algorithm 1)."""
    return partial_averaging(task, split(task))


@register("fedavg_ft", targets=True, trainings=1)
def fedavg_ft(
    task: Task,
    *,
    fine_tune_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
    fine_tune: Literal["all", "head", "body"] = "all",
) -> Method:
    """FedAvg whose global model each client fine-tunes before it predicts; the
    fine-tuned copy is discarded.

    Args:
      fine_tune_epochs: E_ft in [0, 10000]; default max(E, 5), as no paper gives a
        value.
      fine_tune: what of the model moves then, one of all, head, body.
    """
    epochs = max(task.epochs or 0, 5) if fine_tune_epochs is None else fine_tune_epochs
    phase = Phase(FINE_TUNED[fine_tune], epochs)
    return partial_averaging(task, split(task), fine_tune=phase)


@register("fedprox", targets=True, trainings=1)
def fedprox(task: Task, *, mu: Annotated[float, Ge(0)] = 0.001) -> Method:
    """FedAvg with the proximal term mu/2 ||w - w^t||^2 in the local loss (Eq. 2).

    Args:
      mu: weight of the proximal term (μ) in [0, inf); the paper's grid is {0.001, 0.01,
        0.1, 1}, PFLlib uses 0.001.
    """
    return partial_averaging(task, split(task), mu=mu)
