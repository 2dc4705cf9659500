"""The rules of the contract on clients' networks: batch norm, and several
architectures."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedjax_pfl import architectures, models
from fedjax_pfl.engine import program
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, nets
from fedjax_pfl.testing.rounds import (
    ACTIVE,
    IDS,
    ContractViolation,
    Subject,
    filled,
    reported,
    rows_of,
    run,
    same,
    same_round,
    subject,
)
from fedjax_pfl.testing.synthetic import SIZES
from fedjax_pfl.types import Array, Grouped, PyTree, RunState, State

TWO_GROUPS = np.array([0, 1, 0, 1, 1])  # architecture of each client


def bn_stats(s: Subject) -> None:
    """With bn_stats=local running statistics stay with their client and influence
    nobody else, masked rows nothing."""
    shape = s.task.prepared.shape[1:]
    net = lambda shape, classes, rngs: nets.Net(
        _Marked(shape, rngs), layers.linear(8, classes, rngs)
    )
    model = models.model(net, shape, s.task.num_classes)
    # the other inputs of a small model would influence all
    shared = None if s.task.shared is None else model
    t = s.task._replace(models=(model,), shared=shared, bn_stats="local")
    try:
        s.factory(t)
    except InputError:
        return  # a method for particular models
    normed = subject(s.factory, t)
    f, of = s.federation, 0
    x = np.array(f.examples.x).reshape(len(f.examples.y), -1)
    x[:, 0] = 0
    found = []
    # in the input that only a batch norm of its own sees, whose outputs nobody reads
    for value in (0, 5):
        x[np.asarray(f.train.index)[of][: SIZES[of]], 0] = value
        examples = f.examples._replace(x=jnp.asarray(x.reshape(f.examples.x.shape)))
        found.append(run(normed, federation=f._replace(examples=examples)))
    masked = run(normed, federation=filled(f._replace(examples=examples)))
    others = np.setdiff1d(IDS[ACTIVE], of)
    same_round(found[1], found[0], others)
    before, after = (reported(metrics, np.array([of])) for _, metrics in found)
    same("metrics", after, before, [of])
    same_round(masked, found[1], IDS[ACTIVE])
    rows = [jax.tree.leaves(rows_of(state.clients, of)) for state, _ in found]
    if all(np.array_equal(*pair) for pair in zip(*rows, strict=True)):
        raise ContractViolation(
            f"the running statistics of client {of} are not kept in State.clients"
        )


class _Marked(nnx.Module):
    """A batch-norm network, and a batch norm of the first input alone that nothing
    depends on."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.inner = layers.linear(int(np.prod(shape)) - 1, 8, rngs)
        self.norm, self.mark = (
            layers.BatchNorm(8, rngs=rngs),
            layers.BatchNorm(1, rngs=rngs),
        )

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        x = x.reshape(len(x), -1)
        self.mark(x[:, :1], mask, train)
        return jax.nn.relu(self.norm(self.inner(x[:, 1:]), mask, train))


def grouping(s: Subject) -> None:
    """Grouping does not matter: one architecture declared twice is one."""
    if s.factory(s.task).one_architecture:
        return
    t = s.task._replace(
        models=s.task.models * 2, architecture=TWO_GROUPS, participation=(0.8, 0.8)
    )
    own = [architectures.members(t, g) for g in range(2)]
    like = jax.eval_shape(s.factory(t).init, jax.random.key(0))
    if any(
        architectures.is_grouped(x)
        for x in jax.tree.leaves(like.server, is_leaf=architectures.is_grouped)
    ):
        return  # it averages within architectures, so that grouping is meant to matter

    def divided(node: Any, tree: PyTree) -> PyTree:
        return (
            Grouped(tuple(rows_of(tree, ids) for ids in own))
            if architectures.is_grouped(node)
            else tree
        )

    def joined(node: Any) -> PyTree:
        if not architectures.is_grouped(node):
            return node
        by_id = np.argsort(np.concatenate(own))
        return jax.tree.map(lambda *x: np.concatenate(x)[by_id], *node.trees)

    clients = jax.tree.map(
        divided, like.clients, s.start.clients, is_leaf=architectures.is_grouped
    )
    # what the architectures share is the same leaves, in containers of what both have
    server = jax.tree.unflatten(
        jax.tree.structure(like.server), jax.tree.leaves(s.start.server)
    )
    other = subject(s.factory, t, start=RunState(State(server, clients)))
    state, metrics = run(other, ids=IDS[ACTIVE], active=np.ones(4, bool))
    state = state.with_rows(
        jax.tree.map(joined, state.rows, is_leaf=architectures.is_grouped)
    )
    same_round((state, metrics), run(s), IDS[ACTIVE], 1e-5)


def several_architectures(s: Subject) -> None:
    """Clients may have different networks, as `one_architecture=False` says."""
    if s.factory(s.task).one_architecture:
        return
    shape, model = s.task.prepared.shape[1:], s.task.model
    width = model.num_features
    net = lambda shape, classes, rngs: nets.Net(
        nets.Dense(int(np.prod(shape)), (3, width), rngs),
        layers.linear(width, classes, rngs),
    )
    other = models.model(net, shape, s.task.num_classes)
    program.program(
        s.factory, s.task._replace(models=(model, other), architecture=TWO_GROUPS)
    )
