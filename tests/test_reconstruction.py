"""Reconstruction of examples from what a client sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from fedjax_pfl import models, trees
from fedjax_pfl.engine import parts, program
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, nets
from fedjax_pfl.privacy import reconstruction
from fedjax_pfl.testing import synthetic

SHAPE = (4, 4, 1)


class Sigmoids(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = layers.linear(16, 24, rngs)

    def __call__(self, x, train=False):
        return jax.nn.sigmoid(self.inner(x.reshape(len(x), -1)))


def sigmoid_net(input_shape, num_classes, rngs):
    return nets.Net(Sigmoids(rngs), layers.linear(24, num_classes, rngs))


@functools.cache
def images_task(batch_size=1):
    model = models.model(sigmoid_net, SHAPE, toy.C)
    shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return synthetic.task(models=(model,), input=shape, epochs=1, batch_size=batch_size)


def sent(method, count=1, seed=3, **options):
    """A client's images, the update, and the function and state of the server."""
    given = images_task(count)
    send = reconstruction.sender(method, given)
    on = parts.parts(program.set_up(method, given))
    traced = {name: jnp.float32(value) for name, value in on.traced.items()}
    state = on.init(jax.random.key(0), traced)
    x = jax.random.uniform(jax.random.key(seed), (count, *SHAPE))
    y = jnp.arange(count, dtype=jnp.int32) % toy.C
    key = jax.random.key(9)
    run = lambda x, y: send(key, traced, state, x, y)
    return x, y, jax.jit(run)(x, y), run


def psnr(x, found):
    return -10 * np.log10(np.mean((np.asarray(x) - np.asarray(found)) ** 2))


def attack(method, **options):
    x, y, update, run = sent(method)
    options = {"steps": 1500, "lr": 0.1, "attack": "dlg"} | options
    change = options.pop("change", lambda update: update)
    labels = reconstruction.inferred_labels(update, 1, toy.C)
    found = jax.jit(
        lambda key, update: reconstruction.reconstruct(
            key,
            run,
            change(update),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            y if labels is None else labels,
            num_classes=toy.C,
            restarts=2,
            **options,
        )
    )(jax.random.key(1), update)
    return psnr(x, found.x)


def test_one_image_of_one_step_is_recovered():
    assert attack("fedavg") > 30


def test_with_clipping_and_noise_it_is_not():
    def private(update):
        norm = jnp.sqrt(trees.sq_dist(update, jax.tree.map(jnp.zeros_like, update)))
        key = jax.random.key(4)
        return jax.tree.map(
            lambda x: x / norm + 0.1 * jax.random.normal(key, x.shape), update
        )

    assert attack("fedavg", change=private, steps=200) < 15


def names(tree):
    return {name for name, _ in trees.named_shapes(tree)}


def test_what_a_client_keeps_is_not_in_the_servers_view():
    whole = names(sent("fedavg")[2])
    assert {name for name in whole if name.startswith("head/")}
    assert not {name for name in names(sent("fedper")[2]) if name.startswith("head/")}
    assert reconstruction.inferred_labels(sent("fedper")[2], 1, toy.C) is None
    given = toy.task("norm")
    shared = uploaded(reconstruction.sender("fedbn", given), given, "fedbn")
    assert not {name for name in names(shared) if "norm" in name} and shared["head"]


def uploaded(send, given, method):
    on = parts.parts(program.set_up(method, given))
    state = jax.eval_shape(on.init, jax.random.key(0), on.traced)
    x = jnp.zeros((3, *given.input.shape))
    return jax.eval_shape(send, jax.random.key(0), on.traced, state, x, jnp.arange(3))


@pytest.mark.parametrize("method", ["fedcp", "fedproto", "scaffold", "ditto", "pfedc"])
def test_every_upload_has_a_derivative_by_the_images(method):
    given = images_task(3)
    send = reconstruction.sender(method, given)
    on = parts.parts(program.set_up(method, given))
    state = jax.eval_shape(on.init, jax.random.key(0), on.traced)

    def size(x, key, state):
        update = send(key, on.traced, state, x, jnp.arange(3))
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(update))

    x = jax.ShapeDtypeStruct((3, *SHAPE), jnp.float32)
    found = jax.eval_shape(jax.grad(size), x, jax.random.key(0), state)
    assert found.shape == x.shape


def test_methods_without_a_mean_are_refused_by_name():
    given = toy.method_task("fedamp")
    with pytest.raises(InputError, match="fedamp sends no update"):
        uploaded(reconstruction.sender("fedamp", given), given, "fedamp")


def test_labels_follow_from_the_update_of_the_bias():
    y = jnp.array([0, 2, 2, 3])
    logits = 0.01 * jax.random.normal(jax.random.key(0), (4, 5))
    gradient = jax.grad(
        lambda b: jnp.mean(-jax.nn.log_softmax(logits + b[None])[jnp.arange(4), y])
    )(jnp.zeros(5))
    update = {"head": {"bias": -0.1 * gradient}}
    assert jnp.array_equal(reconstruction.inferred_labels(update, 4, 5, 0.1), y)


def test_quality_is_that_of_matched_images():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(3, 8, 8, 3)).astype(np.float32)
    found = reconstruction.matched(x, x[[2, 0, 1]] + np.float32(0.01))
    assert np.allclose(found, x + 0.01)
    pytest.importorskip("skimage")
    result = reconstruction.quality(x, found)
    wide = np.ptp(x)
    assert np.all(result["psnr"] >= 20 * np.log10(wide / 0.01) - 1e-3)
    assert np.all(result["ssim"] > 0.99)
    noise = reconstruction.quality(x, rng.uniform(size=x.shape).astype(np.float32))
    assert np.all(noise["psnr"] < 10) and np.all(noise["ssim"] < 0.3)


def test_total_variation_is_that_of_neighbours():
    x = jnp.zeros((1, 2, 2, 1)).at[0, 0, 0, 0].set(1.0)
    assert reconstruction.total_variation(x) == 1.0
    assert reconstruction.total_variation(jnp.ones((2, 5))) == 0
