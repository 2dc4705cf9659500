"""Checks of a network of one's own: `check_network(factory, shape, num_classes)`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import losses, models, trees
from fedjax_pfl.models.registry import Factory
from fedjax_pfl.testing.rounds import ContractViolation
from fedjax_pfl.types import Batch, Model, PyTree


class Given(NamedTuple):
    """A network, its variables, a batch of eight, and how to make the network anew."""

    model: Model
    variables: PyTree
    batch: Batch
    make: Callable[..., Model]


def learned(model: Model, variables: PyTree, batch: Batch) -> PyTree:
    """Returns loss, new running statistics and gradient of one training step."""
    loss = losses.classification(model)
    (value, stats), slope = jax.value_and_grad(loss, has_aux=True)(
        variables, batch, jax.random.key(0)
    )
    return value, stats, {part: slope[part] for part in ("body", "head")}


def _finite(given: Given, batch: Batch) -> None:
    found = learned(given.model, given.variables, batch)
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(found)):
        raise ContractViolation("the loss or its gradient is not finite")


def zeros(g: Given) -> None:
    """An input of zeros has a finite loss and gradient."""
    _finite(g, g.batch._replace(x=jnp.zeros_like(g.batch.x)))


def batch_of_one(g: Given) -> None:
    """A batch of one example has a finite loss and gradient."""
    _finite(g, jax.tree.map(lambda x: x[:1], g.batch))


def masked_rows(g: Given) -> None:
    """Masked rows influence neither the loss nor the statistics nor the gradient."""
    mask = jnp.arange(len(g.batch.y)) < 5
    others = jnp.where(trees.expand(mask, g.batch.x.ndim), g.batch.x, g.batch.x[:1])
    one = learned(g.model, g.variables, g.batch._replace(mask=mask))
    other = learned(g.model, g.variables, g.batch._replace(x=others, mask=mask))
    _close(one, other)


def statistics(g: Given) -> None:
    """A prediction does not change running statistics, nor a step their shapes."""
    _, new, _ = learned(g.model, g.variables, g.batch)
    _, same = g.model.apply(g.variables, g.batch.x, mask=g.batch.mask)
    if trees.named_shapes(new) != trees.named_shapes(g.variables["stats"]):
        raise ContractViolation("the running statistics change their shapes")
    _close(same, g.variables["stats"])


def random_streams(g: Given) -> None:
    """Equal keys train equally, and a prediction depends on no earlier one."""
    _close(*(learned(g.model, g.variables, g.batch) for _ in range(2)))
    _close(*(g.model.apply(g.variables, g.batch.x)[0] for _ in range(2)))


def bfloat16(g: Given) -> None:
    """In bfloat16 the outputs are float32, and loss and gradient are finite."""
    model = g.make(compute_dtype="bfloat16")
    if model.apply(g.variables, g.batch.x)[0].dtype != jnp.float32:
        raise ContractViolation("the logits are not float32")
    _finite(g._replace(model=model), g.batch)


RULES = (zeros, batch_of_one, masked_rows, statistics, random_streams, bfloat16)


def check_network(
    factory: Factory | str,
    input_shape: tuple[int, ...],
    num_classes: int,
    **options: Any,
) -> None:
    """Checks a network on a random batch.

    Args:
      factory: as of `models.model`, as are the other arguments.

    Raises:
      ContractViolation: a rule of RULES is broken.
      InputError: the module is no network, see `models.model`.
    """

    def make(**more: Any) -> Model:
        return models.model(factory, input_shape, num_classes, **options | more)

    model, dtype = make(), options.get("input_dtype", jnp.float32)
    key = jax.random.key(0)
    x = jax.random.normal(key, (8, *input_shape))
    # integers are tokens, which are few
    x = (
        x.astype(dtype)
        if jnp.issubdtype(dtype, jnp.floating)
        else (x > 0).astype(dtype)
    )
    rows = jnp.arange(8)
    batch = Batch(x, rows % num_classes, rows >= 0, rows)
    given = Given(model, model.init(key), batch, make)
    for rule in RULES:
        try:
            rule(given)
        except ContractViolation as error:
            meaning = " ".join((rule.__doc__ or "").split())
            raise ContractViolation(
                f"{rule.__name__}: {meaning} Here {error}."
            ) from None


def _close(a: PyTree, b: PyTree) -> None:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    if not all(np.allclose(x, y, atol=1e-5, equal_nan=True) for x, y in pairs):
        raise ContractViolation("they differ")
