"""FedPer and its relatives: the model is cut into body and head, and one part is kept
with the client or at its start.

References: FedPer, Arivazhagan et al., Federated learning with personalization layers
(2019); FedRep, Collins et al., Exploiting shared representations for personalized
federated learning (ICML 2021); LG-FedAvg, Liang et al., Think locally, act globally:
federated learning with local and global representations (2020); FedBABU, Oh et al.,
FedBABU: toward enhanced representation for federated image classification (ICLR 2022).
Authors' code: lgcollins/FedRep, jhoon-oh/FedBABU.
"""

from typing import Annotated, Literal

from annotated_types import Interval

from fedjax_pfl import keys
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import FINE_TUNED, Phase, partial_averaging, split
from fedjax_pfl.types import Method, Task


@register("fedper", targets=True, trainings=1)
def fedper(task: Task) -> Method:
    """Shares the body and keeps the head, the last layer, personal; both are trained
    together.

    Note:
      The paper's personal layers before the last one are not built; see `lg_fedavg` for
      the mirror.
    """
    return partial_averaging(task, split(task, ("head",)))


@register("fedrep", targets=True)
def fedrep(
    task: Task,
    *,
    head_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 1,
    body_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
) -> Method:
    """FedPer in two phases: first the personal head on the received body, then the body
    under that head.

    Args:
      head_epochs: E_h in [0, 10000]; 1 as in PFLlib (the authors' code uses 10).
      body_epochs: E_b in [0, 10000]; default the task's local work.

    Note:
      The loss is that of the body's phase, of the head's if body_epochs is 0. A last
      training of the head alone, after all rounds as in the authors' code, is not
      built.
    """
    head = (
        (Phase(("head",), head_epochs, keys.Client.HEAD_PHASE),) if head_epochs else ()
    )
    body = () if head and body_epochs == 0 else (Phase(("body",), body_epochs),)
    return partial_averaging(task, split(task, ("head",)), phases=head + body)


@register("lg_fedavg", several_architectures=True, targets=True, trainings=1)
def lg_fedavg(task: Task) -> Method:
    """The mirror of FedPer: shares the head and keeps the body personal; both are
    trained together.

    Note:
      The paper also shares further upper layers, and its code on CIFAR the
      convolutions. Weighted by training examples, where the authors' code averages
      uniformly, and without their FedAvg warm start. All architectures must have the
      same feature width.
    """
    return partial_averaging(task, split(task, ("body",)))


@register("fedbabu", targets=True, trainings=1)
def fedbabu(
    task: Task,
    *,
    fine_tune_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 5,
    fine_tune: Literal["all", "head", "body"] = "all",
) -> Method:
    """Federates the body under a head frozen at its random start; each client
    fine-tunes it before it predicts.

    Args:
      fine_tune_epochs: E_ft in [0, 10000]; 5 as in the paper.
      fine_tune: what of the model moves then, one of all (the paper's choice), head,
        body.

    Note:
      `pre` scores are of the fine-tuned model, and as `untuned_acc` of the model as
      received; `post` scores are of the trained body. The last two are under a head
      that nobody trained, and say little. Bodies are weighted by training examples,
      where the authors' code averages uniformly.
    """
    parts = FINE_TUNED[fine_tune]
    return partial_averaging(
        task,
        split(task),
        fixed=("head",),
        phases=(Phase(("body",)),),
        fine_tune=Phase(parts, fine_tune_epochs, keys.Client.FINE_TUNE),
        untuned=True,
    )
