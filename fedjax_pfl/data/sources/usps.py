"""USPS digits of an .h5 file."""

from pathlib import Path

import numpy as np

from fedjax_pfl.data.datasets import Dataset, from_arrays, pixels
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, in_one_line


@register("usps:PATH", "9,298 digits, 16x16 grey, 10 classes: .h5 with train and test")
def usps(path: str) -> Dataset:
    """Reads the USPS digits of an .h5 file with /train and /test, each of `data` in [0,
    1] and `target`.

    Returns:
      uint8 images [n, 16, 16, 1], the official test set at the end.

    Raises:
      InputError: h5py is missing, or the file has other content.
    """
    try:
        import h5py

        with h5py.File(Path(path).expanduser()) as file:
            parts = [
                (file[s]["data"][()], file[s]["target"][()]) for s in ("train", "test")
            ]
        x, x_test = (pixels(data.reshape(len(data), 16, 16)) for data, _ in parts)
    except ImportError:
        raise InputError("usps needs h5py: pip install -e '.[data]' adds it.") from None
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error
    y, y_test = (target.astype(np.int32) for _, target in parts)
    return from_arrays(x, y, x_test, y_test, name=f"usps:{path}", num_classes=10)
