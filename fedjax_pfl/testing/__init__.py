"""The contract as checks that anybody can run on a method of their own:
`check_algorithm(factory)`."""

import warnings
from collections.abc import Callable, Iterable

import jax
import numpy as np

from fedjax_pfl.engine import program, validate
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.testing import synthetic
from fedjax_pfl.testing.own_network import check_network
from fedjax_pfl.testing.rounds import (
    ContractViolation,
    Subject,
    evaluate,
    run,
    subject,
)
from fedjax_pfl.testing.rules import RULES, UPLOAD_RULES, unused
from fedjax_pfl.testing.synthetic import federation, task
from fedjax_pfl.types import Algorithm, Method, Task, Upload
from fedjax_pfl.uploads.chain import Option

__all__ = [
    "RULES",
    "ContractViolation",
    "Subject",
    "check",
    "check_algorithm",
    "check_network",
    "check_upload",
    "evaluate",
    "federation",
    "run",
    "subject",
    "task",
]


# of methods whose clients may have several architectures
_SEVERAL = ("grouping", "several_architectures")


def check(rule: str, s: Subject) -> None:
    """Raises ContractViolation if a method breaks one of RULES."""
    try:
        RULES[rule](s)
    except (ContractViolation, InputError) as error:
        sentence = (
            f"{method_name(s.factory)} breaks the rule {rule!r} "
            f"({_meaning(rule).rstrip('.')}): {str(error).rstrip('.')}."
        )
        raise ContractViolation(sentence) from None
    except Exception as error:  # of the method's own code
        error.add_note(f"(in the rule {rule!r}: {_meaning(rule)})")
        raise


def _meaning(rule: str) -> str:
    return " ".join((RULES[rule].__doc__ or "").split())


def _checked(rules: Iterable[str], s: Subject) -> dict[str, str]:
    for rule in (found := {name: _meaning(name) for name in rules}):
        check(rule, s)
    return found


def check_algorithm(
    factory: Callable[..., Algorithm | Method] | str, task: Task | None = None
) -> dict[str, str]:
    """Checks a method against every rule of the contract, on a synthetic federation of
    five clients.

    Args:
      factory: factory(task, **hyperparameters) -> Algorithm, with a default for each
        hyperparameter; or a method's name.
      task: as the function `task` makes it, of one architecture; for methods that need
        other models or public data.

    Returns:
      {rule: what holds} of the rules that were checked. Rules on several architectures
      are left out for methods of one. A warning names a number among the
      hyperparameters that changes nothing under the defaults of the others.

    Raises:
      ContractViolation: a rule is broken; the message names the rule and where.
      InputError: what the method returns has a wrong shape, structure or signature.
    """
    factory, given = (
        validate.method(factory),
        synthetic.task() if task is None else task,
    )
    if len(given.models) != 1 or not np.array_equal(given.sizes, synthetic.SIZES):
        raise InputError(
            "check_algorithm needs a Task made by testing.task, with clients of one "
            "architecture."
        )
    validate.key(jax.random.key(0))  # the rules draw from keys of the default kind
    program.program(factory, given)
    made = subject(factory, given)
    alone = _SEVERAL if factory(given).one_architecture else ()
    found = _checked([name for name in RULES if name not in alone], made)
    for name in unused(made):
        warnings.warn(
            f"{method_name(factory)}: no result depends on `{name}` under the defaults "
            "of the other hyperparameters.",
            stacklevel=2,
        )
    return found


def check_upload(
    option: Option | Upload,
    factory: Callable[..., Algorithm | Method] | str = "fedavg",
) -> dict[str, str]:
    """Checks an option on uploads against the rules of the contract that it could
    break, under a method on the federation of `check_algorithm`.

    Args:
      option: of `uploads`, or an `Upload` of one's own.
      factory: a method that takes options on uploads, or its name.

    Returns:
      {rule: what holds} of the rules that were checked.

    Raises:
      ContractViolation: a rule is broken; the message names the rule and where.
      InputError: what the option returns has a wrong shape, structure or signature, or
        the method does not take it.
    """
    factory, given = validate.method(factory), synthetic.task()
    program.program(factory, given, uploads=option)
    return _checked(UPLOAD_RULES, subject(factory, given, uploads=option))
