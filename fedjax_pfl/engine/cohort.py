"""How the clients of a round are laid out on devices. The only file that knows about chunks, widths and meshes.

On each device `width` clients are trained at once (vmap), the chunks one after another (scan), the longest clients
first; within a chunk each client takes exactly its own steps, and a mean is accumulated inside the scan, so that
`width` models are held, not S. Over several devices each trains its own block of the cohort (shard_map), without a
word to the others until the partial means are summed, once. The result is the same for every layout, to rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl import aggregate, trees
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import Array, Client, Data, Federation, PyTree, Rows

AXIS = "clients"  # of the mesh
ORDER = 0x5CA4  # the stream of a cohort's key that `scan` draws its order from; phases are smaller


def take(devices: int, local: bool = False) -> list[jax.Device]:
    """The first `devices` devices, of each process equally many; `local`: of this process alone.

    Raises:
      InputError: there are not that many, or the processes cannot share them.
    """
    found, processes = (jax.local_devices(), 1) if local else (jax.devices(), jax.process_count())
    check("devices", devices, 1, len(found))
    if devices % processes:
        raise InputError(
            f"devices={devices} cannot be shared by {processes} processes: take a multiple of {processes}."
        )
    if processes == 1:
        return found[:devices]
    own = [[device for device in found if device.process_index == i] for i in range(processes)]
    return [device for part in own for device in part[: devices // processes]]


def make_mesh(devices: int, local: bool = False) -> Mesh | None:
    """A mesh of the devices that `take` gives; None for a single one, which needs no mesh (of several processes each
    then computes everything)."""
    if devices == 1:
        return None
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=take(devices, local))


def deal(work: Array, devices: int) -> Array:
    """Deals clients to devices, equally many to each and as equal in work as can be: the longest first, each to the
    least loaded device that has a place left.

    Args:
      work: [S], of any unit.

    Returns:
      [D ceil(S / D)] int32, the positions of the first device's clients, then the second's, ...; what is S or more
      stands for an empty place. No value occurs twice.
    """
    count = work.shape[0]
    capacity = -(-count // devices)
    order = jnp.argsort(-work).astype(jnp.int32)

    def give(carry: tuple[Array, Array], position: Array) -> tuple[tuple[Array, Array], Array]:
        load, held = carry
        device = jnp.argmin(jnp.where(held < capacity, load, jnp.inf))
        place = device * capacity + held[device]
        return (load.at[device].add(work[position]), held.at[device].add(1)), place

    start = (jnp.zeros(devices), jnp.zeros(devices, jnp.int32))
    _, places = jax.lax.scan(give, start, order)
    dealt = jnp.full(devices * capacity, count, jnp.int32).at[places].set(order)
    empty = dealt == count
    return jnp.where(empty, count - 1 + jnp.cumsum(empty), dealt)


def lanes(work: np.ndarray, width: int, devices: int = 1) -> float:
    """How many steps are computed for each that is wanted, where clients are laid out as a Cohort does it: in a chunk
    all go on until the longest client has ended, and a last chunk has empty places.

    Args:
      work: [S] steps of each client.
      width: clients at once on each device.

    Returns:
      1 or more; over several devices as many as if all had as many as the slowest.
    """
    places = np.asarray(jax.jit(deal, static_argnums=1)(work, devices)) if devices > 1 else np.arange(len(work))
    blocks = np.append(work, np.zeros(len(places) - len(work)))[places].reshape(devices, -1)
    width = min(width, blocks.shape[1])
    longest = -np.sort(-blocks)[:, ::width]  # of each chunk
    return float(devices * width * longest.sum(axis=1).max() / work.sum()) if work.any() else 1.0


def sharded(tree: PyTree, mesh: Mesh | None, spec: P) -> PyTree:
    """The tree with a constraint on where its leaves lie; without a mesh, the tree."""
    if mesh is None:
        return tree
    return unmarked(jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), tree))


_unmark = Primitive("unmark")  # the identity
_unmark.def_impl(lambda x: x)
_unmark.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_unmark, lambda ctx, x: [x])
batching.defvectorized(_unmark)


def unmarked(tree: PyTree) -> PyTree:
    """The same arrays without the mesh in their type.

    What `client` closes over enters the shard_map as it is; some of jax's functions refuse an operand whose type says
    that the mesh is automatic where they run inside of it (seen with JAX 0.10: indexing, broadcasting).
    """
    return jax.tree.map(_unmark.bind, tree)


class Cohort:
    """What a round is given.

    Attributes:
      ids: [S] int32, distinct; N or more in padding, where jax's indexing reads some other row and writes nothing.
      active: [S] bool: takes part; the others are padding or dropped out, and change nothing.
      sizes: [S] int32 training examples.
      class_counts: [S, C] int32.
      total: [] int32 training examples of all N clients.
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
        mesh: Mesh | None = None,
    ):
        self.ids, self.active, self.round, self.evaluated = ids, active, round, evaluated
        known = jnp.minimum(ids, federation.train.size.shape[0] - 1)
        self.sizes, self.class_counts = federation.train.size[known], federation.class_counts[known]
        self.total = jnp.sum(federation.train.size)
        if mesh is not None:  # every device knows these, so that sums over them need no word between devices
            here = (self.ids, self.active, self.sizes, self.class_counts, self.total)
            self.ids, self.active, self.sizes, self.class_counts, self.total = sharded(here, mesh, P())
        self._federation, self._prepare, self._key, self._mesh = federation, prepare, key, mesh
        block, rest = divmod(ids.shape[0], 1 if mesh is None else mesh.size)
        assert rest == 0, "every device gets equally many places: see `deal`"
        self._width = min(width, block)

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
        shares = sharded(aggregate.shares(weight, self.active), self._mesh, P())
        total, rest = self._run(lambda c, *rows: _head_tail(client(c, *rows)), rows, shares, phase)
        return total if empty is None else aggregate.filled(shares, total, empty), rest

    def scan(
        self, client: Callable[..., tuple[PyTree, PyTree]], carry: PyTree, *rows: PyTree, phase: int = 0
    ) -> tuple[PyTree, PyTree]:
        """Active clients one after another: `carry, results = client(c, carry, *rows)`.

        Their order is random, drawn from the key of the round by the clients' ids: it does not depend on the order of
        the cohort, and the others keep theirs when one is absent. Inactive clients are passed over.

        Returns:
          (the last carry, results [S, ...]); the results of inactive clients are zeros.
        """
        key = jax.random.fold_in(jax.random.fold_in(self._key, ORDER), phase)
        draws = jax.vmap(lambda id: jax.random.bits(jax.random.fold_in(key, id)))(self.ids)
        order = jnp.lexsort((self.ids, draws, ~self.active))

        def one(i: Array, loop: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            carry, results = loop
            position = order[i]
            c = self._client(self._federation, self.ids[position], self.active[position], phase)
            carry, result = client(c, carry, *trees.gather(rows, position))
            return carry, jax.tree.map(lambda all, x: all.at[position].set(x), results, result)

        def first() -> PyTree:
            c = self._client(self._federation, self.ids[0], self.active[0], phase)
            return client(c, carry, *trees.gather(rows, order[0]))[1]

        shapes = jax.eval_shape(first)
        results = jax.tree.map(lambda x: jnp.zeros((self.ids.shape[0], *x.shape), x.dtype), shapes)
        # the trip count is dynamic, so that whoever is inactive costs nothing and the carry needs no select
        return jax.lax.fori_loop(0, jnp.sum(self.active), one, (carry, results))

    def everywhere(self, rows: PyTree) -> PyTree:
        """Rows [S, ...] in the order of `ids`, all of them on every device: what a step on the host is to be given."""
        return sharded(rows, self._mesh, P())

    def _client(self, f: Federation, id: Array, active: Array, phase: int) -> Client:
        row = jnp.minimum(id, f.train.size.shape[0] - 1)

        def data(rows: Rows) -> Data:
            index = rows.index[row] if rows.index.shape[1] else jnp.zeros(1, jnp.int32)  # a split that nobody has
            return Data(f.examples, index, jnp.where(active, rows.size[row], 0), self._prepare)

        key = jax.random.fold_in(jax.random.fold_in(self._key, phase), id)
        return Client(id, key, data(f.train), data(f.val), data(f.test), f.class_counts[row])

    def _run(self, client: Callable, rows: tuple, shares: PyTree, phase: int) -> tuple[PyTree, Any]:
        """Accumulates share * first result and stacks the second results in the cohort's order."""
        block: Callable = functools.partial(self._block, client, phase)
        if self._mesh is not None:
            # check_vma would refuse loops that start from the server's state, which `client` closes over
            inside, outside = (P(), *[P(AXIS)] * 5), (P(), P(AXIS))
            block = jax.shard_map(block, mesh=self._mesh, in_specs=inside, out_specs=outside, check_vma=False)
        results = block(self._federation, self.ids, self.active, self.sizes, rows, shares)
        return results if self._mesh is None else unmarked(results)

    def _block(
        self,
        client: Callable,
        phase: int,
        federation: Federation,
        ids: Array,
        active: Array,
        sizes: Array,
        rows: tuple,
        shares: PyTree,
    ) -> tuple[PyTree, Any]:
        """What one device does: `_run` over its own clients, all arrays with as many rows."""
        count, width = ids.shape[0], self._width
        # longest first, ties by id: no chunk and no sum depends on the order of the cohort
        order = jnp.lexsort((ids, -jnp.where(active, sizes, 0)))
        chunks = -(-count // width)
        positions = jnp.pad(order, (0, chunks * width - count), constant_values=count).reshape(chunks, width)

        def one(position: Array) -> tuple[PyTree, PyTree, PyTree]:
            real = position < count
            position = jnp.minimum(position, count - 1)
            c = self._client(federation, ids[position], active[position] & real, phase)
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
        if width > 1:
            rest = jax.tree.map(lambda x: x.reshape(chunks * width, *x.shape[2:]), rest)
        if self._mesh is not None:
            total = jax.lax.psum(total, AXIS)
        return trees.cast(total, first), trees.gather(rest, jnp.argsort(order))


def _head_tail(results: tuple) -> tuple[PyTree, tuple]:
    return results[0], tuple(results[1:])
