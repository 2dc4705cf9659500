"""A method to copy and change: clients average the body, and each keeps a head under an
L2 penalty.

It is not in `ALGORITHMS`. Copy it to a file of your own, say own.py;
`--algo=own.py:small_head` runs the copy, and `testing.check_algorithm(own.small_head)`
checks it.
"""

from typing import Annotated

import optax
from annotated_types import Ge

from fedjax_pfl import averaging, local_training, losses
from fedjax_pfl.types import Method, Task, Update


def small_head(task: Task, *, mu: Annotated[float, Ge(0)] = 0.01) -> Method:
    """Averages the body; each client keeps its head, under the penalty mu/2
    ||head||^2.

    Args:
      mu: weight of the penalty in [0, inf).
    """
    plain = losses.classification(task.model, task)

    def loss(w, batch, key):
        value, stats = plain(w, batch, key)
        return value + mu / 2 * optax.tree.norm(w["head"], squared=True), stats

    sgd, split = local_training.bind(task, loss), averaging.split(task, ("head",))

    def client(c, server, own):
        w, value = sgd(c, split.receive(server, own))
        body, own = split.send(w)
        return Update(body, own, averaging.predictor(c.model, w), value)

    def predict(server, own, c):
        return averaging.predictor(c.model, split.receive(server, own))

    return averaging.from_client(split.init, client, predict, averages=("body",))
