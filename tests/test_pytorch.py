"""Local training of the 4-layer CNN beside PyTorch's: the same weights in, the same
batches, the same weights out."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import pytorch
from fedjax_pfl import keys, local_training, losses, models, testing
from fedjax_pfl.experiment.build import optimizer
from fedjax_pfl.types import Data, Examples

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: it is the reference here"
)

# four batches of 10 and a short one of 2
SHAPE, CLASSES, ROWS, BATCH, LR = (28, 28, 1), 10, 42, 10, 0.1
KEY = jax.random.key(0)


def ours(x, y, momentum, decay):
    """The parameters before and after an epoch of five steps, and the order of the rows
    in it."""
    model = models.model("cnn", SHAPE, CLASSES)
    task = testing.task(
        models=(model,), lr=LR, optimizer=optimizer("sgd", momentum, decay)
    )
    task = task._replace(batch_size=BATCH, epochs=1)
    start = jax.tree.map(
        lambda leaf: leaf.astype(x.dtype), model.init(jax.random.key(1))
    )
    data = Data(
        Examples(jnp.asarray(x), jnp.asarray(y)),
        jnp.arange(ROWS),
        jnp.int32(ROWS),
        lambda x: x,
    )
    loss = losses.classification(model)
    end, _ = jax.jit(lambda w: local_training.sgd(KEY, data, loss, w, task))(start)
    order = local_training.shuffle(
        jax.random.fold_in(keys.fold(KEY, keys.Client.SHUFFLE), 0), ROWS, data.size
    )
    return *(pytorch.parameters(w, SHAPE[-1]) for w in (start, end)), np.array(
        order, np.int64
    )


def theirs(start, x, y, order, momentum, decay):
    """The parameters after the same steps of torch.optim.SGD."""
    net = pytorch._network("cnn", SHAPE, CLASSES).to(torch.from_numpy(x).dtype)
    for parameter, value in zip(net.parameters(), start, strict=True):
        parameter.data = torch.tensor(np.array(value))
    sgd = torch.optim.SGD(net.parameters(), LR, momentum=momentum, weight_decay=decay)
    images, labels = (
        torch.from_numpy(x.transpose(0, 3, 1, 2).copy()),
        torch.from_numpy(y),
    )
    for rows in torch.from_numpy(order).split(BATCH):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        sgd.step()
    return [parameter.detach().numpy() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("dtype", "momentum", "decay", "within"),
    [
        ("float32", 0.0, 0.0, 1e-6),
        ("float32", 0.9, 1e-3, 1e-6),
        ("float64", 0.9, 1e-3, 1e-14),
    ],
)
def test_five_steps_of_the_cnn_are_pytorchs(dtype, momentum, decay, within):
    """The last of them on a short batch; plain SGD, and with momentum and weight
    decay."""
    rng = np.random.default_rng(0)
    x, y = (
        rng.uniform(-1, 1, (ROWS, *SHAPE)).astype(dtype),
        rng.integers(0, CLASSES, ROWS),
    )
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        start, end, order = ours(x, y, momentum, decay)
    expected = theirs(start, x, y, order, momentum, decay)
    for before, after, reference in zip(start, end, expected, strict=True):
        assert after.dtype == reference.dtype == np.dtype(dtype)
        np.testing.assert_allclose(after, reference, rtol=0, atol=within)
        assert np.abs(after - before).max() > 1e-3  # they may differ by far less
