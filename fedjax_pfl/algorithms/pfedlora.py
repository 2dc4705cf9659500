"""pFedLoRA: clients of any architectures average a low-rank adapter of their logits,
trained in turns with their own models.

Reference: Yi et al., pFedLoRA: model-heterogeneous personalized federated learning with
LoRA tuning (arXiv 2310.13283, 2024).
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import architectures, averaging, keys, local_training, losses
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Method, Own, State, Task, Update


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    ADAPTER = 50, "A of the adapter"


class Local(keys.Stream):
    """Streams below a client's key."""

    ADAPTER = 51, "the batches of the adapter"


@register("pfedlora", several_architectures=True)
def pfedlora(
    task: Task,
    *,
    rank: Annotated[int, Ge(1)] = 4,
    mu: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    adapter_epochs: Annotated[int, Ge(0)] | None = None,
) -> Method:
    """Adds (h A) B to the logits g(h) of the client's own model; A [K, r] and B [r, C]
    are averaged.

    In turns, with the other part frozen: the own model minimises mu CE(g(h) + h A B, y)
    + (1 - mu) CE(g(h), y), then the adapter CE(g(h) + h A B, y).

    Args:
      rank: r of the adapter, in [1, inf).
      mu: weight of the adapted logits in the own model's loss, in [0, 1].
      adapter_epochs: epochs of the adapter, in [0, inf); None: the task's local work;
        0: not trained.

    Note:
      The adapter is at the head, whose input width K and classes C all architectures
      share (`features`). A is drawn from N(0, 1/r^2), B is zero. The position, mu and
      the form of the loss were not compared with the paper's text. `acc` scores the
      adapted logits, `own_acc` the own model alone. With mu 0 and adapter_epochs 0
      every client trains alone.
    """
    widths = {model.num_features for model in task.models}
    if len(widths) > 1:
        raise InputError(
            "pfedlora needs networks of one feature width K (`features`), got "
            f"{', '.join(map(str, sorted(widths)))}."
        )
    width, loss_of = widths.pop(), losses.of(task)

    def init(key):
        draw = keys.fold(key, Start.ADAPTER)
        a = jax.random.normal(draw, (width, rank), jnp.float32) / rank
        b = jnp.zeros((rank, task.num_classes), jnp.float32)
        own = architectures.stack(task, lambda model: model.init(key))
        return State({"adapter": {"a": a, "b": b}}, {"w": own})

    def logits(c, w, adapter, x, mask, train=False, key=None):
        # Both logits, and the new statistics.
        h, stats = c.model.features(w, x, mask=mask, train=train, key=key)
        z = c.model.head(w["head"], h)
        return z + (h @ adapter["a"]) @ adapter["b"], z, stats

    def predictor(c, w, adapter):
        return lambda x, mask: jnp.stack(logits(c, w, adapter, x, mask)[:2], axis=-1)

    def client(c, server, row):
        def own_loss(w, batch, key):
            both, z, stats = logits(
                c, w, server["adapter"], batch.x, batch.mask, True, key
            )
            values = [loss_of(each, batch.y, batch.mask) for each in (both, z)]
            return mu * values[0] + (1 - mu) * values[1], stats

        def adapter_loss(v, batch, key):
            both, _, _ = logits(c, w, v["adapter"], batch.x, batch.mask, True, key)
            return loss_of(both, batch.y, batch.mask), v["stats"]

        sgd = local_training.bind(task)
        # The adapter is frozen.
        w, value = sgd(c, row["w"], loss=own_loss)
        # The own model is frozen.
        adapter = server["adapter"]
        if adapter_epochs != 0:
            given = {"adapter": adapter, "stats": {}}
            trained, _ = sgd(
                c,
                given,
                loss=adapter_loss,
                train=("adapter",),
                epochs=adapter_epochs,
                stream=Local.ADAPTER,
            )
            adapter = trained["adapter"]
        row = {"w": Own(w)}
        return Update({"adapter": adapter}, row, predictor(c, w, adapter), value)

    def predict(server, row, c):
        return predictor(c, row["w"], server["adapter"])

    return averaging.from_client(
        init,
        client,
        predict,
        score=_score,
        averages=("adapter",),
        trainings=2 if adapter_epochs is None else 0,
    )


def _score(outputs, y, mask, c):
    return averaging.score_paired(outputs, y, mask, c, names=("own",))
