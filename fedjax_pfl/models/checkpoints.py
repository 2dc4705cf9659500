"""Folders of Hugging Face: config.json, safetensors files and tokenizer.json."""

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.errors import InputError, choose, in_one_line
from fedjax_pfl.models.transformer import ACTIVATIONS
from fedjax_pfl.models.vit import Pixels

WEIGHTS = "model.safetensors"
PIECE = 2**24  # numbers of a tensor that are read at once
_METHODS = {1: "lanczos3", 2: "linear", 3: "cubic"}  # by Pillow's number
# model types whose processors resize the shorter side and cut out the centre
_CROPPING = ("clip", "clip_vision_model", "deit", "dinov2")


class Config(dict[str, Any]):
    """The content of a config.json, which names what it does not have."""

    path: str = "config.json"

    def __missing__(self, name: str) -> Any:
        raise InputError(f"{self.path} has no {name!r}.")

    def only(self, name: str, *values: Any) -> None:
        """Raises InputError unless a setting is absent or one of the values."""
        if self.get(name, values[0]) not in values:
            wanted = " or ".join(map(str, values))
            raise InputError(f"{self.path}: {name!r} must be {wanted}.")

    def activation(self, name: str, default: str) -> str:
        """Returns the name of an activation."""
        return choose(name, self.get(name, default), ACTIVATIONS)


def read_config(folder: Path) -> Config:
    """Reads config.json, and what preprocessor_config.json says of pixels.

    Raises:
      InputError: config.json cannot be read.
    """
    config = Config(read_json(folder / "config.json"))
    config.path = str(folder / "config.json")
    if "vision_config" in config:
        kind = config["model_type"]
        inner = config["vision_config"]
        config.clear()
        config.update(inner, model_type=kind)
    path = folder / "preprocessor_config.json"
    if path.exists():
        given = Config(read_json(path))
        given.path = str(path)
        _read_pixels(config, given)
    return config


def _read_pixels(config: Config, given: Config) -> None:
    """Adds `pixels`, `side` and `whole` (images are not cut) of an image processor."""
    kind = config["model_type"]
    crops = kind in _CROPPING
    cut = given.get("do_center_crop", crops)
    side = _square(given, "crop_size") if cut else None
    size: tuple[int, int] | int | None = None
    if given.get("do_resize", True):
        edge, shorter = given["size"], kind in _CROPPING
        if isinstance(edge, dict) and "shortest_edge" in edge:
            size = edge["shortest_edge"]
        elif isinstance(edge, int) and shorter:
            size = edge
        else:
            size = (_square(given, "size"),) * 2
        least = size if isinstance(size, int) else size[0]
        if side is None and isinstance(size, int):
            raise InputError(f"{given.path}: 'shortest_edge' needs do_center_crop.")
        side = least if side is None else side
        if least < side:
            raise InputError(
                f"{given.path}: 'size' must be at least 'crop_size', got {least}."
            )
    if side is not None:
        config["side"] = side
    config["whole"] = not cut
    scale = 255 * given.get("rescale_factor", 1 / 255)
    scale = scale if given.get("do_rescale", True) else 255
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    if given.get("do_normalize", True):
        mean, deviation = tuple(given["image_mean"]), tuple(given["image_std"])
    code = given.get("resample", 3 if crops else 2)
    if code not in _METHODS:
        known = " or ".join(map(str, _METHODS))
        raise InputError(f"{given.path}: 'resample' must be {known}, got {code}.")
    config["pixels"] = Pixels(
        tuple(x / scale for x in mean),
        tuple(x / scale for x in deviation),
        size,
        _METHODS[code],
    )


def _square(given: Config, name: str) -> int:
    """Returns the side of a square size."""
    size = given[name]
    pair = {size["height"], size["width"]} if isinstance(size, dict) else {size}
    if len(pair) > 1:
        raise InputError(f"{given.path}: {name!r} must be a square, got {size}.")
    return int(pair.pop())


class Files:
    """Tensors by name, in one or several safetensors files."""

    def __init__(self, folder: Path):
        try:
            from safetensors import safe_open
        except ImportError:
            raise InputError(
                f"{folder} needs safetensors: pip install -e '.[pretrained]' adds it."
            ) from None
        self.folder, self.prefix = folder, ""
        self._open: Any = functools.partial(safe_open, framework="numpy")
        self._where: dict[str, Path] = {}
        for file in weight_files(folder):
            try:
                with self._open(file) as opened:
                    self._where |= dict.fromkeys(opened.keys(), file)
            except Exception as error:  # of the library, which has no other type
                problem = in_one_line(error)
                raise InputError(f"{file} cannot be read ({problem}).") from error

    def find(self, name: str) -> str | None:
        """Returns the full name of a tensor, None where there is none."""
        return next((x for x in (self.prefix + name, name) if x in self._where), None)

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor, without reading it; raises as `read`."""
        full = self._full(name)
        with self._open(self._where[full]) as opened:
            return list(opened.get_slice(full).get_shape())

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """Returns a tensor in this type.

        A large one is read in pieces. The pages of a file remain in memory until it is
        closed.

        Raises:
          InputError: there is none of this name.
        """
        full, shape = self._full(name), self.shape(name)
        file, size = self._where[full], math.prod(shape)
        if size <= PIECE:
            with self._open(file) as opened:
                return np.asarray(opened.get_tensor(full), dtype)
        rows = max(1, PIECE * shape[0] // size)
        whole = np.empty(shape, dtype)
        for first in range(0, shape[0], rows):
            at = slice(first, min(first + rows, shape[0]))
            with self._open(file) as opened:
                whole[at] = opened.get_slice(full)[at]
        return whole

    def _full(self, name: str) -> str:
        full = self.find(name)
        if full is None:
            raise InputError(f"{self.folder} has no tensor {self.prefix + name!r}.")
        return full


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder.

    Raises:
      InputError: there are none.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        raise InputError(f"{folder} must hold config.json and {WEIGHTS}.")
    named = sorted(set(read_json(index).get("weight_map", {}).values()))
    outside = [name for name in named if Path(name).name != name]
    if outside:
        raise InputError(f"{index} must name files of its folder, got {outside[0]!r}.")
    missing = [name for name in named if not (folder / name).exists()]
    if missing or not named:
        raise InputError(f"{index} names files that are missing: {missing or 'none'}.")
    return [folder / name for name in named]


def digest(folder: str) -> str:
    """Returns the SHA-256 of a folder's config.json and weights."""
    path, found = Path(folder).expanduser(), hashlib.sha256()
    for file in [path / "config.json", *weight_files(path)]:
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def words(folder: str) -> tuple[str, ...]:
    """Returns `words_of` the tokenizer.json of a folder."""
    return words_of(Path(folder).expanduser() / "tokenizer.json")


def words_of(file: str | Path) -> tuple[str, ...]:
    """Returns the texts of the tokens of a tokenizer.json by their number.

    Raises:
      InputError: it cannot be read.
    """
    path = Path(file).expanduser()
    given = read_json(path)
    known = given.get("model", {}).get("vocab", {})
    if isinstance(known, list):  # pairs of a text and its score
        known = {pair[0]: i for i, pair in enumerate(known)}
    added = {token["content"]: token["id"] for token in given.get("added_tokens", ())}
    by_number = {number: word for word, number in (known | added).items()}
    if not by_number:
        raise InputError(f"{path} has no vocabulary.")
    last = max(by_number)
    return tuple(by_number.get(i, f"<unused {i}>") for i in range(last + 1))


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises InputError where that fails."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error
