"""pFedMe: a client's model is the minimiser theta of its loss plus lam/2 ||theta -
w||^2, and w descends that minimum.

Reference: Dinh, Tran & Nguyen, Personalized federated learning with Moreau envelopes
(NeurIPS 2020), Algorithm 1; authors' code: CharlieDinh/pFedMe.
"""

from typing import Annotated

import jax
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import ONE_RATE, register
from fedjax_pfl.averaging import paired
from fedjax_pfl.types import Method, Task, Update


@register("pfedme", targets=True, excludes={"lr": ONE_RATE})
def pfedme(
    task: Task,
    *,
    inner_steps: Annotated[int, Interval(ge=0, le=10_000)] = 5,
    inner_lr: Annotated[float, Ge(0)] = 0.01,
    lam: Annotated[float, Ge(0)] = 15.0,
    beta: Annotated[float, Ge(0)] = 1.0,
) -> Method:
    """Per batch approaches theta in K steps from the last theta, then moves w by lr lam
    (w - theta).

    Args:
      inner_steps: K in [0, 10000], steps of theta on each batch; 5 as in the authors'
        code.
      inner_lr: the step size (η_p) in [0, inf) of theta; 0.01 as in the authors'
        command for CIFAR-10 (their default is 0.09).
      lam: weight of the proximal term (λ) in [0, inf); 15 as in the authors' code.
      beta: the server's mixing weight (β) in [0, inf); 1 is the plain average.

    Note:
      A round's local work is the task's batches, as in PFLlib (the authors take 20
      batches), for the participants only (the authors' code trains all clients). The
      authors' code adds weight decay 0.001 to theta. The personal model is theta; in
      both codes it is an alias of w. Running statistics are theta's, also in the global
      model. `global_acc` scores w. The loss is theta's before the last inner step,
      without the proximal term.
    """
    loss, optimizer = losses.classification(task.model, task), task.optimizer(inner_lr)
    split = averaging.split(task)

    def approach(key, w, start, batch):
        # K steps from (theta, running statistics, optimizer state).
        def step(i, loop):
            (theta, stats, opt), _ = loop
            draw = keys.fold(key, keys.Loss.INNER, i)
            objective = lambda theta: loss({**theta, "stats": stats}, batch, draw)
            gradient = jax.value_and_grad(objective, has_aux=True)
            (value, stats), slope = gradient(theta)
            whole = trees.add(slope, trees.proximal(w, lam)(theta))
            updates, opt = optimizer.update(whole, opt, theta)
            return (optax.apply_updates(theta, updates), stats, opt), value

        value, _ = loss({**start[0], "stats": start[1]}, batch, key)
        return jax.lax.fori_loop(0, inner_steps, step, (start, value))

    def step(key, carry, batch):
        w, inner = carry
        inner, value = approach(key, w, inner, batch)
        moved = jax.tree.map(lambda x, t: x - task.lr * lam * (x - t), w, inner[0])
        return (optax.tree.cast_like(moved, w), inner), value

    def init(key):
        return split.init(key, lambda w: {"theta": w})

    def client(c, server, row):
        received = split.receive(server, row["own"])
        w = averaging.params(received)
        start = (w, (w, received["stats"], optimizer.init(w)))
        end, value, _ = local_training.work(c.key, c.train, step, start, task)
        w, (theta, stats, _) = end
        w, theta = {**w, "stats": stats}, {**theta, "stats": stats}
        upload, own = split.send(w)
        return Update(
            upload, {"theta": theta, "own": own}, paired(c.model, theta, w), value
        )

    def update(key, server, mean, mass):
        new, old = averaging.params(mean), averaging.params(server)
        mixed = trees.lerp(beta, new, old)
        return {**mean, **trees.choose(mass > 0, mixed, old)}

    def predict(server, row, c):
        return paired(c.model, row["theta"], split.receive(server, row["own"]))

    return averaging.from_client(
        init,
        client,
        predict,
        update=update,
        score=averaging.score_paired,
        averages=averaging.BODY_AND_HEAD,
    )
