"""Options of a run on what clients send, and the optimizer of the server."""

from typing import TYPE_CHECKING

from fedjax_pfl.errors import moved
from fedjax_pfl.uploads.attacks import attack
from fedjax_pfl.uploads.chain import Chain, Option, chain, option
from fedjax_pfl.uploads.compression import low_rank, qsgd, top_k
from fedjax_pfl.uploads.privacy import private
from fedjax_pfl.uploads.robust import robust
from fedjax_pfl.uploads.server import (
    fedadagrad,
    fedadam,
    fedavgm,
    fedyogi,
    optimizer,
)

__all__ = [
    "Chain",
    "Option",
    "attack",
    "chain",
    "fedadagrad",
    "fedadam",
    "fedavgm",
    "fedyogi",
    "low_rank",
    "optimizer",
    "option",
    "private",
    "qsgd",
    "robust",
    "top_k",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    _UPLOAD = "an Upload in program(..., uploads=chain(...))"
    __getattr__ = moved(
        __name__,
        dict.fromkeys(("Through", "key_of", "must_send", "over", "sending"), _UPLOAD),
    )
