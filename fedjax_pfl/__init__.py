"""Vectorised simulation of personalised federated learning in JAX and Flax.

`load` a data set, `partition` it among clients, `federate` it onto the device. `task`
describes the local training, `program` binds a method of `ALGORITHMS` to it, and
`rounds` runs it round by round (`curve` inside one compiled function). Your own method
is a factory of a `Method`, one function for one `Client`; `check_algorithm` checks it
against the rules of the contract. `uploads` has options on what clients send.
"""

from typing import TYPE_CHECKING

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.loading import load
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.engine.program import Program, program
from fedjax_pfl.engine.results import Result, record
from fedjax_pfl.errors import DivergenceError, InputError, moved
from fedjax_pfl.models import MODELS, model
from fedjax_pfl.simulate import curve, rounds, task
from fedjax_pfl.testing import check_algorithm
from fedjax_pfl.types import (
    Algorithm,
    Client,
    Cohort,
    Federation,
    Method,
    Metrics,
    Model,
    Own,
    State,
    Task,
    Traffic,
    Update,
)

__version__ = "0.1.0"
__all__ = [
    "ALGORITHMS",
    "MODELS",
    "Algorithm",
    "Client",
    "Cohort",
    "Dataset",
    "DivergenceError",
    "Federation",
    "InputError",
    "Method",
    "Metrics",
    "Model",
    "Own",
    "Partition",
    "Program",
    "Result",
    "State",
    "Task",
    "Traffic",
    "Update",
    "check_algorithm",
    "curve",
    "federate",
    "load",
    "model",
    "partition",
    "program",
    "record",
    "rounds",
    "task",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = moved(
        __name__,
        {
            "compression": "program(..., uploads=uploads.top_k(0.1))",
            "server_optimizer": "program(..., server=uploads.fedadam(0.1))",
        },
    )
