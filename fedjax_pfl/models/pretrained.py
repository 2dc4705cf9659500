"""Networks and weights of local folders of Hugging Face, as their inputs and labels
need them."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx, traverse_util

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.models import nnx_model
from fedjax_pfl.models.checkpoints import (
    Files,
    digest,
    read_config,
    read_json,
    words,
    words_of,
)
from fedjax_pfl.models.families import TYPES, Family, general
from fedjax_pfl.models.nets import Shape
from fedjax_pfl.models.registry import Factory
from fedjax_pfl.types import Array, Model, PyTree, Stored

__all__ = ["Pretrained", "digest", "load", "model", "words", "words_of"]

PREFIX = "pretrained:"  # of --model=pretrained:FOLDER
user_code.reserve((PREFIX, "blocks:", "file:"))
_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "bias": "bias",
}


class Pretrained(NamedTuple):
    """A network and its variables in a folder.

    Attributes:
      factory: as of `models.model`.
      variables: {"body": parameters, "stats": {}}, and "head" where the file has one;
        "body" may have parts that the network of a task does not use. Its leaves are
        `Stored`, float32.
      family: the names in the file.
    """

    factory: Factory
    variables: PyTree
    family: Family


def folder(name: str) -> str | None:
    """Returns the folder of the network pretrained:FOLDER, None of other names."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def folders(spec: str) -> list[str]:
    """Returns the folders of --model, such as pretrained:FOLDER or
    blocks:cnn,pretrained:FOLDER."""
    found = map(folder, spec.removeprefix("blocks:").split(","))
    return list(filter(None, found))


def is_folder(path: str) -> bool:
    """Returns True for a folder with a config.json of a model type."""
    file = Path(path).expanduser() / "config.json"
    return file.exists() and "model_type" in read_json(file)


def tokenizer(folder: str) -> str | None:
    """Returns the path of a folder's tokenizer.json, None where there is none."""
    path = Path(folder).expanduser() / "tokenizer.json"
    return str(path) if path.exists() else None


@functools.cache
def load(folder: str, image_size: int | None = None) -> Pretrained:
    """Loads a network; nothing is downloaded, and the body is read where it is used.

    Args:
      folder: with config.json and model.safetensors, or its parts with
        model.safetensors.index.json; of the model types in TYPES.
      image_size: pixels per side of the images that a vision transformer sees, to which
        others are resized; positions are interpolated as in transformers. Default: that
        of preprocessor_config.json, else of config.json.

    Raises:
      InputError: a file is missing or has other content, the model type is unknown, or
        a tensor is missing or has another shape.
    """
    path = Path(folder).expanduser()
    config = read_config(path)
    kind = choose("model_type", config["model_type"], TYPES)
    if image_size is not None:
        config["side"] = image_size
        if "pixels" in config:
            size = (image_size, image_size)
            config["pixels"] = config["pixels"]._replace(size=size)
    files = Files(path)
    family = TYPES[kind](config, files)
    files.prefix = family.prefix
    if not any(name.startswith(family.prefix) for name in files._where):
        files.prefix = ""
    return Pretrained(family.factory, _variables(family, files), family)


def model(folder: str, input_shape: Shape, num_classes: int, **options: Any) -> Model:
    """Makes a Model that starts from the weights of a folder.

    Its head is the file's where it has one of `num_classes`, else a new one.

    Args:
      folder: as of `load`.
      input_shape: as `num_classes` and `options` those of `models.model`.

    Raises:
      InputError: as `load` and `models.model`.
    """
    found = load(folder)
    made = nnx_model.model(found.factory, input_shape, num_classes, **options)
    shapes = jax.eval_shape(made.init, jax.random.key(0))
    body = _taken(shapes["body"], _body(folder))
    if body is None:
        raise InputError(f"{folder} has not all weights for these labels.")
    head = _taken(shapes["head"], found.variables.get("head", {}))

    def init(key: Array) -> PyTree:
        drawn = made.init(key) if head is None else {"stats": {}, "head": head}
        return drawn | {"body": body}

    return made._replace(init=init)


@functools.cache  # one copy for all networks
def _body(folder: str) -> PyTree:
    """Reads all parameters of a body."""
    return jax.tree.map(np.asarray, load(folder).variables["body"])


def _taken(shapes: PyTree, given: PyTree) -> PyTree | None:
    """Returns the values of a tree, None unless all are given in these shapes."""
    flat, known = (traverse_util.flatten_dict(tree) for tree in (shapes, given))
    if any(np.shape(known.get(path)) != x.shape for path, x in flat.items()):
        return None
    return traverse_util.unflatten_dict({path: known[path] for path in flat})


def _variables(family: Family, files: Files) -> PyTree:
    """Returns all variables of a network."""
    make = functools.partial(family.factory, num_classes=2, **family.example)
    template: Any = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    shapes = {
        tuple(map(str, path)): variable.get_value().shape
        for path, variable in nnx.to_flat_state(nnx.state(template.body, nnx.Param))
    }
    body = {path: _stored(family, files, path, shapes[path]) for path in shapes}
    found = {"body": traverse_util.unflatten_dict(body), "stats": {}}
    head = family.names.get("head")
    if head is not None and files.find(f"{head}.weight"):
        found["head"] = {"kernel": files.read(f"{head}.weight").T}
        if files.find(f"{head}.bias"):
            found["head"]["bias"] = files.read(f"{head}.bias")
    return found


def _stored(
    family: Family, files: Files, path: tuple[str, ...], shape: Shape
) -> Stored:
    """Returns one parameter of the body, without reading it."""
    *module, leaf = path
    if leaf in _LEAVES:
        name = f"{family.file_name(tuple(module))}.{_LEAVES[leaf]}"
    else:
        name = family.file_name(path)
    edit = family.edits.get(general(path))

    def arranged(value: np.ndarray) -> np.ndarray:
        if leaf == "kernel" and value.ndim == 4:  # patches, of a convolution
            value = value.transpose(2, 3, 1, 0).reshape(-1, len(value))
        elif leaf == "kernel" and family.transposed:
            value = value.T
        return value if edit is None else edit(value, files)

    def load(dtype: np.dtype[Any]) -> np.ndarray:
        return arranged(files.read(name, dtype if edit is None else np.float32))

    stored = files.shape(name)
    # one number in this shape
    if arranged(np.broadcast_to(np.float32(0), stored)).shape != shape:
        raise InputError(
            f"{files.folder}: the tensor {name!r} does not fit config.json: "
            f"{'.'.join(path)} must be {list(shape)}, got {stored}."
        )
    return Stored(shape, np.dtype(np.float32), load)
