"""LoRA adapters of networks in folders of Hugging Face, in the layout of the library
peft: adapter_config.json and adapter_model.safetensors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from fedjax_pfl import trees
from fedjax_pfl.errors import InputError
from fedjax_pfl.models.adapted import A, B, unstacked
from fedjax_pfl.models.families import HEADS, Family
from fedjax_pfl.models.pretrained import load
from fedjax_pfl.types import Model, PyTree

_START = "base_model.model."  # of all names
Low = tuple[np.ndarray, np.ndarray]  # A [I, r] and B [r, O] of a layer


def save(
    folder: str | Path,
    base: str,
    model: Model,
    variables: PyTree,
    scale: float,
    transformers: int = 5,
) -> None:
    """Writes one client's adapter and head; peft loads them on the network of the base.

    Args:
      folder: to write to; it is made.
      base: folder of the network, as of `pretrained.load`.
      model: of `models.adapted` with `lora`, on the network of the base.
      variables: one client's.
      scale: alpha / rank, `lora(...).scale`.
      transformers: major version of the library whose module names are written; they
        differ for ViT, DeiT and DINOv2.

    Raises:
      InputError: the model has no LoRA, or layers of different ranks.
    """
    family = load(base).family
    held = {} if model.frozen is None else unstacked(trees.read(model.frozen.values))
    flat = traverse_util.flatten_dict(held)
    flat |= traverse_util.flatten_dict(variables)
    layers = _layers({path: np.asarray(x) for path, x in flat.items()})
    ranks = {len(b) for _, b in layers.values()}
    if len(ranks) != 1:
        raise InputError(f"The adapter must have LoRA of one rank, got {len(ranks)}.")
    tensors, names = dict[str, np.ndarray](), list[str]()
    for path, (a, b) in layers.items():
        name = _module(family, path, transformers)
        first, second = _patches(family, a, b) if path == ("embed",) else (a.T, b.T)
        tensors[f"{name}.lora_A.weight"] = first
        tensors[f"{name}.lora_B.weight"] = second
        names.append(name)
    config = _config(names, ranks.pop(), scale)
    config |= {"base_model_name_or_path": base, "fan_in_fan_out": not family.transposed}
    head, name = variables.get("head", {}), family.names.get("head", "")
    if head and name:
        tensors[f"{name}.weight"] = np.asarray(head["kernel"]).T
        if "bias" in head:
            tensors[f"{name}.bias"] = np.asarray(head["bias"])
        config["modules_to_save"] = [name]
    _write(Path(folder).expanduser(), config, tensors)


def _layers(flat: dict[tuple[str, ...], np.ndarray]) -> dict[tuple[str, ...], Low]:
    """Returns A and B of each module of the body with LoRA."""
    body = {path[1:]: x for path, x in flat.items() if path[0] == "body"}
    found = {}
    for path, a in body.items():
        if A in path:
            layer = path[: path.index(A)]
            found[layer] = (a, body[(*layer, B)])
    return found


def _module(family: Family, path: tuple[str, ...], version: int) -> str:
    """Returns the name of a module in transformers."""
    name = family.file_name(path)
    for old, new in family.renamed if version >= 5 else ():
        name = name.replace(old, new)
    return name if name in HEADS else family.prefix + name


def _patches(family: Family, a: np.ndarray, b: np.ndarray) -> Low:
    """Returns A and B of the patches as convolutions [r, C, P, P] and [O, r, 1, 1]."""
    channels = family.example["input_shape"][-1]
    side = math.isqrt(len(a) // channels)
    first = a.reshape(side, side, channels, -1).transpose(3, 2, 0, 1)
    return first, b.T[..., None, None]


def _config(names: list[str], rank: int, scale: float) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": rank * scale,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names),
        "modules_to_save": None,
        "inference_mode": True,
    }


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    whole = {f"{_START}{name}": np.ascontiguousarray(x) for name, x in tensors.items()}
    file = folder / "adapter_model.safetensors"
    save_file(whole, file, metadata={"format": "pt"})
