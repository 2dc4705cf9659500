"""FedPer and its relatives: the model is cut into body and head, and one part stays with the client or at its start.

References: FedPer, Arivazhagan et al. (2019); FedRep, Collins et al. (ICML 2021); LG-FedAvg, Liang et al. (2020);
FedBABU, Oh et al. (ICLR 2022).
"""

from fedjax_pfl import keys
from fedjax_pfl.averaging import FINE_TUNED, Phase, partial_averaging, split
from fedjax_pfl.errors import check, choose
from fedjax_pfl.types import Algorithm, Task


def fedper(task: Task) -> Algorithm:
    """Shares the body and keeps the head, the last layer, personal; both are trained together."""
    return partial_averaging(task, split(task, ("head",)))


def fedrep(task: Task, *, head_epochs: int = 1, body_epochs: int | None = None) -> Algorithm:
    """FedPer in two phases: first the personal head on the received body, then the body under that head.

    Args:
      head_epochs: E_h in [0, 10000]; 1 as in PFLlib (the authors' code uses 10).
      body_epochs: E_b in [0, 10000]; default the task's local work.
    """
    check("head_epochs", head_epochs, 0, 10_000)
    check("body_epochs", body_epochs or 0, 0, 10_000)
    head = (Phase(("head",), head_epochs, keys.Client.HEAD_PHASE),) if head_epochs else ()
    phases = (*head, Phase(("body",), body_epochs))
    return partial_averaging(task, split(task, ("head",)), phases=phases)


def lg_fedavg(task: Task) -> Algorithm:
    """The mirror of FedPer: shares the head and keeps the body personal; both are trained together.

    Note:
      Weighted by training examples, where the authors' code averages uniformly, and without their FedAvg warm start.
    """
    return partial_averaging(task, split(task, ("body",)), one_architecture=False)


def fedbabu(task: Task, *, fine_tune_epochs: int = 5, fine_tune: str = "all") -> Algorithm:
    """Federates the body under a head frozen at its random start; each client fine-tunes it before it predicts.

    Args:
      fine_tune_epochs: E_ft in [0, 10000]; 5 as in the paper.
      fine_tune: what of the model moves then, one of all (the paper's choice), head, body.

    Note:
      `pre` scores are of the fine-tuned model, and as `untuned_acc` of the model as received; `post` scores are of
      the trained body. The last two are under a head that nobody trained, and say little.
    """
    check("fine_tune_epochs", fine_tune_epochs, 0, 10_000)
    parts = FINE_TUNED[choose("fine_tune", fine_tune, FINE_TUNED)]
    return partial_averaging(
        task,
        split(task),
        fixed=("head",),
        phases=(Phase(("body",)),),
        fine_tune=Phase(parts, fine_tune_epochs, keys.Client.FINE_TUNE),
        untuned=True,
    )
