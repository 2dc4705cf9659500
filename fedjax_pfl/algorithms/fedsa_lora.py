"""FedSA-LoRA: the matrices A of LoRA are shared, B and the head remain with the client.

Reference: Guo et al., Selective aggregation for low-rank adaptation in federated
learning (ICLR 2025). Authors' code: Pengxin-Guo/FedSA-LoRA.
"""

from typing import Any

import jax
from flax import traverse_util

from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import Split, partial_averaging, split
from fedjax_pfl.errors import InputError
from fedjax_pfl.models.adapted import A, B
from fedjax_pfl.types import Method, PyTree, Task


@register("fedsa_lora", trainings=1)
def fedsa_lora(task: Task) -> Method:
    """Averages A of every layer; B and the head are trained with it and kept.

    The paper finds that A holds what clients have in common, and B what is their own.

    Note:
      The model must be adapted by `lora`. Where the body ends in logits, as of
      networks of the next token, there is no head.
    """
    _check_lora(task)
    kept = split(task, ("head",)).personal
    return partial_averaging(task, Split(task, tuple(map(_with_b, kept))))


def _with_b(kept: PyTree) -> PyTree:
    """Marks B, too, in a tree of the leaves that stay."""
    return jax.tree.map_with_path(lambda path, own: own or _is_b(path), kept)


def _is_b(path: tuple[Any, ...]) -> bool:
    return any(key.key == B for key in path)


def _check_lora(task: Task) -> None:
    body = jax.eval_shape(task.model.init, jax.random.key(0))["body"]
    if not any(A in path for path in traverse_util.flatten_dict(body)):
        raise InputError(
            "fedsa_lora needs a model whose A is trained: models.adapted(..., "
            "models.lora(rank), ...), --adapt=lora:RANK."
        )
