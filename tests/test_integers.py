"""Inputs that are integers, as tokens: they reach the model as they are, and an
embedding learns from them."""

import jax
import jax.numpy as jnp
import numpy as np
import prepared
import pytest
from flax import nnx

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, loading, partitioners
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


def sequences():
    """Sequences whose tokens are those of their class, all above 255 so that bytes
    would not hold them."""
    draw = np.random.default_rng(0)
    y = np.arange(400) % CLASSES
    return 300 + CLASSES * draw.integers(0, 5, (400, LENGTH)) + y[:, None], y


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path, (x, y) = tmp_path_factory.mktemp("data") / "tokens.npz", sequences()
    np.savez(path, x=x.astype(np.int32), y=y.astype(np.int32))
    return loading.load(f"npz:{path}")


def learns(tokens, *algorithms):
    federation = federate.federate(
        tokens, partitioners.partition(tokens, "pathological", num_clients=4, seed=0)
    )
    model = models.model(Text, (LENGTH,), CLASSES, input_dtype=jnp.int32)
    task = simulate.task(
        tokens, federation.class_counts, model, lr=1.0, batch_size=10, epochs=3
    )
    assert task.input == jax.ShapeDtypeStruct((LENGTH,), np.int32)
    for algo in algorithms:
        program = simulate.program(ALGORITHMS[algo], task)
        *_, last = simulate.rounds(
            program, jax.random.key(0), federation, rounds=4, eval_every=4
        )
        assert np.mean(last.pre["acc"]) > 0.9, algo


@pytest.mark.slow  # from TFDS it learns below
def test_an_embedding_learns_from_integers(tokens):
    assert tokens.x.dtype == np.int32
    learns(tokens, "fedavg", "fedper")


@pytest.mark.slow
def test_an_embedding_learns_from_integers_that_tfds_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))
    x, y = sequences()
    prepared.dataset(tmp_path, "words/plain", x.astype(np.int64), {"label": y}, 300)
    data = loading.load("tfds:words/plain", str(tmp_path))
    assert (
        data.x.dtype == np.int32
        and np.array_equal(data.x, x)
        and np.array_equal(data.y, y)
    )
    assert (data.num_train, data.num_classes) == (300, CLASSES)
    learns(data, "fedavg")


def test_bytes_of_tfds_that_are_no_image_stay_integers(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))
    x = np.arange(24, dtype=np.uint8).reshape(8, 3)
    prepared.dataset(tmp_path, "bytes", x, {"label": np.arange(8) % 2}, 6)
    data = loading.load("tfds:bytes", str(tmp_path))
    assert data.x.dtype == np.int32 and np.array_equal(data.prepare(data.x), x)


def test_what_tfds_has_of_no_fixed_shape_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))
    folder = prepared.dataset(
        tmp_path, "ragged", np.zeros((4, 3), np.int64), {"label": np.zeros(4)}, 2
    )
    features = folder / "features.json"
    features.write_text(features.read_text().replace('"length": "3"', '"length": "-1"'))
    with pytest.raises(InputError, match=r"'ragged' must have .* Sequence\(int64\)"):
        loading.load("tfds:ragged", str(tmp_path))


def test_networks_of_the_library_take_integers_as_floats(tokens):
    plain, whole = (
        models.model("mlp", (LENGTH,), CLASSES, input_dtype=dtype)
        for dtype in (jnp.float32, jnp.int32)
    )
    variables, x = plain.init(jax.random.key(0)), jnp.asarray(tokens.x[:5])
    assert jnp.array_equal(
        whole.apply(variables, x)[0], plain.apply(variables, x.astype(jnp.float32))[0]
    )


def test_integers_beyond_int32_are_refused(tmp_path):
    np.savez(tmp_path / "large.npz", x=np.full((4, 3), 2**40), y=np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="x must hold integers that fit int32"):
        loading.load(f"npz:{tmp_path / 'large.npz'}")
