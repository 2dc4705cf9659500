"""The rules of the contract, each a function of a Subject that raises ContractViolation.

The round of a Subject serves most of them, because cohort, state, learning rate, round and what
masked rows hold are its arguments. A rule's docstring is said where it is broken.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedjax_pfl import groups, models, trees
from fedjax_pfl.engine import program
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, nets
from fedjax_pfl.testing.rounds import (
    ACTIVE,
    IDS,
    ContractViolation,
    Round,
    Subject,
    arguments,
    evaluate,
    reported,
    rows_of,
    run,
    same,
    same_round,
    subject,
)
from fedjax_pfl.testing.synthetic import SIZES, C, N, federation
from fedjax_pfl.types import Array, Examples, Federation, Grouped, Model, PyTree, State

TWO_GROUPS = np.array([0, 1, 0, 1, 1])  # architecture of each client


def order(s: Subject) -> None:
    """The order of the cohort's clients changes nothing."""
    mixed = np.array([2, 0, 4, 3, 1])
    same_round(run(s, ids=IDS[mixed], active=ACTIVE[mixed]), run(s), IDS[ACTIVE])


def padding(s: Subject) -> None:
    """What padding holds changes nothing."""
    f = s.federation
    nobody = f.examples.x.shape[0] - 1
    poisoned = _poisoned(f, np.array([nobody]))
    poisoned = poisoned._replace(examples=poisoned.examples._replace(y=f.examples.y.at[nobody].set(3)))
    same_round(run(s, federation=poisoned), run(s), IDS[ACTIVE])
    same("scores", evaluate(s, poisoned), evaluate(s), np.arange(N))


def _poisoned(f: Federation, at: np.ndarray) -> Federation:
    """NaN, or another integer, in some examples."""
    x = np.array(f.examples.x)
    x[at] = np.nan if np.issubdtype(x.dtype, np.floating) else 9 - x[at]
    return f._replace(examples=f.examples._replace(x=jnp.asarray(x)))


def mask(s: Subject) -> None:
    """What masked rows of a batch hold changes nothing: every mean over a batch is masked."""
    filled = _filled(s.federation)
    same_round(run(s, federation=filled), run(s), IDS[ACTIVE])
    same("scores", evaluate(s, filled), evaluate(s), np.arange(N))


def _filled(f: Federation) -> Federation:
    """Other finite values and a valid label in masked rows."""
    x = _mask_fill(f).x
    return f._replace(mask_fill=Examples(jnp.linspace(1, 3, x.size).reshape(x.shape).astype(x.dtype), jnp.int32(C - 1)))


def _mask_fill(f: Federation) -> Examples:
    assert f.mask_fill is not None
    return f.mask_fill


def inactive(s: Subject) -> None:
    """Clients that take no part have no influence: neither their data, nor their rows, nor their
    ids."""
    away = 1  # the place of client 0
    active = ACTIVE & (np.arange(len(IDS)) != away)
    wanted, others = run(s, active=active), IDS[active]
    f = s.federation
    poisoned = _poisoned(f, np.asarray(f.train.index)[IDS[away]][: SIZES[IDS[away]]])
    empty = lambda x: np.where(trees.expand(np.arange(N) == IDS[away], x.ndim), _nothing(x), x)
    state = State(s.start.server, jax.tree.map(empty, s.start.clients))
    elsewhere = np.where(np.arange(len(IDS)) == away, N + 9, IDS).astype(np.int32)
    for change in ({"federation": poisoned}, {"state": state}, {"ids": elsewhere}):
        same_round(run(s, active=active, **change), wanted, others)
    _finite(wanted, others)
    for name, x in wanted[1].traffic._asdict().items():
        if x is not None and np.any(x[~active]):
            raise ContractViolation(f"traffic.{name} is not 0 for clients that take no part")


def _nothing(x: np.ndarray) -> Any:
    return np.nan if np.issubdtype(x.dtype, np.floating) else np.zeros((), x.dtype)


def _finite(result: tuple[State, Round], clients: np.ndarray) -> None:
    for what, tree in (("server", result[0].server), ("clients", rows_of(result[0].clients, clients))):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                raise ContractViolation(f"{what}{jax.tree_util.keystr(path)} is not finite")


def absent(s: Subject) -> None:
    """Absent clients keep their rows bit for bit, and those that train change theirs."""
    state, _ = run(s)
    gone, here = np.setdiff1d(np.arange(N), IDS), IDS[ACTIVE]
    same("clients", rows_of(state.clients, gone), rows_of(s.start.clients, gone), gone)
    leaves = zip(*(jax.tree.leaves(rows_of(x.clients, here)) for x in (state, s.start)), strict=True)
    moved = [np.any(x != y) for x, y in leaves]
    if moved and not any(moved):
        raise ContractViolation("no row of State.clients changes in a round")


def nobody(s: Subject) -> None:
    """A round in which nobody trains leaves the server as it was, and if nobody takes part the
    clients, too."""
    before = State(run(s)[0].server, s.start.clients)  # after a round nothing in the server is zero
    f = s.federation
    empty = f._replace(
        train=f.train._replace(size=jnp.zeros_like(f.train.size)), class_counts=jnp.zeros_like(f.class_counts)
    )
    for traced in ({}, {name: x / 2 for name, x in s.traced.items()}):  # mixing by one would be exact by itself
        after, _ = run(s, active=ACTIVE & False, state=before, **traced)
        same("server", after.server, before.server)
        same("clients", after.clients, before.clients, np.arange(N))
        if s.task.public is None:
            same("server", run(s, federation=empty, state=before, **traced)[0].server, before.server)


def determinism(s: Subject) -> None:
    """The same arguments give the same bits."""
    same_round(run(s), run(s), IDS[ACTIVE])


def compilation(s: Subject) -> None:
    """One compilation serves every cohort, state, round and traced hyperparameter."""
    state, _ = s.round(*arguments(s))
    s.round(*arguments(s, state=jax.device_get(state), t=9, lr=0.03, ids=IDS[::-1], active=~ACTIVE, evaluated=False))
    if (count := s.round._cache_size()) != 1:  # type: ignore[attr-defined]  # it is jitted
        raise ContractViolation(f"the round was compiled {count} times")


def scores(s: Subject) -> None:
    """`post` holds the headline, is scored only when wanted, and is as finite as the loss and the
    state."""
    state, metrics = run(s)
    headline = s.factory(s.task).headline[0]
    if headline not in metrics.post:
        raise ContractViolation(
            f"the headline {headline!r} is not in Metrics.post, which has {', '.join(metrics.post)}"
        )
    _finite((State(metrics.loss[ACTIVE], metrics.post[headline]), metrics), np.flatnonzero(ACTIVE))
    _finite((state, metrics), IDS[ACTIVE])
    _, unwanted = run(s, evaluated=False)
    for name, x in unwanted.post.items():
        if not np.isnan(x[ACTIVE]).all():
            raise ContractViolation(f"post[{name!r}] is scored though cohort.evaluated is False: use evaluate.post")


def traffic(s: Subject) -> None:
    """Traffic counts whole scalars from 0 on for each client."""
    _, metrics = run(s)
    for name, x in metrics.traffic._asdict().items():
        if x is not None and (not np.issubdtype(x.dtype, np.integer) or np.any(x < 0)):
            raise ContractViolation(f"traffic.{name} is {x} of the type {x.dtype}")


def dtype(s: Subject) -> None:
    """A state of low precision keeps its types, and no type is weak."""

    def low(model: Model) -> Model:
        init = lambda key: (
            model.init(key) | {"body": jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(key)["body"])}
        )
        return model._replace(init=init)

    made = program.parts(s.factory, s.task._replace(models=tuple(map(low, s.task.models))))
    before = jax.eval_shape(made.init, jax.random.key(0), s.traced)
    after, _ = jax.eval_shape(made.train, *arguments(s, state=before)[:-1])  # refuses other types itself
    for path, x in jax.tree_util.tree_leaves_with_path((before, after)):
        if x.weak_type:
            raise ContractViolation(
                f"the state's leaf {jax.tree_util.keystr(path[1:])} has a weak type: give it a dtype"
            )


def layout(s: Subject) -> None:
    """The layout does not matter: clients at once, devices, places, and the padding of examples."""
    devices = 2 if jax.device_count() > 1 else 1
    if devices == 2:  # six places
        t, ids = s.task, np.array([3, N + 1, 0, 4, N, 1], np.int32)
    else:
        t, ids = s.task._replace(participation=(0.8, 0.8)), np.array([3, 0, 4, 1], np.int32)
    other = subject(s.factory, t, width=2, devices=devices, start=s.start)
    wide = federation(24, input=t.input, public=t.public)._replace(mask_fill=s.federation.mask_fill)
    found = run(other, federation=wide, ids=ids, active=ids < N)
    same_round(found, run(s), IDS[ACTIVE], 1e-5)


def bn_stats(s: Subject) -> None:
    """With bn_stats=local running statistics stay with their client and influence nobody else,
    masked rows nothing."""
    shape = _mask_fill(s.federation).x.shape
    net = lambda shape, classes, rngs: nets.Net(_Marked(shape, rngs), layers.linear(8, classes, rngs))
    model = models.model(net, shape, s.task.num_classes)
    shared = None if s.task.shared is None else model  # the other inputs of a small model would influence all
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
    for value in (0, 5):  # in the input that only a batch norm of its own sees, whose outputs nobody reads
        x[np.asarray(f.train.index)[of][: SIZES[of]], 0] = value
        examples = f.examples._replace(x=jnp.asarray(x.reshape(f.examples.x.shape)))
        found.append(run(normed, federation=f._replace(examples=examples)))
    filled = run(normed, federation=_filled(f._replace(examples=examples)))
    others = np.setdiff1d(IDS[ACTIVE], of)
    same_round(found[1], found[0], others)
    before, after = (reported(metrics, np.array([of])) for _, metrics in found)
    same("metrics", after, before, [of])
    same_round(filled, found[1], IDS[ACTIVE])
    rows = [jax.tree.leaves(rows_of(state.clients, of)) for state, _ in found]
    if all(np.array_equal(*pair) for pair in zip(*rows, strict=True)):
        raise ContractViolation(f"the running statistics of client {of} are not kept in State.clients")


class _Marked(nnx.Module):
    """A batch-norm network, and a batch norm of the first input alone that nothing depends on."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.inner = layers.linear(int(np.prod(shape)) - 1, 8, rngs)
        self.norm, self.mark = layers.BatchNorm(8, rngs=rngs), layers.BatchNorm(1, rngs=rngs)

    def __call__(self, x: Array, mask: Array | None = None, train: bool = False) -> Array:
        x = x.reshape(len(x), -1)
        self.mark(x[:, :1], mask, train)
        return jax.nn.relu(self.norm(self.inner(x[:, 1:]), mask, train))


def grouping(s: Subject) -> None:
    """Grouping does not matter: one architecture declared twice is one."""
    if s.factory(s.task).one_architecture:
        return
    t = s.task._replace(models=s.task.models * 2, architecture=TWO_GROUPS, participation=(0.8, 0.8))
    own = [groups.members(t, g) for g in range(2)]
    like = jax.eval_shape(s.factory(t).init, jax.random.key(0))
    if any(groups.is_grouped(x) for x in jax.tree.leaves(like.server, is_leaf=groups.is_grouped)):
        return  # it averages within architectures, so that grouping is meant to matter

    def divided(node: Any, tree: PyTree) -> PyTree:
        return Grouped(tuple(rows_of(tree, ids) for ids in own)) if groups.is_grouped(node) else tree

    def joined(node: Any) -> PyTree:
        if not groups.is_grouped(node):
            return node
        by_id = np.argsort(np.concatenate(own))
        return jax.tree.map(lambda *x: np.concatenate(x)[by_id], *node.trees)

    clients = jax.tree.map(divided, like.clients, s.start.clients, is_leaf=groups.is_grouped)
    # what the architectures share is the same leaves, in containers of what both have
    server = jax.tree.unflatten(jax.tree.structure(like.server), jax.tree.leaves(s.start.server))
    other = subject(s.factory, t, start=State(server, clients))
    state, metrics = run(other, ids=IDS[ACTIVE], active=np.ones(4, bool))
    state = state._replace(clients=jax.tree.map(joined, state.clients, is_leaf=groups.is_grouped))
    same_round((state, metrics), run(s), IDS[ACTIVE], 1e-5)


RULES: dict[str, Callable[[Subject], None]] = {
    rule.__name__: rule
    for rule in (
        order,
        padding,
        mask,
        inactive,
        absent,
        nobody,
        determinism,
        compilation,
        scores,
        traffic,
        dtype,
        layout,
        bn_stats,
        grouping,
    )
}
