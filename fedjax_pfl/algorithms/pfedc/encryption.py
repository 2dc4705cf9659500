"""Sums of the clients' vectors that whoever adds them cannot read: CKKS through
TenSEAL, an optional dependency.

The clients share one `KeyHolder`, which has the secret key; the server has an
`Aggregator`, made of the public context. Only serialised bytes pass between the two. A
client that colludes with the server breaks the secrecy, because the key is common to
all clients.

Reference: Cheon, Kim, Kim & Song, Homomorphic encryption for arithmetic of approximate
numbers (ASIACRYPT 2017).
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_pfl import host_callback
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.types import Array, PyTree

BACKENDS = ("ckks", "plain")
# of the polynomials: half as many numbers fit into a ciphertext, of 0.24 MB
DEGREE = 8192
# of the primes; 160 bits are below the 218 that leave 128 bits of security at this
# degree
COEFF_BITS = (60, 40, 60)
# Nothing is multiplied, so the scale may take most of the modulus. The noise of a sum
# of 200 numbers around 1 is 1e-7 at 2^40 and 2e-12 here: rounded to the grid on which
# they were encrypted, sums below 2^15 come out exactly, alike in all runs.
SCALE = 2.0**56
GRID = 2.0**-32
# numbers in a vector, of which the bytes both ways, 120 a number, stay below 2^31
LONGEST = 2**24
# of a number to encrypt; what a modulus of 100 bits leaves above the scale is for the
# sum
LARGEST = 2.0**30


def tenseal() -> Any:
    """The module.

    Raises:
      InputError: it is not installed.
    """
    try:
        import tenseal
    except ImportError as error:
        raise InputError(
            "backend='ckks' encrypts with TenSEAL, which cannot be imported "
            f"({error}): "
            "pip install -e '.[privacy]' adds it, and backend='plain' computes the "
            "same without encryption."
        ) from None
    return tenseal


def check_backend(name: str) -> None:
    """Raises InputError unless the backend is known and can be used."""
    if choose("backend", name, BACKENDS) == "ckks":
        tenseal()


class KeyHolder:
    """The clients' side: encrypts vectors, and decrypts sums of them; it makes the only
    copy of the secret key.

    Args:
      degree: of the polynomials, a power of two from 8192 on.
    """

    def __init__(self, degree: int = DEGREE) -> None:
        self._tenseal, self._slots = tenseal(), degree // 2
        self._context = self._tenseal.context(
            self._tenseal.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=COEFF_BITS
        )
        self._context.global_scale = SCALE

    def public(self) -> bytes:
        """Returns the part that the server needs in order to add: the parameters and
        the public key."""
        return bytes(
            self._context.serialize(
                save_secret_key=False, save_galois_keys=False, save_relin_keys=False
            )
        )

    def encrypt(self, vector: np.ndarray) -> list[bytes]:
        """The ciphertexts of a vector [d] whose entries are below 2^30; their number
        depends on d alone."""
        on_grid = np.round(np.asarray(vector, np.float64) / GRID) * GRID
        parts = np.split(on_grid, range(self._slots, len(on_grid), self._slots))
        return [
            self._tenseal.ckks_vector(self._context, part).serialize() for part in parts
        ]

    def decrypt(self, ciphertexts: list[bytes]) -> np.ndarray:
        """The vector [d] of float64."""
        parts = [
            self._tenseal.ckks_vector_from(self._context, part).decrypt()
            for part in ciphertexts
        ]
        return np.round(np.concatenate(parts) / GRID) * GRID


class Aggregator:
    """The server's side: adds ciphertexts, which it cannot decrypt.

    Raises:
      ValueError: it was given a context with the secret key.
    """

    def __init__(self, public: bytes) -> None:
        self._tenseal = tenseal()
        self._context = self._tenseal.context_from(public)
        if self._context.is_private():
            raise ValueError("The server was given the secret key.")

    def add(self, uploads: Iterable[list[bytes]]) -> list[bytes]:
        """The ciphertexts of the sum of vectors of one length, at least one of them."""
        total: list[Any] = []
        for upload in uploads:
            vectors = [
                self._tenseal.ckks_vector_from(self._context, part) for part in upload
            ]
            total = (
                [a + b for a, b in zip(total, vectors, strict=True)]
                if total
                else vectors
            )
        return [vector.serialize() for vector in total]


@functools.cache
def parties() -> tuple[KeyHolder, Aggregator]:
    """Both sides, with one key pair a process: no ciphertext outlives a round."""
    clients = KeyHolder()
    return clients, Aggregator(clients.public())


def total(
    rows: PyTree, ids: Array, active: Array, backend: str
) -> tuple[PyTree, Array, Array]:
    """The sum of the active clients' rows, under ckks on the host; not finite if a row
    is not, and NaN if it is too large for ckks.

    Args:
      rows: a tree of floats [S, ...], of which each client's row is sent as one vector;
        ids: [S] distinct.
      active: [S] bool.
      backend: ckks, exact where entries lie on the grid of 2^-32 and sums are below
        2^15; or plain, in floating point in the ids' order.

    Returns:
      (the sum of the rows, and the bytes of the ciphertexts that each client sends and
      receives, [S] int32).

    Raises:
      InputError: for ckks a row is longer than 2^24 numbers.
    """
    whole = ravel_pytree(jax.tree.map(lambda x: x[0], rows))[1]
    vectors = jnp.where(
        active[:, None], jax.vmap(lambda row: ravel_pytree(row)[0])(rows), 0
    )
    if backend == "plain":
        nothing = jnp.zeros(ids.shape, jnp.int32)
        return whole(jnp.sum(vectors[jnp.argsort(ids)], axis=0)), nothing, nothing
    if vectors.shape[1] > LONGEST:
        raise InputError(
            f"A client would encrypt {vectors.shape[1]:,} numbers, more than "
            f"{LONGEST:,}, and so many that their bytes "
            "could not be counted: take a smaller model, or leave its body in the "
            "clear."
        )
    sizes = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    shapes = (jax.ShapeDtypeStruct(vectors.shape[1:], vectors.dtype), sizes, sizes)
    vector, up, down = host_callback.call(_encrypted_total, shapes, vectors, active)
    return whole(vector), up, down


def _encrypted_total(
    rows: np.ndarray, active: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    here, sizes = np.flatnonzero(active), np.zeros((2, len(active)), np.int32)
    if not len(here) or not np.all(np.abs(rows) < LARGEST):
        return np.full(rows.shape[1:], np.nan if len(here) else 0, rows.dtype), *sizes
    clients, server = parties()

    def uploads() -> Iterator[list[bytes]]:
        for i in here:
            sent = clients.encrypt(rows[i])
            sizes[0, i] = sum(map(len, sent))
            yield sent

    answer = server.add(uploads())
    sizes[1, here] = sum(map(len, answer))
    return clients.decrypt(answer).astype(rows.dtype), *sizes
