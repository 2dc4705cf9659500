"""Every hyperparameter of every method changes what is computed. Methods are traced,
not compiled and not run."""

import functools
import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.interpreters import partial_eval

from fedjax_pfl import hyperparameters, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.types import Context

KEY = jax.random.key(0)
# in the order of what an option most often changes
PARTS = ("round", "init", "evaluate")

# Options that act only beside others: {option: {method or "": the others}}; "" is for
# all methods that have it.
BESIDE = {
    "warmup_epochs": {"": {"order": "code"}},
    "normalise": {"": {"weighting": "mgda_ub"}},
    "head_lr": {"feddva": {"head": "personal", "head_epochs": 1}},
}
# the task's rate is not used, as is documented
NO_RATE = ("pfedhn", "mocha")
# The other value, where it is not the default's neighbour: 5 clients, of which one
# takes at most 5 models, and 11 public examples.
OTHER = {
    "received": [2],
    "neighbours": [2],
    "public_size": [5],
    "tasks": ["consecutive:2"],
    "embedding": [4],  # not those of 5 clients
    "rank_min": [2],  # of a rank of 3, which is flora's default
}
# What None stands for, where it is not another training.
NONE = {
    ("fedavg_ft", "fine_tune_epochs"): lambda task: max(task.epochs, 5),
    ("pfedma", "fine_tune_epochs"): lambda task: max(task.epochs, 5),
    ("mocha", "relate_every"): lambda task: max(1, task.rounds // 10),
    ("pfedhn", "embedding"): lambda task: 1 + toy.N // 4,
    ("pefll", "embedding"): lambda task: max(3, 1 + toy.N // 4),
}
# Every option is another trace of a round: the others are slow.
QUICK = ("ditto", "scaffold", "fedrep", "fedamp")


@functools.cache
def task_of(method, name=""):
    if name == "norm":
        return toy.fitted(method, "norm", public=toy.POOL)
    return toy.method_task(method)


class Traced:
    """The programs of a method with these options: `init`, a round and an evaluation,
    each traced on demand."""

    def __init__(self, method, options, task):
        self.program = toy.program(toy.METHODS[method], task, options)
        self.text = functools.cache(self._text)

    @functools.cached_property
    def _init(self):
        return jax.make_jaxpr(self.program.init, return_shape=True)(
            KEY, self.program.traced
        )

    @functools.cached_property
    def jaxprs(self):
        f = simulate.with_frozen(toy.federation(), self.program.task)
        args = (Context(KEY, self.program.traced, f, jnp.int32(1)), self._init[1])
        make = {"init": lambda: self._init[0]}
        make["round"] = lambda: jax.make_jaxpr(self.program.round)(
            *args, jnp.bool(True)
        )
        make["evaluate"] = lambda: jax.make_jaxpr(self.program.evaluate)(*args)
        return {part: functools.cache(make[part]) for part in PARTS}

    def _text(self, part):
        jaxpr = self.jaxprs[part]()
        raw = (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
            for x in jaxpr.consts
        )
        consts = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in raw]
        return re.sub("0x[0-9a-f]+", "", f"{jaxpr} {consts}")  # addresses say nothing

    def computes(self, other):
        """Is it the same computation?"""
        return all(self.text(part) == other.text(part) for part in PARTS)

    def unused(self):
        """The traced hyperparameters on which no result depends."""
        names = sorted(self.program.traced)
        for part in PARTS:
            jaxpr = self.jaxprs[part]().jaxpr
            _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
            # the first is the key
            used = dict(zip(sorted(self.program.traced), used[1:], strict=False))
            names = [name for name in names if not used[name]]
            if not names:
                break
        return names


class Cases:
    """The programs of a method, each traced once."""

    def __init__(self, method):
        self.method, self.traced = method, {}

    def of(self, options, task=""):
        found = (*sorted(options.items(), key=str), task)
        if found not in self.traced:
            self.traced[found] = Traced(
                self.method, options, task_of(self.method, task)
            )
        return self.traced[found]

    def beside(self, name):
        """The other options and the task with which an option acts."""
        of = BESIDE.get(name, {})
        return of.get(self.method, of.get("", {})), ""


def others(known, default):
    """Values of a hyperparameter that must each make a difference."""
    if known.name in OTHER:
        return OTHER[known.name]
    if known.choices:
        return [choice for choice in known.choices if choice != default]
    if known.kind is bool:
        return [not default]
    if known.kind is float:  # it is an argument of what is traced, unless it is None
        return [0.3] if default is None else []
    assert known.kind is int, known
    return (
        [3]
        if default is None
        else [default + 1 if default < known.high else default - 1]
    )


def without_effect(method):
    """Returns the hyperparameters of a method that change nothing, and their values."""
    cases, found = Cases(method), []
    for name, known in hyperparameters.of(ALGORITHMS[method]).items():
        default = toy.SMALL.get(method, {}).get(name, known.default)
        options, task = cases.beside(name)
        seen = [cases.of(options, task)]
        for value in others(known, default):
            changed = cases.of(options | {name: value}, task)
            if any(changed.computes(each) for each in seen):
                found.append((name, value))
            if known.kind is float:
                found += [(name, value)] * (name in changed.unused())
            seen.append(changed)
        if known.kind is float and default is not None:
            found += [(name, default)] * (name in seen[0].unused())
    options, task = cases.beside("lr")
    rate = method not in NO_RATE and "lr" in cases.of(options, task).unused()
    return found + [("lr", "of the task")] * rate


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [name if name in QUICK else toy.slow(name) for name in ALGORITHMS]
)
def test_no_option_is_without_effect(method):
    assert without_effect(method) == []


@pytest.mark.slow
@pytest.mark.parametrize("method, name", NONE)
def test_none_is_the_value_that_is_documented(method, name):
    for change in ({}, {"epochs": 7, "rounds": 40}):
        task = task_of(method)._replace(**change)
        assert Traced(method, {}, task).computes(
            Traced(method, {name: NONE[method, name](task)}, task)
        )
