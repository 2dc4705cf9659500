"""Every method by its name on the command line: {name: factory}, factory(task,
**hyperparameters) -> Algorithm.

A factory checks its hyperparameters against its signature, see
`fedjax_pfl.hyperparameters`.
"""

# ruff: noqa: F401, I001  # imported to be registered, in the order of the methods' table
from fedjax_pfl.algorithms import (
    standalone,
    fedavg,
    scaffold,
    perfedavg,
    pfedme,
    fedper,
    fedbn,
    fedma,
    fedrod,
    ditto,
    apfl,
    fedamp,
    fedphp,
    fedala,
    fedfomo,
    pfedhn,
    mocha,
    fedproto,
    fd,
    mutual,
    mnfl,
    knowledge_transfer,
    feddf,
    fedem,
    fedcp,
    feddva,
    pfedc,
    pfedafm,
)
from fedjax_pfl.algorithms.registry import ALGORITHMS, SEVERAL_ARCHITECTURES, register

__all__ = ["ALGORITHMS", "SEVERAL_ARCHITECTURES", "register"]
globals().update(ALGORITHMS)  # the factories hide the modules of the same name
