"""Task maps of many classes, a user's own, and pFedC's branches when a few of many
clients take part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from fedjax_pfl import keys, models
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.pfedc import task_maps
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import (
    Context,
    Examples,
    Federation,
    RunState,
    State,
    Subset,
    Task,
)

# fmt: off
SUPERCLASS = np.array([  # of each class of CIFAR-100
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10,
    12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16,
    12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17,
    8, 14, 13,
])
# fmt: on


# --- a user's own map


def test_a_map_of_ones_own():
    b = task_maps.branches(toy.task(), "map:0,1,0,2")
    np.testing.assert_array_equal(b.of, [0, 1, 0, 2])
    np.testing.assert_array_equal(b.binary, [False, True, True])
    named = toy.task()._replace(superclass=np.array([3, 5, 3, 8]))
    toy.assert_same(list(b), list(task_maps.branches(named, "superclass")))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("map:0,1,0", "has 3 entries for 4 classes"),
        ("map:0,0,3,3", "has a task 3 but no class of task 1: leave no number out"),
        ("map:1,1,2,2", "no class of task 0"),
    ],
)
def test_a_map_that_cannot_be_used(spec, sentence):
    with pytest.raises(InputError, match=sentence):
        task_maps.branches(toy.task(), spec)


@pytest.mark.parametrize("spec", ["map", "map:", "map:0,a", "map:0,-1", "map:0 1"])
def test_a_map_that_is_mistyped(spec):
    with pytest.raises(
        InputError,
        match="write the task of each class as whole numbers from 0, as map:0,0,1",
    ):
        task_maps.branches(toy.task(), spec)


# --- as many classes as CIFAR-100's


def hundred(num_clients: int = 20) -> Task:
    counts = np.random.default_rng(0).integers(0, 2, (num_clients, 100)) * 5
    model = models.model("linear", (6,), 100)
    like = jax.ShapeDtypeStruct((6,), jnp.float32)
    of, prepare = np.zeros(num_clients, int), lambda x: x
    return Task(
        (model,),
        of,
        counts.sum(1),
        counts,
        100,
        like,
        prepare,
        0.1,
        optax.sgd,
        16,
        superclass=SUPERCLASS,
    )


@pytest.mark.parametrize(
    ("spec", "count", "head", "logits"),
    [
        ("single", 1, "group_softmax", 100),
        ("consecutive:10", 10, "group_softmax", 100),
        ("superclass", 20, "group_softmax", 100),
        ("class", 100, "group_softmax", 100),
        ("superclass", 20, "group_reject", 120),
    ],
)
def test_the_tasks_of_a_hundred_classes(spec, count, head, logits):
    """The paper's 1, 10, 20 and 100 tasks: who owns what, and the shapes of a round;
    nothing is compiled."""
    task, f = hundred(), shapes(100)
    b = task_maps.branches(task, spec, head)
    assert (
        len(b.member) == count
        and set(b.member.sum(1)) == {100 // count}
        and b.owns.shape == (count, logits)
    )
    assert (b.owns.sum(0) == 1).all() and b.binary.all() == (count == 100)
    program = toy.program(ALGORITHMS["pfedc"], task, {"tasks": spec, "head": head})
    key, t = (
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    numbers = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.traced}
    state = jax.eval_shape(program.init, key, numbers)
    assert state.server["head"]["kernel"].shape == (6, logits)
    wanted = jax.ShapeDtypeStruct((), jnp.bool)
    context = Context(key, numbers, f, t)
    new, metrics = jax.eval_shape(program.round, context, state, wanted)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert {name: x.shape for name, x in metrics.post.items()} == {
        name: (20,) for name in metrics.post
    }
    client = jax.ShapeDtypeStruct((), jnp.int32)
    x = jax.ShapeDtypeStruct((3, 6), jnp.float32)
    assert jax.eval_shape(program.predict, context, state, client, x).shape == (3, 100)


def shapes(num_classes: int, num_clients: int = 20, length: int = 30) -> Federation:
    """A federation without its arrays."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    rows = lambda length: Subset(array(num_clients, length), array(num_clients))
    examples = Examples(jax.ShapeDtypeStruct((500, 6), jnp.float32), array(500))
    return Federation(
        examples, rows(length), rows(0), rows(10), array(num_clients, num_classes)
    )


def test_consecutive_and_superclass_tasks_of_cifar100():
    b = {
        spec: task_maps.branches(hundred(), spec)
        for spec in ("consecutive:10", "superclass")
    }
    np.testing.assert_array_equal(b["consecutive:10"].of, np.arange(100) // 10)
    np.testing.assert_array_equal(b["superclass"].of, SUPERCLASS)
    # aquatic mammals
    np.testing.assert_array_equal(
        np.flatnonzero(b["superclass"].member[0]), [4, 30, 55, 72, 95]
    )


# --- ten of a hundred clients

MANY, CLASSES, HELD = 100, 40, 2


@functools.cache
def sparse() -> tuple[Task, Federation]:
    """100 clients with six examples of two of 40 classes each, of whom ten take
    part."""
    rng = np.random.default_rng(1)
    own = np.stack([rng.permutation(CLASSES)[:HELD] for _ in range(MANY)])
    y = np.repeat(own, 3, axis=1).astype(np.int32)  # [100, 6]
    x = rng.normal(size=(y.size, 5)).astype(np.float32)
    counts = np.stack([np.bincount(row, minlength=CLASSES) for row in y])
    index = np.arange(y.size, dtype=np.int32).reshape(y.shape)
    rows = Subset(jnp.asarray(index), jnp.full(MANY, 6, jnp.int32))
    nothing = Subset(jnp.zeros((MANY, 0), jnp.int32), jnp.zeros(MANY, jnp.int32))
    f = Federation(
        Examples(jnp.asarray(x), jnp.asarray(y.ravel())),
        rows,
        nothing,
        rows,
        jnp.asarray(counts),
    )
    model = models.model("linear", (5,), CLASSES)
    given = (
        np.zeros(MANY, int),
        counts.sum(1),
        counts,
        CLASSES,
        jax.ShapeDtypeStruct((5,), jnp.float32),
        lambda x: x,
    )
    return Task((model,), *given, 0.5, optax.sgd, 4, participation=(0.1, 0.1)), f


def worn(state: RunState) -> RunState:
    """The state with a bank that is not as it started."""
    noise = (
        np.random.default_rng(2)
        .normal(size=state.server["head"]["kernel"].shape)
        .astype(np.float32)
    )
    head = state.server["head"]
    bank = {"kernel": head["kernel"] + noise, "bias": head["bias"] + noise[0]}
    return RunState(State(state.server | {"head": bank}, state.clients))


@pytest.mark.slow
def test_masks_are_of_the_selected_and_the_bank_keeps_what_none_of_them_holds():
    """Every branch is the mean of its selected holders' (Eqs. 4 and 7 over S_t), each
    trained alone, or what it was."""
    task, f = sparse()
    program, key = toy.program(ALGORITHMS["pfedc"], task, {}), jax.random.key(3)
    begin = worn(program.init(key, program.traced))
    run = jax.jit(program.round)
    state, metrics = run(
        Context(key, program.traced, f, jnp.int32(4)), begin, jnp.bool(False)
    )
    ids = np.asarray(metrics.ids)
    assert len(ids) == 10 and metrics.active.all()
    counts = np.asarray(f.class_counts)
    absent = np.setdiff1d(np.arange(MANY), ids)
    held, elsewhere = (counts[ids] > 0).any(0), (counts[absent] > 0).any(0)
    assert (elsewhere & held).any() and (elsewhere & ~held).sum() > 10

    kernels = np.stack([alone(task, f, key, begin, i) for i in ids])  # [10, 5, 40]
    expected = np.asarray(begin.server["head"]["kernel"]).copy()
    for c in np.flatnonzero(held):
        expected[:, c] = kernels[counts[ids, c] > 0, :, c].mean(0)
    np.testing.assert_allclose(
        state.server["head"]["kernel"], expected, rtol=1e-5, atol=1e-6
    )
    for name in ("kernel", "bias"):
        before, after = (
            np.asarray(s.server["head"][name])[..., ~held] for s in (begin, state)
        )
        np.testing.assert_array_equal(after, before)
    assert (
        (
            np.asarray(state.server["head"]["kernel"])
            != np.asarray(begin.server["head"]["kernel"])
        )[:, held]
        .any(0)
        .all()
    )

    swapped = counts.copy()
    swapped[absent] = 1  # what clients hold that do not take part means nothing
    other = run(
        Context(
            key,
            program.traced,
            f._replace(class_counts=jnp.asarray(swapped)),
            jnp.int32(4),
        ),
        begin,
        jnp.bool(False),
    )
    toy.assert_same(other[0], state)


@functools.cache
def one_client():
    task, _ = sparse()

    @jax.jit
    def run(key, f, state, ids):
        cohort = toy.cohort(task, ids, ids >= 0, f, key, jnp.int32(4))
        return toy.round_of(ALGORITHMS["pfedc"](task), task)(key, state, cohort)[
            0
        ].server["head"]["kernel"]

    return run


def alone(task: Task, f: Federation, key, state: RunState, i: int) -> np.ndarray:
    """The branches [K, C] that one selected client sends."""
    clients_key = keys.clients_key(key, jnp.int32(4))
    rows = jax.tree.map(lambda x: x[i : i + 1], state.clients)
    return np.asarray(
        one_client()(clients_key, f, State(state.server, rows), np.array([i], np.int32))
    )


@pytest.mark.slow
def test_consecutive_tasks_whose_number_does_not_divide_the_classes():
    of = task_maps.branches(toy.task()._replace(num_classes=10), "consecutive:4").of
    np.testing.assert_array_equal(of, [0, 0, 0, 1, 1, 2, 2, 2, 3, 3])
