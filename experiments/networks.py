"""The networks of --model and --shared_model, and the clients' optimizer."""

import functools
import inspect
import os
from pathlib import Path

import jax
import numpy as np
import optax
from chex import Numeric

from experiments.config import OWN_NETWORKS, Config
from fedjax_pfl import user_code
from fedjax_pfl.data import datasets
from fedjax_pfl.engine import validate
from fedjax_pfl.engine.contract import ENDINGS
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nnx_model
from fedjax_pfl.types import Model


def architectures(spec: str, num_clients: int) -> tuple[list[str], np.ndarray]:
    """Reads --model.

    Returns:
      the names of the networks [G], and which of them each client has [N].

    Raises:
      InputError: a file cannot be read or has not one name per client, or there are
        more networks than clients.
    """
    if not spec.startswith("file:"):
        listed = spec.removeprefix("blocks:").split(",")
        if len(listed) > num_clients:
            raise InputError(
                f"--model={spec} has {len(listed)} networks for {num_clients} clients: "
                "name fewer."
            )
        ids, count = np.arange(num_clients), len(listed)
        places = (
            ids * count // num_clients if spec.startswith("blocks:") else ids % count
        )
        return _numbered([listed[place] for place in places])
    path = Path(os.path.expanduser(spec.removeprefix("file:")))
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--model={spec} cannot be read ({error}): write the name of a network per "
            "client."
        ) from None
    if len(words) != num_clients:
        raise InputError(
            f"--model={spec} names {len(words)} networks for {num_clients} clients: "
            "write one per client."
        )
    return _numbered(words)


def _numbered(words: list[str]) -> tuple[list[str], np.ndarray]:
    """The names in the order of their first clients, and the number of each client's
    [N]."""
    names = list(dict.fromkeys(words))
    return names, np.array([names.index(word) for word in words])


def label(config: Config) -> str:
    """How tables name the network, "own" of a method that makes its own."""
    return "own" if config.algo in OWN_NETWORKS else config.model


def names(config: Config, num_clients: int) -> np.ndarray:
    """The name of each client's network [N], "own" of a method that makes its own; of a
    user's own the function's, if no other has it.

    Raises:
      InputError: there are several, and a score of one would have the name of a
        statistic.
    """
    if config.algo in OWN_NETWORKS:
        return np.full(num_clients, "own")
    found, of = architectures(config.model, num_clients)
    brief = [user_code.short(name) for name in found]
    if len(found) > 1 and (taken := [name for name in brief if name.endswith(ENDINGS)]):
        raise InputError(
            f"--model={config.model}: no network may end in {', '.join(ENDINGS)} "
            "beside others, as the statistics of "
            f"scores do; give the function {taken[0]} another name."
        )
    return np.array(brief if len(set(brief)) == len(set(found)) else found)[of]


def model(config: Config, dataset: datasets.Dataset, conv: str, name: str) -> Model:
    """A network for inputs of the data set's shape, with convolutions in the form
    `conv`."""
    example = jax.ShapeDtypeStruct((1, *dataset.x.shape[1:]), dataset.x.dtype)
    prepared = jax.eval_shape(dataset.prepare, example)
    options = (config.bn_stats, conv, config.compute_dtype, config.features)
    arguments = (name, prepared.shape[1:], dataset.num_classes, *options)
    if not user_code.named(name):
        return _known(*arguments, input_dtype=prepared.dtype)
    with user_code.blamed("model", name):
        made = nnx_model.model(*arguments, input_dtype=prepared.dtype)
        validate.model(made, dataset)
    return made


# the same in all runs of a sweep: what is traced of it is traced once
_known = functools.cache(nnx_model.model)


def shared(
    config: Config, dataset: datasets.Dataset, conv: str, made: dict[str, Model]
) -> Model:
    """The network that all clients exchange: as --shared_model says, else the smallest
    of the clients' own."""
    if config.shared_model is not None:
        return model(config, dataset, conv, config.shared_model)
    return min(made.values(), key=num_parameters)


def num_parameters(model: Model) -> int:
    """Parameters of a network."""
    return nnx_model.num_parameters(
        jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    )


def optimizer(
    momentum: float, weight_decay: float, clip: float | None, name: str = "sgd"
):
    """An optimizer with PyTorch's meaning of its numbers, lr -> transformation:
    gradients clipped, then decayed, unless the optimizer has a decay of its own
    (AdamW).

    Args:
      momentum: of SGD.
      name: one of `config.optimizers`, with optax's defaults but for the learning rate
        and the decay.
    """

    def make(lr: Numeric) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(clip)] if clip is not None else []
        if "weight_decay" in inspect.signature(rule := getattr(optax, name)).parameters:
            return optax.chain(*parts, rule(lr, weight_decay=weight_decay))
        parts += [optax.add_decayed_weights(weight_decay)] if weight_decay else []
        return optax.chain(
            *parts, rule(lr, momentum or None) if name == "sgd" else rule(lr)
        )

    return make
