"""The layers of a model in the order in which it applies them, which the names of its
variables do not tell."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, jaxprs_in_params

from fedjax_pfl.types import Model

Path = tuple[str, ...]  # of a layer in the variables, such as ("body", "convs", "0")


def layers(
    model: Model, x: jax.ShapeDtypeStruct
) -> list[dict[Path, tuple[tuple[int, ...], ...]]]:
    """Lists a model's layers from the input to the logits, without those that no
    prediction uses.

    Args:
      x: an input of the model, [B, ...].

    Returns:
      For each layer the shapes of its parameters by path: first the layer's own path,
      then those of the batch norms that follow it.
    """
    variables = jax.eval_shape(model.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda variables, x: model.apply(variables, x)[0])(
        variables, x
    ).jaxpr
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    order, _ = _uses(traced, range(len(traced.invars)))
    used = [
        leaves[i]
        for i in dict.fromkeys([*order, *range(len(leaves))])
        if i < len(leaves)
    ]
    needed = {leaves[i][0][:-1] for i in order if i < len(leaves)}
    bn_mask = dict(jax.tree_util.tree_leaves_with_path(model.bn_mask))
    found: list[dict[Path, tuple[tuple[int, ...], ...]]] = []
    for path, leaf in used:
        part, *inside, _name = (key.key for key in path)
        if part == "stats" or path[:-1] not in needed:
            continue
        layer = (part, *inside)
        if not any(layer in known for known in found):
            found += [] if bn_mask[path] and found else [{}]
            found[-1][layer] = ()
        here = next(known for known in found if layer in known)
        here[layer] += (leaf.shape,)
    return found


def _uses(
    jaxpr: Any, inputs: Sequence[int | None]
) -> tuple[list[int], list[int | None]]:
    """Which of a jaxpr's inputs, by number, its equations compute with, in their order,
    and which are its outputs: a change of type is no use, and what is within jit or
    remat is looked at by itself."""
    known, found = dict(zip(jaxpr.invars, inputs, strict=True)), list[int]()
    for e in jaxpr.eqns:
        given = [None if isinstance(v, Literal) else known.get(v) for v in e.invars]
        if e.primitive.name == "convert_element_type":
            known[e.outvars[0]] = given[0]
            continue
        inner = list(jaxprs_in_params(e.params))
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            used, through = _uses(inner[0], given)
            found += used
            known |= dict(zip(e.outvars, through, strict=True))
        else:
            found += [i for i in given if i is not None]
    return found, [
        None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars
    ]
