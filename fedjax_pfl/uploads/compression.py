"""Compression of updates, with error feedback where it is biased.

References: Stich, Cordonnier & Jaggi, Sparsified SGD with memory (NeurIPS 2018, arXiv
1809.07599); Alistarh, Grubic, Li, Tomioka & Vojnovic, QSGD (NeurIPS 2017, arXiv
1610.02132); Vogels, Karimireddy & Jaggi, PowerSGD (NeurIPS 2019, arXiv 1905.13727).
"""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Interval
from jax.flatten_util import ravel_pytree

from fedjax_pfl import keys, trees
from fedjax_pfl.types import Array, Client, PyTree, Upload
from fedjax_pfl.uploads.chain import option


@option("compress")
def top_k(fraction: Annotated[float, Interval(gt=0, le=1)]) -> Upload:
    """Sends the numbers of largest magnitude and their positions; what is left out is
    added to the client's next update (Stich et al.).

    Args:
      fraction: of all numbers, in (0, 1].
    """

    def count(tree: PyTree) -> Array:
        kept = jnp.ceil(jnp.asarray(fraction, jnp.float32) * trees.size(tree) - 1e-3)
        return jnp.maximum(kept, 1).astype(jnp.int32)

    def client(
        c: Client, update: PyTree, _: PyTree, lost: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        update = optax.tree.cast_like(trees.add(update, lost), update)
        vector, whole = ravel_pytree(update)
        kept = largest(vector, count(update))
        sent = whole(jnp.where(kept, vector, 0))
        return sent, jax.tree.map(jnp.subtract, update, sent), ()

    def size(like: PyTree) -> tuple[Array, Array]:
        return count(like), count(like)

    return Upload(lambda like: ((), like), client, size=size)


def largest(x: Array, k: Array) -> Array:
    """Marks the k numbers of largest magnitude, the first ones where several are equal.

    The k-th largest is found bit by bit: k is traced, and a sort is slower.

    Args:
      x: [Z]; compared in float32.
      k: [] int32, in [1, Z].

    Returns:
      bool [Z], k of them True.
    """
    # of numbers that are not negative, the order of bits is that of values
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.uint32)

    def narrowed(i: Array, low: Array) -> Array:
        middle = low | (jnp.uint32(1) << (30 - i).astype(jnp.uint32))
        return jnp.where(jnp.sum(bits >= middle) >= k, middle, low)

    last = jax.lax.fori_loop(0, 31, narrowed, jnp.uint32(0))
    above, equal = bits > last, bits == last
    return above | (equal & (jnp.cumsum(equal) <= k - jnp.sum(above)))


@option("compress")
def qsgd(levels: Annotated[int, Ge(1)]) -> Upload:
    """Rounds each number at random to a multiple of 1/levels of its array's norm,
    without bias (Alistarh et al.).

    A number takes log2(2 levels + 1) bits, rounded up to whole bits; 32 bits count as
    one scalar. Each array sends its norm, too.

    Args:
      levels: in [1, inf).
    """
    bits = math.ceil(math.log2(2 * levels + 1))

    def one(key: Array, x: Array) -> Array:
        norm = jnp.linalg.norm(x.reshape(-1))
        level = levels * jnp.abs(x) / jnp.where(norm > 0, norm, 1)
        low = jnp.floor(level)
        up = jax.random.uniform(key, x.shape) < level - low
        return (norm * jnp.sign(x) * (low + up) / levels).astype(x.dtype)

    def client(
        c: Client, update: PyTree, _: PyTree, row: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        leaves, structure = jax.tree.flatten(update)
        drawn = jax.random.split(keys.fold(c.key, keys.Client.COMPRESS), len(leaves))
        return jax.tree.unflatten(structure, list(map(one, drawn, leaves))), row, ()

    def size(like: PyTree) -> tuple[int, int]:
        numbers = math.ceil(trees.size(like) * bits / 32)
        return numbers + len(jax.tree.leaves(like)), 0

    return Upload(lambda like: ((), ()), client, size=size)


@option("compress")
def low_rank(rank: Annotated[int, Ge(1)]) -> Upload:
    """Sends two factors P Q^T of each array as a matrix [m, n] of its last axis; what
    is left out is added to the client's next update.

    Q is kept by the client, and each round takes one power iteration from it, as in
    PowerSGD (Vogels et al.), which averages P over the clients before Q is computed.
    An array of which the factors would be larger is sent whole.

    Args:
      rank: columns of P and Q, in [1, inf).
    """

    def sides(shape: tuple[int, ...]) -> tuple[int, int]:
        return math.prod(shape[:-1]), math.prod(shape[-1:])

    def smaller(shape: tuple[int, ...]) -> bool:
        m, n = sides(shape)
        return rank * (m + n) < m * n

    def init(like: PyTree) -> tuple[PyTree, PyTree]:
        draw = np.random.default_rng(0).normal  # the same start in every run
        starts = [
            jnp.asarray(draw(size=(sides(x.shape)[1], rank)), x.dtype)
            if smaller(x.shape)
            else ()
            for x in jax.tree.leaves(like)
        ]
        return (), {"lost": like, "q": starts}

    def one(x: Array, q: Any) -> tuple[Array, Any]:
        if not smaller(x.shape):
            return x, q
        matrix = x.reshape(sides(x.shape))
        p, _ = jnp.linalg.qr(matrix @ q)
        new = matrix.T @ p
        # an update of zeros keeps the start
        q = jnp.where(jnp.any(new != 0), new, q)
        return (p @ new.T).reshape(x.shape), q

    def client(
        c: Client, update: PyTree, _: PyTree, row: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        update = optax.tree.cast_like(trees.add(update, row["lost"]), update)
        leaves, structure = jax.tree.flatten(update)
        pairs = [one(x, q) for x, q in zip(leaves, row["q"], strict=True)]
        sent = jax.tree.unflatten(structure, [x for x, _ in pairs])
        lost = jax.tree.map(jnp.subtract, update, sent)
        return sent, {"lost": lost, "q": [q for _, q in pairs]}, ()

    def size(like: PyTree) -> tuple[int, int]:
        shapes = [x.shape for x in jax.tree.leaves(like)]
        each = [
            rank * sum(sides(shape)) if smaller(shape) else math.prod(shape)
            for shape in shapes
        ]
        return sum(each), 0

    return Upload(init, client, size=size)
