"""Networks with a body and a head, and the pure functions made of them."""

from fedjax_pfl.models.adapted import (
    adapted,
    bias,
    head,
    lora,
    merged,
    norms,
    prompt,
)
from fedjax_pfl.models.nnx_model import flops, model, network, num_parameters
from fedjax_pfl.models.registry import MODELS

__all__ = [
    "MODELS",
    "adapted",
    "bias",
    "flops",
    "head",
    "lora",
    "merged",
    "model",
    "network",
    "norms",
    "num_parameters",
    "prompt",
]
