"""PFL-DA: the clients share a head only, to which each draws its own head, and under
which it trains its body.

Reference: Shi & Kontar, Personalized federated learning via domain adaptation with an
application to distributed 3D printing (Technometrics 2023).
"""

from typing import Annotated, Literal

import optax
from annotated_types import Ge

from fedjax_pfl import averaging, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Method, State, Task, Update


@register("pfl_da", targets=True, trainings=2)
def pfl_da(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    variant: Literal["squared", "pfllib"] = "squared",
) -> Method:
    """Trains the own head on CE + lam ||head - g||^2, g the received head, then body
    and g on the cross entropy under g; the heads g are averaged.

    Args:
      lam: weight of the distance (λ) in [0, inf); 1 as in PFLlib.
      variant: the distance, squared or pfllib, which has no gradient: the head trains
        on the cross entropy alone.

    Note:
      The authors published no code; the phases are PFLlib's, which adds the norm, not
      squared, of detached parameters. Both phases take the task's local work. A client
      keeps its body and head, and predicts with them. The reported loss is that of the
      second phase.
    """
    weight = lam if variant == "squared" else 0.0
    sgd = local_training.bind(task)

    def init(key):
        w = task.model.init(key)
        return State({"head": w["head"]}, trees.replicate(w, task.num_clients))

    def client(c, server, w):
        plain = losses.classification(c.model, task)

        def near(w, batch, key):
            value, stats = plain(w, batch, key)
            gap = trees.sq_dist(w["head"], server["head"])
            return value + weight * gap, stats

        stream = keys.Client.HEAD_PHASE
        w, _ = sgd(c, w, loss=near, train=("head",), stream=stream)
        under, value = sgd(c, {**w, "head": server["head"]})
        w = {**under, "head": w["head"]}
        head = optax.tree.cast_like(under["head"], server["head"])
        return Update({"head": head}, w, predictor(c.model, w), value)

    def predict(server, w, c):
        return predictor(c.model, w)

    return averaging.from_client(init, client, predict, averages=("head",))
