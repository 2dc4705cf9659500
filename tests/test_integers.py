"""Inputs that are integers, as tokens: they reach the model as they are, and an embedding learns from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import datasets, federate, partitioners
from fedjax_pfl.errors import InputError

TOKENS, LENGTH, CLASSES = 1000, 6, 4


class Body(nnx.Module):
    """The mean embedding of a sequence."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, 16, rngs=rngs)

    def __call__(self, x):
        return self.embed(x).mean(axis=1)


class Text(nnx.Module):
    def __init__(self, input_shape, num_classes, rngs):
        self.body, self.head = Body(rngs), nnx.Linear(16, num_classes, rngs=rngs)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Sequences whose tokens are those of their class, all above 255 so that bytes would not hold them."""
    path, draw = tmp_path_factory.mktemp("data") / "tokens.npz", np.random.default_rng(0)
    y = np.arange(400) % CLASSES
    x = 300 + CLASSES * draw.integers(0, 5, (400, LENGTH)) + y[:, None]
    np.savez(path, x=x.astype(np.int32), y=y.astype(np.int32))
    return datasets.load(f"npz:{path}")


def test_an_embedding_learns_from_integers(tokens):
    assert tokens.x.dtype == np.int32
    federation = federate.federate(tokens, partitioners.partition(tokens, "pathological", num_clients=4, seed=0))
    model = models.model(Text, (LENGTH,), CLASSES, input_dtype=jnp.int32)
    task = simulate.task(tokens, federation.class_counts, model, lr=1.0, batch_size=10, epochs=3)
    assert task.input == jax.ShapeDtypeStruct((LENGTH,), np.int32)
    for algo in ("fedavg", "fedper"):
        program = simulate.program(ALGORITHMS[algo], task)
        *_, last = simulate.rounds(program, jax.random.key(0), federation, rounds=4, eval_every=4)
        assert np.mean(last.pre["acc"]) > 0.9, algo


def test_networks_of_the_library_take_integers_as_floats(tokens):
    plain, whole = (models.model("mlp", (LENGTH,), CLASSES, input_dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    variables, x = plain.init(jax.random.key(0)), jnp.asarray(tokens.x[:5])
    assert jnp.array_equal(whole.apply(variables, x)[0], plain.apply(variables, x.astype(jnp.float32))[0])


def test_integers_beyond_int32_are_refused(tmp_path):
    np.savez(tmp_path / "large.npz", x=np.full((4, 3), 2**40), y=np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="x has integers that int32 cannot hold"):
        datasets.load(f"npz:{tmp_path / 'large.npz'}")
