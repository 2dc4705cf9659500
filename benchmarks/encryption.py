"""Seconds and bytes of encrypted sums: `python -m benchmarks.encryption`.

A row is one round's sum of one vector per client. Encryption and decryption are the
clients' work, per client; the sum is the server's, over all clients.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from absl import app, flags

from fedjax_pfl.algorithms.pfedc import encryption

CLIENTS = flags.DEFINE_multi_integer("clients", [10, 50, 100], "clients of a round")
NUMBERS = flags.DEFINE_multi_integer(
    "numbers",
    [650, 5130, 51300],
    "numbers that a client encrypts, as 64, 512 x 10 + 10",
)
DEGREES = flags.DEFINE_multi_integer("degrees", [8192, 16384], "polynomial degrees")


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Returns a function's result and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def row(degree: int, numbers: int, clients: int) -> dict[str, float]:
    """Measures one sum and checks it."""
    holder = encryption.KeyHolder(degree)
    server = encryption.Aggregator(holder.public())
    vectors = np.random.default_rng(0).normal(size=(clients, numbers))
    uploads, encrypting = timed(lambda: [holder.encrypt(v) for v in vectors])
    total, adding = timed(lambda: server.add(uploads))
    found, decrypting = timed(lambda: holder.decrypt(total))
    assert np.allclose(found, vectors.sum(axis=0), atol=1e-6)
    return {
        "degree": degree,
        "numbers": numbers,
        "clients": clients,
        "MB per upload": sum(map(len, uploads[0])) / 1e6,
        "MB in all": sum(len(part) for u in uploads for part in u) / 1e6,
        "encrypt (s)": encrypting / clients,
        "sum (s)": adding,
        "decrypt (s)": decrypting,
    }


def main(_: list[str]) -> None:
    rows = [
        row(degree, numbers, clients)
        for degree in DEGREES.value
        for numbers in NUMBERS.value
        for clients in CLIENTS.value
    ]
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    app.run(main)
