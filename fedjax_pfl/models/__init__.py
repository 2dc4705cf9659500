"""Networks with a body and a head, and the pure functions made of them."""

from fedjax_pfl.models.functional import model, network, num_parameters
from fedjax_pfl.models.registry import MODELS
from fedjax_pfl.models.superset import native_size, pad_to_superset
from fedjax_pfl.models.work import flops

__all__ = [
    "MODELS",
    "flops",
    "model",
    "native_size",
    "network",
    "num_parameters",
    "pad_to_superset",
]
