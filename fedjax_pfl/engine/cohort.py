"""The clients of a round on devices: batches of clients, means and scans.

On each device `width` clients are trained at once (`jax.vmap`), and batches of as many
one after another (`jax.lax.scan`), the clients with the most training examples first. A
client takes exactly its own steps, though a batch takes as long as its longest client.
A mean is accumulated inside the scan, so that `width` models are held, not S. Over
several devices each trains its own segment of the cohort (`jax.shard_map`), without
communication until the partial means are summed, once. The clients of each architecture
form a segment of the cohort, and the segments run one after another. The results are
the same for every layout, to rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from fedjax_pfl import aggregate, architectures, keys, trees
from fedjax_pfl.engine import contract
from fedjax_pfl.engine.placement import AXIS, Layout, sharded, slices, without_mesh
from fedjax_pfl.errors import ContractError, InputError
from fedjax_pfl.types import (
    Array,
    Client,
    Context,
    Data,
    Examples,
    Federation,
    Own,
    PyTree,
    Subset,
    Task,
)

# (uploads [S, ...], shares as of `aggregate.shares`, default) -> their mean
Combine = Callable[[PyTree, PyTree, PyTree], PyTree]
# (client, *rows) -> (summed over the clients, not summed)
Sender = Callable[..., tuple[PyTree, PyTree]]


class Cohort:
    """The cohort of a round; `types.Cohort` is its public interface.

    Attributes:
      lengths: [G] clients in each architecture's segment, padding included, in the
        order of Task.models.
    """

    def __init__(
        self,
        context: Context,
        task: Task,
        ids: Array,
        active: Array,
        *,
        evaluated: Array,
        layout: Layout | None = None,
        held: bool = False,
    ):
        """Sets the attributes.

        Args:
          layout: None is one architecture on one device, a client at a time.
          held: every mean is its `default`.
        """
        federation = context.federation
        known = jnp.minimum(ids, federation.train.size.shape[0] - 1)
        sizes = jnp.where(active, federation.train.size[known], 0)
        counts = jnp.where(active[:, None], federation.class_counts[known], 0)
        total = jnp.sum(federation.train.size)
        layout = Layout((len(ids),)) if layout is None else layout
        # replicated on every device, so that sums over them need no communication
        replicated = sharded((ids, active, sizes, counts, total), layout.mesh, P())
        self.ids, self.active, self.sizes, self.class_counts, self.total = replicated
        self.round, self.evaluated = context.t, evaluated
        self.metrics = task.metrics
        self.trained = self.sizes > 0
        self.public = _public(federation, task, jnp.bool(True))
        self.lengths = layout.lengths
        self._context, self._task = context, task
        self._federation = federation
        self._key = keys.clients_key(context.key, context.t)
        self._mesh, self._width, self._held = layout.mesh, layout.width, held
        self._phases: set[int] = set()

    def alone(self, id: Array, active: Array, t: Array) -> "Cohort":
        """Returns the cohort of one client in round `t`."""
        context = self._context._replace(t=t)
        evaluated = self.evaluated
        return Cohort(context, self._task, id[None], active[None], evaluated=evaluated)

    def map(
        self, client: Callable[..., PyTree], *rows: PyTree, phase: int | None = 0
    ) -> PyTree:
        """See `types.Cohort`."""
        self._once(phase)
        _, results = self._run(lambda c, *rows: ((), client(c, *rows)), rows, (), phase)
        return results

    def mean(
        self,
        client: Callable[..., tuple[PyTree, ...]],
        *rows: PyTree,
        weight: PyTree = None,
        default: PyTree,
        phase: int | None = 0,
        combine: Combine | None = None,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """See `types.Cohort`."""
        self._once(phase)
        contract.check_weight(weight, len(self.ids))
        # then each architecture's clients are averaged separately
        per_group = architectures.is_grouped(default)
        segments = slices(self.lengths) if per_group else [slice(None)]
        shares = [
            aggregate.shares(
                jax.tree.map(lambda w, here=here: w[here], weight), self.active[here]
            )
            for here in segments
        ]
        shares = sharded(shares, self._mesh, P())
        send = self._sender(default, client)
        if self._held:
            _, rest = self._run(
                lambda c, *rows: ((), send(c, *rows)[1]), rows, (), phase
            )
            return default, rest
        if combine is not None:
            return self._combined(send, rows, shares, default, phase, combine)
        if not per_group:
            totals, rest = self._run(send, rows, shares[0], phase)
            total = functools.reduce(trees.add, totals)
            return aggregate.filled(shares[0], total, default), rest
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *shares)
        totals, rest = self._run(send, rows, joined, phase)
        means = map(aggregate.filled, shares, totals, default.trees)
        return architectures.grouped(list(means)), rest

    def _combined(
        self,
        send: Sender,
        rows: tuple[PyTree, ...],
        shares: list[PyTree],
        default: PyTree,
        phase: int | None,
        combine: Combine,
    ) -> tuple[PyTree, PyTree]:
        """Returns combine(uploads, shares, default) per architecture, and the clients'
        other results.

        All uploads [S, ...] are held on every device, in the order of the ids.
        """
        per_group = architectures.is_grouped(default)

        def keep(c: Client, *rows: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
            upload, rest = send(c, *rows)
            return (), (Own(upload) if per_group else upload, rest)

        _, (uploads, rest) = self._run(keep, rows, (), phase)
        uploads = self.replicated(uploads)
        if not per_group:
            one = self._one_combined(uploads, self.ids, shares[0], default, combine)
            return one, rest
        found = []
        for g, here in enumerate(slices(self.lengths)):
            mine = uploads.trees[g], self.ids[here], shares[g], default.trees[g]
            found.append(self._one_combined(*mine, combine))
        return architectures.grouped(found), rest

    def _one_combined(
        self,
        uploads: PyTree,
        ids: Array,
        shares: PyTree,
        default: PyTree,
        combine: Combine,
    ) -> PyTree:
        order = jnp.argsort(ids)  # no result depends on the order of the cohort
        stack, each = trees.gather((uploads, shares), order)
        found = optax.tree.cast_like(combine(stack, each, default), default)
        contract.check_like("`combine` must keep the upload", default, found)
        return aggregate.filled(shares, found, default)

    def scan(
        self,
        client: Callable[..., tuple[PyTree, PyTree]],
        carry: PyTree,
        *rows: PyTree,
        phase: int | None = 0,
    ) -> tuple[PyTree, PyTree]:
        """See `types.Cohort`.

        The order comes from a random number of (round, phase, id; None as phase 0).
        Neither the order of the cohort nor an absent client changes the relative order
        of the others.
        """
        if len(self.lengths) > 1:
            raise InputError("cohort.scan needs clients of one architecture.")
        self._once(phase)
        key = jax.random.fold_in(keys.fold(self._key, keys.Cohort.ORDER), phase or 0)
        draws = jax.vmap(
            lambda id: jax.random.bits(jax.random.fold_in(key, id), (), jnp.uint32)
        )(self.ids)
        order = jnp.lexsort((self.ids, draws, ~self.active))

        def turn(position: Array, carry: PyTree) -> tuple[PyTree, PyTree]:
            c = self._client(
                self._federation, self.ids[position], self.active[position], phase, 0
            )
            return client(c, carry, *trees.gather(rows, position))

        def one(i: Array, loop: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            carry, result = turn(order[i], loop[0])
            return carry, jax.tree.map(
                lambda all, x: all.at[order[i]].set(x), loop[1], result
            )

        shapes = jax.eval_shape(turn, order[0], carry)[1]
        results = jax.tree.map(
            lambda x: jnp.zeros((len(self.ids), *x.shape), x.dtype), shapes
        )
        # the trip count is dynamic: inactive clients cost nothing, and the carry needs
        # no select
        return jax.lax.fori_loop(0, jnp.sum(self.active), one, (carry, results))

    def replicated(self, tree: PyTree) -> PyTree:
        """See `types.Cohort`."""
        return sharded(tree, self._mesh, P())

    def _once(self, phase: int | None) -> None:
        """Raises InputError if a phase is used again: its clients would draw the same
        random numbers."""
        if phase in self._phases:
            raise InputError(
                "Each call of map, mean and scan in a round must have its own `phase`, "
                f"got {phase} twice: use None if it draws nothing."
            )
        self._phases |= set() if phase is None else {phase}

    def _sender(
        self, default: PyTree, client: Callable[..., tuple[PyTree, ...]]
    ) -> Sender:
        """Returns `client` with its upload checked against `default`."""

        def send(c: Client, *rows: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
            results = trees.single(client(c, *rows))
            if not isinstance(results, tuple) or not results:
                raise ContractError(
                    "the function given to cohort.mean must return a tuple (upload, "
                    f"...), got {type(results).__name__}."
                )
            first, *rest = results
            upload = first.tree if isinstance(first, Own) else first
            like = architectures.select(default, c.architecture)
            contract.check_like("the upload must be like `default`", like, upload)
            return upload, tuple(rest)

        return send

    def _client(
        self, f: Federation, id: Array, active: Array, phase: int | None, group: int
    ) -> Client:
        row = jnp.minimum(id, f.train.size.shape[0] - 1)
        prepare, loop = self._task.prepare, self._task.loop

        def data(rows: Subset) -> Data:
            # the first axis is empty where no client has examples in this split
            index = rows.index[row] if rows.index.shape[1] else jnp.zeros(1, jnp.int32)
            size = jnp.where(active, rows.size[row], 0)
            return Data(f.examples, index, size, prepare, f.mask_fill, None, loop)

        key = None
        if phase is not None:
            key = jax.random.fold_in(jax.random.fold_in(self._key, phase), id)
        train = data(f.train)
        if self._task.work is not None:
            train = train._replace(work=self._task.work(id, self.round))
        splits = (train, data(f.val), data(f.test))
        public = _public(f, self._task, active)
        counts = jnp.where(active, f.class_counts[row], 0)
        model = self._task.models[group]
        malicious = None
        if self._task.malicious is not None:
            malicious = jnp.asarray(self._task.malicious)[row]
        here = self.round, self.evaluated, malicious
        return Client(id, key, *splits, public, counts, model, group, *here)  # type: ignore[arg-type]  # see Client.key

    def _run(
        self,
        client: Sender,
        rows: tuple[PyTree, ...],
        shares: PyTree,
        phase: int | None,
    ) -> tuple[list[PyTree], PyTree]:
        """Returns the weighted sum of the uploads per architecture, and all clients'
        other results in the cohort's order."""
        some = [group for group, length in enumerate(self.lengths) if length]
        arrays = (self.ids, self.active, self.sizes, rows, shares)
        each = [arrays]
        if len(self.lengths) > 1:
            segments = slices(self.lengths)
            each = [architectures.rows_of(arrays, g, segments[g]) for g in some]

        # one group of devices that share a base has all clients
        several = self._mesh is not None and self._mesh.shape[AXIS] > 1

        def here(
            federation: Federation, each: list[Any]
        ) -> tuple[list[PyTree], list[PyTree]]:
            blocks = (
                self._block(client, phase, group, federation, mine)
                for group, mine in zip(some, each, strict=True)
            )
            totals, results, like = (list(part) for part in zip(*blocks, strict=True))
            # all at once: with a sum after each architecture devices would wait
            totals = jax.lax.psum(totals, AXIS) if several else totals
            return optax.tree.cast_like(totals, like), results

        if not several:
            totals, results = here(self._federation, each)
        else:
            # check_vma would refuse loops that start from the server's state, which
            # `client` closes over
            spread = jax.shard_map(
                here,
                mesh=self._mesh,
                in_specs=(P(), P(AXIS)),
                out_specs=(P(), P(AXIS)),
                # products with a divided base are the partitioner's
                axis_names={AXIS},
                check_vma=False,
            )
            totals, results = without_mesh(spread(self._federation, each))
        return totals, architectures.join(results)

    def _block(
        self,
        client: Sender,
        phase: int | None,
        group: int,
        federation: Federation,
        given: tuple[Array, Array, Array, tuple[PyTree, ...], PyTree],
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Runs one device's clients of an architecture.

        Args:
          given: ids, active, sizes, rows and shares of these clients.

        Returns:
          the weighted sum of the uploads, the other results, and the shapes and types
          of one upload.
        """
        ids, active, sizes, rows, shares = given
        count = ids.shape[0]
        width = min(self._width, count)
        # longest first, ties by id: no batch and no sum depends on the order of the
        # cohort
        order = jnp.lexsort((ids, -sizes))
        chunks = -(-count // width)
        positions = jnp.pad(
            order, (0, chunks * width - count), constant_values=count
        ).reshape(chunks, width)

        def one(position: Array) -> tuple[PyTree, PyTree, PyTree]:
            real = position < count
            position = jnp.minimum(position, count - 1)
            c = self._client(
                federation, ids[position], active[position] & real, phase, group
            )
            first, rest = client(c, *trees.gather(rows, position))
            share = jax.tree.map(lambda p: jnp.where(real, p[position], 0), shares)
            return share, first, rest

        def weighed(position: Array) -> tuple[PyTree, PyTree]:
            share, first, rest = one(position)
            return aggregate.weigh(share, first), rest

        def chunk(
            carry: tuple[PyTree, PyTree], positions: Array
        ) -> tuple[tuple[PyTree, PyTree], None]:
            total, results = carry
            # no vmap: a batched loop condition copies the carry by a select per step
            if width == 1:
                part, rest = weighed(positions[0])
                results = jax.tree.map(
                    lambda all, x: all.at[positions[0]].set(x), results, rest
                )
            else:
                parts, rest = jax.vmap(weighed)(positions)
                part = jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)
                results = trees.scatter(results, positions, rest, positions < count)
            return (trees.add(total, part), results), None

        one = trees.traced_once(one)  # for the shape of the sum, and in the loop
        share, first, rest = jax.eval_shape(one, positions[0, 0])
        shapes = jax.eval_shape(aggregate.weigh, share, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # carried, not stacked by the scan: rows in the scan's order would be copied
        results = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), rest)
        (total, results), _ = jax.lax.scan(chunk, (zeros, results), positions)
        return total, results, first


def _public(federation: Federation, task: Task, active: Array) -> Data | None:
    """Returns the public pool, of size 0 where not active."""
    pool: Examples | None = federation.public
    if pool is None:
        return None
    count = pool.x.shape[0]
    size = jnp.where(active, count, 0).astype(jnp.int32)
    prepare = task.prepare_public or task.prepare
    rows = jnp.arange(count, dtype=jnp.int32)
    return Data(pool, rows, size, prepare, federation.mask_fill, None, task.loop)
