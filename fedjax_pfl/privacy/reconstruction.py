"""Reconstruction of a client's examples by a server that knows what the client sends.

The server simulates the method's own local training on examples of its own and changes
them until what they would send is what the client has sent. It sees the upload of
`Cohort.mean` and nothing else.

References: Zhu, Liu & Han, Deep leakage from gradients (NeurIPS 2019, arXiv
1906.08935); Zhao, Mopuri & Bilen, iDLG (arXiv 2001.02610); Geiping, Bauermeister,
Dröge & Moeller, Inverting gradients (NeurIPS 2020, arXiv 2003.14053).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import architectures, keys, trees
from fedjax_pfl.engine import averaged
from fedjax_pfl.engine.method import Traced, bound
from fedjax_pfl.engine.program import set_up
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Data,
    Examples,
    Method,
    Own,
    PyTree,
    RunState,
    Task,
)
from fedjax_pfl.uploads.chain import Chain, composed

ATTACKS = ("dlg", "idlg", "inverting")
# (x [B, ...] prepared, y [B]) -> the update that they would send
Send = Callable[[Array, Array], PyTree]


class Reconstruction(NamedTuple):
    """Reconstructed examples: of all restarts the one with the least distance."""

    x: Array  # [B, ...], prepared
    y: Array  # [B] int32
    distance: Array  # [], of the update to the one that was sent
    distances: Array  # [R] of each restart


def sender(
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    t: int = 0,
    lr_decay: float = 1.0,
    uploads: Chain | None = None,
) -> Callable[[Array, Traced, RunState, Array, Array], PyTree]:
    """Returns the update that a client sends as a function of its examples.

    The function is send(key, traced, state, x, y): a client with the examples x
    [n, ...], prepared, and y [n], the row 0 of the state and the key's random draws
    takes the method's local steps of round t and sends upload - default, after the
    options on uploads. It has a derivative in reverse mode by x. All n examples are a
    client's training examples; batch size and epochs are the task's.

    Raises:
      InputError: the method's round is not one mean over the clients, or the task
        counts steps.
    """
    if task.epochs is None:
        raise InputError("A reconstruction needs a task with `epochs`.")
    # which has a reverse mode
    task = task._replace(augment=None, participation=(1.0, 1.0), loop="bounded")
    setting = set_up(factory, task, hparams, lr_decay=lr_decay, uploads=uploads)
    runner, traced = bound(setting)

    def send(key: Array, given: Traced, state: RunState, x: Array, y: Array) -> PyTree:
        run = runner({**traced, **given}, t).averaged
        if run is None:
            raise InputError(
                f"{setting.name} sends no update: its round is not one mean over the "
                "clients."
            )
        run = run._replace(uploads=run.uploads or composed({}))
        c = _client(task, key, x, y, t)
        alone: Any = _alone(c)
        more: tuple[PyTree, ...] = ()
        if run.method.start is not None:
            stream = keys.fold(key, keys.Round.SERVER)
            common, each = run.method.start(stream, state.method.server, alone)
            more = common, trees.gather(each, 0)
        rows = trees.gather(state.rows, 0)
        upload, _ = averaged.work(run, alone, c, state, rows, (), *more)
        found = upload.tree if isinstance(upload, Own) else upload
        default = architectures.select(run.method.default(state.method.server), 0)
        (update, new), (_, old) = map(averaged.divided, (found, default))
        return trees.merge(update, jax.tree.map(jnp.subtract, new, old))

    return send


def _alone(c: Client) -> SimpleNamespace:
    """Returns a cohort of one client, without `map`, `mean` and `scan`."""
    size = jnp.full(1, c.train.size, jnp.int32)
    return SimpleNamespace(
        ids=c.id[None],
        active=jnp.ones(1, bool),
        sizes=size,
        trained=size > 0,
        total=size[0],
        class_counts=c.class_counts[None],
        round=c.round,
        evaluated=jnp.bool(False),
        metrics=(),
        public=None,
    )


def _client(task: Task, key: Array, x: Array, y: Array, t: int) -> Client:
    """Returns a client with these examples; their rows are numbers, so that x is read
    by a gather, which has a derivative."""
    count = x.shape[0]
    rows = jnp.arange(count, dtype=jnp.int32)
    prepare = lambda i: x[i]
    train = Data(Examples(rows, y), rows, jnp.int32(count), prepare, loop=task.loop)
    none = train._replace(size=jnp.int32(0))
    counts = jnp.sum(jax.nn.one_hot(y, task.num_classes, dtype=jnp.int32), axis=0)
    model, id = task.models[0], jnp.int32(0)
    here = jnp.int32(t), jnp.bool(False)
    return Client(id, key, train, none, none, None, counts, model, 0, *here)


def inferred_labels(
    update: PyTree, count: int, num_classes: int, scale: float | Array = 1.0
) -> Array | None:
    """Returns `count` labels from the update of the head's bias, ascending [count];
    None where no head is sent.

    With one example it is the class whose bias grows (iDLG). With several, class after
    class is taken whose bias grew most, and as much as one example contributes is taken
    off.

    Args:
      scale: learning rate times steps, of which the update is the sum of gradients.
    """
    head = update.get("head") if isinstance(update, dict) else None
    bias = head.get("bias") if isinstance(head, dict) else None
    if bias is None or bias.shape != (num_classes,):
        return None
    grown = bias / scale

    def take(grown: Array, _: Any) -> tuple[Array, Array]:
        label = jnp.argmax(grown)
        return grown.at[label].add(-1 / count), label

    _, labels = jax.lax.scan(take, grown, None, length=count)
    return jnp.sort(labels).astype(jnp.int32)


def total_variation(x: Array) -> Array:
    """Computes the mean absolute difference of neighbours of images [B, H, W, D]; 0 of
    other inputs."""
    if x.ndim != 4:
        return jnp.zeros(())
    down, right = jnp.diff(x, axis=1), jnp.diff(x, axis=2)
    return jnp.mean(jnp.abs(down)) + jnp.mean(jnp.abs(right))


def squared(found: PyTree, sent: PyTree) -> Array:
    """Computes the squared distance of updates in squared norms of what was sent."""
    zeros = jax.tree.map(jnp.zeros_like, sent)
    return trees.sq_dist(found, sent) / jnp.maximum(trees.sq_dist(sent, zeros), 1e-30)


def cosine(found: PyTree, sent: PyTree) -> Array:
    """Computes 1 minus the cosine of the angle between updates."""
    product = optax.tree.vdot(found, sent)
    norms = [jnp.sqrt(optax.tree.vdot(x, x) + 1e-30) for x in (found, sent)]
    return 1 - product / (norms[0] * norms[1])


def reconstruct(
    key: Array,
    send: Send,
    sent: PyTree,
    x: jax.ShapeDtypeStruct,
    labels: Array | None = None,
    *,
    num_classes: int,
    attack: str = "inverting",
    steps: int = 1000,
    restarts: int = 1,
    lr: float = 0.1,
    tv: float = 1e-2,
    bounds: tuple[float, float] = (-jnp.inf, jnp.inf),
) -> Reconstruction:
    """Returns the examples whose update is the nearest to what was sent.

    A pure function of arrays: jax.vmap it over clients.

    Args:
      send: (x, y) -> update, such as `sender` makes.
      sent: the update of the client.
      x: shape and type of the examples [B, ...], prepared.
      labels: [B]; None: each restart draws labels (DLG optimises soft labels, which a
        method's loss does not take).
      attack: dlg and idlg minimise the squared distance by Adam, inverting 1 - cosine
        plus `tv` times the total variation by Adam on signs of the gradient.
      steps: of the optimizer in each restart.
      restarts: starts from standard normal examples, computed at once.
      lr: the optimizer's rate; it falls to a hundredth along a cosine.
      bounds: smallest and largest value of an input.
    """
    choose("attack", attack, ATTACKS)
    signs, distance = attack == "inverting", squared
    if signs:
        distance = cosine

    def start(key: Array) -> tuple[Array, Array]:
        draw, labelled = jax.random.split(key)
        y = labels
        if y is None:
            y = jax.random.randint(labelled, x.shape[:1], 0, num_classes, jnp.int32)
        return jax.random.normal(draw, x.shape, x.dtype), y

    def run(key: Array) -> tuple[Array, Array, Array]:
        found, y = start(key)

        def loss(found: Array) -> Array:
            value = distance(send(found, y), sent)
            return value + tv * total_variation(found) if signs else value

        optimizer = optax.adam(optax.cosine_decay_schedule(lr, steps, alpha=0.01))

        def step(carry: tuple[Array, PyTree], _: Any) -> tuple[Any, None]:
            found, state = carry
            gradient = jax.grad(loss)(found)
            gradient = jnp.sign(gradient) if signs else gradient
            change, state = optimizer.update(gradient, state)
            return (jnp.clip(found + change, *bounds), state), None

        (found, _), _ = jax.lax.scan(step, (found, optimizer.init(found)), None, steps)
        return found, y, distance(send(found, y), sent)

    images, ys, distances = jax.vmap(run)(jax.random.split(key, restarts))
    best = jnp.argmin(jnp.where(jnp.isfinite(distances), distances, jnp.inf))
    return Reconstruction(images[best], ys[best], distances[best], distances)


def matched(original: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Returns `found` [B, ...] in the order that is nearest to `original` [B, ...]
    (Hungarian algorithm on squared distances)."""
    from scipy.optimize import linear_sum_assignment

    flat = [np.reshape(x, (len(x), -1)) for x in (original, found)]
    cost = np.mean((flat[0][:, None] - flat[1][None]) ** 2, axis=2)
    cost = np.where(np.isfinite(cost), cost, np.finfo(np.float32).max)
    return np.asarray(found)[linear_sum_assignment(cost)[1]]


def quality(original: np.ndarray, found: np.ndarray) -> dict[str, np.ndarray]:
    """Computes psnr in dB and ssim of reconstructed images, {name: [B]}.

    Args:
      original: [B, H, W, D].
      found: in the order of `matched`; clipped to the range of the original.

    Raises:
      InputError: scikit-image is not installed.
    """
    metrics = _metrics()
    low, high = float(np.min(original)), float(np.max(original))
    found = np.clip(found, low, high)
    window = min(7, (min(original.shape[1:3]) - 1) // 2 * 2 + 1)
    pairs = list(zip(original, found, strict=True))
    wide: dict[str, Any] = {"data_range": high - low}
    psnr = [metrics.peak_signal_noise_ratio(*pair, **wide) for pair in pairs]
    wide |= {"channel_axis": -1, "win_size": window}
    ssim = [metrics.structural_similarity(*pair, **wide) for pair in pairs]
    return {"psnr": np.array(psnr), "ssim": np.array(ssim)}


def _metrics() -> Any:
    try:
        from skimage import metrics
    except ImportError as error:
        raise InputError(
            f"PSNR and SSIM need scikit-image, which cannot be imported ({error}): "
            "pip install -e '.[privacy]' adds it."
        ) from None
    return metrics
