"""Options of a run on what clients send, and the optimizer of the server."""

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
