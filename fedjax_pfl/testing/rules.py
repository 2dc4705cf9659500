"""The rules of the contract, each a function of a Subject that raises
ContractViolation.

Most of them use the round of a Subject, whose arguments are the cohort, the state, the
learning rate, the round's number and the values of masked rows. The error message of a
rule holds its docstring.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval

from fedjax_pfl import hyperparameters, trees
from fedjax_pfl.engine import method
from fedjax_pfl.engine.parts import parts
from fedjax_pfl.engine.program import set_up
from fedjax_pfl.testing.networks import bn_stats, grouping, several_architectures
from fedjax_pfl.testing.rounds import (
    ACTIVE,
    IDS,
    ContractViolation,
    Round,
    Subject,
    arguments,
    evaluate,
    filled,
    rows_of,
    run,
    same,
    same_round,
    subject,
)
from fedjax_pfl.testing.synthetic import SIZES, N, federation
from fedjax_pfl.types import (
    Algorithm,
    Context,
    Data,
    Federation,
    Method,
    Model,
    RunState,
    State,
    Task,
)


def order(s: Subject) -> None:
    """The same arguments give the same bits, in whatever order the clients are."""
    mixed = np.array([2, 0, 4, 3, 1])
    wanted = run(s)
    same_round(run(s), wanted, IDS[ACTIVE])
    same_round(run(s, ids=IDS[mixed], active=ACTIVE[mixed]), wanted, IDS[ACTIVE])


def padding(s: Subject) -> None:
    """Padding changes nothing."""
    f = s.federation
    nobody = f.examples.x.shape[0] - 1
    poisoned = _poisoned(f, np.array([nobody]))
    other = jnp.asarray(3, f.examples.y.dtype)
    poisoned = poisoned._replace(
        examples=poisoned.examples._replace(y=f.examples.y.at[nobody].set(other))
    )
    same_round(run(s, federation=poisoned), run(s), IDS[ACTIVE])
    same("scores", evaluate(s, poisoned), evaluate(s), np.arange(N))


def _poisoned(f: Federation, at: np.ndarray) -> Federation:
    """NaN, or another integer, in some examples."""
    x = np.array(f.examples.x)
    x[at] = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 9 - x[at]
    return f._replace(examples=f.examples._replace(x=jnp.asarray(x)))


def mask(s: Subject) -> None:
    """Masked rows of a batch change nothing: every mean over a batch is
    masked."""
    other = filled(s.federation)
    same_round(run(s, federation=other), run(s), IDS[ACTIVE])
    same("scores", evaluate(s, other), evaluate(s), np.arange(N))


def inactive(s: Subject) -> None:
    """Clients that take no part have no influence: neither their data, nor their rows,
    nor their ids."""
    away = 1  # the place of client 0
    active = ACTIVE & (np.arange(len(IDS)) != away)
    wanted, others = run(s, active=active), IDS[active]
    f = s.federation
    poisoned = _poisoned(f, np.asarray(f.train.index)[IDS[away]][: SIZES[IDS[away]]])
    empty = lambda x: np.where(
        trees.expand(np.arange(N) == IDS[away], x.ndim), _nothing(x), x
    )
    state = s.start.with_rows(jax.tree.map(empty, s.start.rows))
    elsewhere = np.where(np.arange(len(IDS)) == away, N + 9, IDS).astype(np.int32)
    for change in ({"federation": poisoned}, {"state": state}, {"ids": elsewhere}):
        same_round(run(s, active=active, **change), wanted, others)
    _finite(wanted, others)
    for name, x in wanted[1].traffic._asdict().items():
        if x is not None and np.any(x[~active]):
            raise ContractViolation(
                f"traffic.{name} is not 0 for clients that take no part"
            )


def _nothing(x: np.ndarray) -> Any:
    return np.nan if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros((), x.dtype)


def _finite(result: tuple[RunState, Round], clients: np.ndarray) -> None:
    for what, tree in (
        ("server", result[0].server),
        ("clients", rows_of(result[0].clients, clients)),
    ):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.issubdtype(x.dtype, jnp.floating) and not np.isfinite(x).all():
                raise ContractViolation(
                    f"{what}{jax.tree_util.keystr(path)} is not finite"
                )


def absent(s: Subject) -> None:
    """Absent clients keep their rows bit for bit; of those that train every float leaf
    of the rows changes."""
    state, _ = run(s)
    gone, here = np.setdiff1d(np.arange(N), IDS), IDS[ACTIVE]
    same("clients", rows_of(state.clients, gone), rows_of(s.start.clients, gone), gone)
    new, old = (rows_of(x.clients, here) for x in (state, s.start))
    leaves = jax.tree_util.tree_leaves_with_path(new)
    for (path, x), y in zip(leaves, jax.tree.leaves(old), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating) and np.array_equal(x, y) and x.size:
            raise ContractViolation(
                f"clients{jax.tree_util.keystr(path)} changes for no client in a round"
            )


def means(s: Subject) -> None:
    """Clients send what they trained: each mean that `averages` names moves in a
    round."""
    made, after = s.factory(s.task), run(s)[0]
    for name in made.averages if isinstance(made, Method) else ():
        new, old = (jax.tree.leaves(x.server[name]) for x in (after, s.start))
        # a mean of equal numbers rounds
        if old and all(np.allclose(*x, 1e-6, 1e-6) for x in zip(new, old, strict=True)):
            raise ContractViolation(f"server[{name!r}] is what it was before the round")


def nobody(s: Subject) -> None:
    """A round in which nobody trains leaves the server as it was, and if nobody takes
    part the clients, too."""
    # after a round nothing in the server is zero
    before = run(s)[0].with_rows(s.start.rows)
    f = s.federation
    empty = f._replace(
        train=f.train._replace(size=jnp.zeros_like(f.train.size)),
        class_counts=jnp.zeros_like(f.class_counts),
    )
    # mixing by one would be exact by itself
    for traced in ({}, {name: x / 2 for name, x in s.traced.items()}):
        after, _ = run(s, active=ACTIVE & False, state=before, **traced)
        same("server", after.server, before.server)
        same("clients", after.clients, before.clients, np.arange(N))
        if s.task.public is None:
            same(
                "server",
                run(s, federation=empty, state=before, **traced)[0].server,
                before.server,
            )


def compilation(s: Subject) -> None:
    """One compilation serves every cohort, state, round and traced hyperparameter."""
    state, _ = s.round(*arguments(s))
    s.round(
        *arguments(
            s,
            state=jax.device_get(state),
            t=9,
            lr=0.03,
            ids=IDS[::-1],
            active=~ACTIVE,
            evaluated=False,
        )
    )
    if (count := s.round._cache_size()) != 1:  # type: ignore[attr-defined]  # it is jitted
        raise ContractViolation(f"the round was compiled {count} times")


def scores(s: Subject) -> None:
    """`post` holds the headline, is scored only when wanted, and is as finite as the
    loss and the state."""
    state, metrics = run(s)
    headline = method.headline(s.task, s.factory(s.task))[0]
    _finite(
        (RunState(State(metrics.loss[ACTIVE], metrics.post[headline])), metrics),
        np.flatnonzero(ACTIVE),
    )
    _finite((state, metrics), IDS[ACTIVE])
    _, unwanted = run(s, evaluated=False)
    for name, x in unwanted.post.items():
        if not np.isnan(x[ACTIVE]).all():
            raise ContractViolation(
                f"post[{name!r}] is scored though cohort.evaluated is False: use "
                "evaluate.post"
            )


def held_out(s: Subject) -> None:
    """Test examples are for scores alone: no training and no prediction reads
    `c.test`."""
    f, closed = s.federation, cast(Data, _Closed())
    x = np.array(f.examples.x)
    of_test = np.unique(
        np.asarray(f.test.index)[
            np.arange(f.test.index.shape[1]) < np.asarray(f.test.size)[:, None]
        ]
    )
    x[of_test] = x[of_test][::-1]
    test = f.test._replace(size=jnp.maximum(f.test.size - 1, 1))
    other = f._replace(examples=f.examples._replace(x=jnp.asarray(x)), test=test)
    found, wanted = (run(s, federation=each) for each in (other, f))
    same_round(
        (found[0], found[1]._replace(post={})),
        (wanted[0], wanted[1]._replace(post={})),
        IDS[ACTIVE],
    )

    def factory(task: Task, **hparams: Any) -> Algorithm | Method:
        made = s.factory(task, **hparams)
        return made._replace(
            predict=lambda server, row, c: made.predict(
                server, row, c._replace(test=closed)
            )
        )

    named = functools.wraps(s.factory)(factory)
    score = parts(set_up(named, s.task)).score
    jax.eval_shape(
        functools.partial(score, lengths=(N,)),
        Context(jax.random.key(0), s.traced, f, 2),
        s.start,
        np.arange(N),
    )


@jax.tree_util.register_static
class _Closed:
    """In place of a client's test examples."""

    def __getattr__(self, name: str) -> Any:
        raise ContractViolation("`predict` reads c.test")


def key(s: Subject) -> None:
    """Every random draw depends on the key: another one gives another start and another
    round, and no function makes a key of its own."""
    context, *rest = arguments(s)
    functions: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "init": (s.init, (s.traced,)),
        "round": (lambda key, *x: s.round(context._replace(key=key), *x), tuple(rest)),
        "predict": (
            lambda key, state: s.evaluate(context._replace(key=key), state),
            (s.start,),
        ),
    }
    for name, (function, given) in functions.items():
        drawn = _primitives(jax.make_jaxpr(function)(jax.random.key(0), *given))
        if "random_seed" in drawn:
            raise ContractViolation(
                f"`{name}` makes a key of its own: fold its own key, or c.key"
            )
        if name == "predict" or "random_bits" not in drawn:
            continue
        found = [function(jax.random.key(i), *given) for i in (7, 8)]
        leaves = [jax.tree.leaves(x if name == "init" else x[0]) for x in found]
        if all(np.array_equal(*pair) for pair in zip(*leaves, strict=True)):
            raise ContractViolation(
                f"`{name}` draws the same under any key: fold its own key, or c.key"
            )


def unused(s: Subject) -> list[str]:
    """Returns the numbers among a method's hyperparameters on which no result depends,
    the others at their values."""
    context, state, *rest = arguments(s)
    left = s.traced.keys() & hyperparameters.of(s.factory).keys()
    functions: tuple[Callable[[Any], Any], ...] = (
        lambda traced: s.round(context._replace(traced=traced), state, *rest),
        lambda traced: s.evaluate(context._replace(traced=traced), state),
        lambda traced: s.init(context.key, traced),
    )
    for function in functions:
        jaxpr = jax.make_jaxpr(function)(s.traced).jaxpr
        _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        left -= {name for name, on in zip(sorted(s.traced), used, strict=True) if on}
    return sorted(left)


def _primitives(closed: Any) -> set[str]:
    """Returns the names of the random operations on which the results depend;
    "random_seed" also for a constant key."""
    used, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    found = set(re.findall(r"random_\w+", str(used)))
    constant = re.search(r"lambda [^;]*key<", str(used))
    return found | {"random_seed"} if constant else found


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
            model.init(key)
            | {
                "body": jax.tree.map(
                    lambda x: x.astype(jnp.bfloat16), model.init(key)["body"]
                )
            }
        )
        return model._replace(init=init)

    # which keeps an average in the gradient's types
    decay = None if s.factory(s.task).excludes.get("optimizer") else 0.9
    momentum = lambda lr: optax.sgd(lr, decay)
    task = s.task._replace(models=tuple(map(low, s.task.models)), optimizer=momentum)
    made = parts(set_up(s.factory, task))
    before = jax.eval_shape(made.init, jax.random.key(0), s.traced)
    # refuses other types itself
    after, _ = jax.eval_shape(made.train, *arguments(s, state=before))
    for path, x in jax.tree_util.tree_leaves_with_path((before, after)):
        if x.weak_type:
            raise ContractViolation(
                f"the state's leaf {jax.tree_util.keystr(path[1:])} has a weak type: "
                "give it a dtype"
            )


def layout(s: Subject) -> None:
    """The layout does not matter: clients at once, devices, slots, and the padding of
    examples."""
    devices = 2 if jax.device_count() > 1 else 1
    if devices == 2:  # six slots
        t, ids = s.task, np.array([3, N + 1, 0, 4, N, 1], np.int32)
    else:
        t, ids = (
            s.task._replace(participation=(0.8, 0.8)),
            np.array([3, 0, 4, 1], np.int32),
        )
    given: dict[str, Any] = {"start": s.start, "uploads": s.uploads}
    other = subject(s.factory, t, width=2, devices=devices, **given)
    wide = federation(24, input=t.input, public=t.public, label=t.label)._replace(
        mask_fill=s.federation.mask_fill
    )
    found = run(other, federation=wide, ids=ids, active=ids < N)
    same_round(found, run(s), IDS[ACTIVE], 1e-5)


RULES: dict[str, Callable[[Subject], None]] = {
    rule.__name__: rule
    for rule in (
        order,
        padding,
        mask,
        inactive,
        absent,
        means,
        nobody,
        compilation,
        scores,
        held_out,
        key,
        traffic,
        dtype,
        layout,
        bn_stats,
        grouping,
        several_architectures,
    )
}
# those that an option on uploads could break
UPLOAD_RULES = (
    *("order", "padding", "mask", "inactive", "absent", "compilation"),
    *("key", "traffic", "dtype", "layout"),
)
