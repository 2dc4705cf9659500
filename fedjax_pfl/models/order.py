"""The layers of a model in the order in which it applies them, which the names of its variables do
not tell."""

import jax
from jax.extend.core import Literal

from fedjax_pfl.types import Model

Path = tuple[str, ...]  # of a layer in the variables, such as ("body", "convs", "0")


def layers(model: Model, x: jax.ShapeDtypeStruct) -> list[dict[Path, tuple[tuple[int, ...], ...]]]:
    """Lists a model's layers from the input to the logits.

    Args:
      x: an input of the model, [B, ...].

    Returns:
      For each layer the shapes of its parameters by path: first the layer's own path, then those of
      the batch norms that follow it.
    """
    variables = jax.eval_shape(model.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda variables, x: model.apply(variables, x)[0])(variables, x).jaxpr
    first = {v: i for i, e in reversed([*enumerate(traced.eqns)]) for v in e.invars if not isinstance(v, Literal)}
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    bn_mask = dict(jax.tree_util.tree_leaves_with_path(model.bn_mask))
    used = sorted(zip(leaves, traced.invars, strict=False), key=lambda one: first.get(one[1], len(traced.eqns)))
    found: list[dict[Path, tuple[tuple[int, ...], ...]]] = []
    for (path, leaf), _ in used:
        part, *inside, _name = (key.key for key in path)
        if part == "stats":
            continue
        layer = (part, *inside)
        if not any(layer in known for known in found):
            found += [] if bn_mask[path] and found else [{}]
            found[-1][layer] = ()
        here = next(known for known in found if layer in known)
        here[layer] += (leaf.shape,)
    return found
