"""Random experiments: whatever the layout, the padding, where the clients' state lies
and an interruption, the results are those of one client after another on one device,
straight through."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from test_differential_privacy import ACCEPTED
from toy import PUBLIC, SHAPE, C, assert_same, rows

from fedjax_pfl import simulate
from fedjax_pfl.algorithms.registry import EXCLUDES
from fedjax_pfl.types import Examples, Federation, Subset, Task

ROUNDS = 6  # enough for several to go to the devices at once
OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "decay": lambda lr: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(lr)),
    # a larger one: steps do not jump with a gradient's last bits
    "adam": lambda lr: optax.adam(lr, eps=0.01),
}
HPARAMS: dict[str, dict[str, tuple]] = {  # other ways through a method
    "scaffold": {"server_lr": (0.5, 1.0)},
    "fedrep": {"head_epochs": (0, 2)},
    "fedma": {
        "matching": ("distance", "identity"),
        "weights": ("classes", "uniform"),
        "retrain_epochs": (0, 1),
    },
    "apfl": {"adaptive": (False, True)},
    "fedala": {"blended": ("none", "head", "all"), "percent": (30.0, 80.0)},
    "fedfomo": {"received": (1, 2, 5), "epsilon": (0.0, 0.5)},
    "pfedhn": {"inner_steps": (None, 3)},
    "mocha": {"relate_every": (1, 2)},
    "mnfl": {"coef_steps": (1, 3)},
    "mnfl_het": {
        "order": ("paper", "code"),
        "public_size": (4, 3000),
    },
    "fedmd": {"passes": (0, 2), "public_batch": (3, 256)},
    "sim_pfd": {"order": ("paper", "code")},
    "topk_pfd": {"neighbours": (1, 2, 5)},
    "feddf": {"student_optimizer": ("adam", "sgd"), "public_batch": (3, 256)},
    "fedcp": {
        "policy": ("softmax", "gumbel"),
        "norm": ("layer", "batch"),
        "cs": (False, True),
        "cpn": (False, True),
    },
    "pfedc": {
        "tasks": ("class", "map:0,1,0,1"),
        "head": ("group_softmax", "group_reject"),
        "train": ("held", "all"),
        "download": ("bank", "stale"),
    },
    "privacy_pfedc": {
        "head_weighting": ("uniform", "data"),
    },
}


class Case(NamedTuple):
    """One experiment, and two other layouts for it, before and after an
    interruption."""

    task: Task
    hparams: dict[str, Any]
    plain: Federation
    padded: Federation  # with more places, that point to examples which are NaN
    layouts: tuple[dict[str, Any], ...]  # width, devices, host
    stop: int
    every: dict[str, int]  # rounds between evaluations, and between states


def draw(method: str, seed: int) -> Case:
    rng = np.random.default_rng([seed, *method.encode()])
    one_of = lambda *values: values[rng.integers(len(values))]
    n = int(rng.integers(2, 14))
    net = (
        one_of("mlp", "norm")
        if method
        not in ("mocha", "fedma", "pfedma", "fedbn", "hetlora", "fedsa_lora", "flora")
        else toy.net_of(method)
    )
    # batch norm of two or three rows magnifies a last bit a thousand times
    apart = net == "norm"
    sizes = (
        rng.choice([0, 1, 5, 8, 13] if apart else [0, 1, 1, 2, 3, 5, 8, 13], n),
        *rng.integers(0, 5, (2, n)),
    )
    # somebody has examples
    sizes[0][rng.integers(n)], sizes[1][:] = 9, sizes[1] * one_of(0, 1)
    own = [rng.choice(C, rng.integers(1, C + 1), replace=False) for _ in range(n)]
    low, high = np.sort(rng.integers(1, n + 1, 2)) / n
    plain, padded = (
        federation(sizes, own, *more, seed)
        for more in ((0, 0.0), (int(rng.integers(1, 9)), np.nan))
    )
    excluded = "optimizer" in EXCLUDES[method]
    optimizers = [name for name in OPTIMIZERS if name == "sgd" or not excluded]
    given = {
        "sizes": sizes[0],
        "class_counts": np.asarray(plain.class_counts),
        "lr": 0.05,
        "optimizer": OPTIMIZERS[one_of(*optimizers)],
        "batch_size": 16 if apart else one_of(1, 2, 4, 16),
        "drop_last": not apart and one_of(True, False, False),
        "participation": one_of(
            (1.0, 1.0), (low, high), (high, high), ((n - 1) / n, (n - 1) / n)
        ),
        "bn_stats": one_of("aggregate", "local", "batch"),
    } | one_of({"epochs": 2}, {"epochs": None, "steps": 3})
    # else nobody has a batch, which is refused
    given["drop_last"] &= given["batch_size"] <= max(sizes[0])
    hparams = {
        name: one_of(*values) for name, values in HPARAMS.get(method, {}).items()
    }
    # Adam's steps on a bias before a batch norm would be those of rounding
    if apart and method in ("feddf", "pfeddf"):
        hparams["student_optimizer"] = "sgd"
    layout = lambda: {
        "width": int(rng.integers(1, n + 2)),
        "devices": one_of(1, 2, 3, 5, 8),
        "host": one_of(True, False),
    }
    layouts = layout(), layout()
    every = {"eval_every": one_of(0, 1, 3, 4), "state_every": one_of(1, 4, 5)}
    return Case(
        toy.fitted(method, net, **given),
        hparams,
        plain,
        padded,
        layouts,
        int(rng.integers(1, ROUNDS)),
        every,
    )


def federation(
    sizes: tuple, own: list, pad: int, nobodys: float, seed: int
) -> Federation:
    """Clients with these numbers of training, validation and test examples [N] of their
    own classes."""
    rng, total = np.random.default_rng(seed), sum(sizes)
    y = np.append(
        np.concatenate(
            [
                np.resize(classes, count)
                for classes, count in zip(own, total, strict=True)
            ]
        ),
        0,
    )
    x = rng.normal(size=(C, *SHAPE))[y] * 2 + rng.normal(size=(len(y), *SHAPE))
    x[-1] = nobodys
    ends, splits = np.cumsum(total), []
    for i, count in enumerate(sizes):
        first = ends - sum(sizes[i:])
        place = np.arange(
            max(count.max() + pad, i != 1) if i != 1 or count.any() else 0
        )[None]
        index = np.where(place < count[:, None], first[:, None] + place, len(y) - 1)
        splits.append(
            Subset(jnp.asarray(index, jnp.int32), jnp.asarray(count, jnp.int32))
        )
    held = [
        np.bincount(y[end - all_ :][:count], minlength=C)
        for end, all_, count in zip(ends, total, sizes[0], strict=True)
    ]
    examples = Examples(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32))
    pool = Examples(
        jnp.asarray(2 * rng.normal(size=(PUBLIC, *SHAPE)), jnp.float32),
        jnp.zeros(PUBLIC, jnp.int32),
    )
    return Federation(examples, *splits, jnp.asarray(np.stack(held), jnp.int32), pool)


def program(
    method: str, case: Case, width: int = 1, devices: int = 1, host: bool = False
) -> simulate.Program:
    sampled = max(case.task.cohort_sizes) < case.task.num_clients
    return simulate.program(
        toy.METHODS[method],
        case.task,
        case.hparams,
        width=width,
        devices=devices,
        storage="host" if host and sampled else "device",
        checked=False,
    )


def run(
    p: simulate.Program, f: Federation, key, rounds: int = ROUNDS, **options
) -> list[simulate.Result]:
    """Each round's result, with a state that stays what it was."""
    keep = lambda state: (
        None
        if state is None
        else jax.tree.map(np.array, jax.device_get(p.unplace(state)))
    )
    return [
        r._replace(state=keep(r.state))
        for r in simulate.rounds(p, key, f, rounds=rounds, **options)
    ]


def interrupted(method: str, case: Case, key) -> list[simulate.Result]:
    """Returns the same run in the first layout, then from its state in the second."""
    before, after = (program(method, case, **layout) for layout in case.layouts)
    results = run(before, case.padded, key, case.stop, **case.every)
    state = after.place(results[-1].state)
    return results[:-1] + run(
        after, case.padded, key, start=case.stop, state=state, **case.every
    )


def assert_close(a: Any, b: Any) -> None:
    toy.assert_close(a, b, 1e-4)


def assert_absent_clients_stay(results: list[simulate.Result]) -> None:
    for before, after in itertools.pairwise(results[:-1]):
        absent = np.setdiff1d(
            np.arange(len(after.pre["acc"])), after.metrics.ids[after.metrics.active]
        )
        assert_same(
            rows(before.state.clients, absent), rows(after.state.clients, absent)
        )


# one case draws from every option; more of one are for methods of each kind. A method
# whose round is one mean has its own code in `client` alone, which the contract calls in
# every layout.
MEAN = set(ACCEPTED) - {"fedavg", "ditto", "fedbn", *HPARAMS}
CASES = [(method, 0) for method in toy.METHODS if method not in MEAN]
CASES += itertools.product(("fedavg", "ditto", "pfedc", "fedfomo", "mnfl_het"), (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seed"), CASES)
def test_the_results_are_those_of_the_plain_run(method, seed):
    case, key = draw(method, seed), jax.random.key(seed)
    plain = run(program(method, case), case.plain, key)
    for mine, theirs in zip(interrupted(method, case, key), plain, strict=True):
        if mine.state is not None:
            assert_close(mine.state, theirs.state)
        if mine.pre is not None:
            assert_close(mine.pre, theirs.pre)
        if theirs.metrics is not None:
            assert_same(mine.metrics.ids, theirs.metrics.ids)
            # of the others they mean nothing
            active, known = theirs.metrics.active, mine.pre is not None
            of = lambda r, on=active, known=known: rows(
                r._replace(server={}, post=r.post if known else {}), on
            )
            assert_close(of(mine.metrics), of(theirs.metrics))
            toy.assert_close(mine.metrics.server, theirs.metrics.server, 1e-4)
    assert_absent_clients_stay(plain)
