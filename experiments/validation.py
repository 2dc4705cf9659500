"""The scores on the clients' validation examples, where they have any: of the model
that `pre` scores, in the same rounds.

No method's training in the round uses what is scored here, but a method that trains
with its validation examples (FedFomo's weights) has seen them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import build
from fedjax_pfl import simulate
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.types import Array, Federation, State

POINT = "val"
# before the names of these scores where they stand among those of the test examples
_MARK = f"{POINT}/"


def exists(experiment: build.Experiment) -> bool:
    """Has any client that trains a validation example?"""
    return bool(experiment.partition.val_sizes.sum())


def sizes(experiment: build.Experiment) -> dict[str, np.ndarray]:
    """Examples per client of the points beside `pre` and `post`, {point: [clients]}: of
    the validation, and of clients that do not train."""
    apart = experiment.unseen
    theirs = (
        {}
        if apart is None
        else dict.fromkeys(("unseen", "unseen_post"), apart.partition.test_sizes)
    )
    return {POINT: experiment.partition.val_sizes} | theirs


def scored(experiment: build.Experiment, program: simulate.Program) -> simulate.Program:
    """The program whose evaluation also scores the validation examples, as val/NAME;
    itself where there are none."""
    return (
        program._replace(evaluate=_with_validation(program.evaluate))
        if exists(experiment)
        else program
    )


def _with_validation(
    evaluate: Callable[..., dict[str, Any]],
) -> Callable[..., dict[str, Any]]:
    def both(
        key: Array, traced: Traced, federation: Federation, state: State, t: Array
    ) -> dict[str, Any]:
        found = evaluate(key, traced, federation, state, t)
        held_out = evaluate(
            key, traced, federation._replace(test=federation.val), state, t
        )
        return found | {_MARK + name: values for name, values in held_out.items()}

    return both


def apart(result: simulate.Result) -> tuple[simulate.Result, dict[str, dict[str, Any]]]:
    """The result with the scores of the test examples only, and {"val": {score: [N]}},
    or nothing where there are none."""
    names = [name for name in result.pre or {} if name.startswith(_MARK)]
    if not names:
        return result, {}
    found: dict[str, Any] = dict(result.pre or {})
    held_out = {name.removeprefix(_MARK): found.pop(name) for name in names}
    return result._replace(pre=found), {POINT: held_out}
