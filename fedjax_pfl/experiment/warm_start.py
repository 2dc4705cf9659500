"""Start states with the variables of a finished run, for fine-tuning."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from fedjax_pfl.engine.method import as_arrays
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.build import make_program, restored
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.types import Array, PyTree, RunState


def first_state(e: Experiment) -> RunState:
    """Returns the state before the first round, on the host.

    With --init_from the method's start is made of the model that the run's clients
    shared. Then every leaf of the state that the run has by the same name and in the
    same shape is the run's, such as the clients' personal parts; the others are new.

    Raises:
      InputError: the run has no checkpoint, or none of its variables fits.
    """
    if e.config.init_from is None:
        return e.fetch(e.program.init(e.key, e.traced))
    path, taken, unfit = str(e.config.init_from), set[str](), set[str]()
    before, _, state = restored(path)
    old = state.method
    shared = old.server if isinstance(old.server, dict) else {}

    def warm(init: Callable[[Array], PyTree]) -> Callable[[Array], PyTree]:
        return lambda key: overlaid(init(key), shared, taken, unfit)

    models = [model._replace(init=warm(model.init)) for model in e.task.models]
    task = e.task._replace(models=tuple(models))
    program = make_program(e.config, task, e.schedule)
    state = program.unplace(program.init(e.key, as_arrays(program.traced)))
    state = state._replace(method=overlaid(state.method, old, taken, unfit))
    if not taken:
        raise InputError(f"--init_from={path} has no variables of this run's shapes.")
    new = [x for x in map(_name, _leaves(state.method)) if x not in taken]
    if new and before.config.algo == e.config.algo:
        logging.warning("Not in %s, so new: %s.", path, ", ".join(new))
    if unfit:
        names = ", ".join(sorted(unfit))
        logging.warning("Of another shape in %s, so new: %s.", path, names)
    classes = before.dataset.classes, e.dataset.classes
    if all(classes) and classes[0] != classes[1]:
        names = " and ".join(", ".join(x or ()) for x in classes)
        logging.warning("Other classes than in %s, by number: %s.", path, names)
    return jax.device_get(state)


def overlaid(tree: PyTree, other: PyTree, taken: set[str], unfit: set[str]) -> PyTree:
    """Returns a tree with the leaves of another one where name, shape and type agree.

    Args:
      taken: gets the names of these leaves.
      unfit: gets those of leaves that have the name alone.
    """
    known = {_name(pair): pair[1] for pair in _leaves(other)}

    def choose(path: Any, leaf: Any) -> Any:
        name = _name((path, leaf))
        theirs = known.get(name)
        if theirs is None:
            return leaf
        if theirs.shape != leaf.shape or theirs.dtype != leaf.dtype:
            unfit.add(name)
            return leaf
        taken.add(name)
        return jnp.asarray(theirs)

    return jax.tree_util.tree_map_with_path(choose, tree)


_leaves = jax.tree_util.tree_leaves_with_path


def _name(pair: tuple[Any, Any]) -> str:
    """Returns the name of a leaf with its path."""
    return jax.tree_util.keystr(pair[0], simple=True, separator="/")
