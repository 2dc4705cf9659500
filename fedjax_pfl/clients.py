"""How the clients of a round are laid out on devices. The only file that knows about chunks, sorting and widths.

`width` clients are trained at once (vmap), the chunks one after another (scan), the longest clients first; within a
chunk each client takes exactly its own steps, and a mean is accumulated inside the scan, so that `width` models are
held, not S. The result is the same for every layout, to rounding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, trees
from fedjax_pfl.types import Array, Client, Data, Federation, PyTree, Rows


class Cohort:
    """What a round is given.

    Attributes:
      ids: [S] int32, distinct.
      active: [S] bool: takes part; the others are padding or dropped out, and change nothing.
      sizes: [S] int32 training examples.
      class_counts: [S, C] int32.
      round: [] int32.
      evaluated: [] bool: are test scores wanted now?
    """

    def __init__(
        self,
        federation: Federation,
        prepare: Callable[[Array], Array],
        ids: Array,
        active: Array,
        *,
        key: Array,
        round: Array,
        evaluated: Array,
        width: int,
    ):
        self.ids, self.active, self.round, self.evaluated = ids, active, round, evaluated
        self.sizes = federation.train.size[ids]
        self.class_counts = federation.class_counts[ids]
        self._federation, self._prepare, self._key = federation, prepare, key
        self._width = min(width, ids.shape[0])

    def map(self, client: Callable[..., PyTree], *rows: PyTree, phase: int = 0) -> PyTree:
        """client(c, *rows) for every client: results [S, ...]; of inactive clients they mean nothing."""
        _, results = self._run(lambda c, *rows: ((), client(c, *rows)), rows, (), phase)
        return results

    def mean(
        self, client: Callable[..., tuple], *rows: PyTree, weight: PyTree = None, empty: PyTree = None, phase: int = 0
    ) -> tuple[PyTree, tuple]:
        """Maps `client`, which returns a tuple, and averages its first result over the active clients.

        Args:
          weight: not yet normalised; None (uniform), [S], or a prefix tree of the first result whose leaves are None,
            [S], or [S, ...] with axes that stand for the last ones of every leaf below (see `aggregate.shares`).
          empty: a tree like the first result, taken where nobody has a weight; None: zeros.

        Returns:
          (the mean, in the types of the first result, and the other results [S, ...] as a tuple).
        """
        shares = aggregate.shares(weight, self.active)
        total, rest = self._run(lambda c, *rows: _head_tail(client(c, *rows)), rows, shares, phase)
        return total if empty is None else aggregate.filled(shares, total, empty), rest

    def _client(self, position: Array, active: Array, phase: int) -> Client:
        f, id = self._federation, self.ids[position]

        def data(rows: Rows) -> Data:
            index = rows.index[id] if rows.index.shape[1] else jnp.zeros(1, jnp.int32)  # a split that nobody has
            return Data(f.examples, index, jnp.where(active, rows.size[id], 0), self._prepare)

        key = jax.random.fold_in(jax.random.fold_in(self._key, phase), id)
        return Client(id, key, data(f.train), data(f.val), data(f.test), f.class_counts[id])

    def _order(self) -> Array:
        """Positions [S], longest first, ties by id: no chunk and no sum depends on the order of the cohort."""
        work = jnp.where(self.active, self.sizes, 0)
        return jnp.lexsort((self.ids, -work))

    def _run(self, client: Callable, rows: tuple, shares: PyTree, phase: int) -> tuple[PyTree, Any]:
        """Accumulates share * first result and stacks the second results in the cohort's order."""
        count, width, order = self.ids.shape[0], self._width, self._order()
        chunks = -(-count // width)
        positions = jnp.pad(order, (0, chunks * width - count), constant_values=count).reshape(chunks, width)

        def one(position: Array) -> tuple[PyTree, PyTree, PyTree]:
            real = position < count
            position = jnp.minimum(position, count - 1)
            c = self._client(position, self.active[position] & real, phase)
            first, rest = client(c, *trees.gather(rows, position))
            share = jax.tree.map(lambda p: jnp.where(real, p[position], 0), shares)
            return share, first, rest

        def weighed(position: Array) -> tuple[PyTree, PyTree]:
            share, first, rest = one(position)
            return aggregate.weigh(share, first), rest

        def chunk(total: PyTree, positions: Array) -> tuple[PyTree, PyTree]:
            if width == 1:  # no axis: no batched loop conditions, whose selects cost a copy of the state a step
                part, rest = weighed(positions[0])
            else:
                parts, rest = jax.vmap(weighed)(positions)
                part = jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)
            return trees.add(total, part), rest

        share, first, _ = jax.eval_shape(lambda: one(positions[0, 0]))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(aggregate.weigh, share, first))
        total, rest = jax.lax.scan(chunk, zeros, positions)
        total = jax.tree.map(lambda x, like: x.astype(like.dtype), total, first)
        if width > 1:
            rest = jax.tree.map(lambda x: x.reshape(chunks * width, *x.shape[2:]), rest)
        return total, trees.gather(rest, jnp.argsort(order))


def _head_tail(results: tuple) -> tuple[PyTree, tuple]:
    return results[0], tuple(results[1:])
