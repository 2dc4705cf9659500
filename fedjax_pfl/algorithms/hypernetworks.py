"""Networks that generate the parameters of a model from an embedding of a client."""

import jax
import jax.numpy as jnp

from fedjax_pfl.models.layers import uniform
from fedjax_pfl.types import Array, PyTree


def hypernetwork(
    key: Array, embedding: int, hidden: int, layers: int, target: PyTree
) -> PyTree:
    """Draws the parameters psi: 1 + `layers` hidden linear layers, and a linear head
    for each leaf of `target`."""

    def linear(key, din, shape):
        key_kernel, key_bias = jax.random.split(key)
        draw = uniform(din)
        kernel, bias = draw(key_kernel, (din, *shape)), draw(key_bias, shape)
        return {"kernel": kernel, "bias": bias}

    key_hidden, key_heads = jax.random.split(key)
    leaves, structure = jax.tree.flatten(target)
    sizes = (embedding, *(hidden for _ in range(layers)))
    mlp = [
        linear(k, din, (hidden,))
        for k, din in zip(jax.random.split(key_hidden, len(sizes)), sizes, strict=True)
    ]
    keys = jax.random.split(key_heads, len(leaves))
    heads = [linear(k, hidden, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return {"hidden": mlp, "heads": jax.tree.unflatten(structure, heads)}


def generate(psi: PyTree, e: Array, target: PyTree) -> PyTree:
    """Generates a client's parameters theta = h(e; psi), in the shapes and types of
    `target`, from its embedding e [d_e]."""
    x = e
    for i, layer in enumerate(psi["hidden"]):
        x = (x if i == 0 else jax.nn.relu(x)) @ layer["kernel"] + layer["bias"]

    def head(like, head):
        out = jnp.tensordot(x, head["kernel"], 1) + head["bias"]
        return out.astype(like.dtype)

    return jax.tree.map(head, target, psi["heads"])
