"""Floco: heads are points of a simplex whose corners are trained together, and each
client has a region of the simplex.

Reference: Grinwald, Wiesner & Nakajima, Federated learning over connected modes
(NeurIPS 2024), Algorithm 1; authors' code: dennis-grinwald/floco.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import (
    aggregate,
    averaging,
    keys,
    local_training,
    losses,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.errors import needed
from fedjax_pfl.types import Array, Method, Metrics, PyTree, Stage, State, Task, Update

LEVELS = 1000  # sums z that are tried in the projection
NEAREST = 1e-4  # smaller distances count as this one


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    CORNERS = 50, "the corners"


class Draw(keys.Stream):
    """Streams below the loss's key of a step."""

    EDGES = 50, "the point of the simplex"
    DIRECTION = 51, "the direction in which it is moved"
    RADIUS = 52, "how far it is moved"


def is_corner(head: PyTree) -> PyTree:
    """Returns True for the leaves of a head that differ between the corners: its
    matrices. The others are shared."""
    return jax.tree.map(lambda x: x.ndim > 1, head)


def corners(key: Array, head: PyTree, count: int) -> PyTree:
    """Returns a head whose matrices are `count` draws of Xavier's normal distribution
    each, [count, ...]; with one corner they are those of `head`."""
    xavier = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "normal")
    leaves, structure = jax.tree.flatten(head)

    def several(i: int, x: Array) -> Array:
        if x.ndim < 2:
            return x
        if count == 1:
            return x[None]
        draws = jax.random.split(jax.random.fold_in(key, i), count)
        return jnp.stack([xavier(k, x.shape, x.dtype) for k in draws])

    drawn = [several(i, x) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def mix(alpha: Array, heads: PyTree, corner: PyTree) -> PyTree:
    """Returns the head sum_m alpha_m theta_m of alpha [M] and the corners theta
    [M, ...], the leaves `corner` of `heads`."""

    def one(x: Array, stacked: bool) -> Array:
        if not stacked:
            return x
        mixed = jnp.tensordot(alpha, x, 1, precision=jax.lax.Precision.HIGHEST)
        return mixed.astype(x.dtype)

    return jax.tree.map(one, heads, corner)


def draw(key: Array, center: Array, assigned: Array, rho: Numeric) -> Array:
    """Returns a point alpha [M] of the region of a client.

    If `assigned` [] it is `center` [M] moved by at most rho in the L1 norm, in the
    direction of a point uniform in [-1, 1]^M; else it is uniform on the simplex.
    """
    shape = center.shape
    edges = jax.random.exponential(keys.fold(key, Draw.EDGES), shape, jnp.float32)
    alpha = edges / jnp.sum(edges)
    cube = jax.random.uniform(
        keys.fold(key, Draw.DIRECTION), shape, jnp.float32, minval=-1
    )
    radius = rho * jax.random.uniform(keys.fold(key, Draw.RADIUS), (), jnp.float32)
    moved = center + radius * cube / jnp.sum(jnp.abs(cube))
    return jnp.where(assigned, moved, alpha)


def components(gram: Array, here: Array, count: int) -> Array:
    """Returns the first principal components [N, count] of rows with the inner products
    `gram` [N, N]; of each the entry of largest size is positive.

    Rows that are not `here` [N] do not count and have zeros.
    """
    weight = here.astype(gram.dtype) / jnp.maximum(jnp.sum(here), 1)
    both = here[:, None] & here[None]
    mean = gram @ weight
    centred = gram - mean[:, None] - mean[None] + weight @ mean
    values, vectors = jnp.linalg.eigh(jnp.where(both, centred, 0))
    # Eigenvalues that are rounding have no direction.
    values = jnp.where(values > 1e-5 * values[-1], values, 0)
    kappa = (vectors * jnp.sqrt(values)[None])[:, ::-1][:, :count]
    kappa = jnp.pad(kappa, ((0, 0), (0, count - kappa.shape[1])))
    largest = jnp.argmax(jnp.abs(kappa), axis=0)
    sign = jnp.where(kappa[largest, jnp.arange(count)] < 0, -1, 1)
    return kappa * sign[None]


def project(kappa: Array, z: Numeric) -> Array:
    """Returns the nearest points [N, M] to kappa [N, M] with entries of at least 0 and
    sum z, divided by z."""
    every = jnp.ones(kappa.shape[1], bool)
    points = jax.vmap(lambda row: aggregate.project_simplex(row, every, z))(kappa)
    return points / jnp.sum(points, axis=1, keepdims=True)


def energy(points: Array, here: Array) -> Array:
    """Returns the sum [] of 1/d^2 over the pairs of points [N, M] `here` [N]."""
    d2 = jnp.sum((points[:, None] - points[None]) ** 2, axis=2)
    pairs = here[:, None] & here[None] & ~jnp.eye(len(points), dtype=bool)
    return jnp.sum(jnp.where(pairs, 1 / jnp.maximum(d2, NEAREST**2), 0)) / 2


def centers(gram: Array, here: Array, count: int) -> Array:
    """Returns the centres [N, count] of the regions of the clients `here` [N], from the
    inner products `gram` [N, N] of their updates.

    Their principal components are projected to the simplex, for the sum z in (0, 1] at
    which the points are furthest from each other by `energy`.
    """
    kappa = components(gram, here, count)
    levels = jnp.linspace(1e-4, 1, LEVELS, dtype=kappa.dtype)
    found = jax.lax.map(lambda z: energy(project(kappa, z), here), levels)
    return project(kappa, levels[jnp.argmin(found)])


@register("floco", targets=True)
def floco(
    task: Task,
    *,
    endpoints: Annotated[int, Interval(ge=1, le=1000)] = 10,
    warmup: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    rho: Annotated[float, Ge(0)] = 0.1,
) -> Method:
    """Trains the body and M heads; in each step the head is sum_m alpha_m theta_m, and
    alpha is drawn from the client's region (`draw`).

    After the warm-up a client's region is around its centre (`centers`), found from the
    updates of the heads. The client predicts with the centre.

    Args:
      endpoints: M, heads, in [1, 1000]; 10 as in the authors' code.
      warmup: share in [0, 1] of the rounds before the regions are assigned, at least
        one round; 0.5 as in the authors' code.
      rho: radius of a region in the L1 norm (ρ) in [0, inf); 0.1 as in the authors'
        code for folds, which has 0.3 for Dirichlet partitions. With one head and rho =
        0 it is FedAvg.

    Note:
      As in the authors' code the corners are the head's matrices, drawn by Xavier's
      normal distribution (of one corner the network's own start), the bias is shared,
      a direction is a point of a cube, and a region may leave the simplex. The authors
      let all clients train in the last round of the warm-up; here each client's last
      update counts. A client that has not trained by then goes on with the whole
      simplex. Floco+ is not built.
    """
    model, n = task.model, task.num_clients
    sgd, split = local_training.bind(task), averaging.split(task)
    rounds = needed("rounds", task.rounds, "which its warm-up follows")
    first = jnp.maximum(jnp.round(warmup * rounds), 1)

    corner = is_corner(jax.eval_shape(model.init, jax.random.key(0))["head"])

    def only(head):
        # The corners, without what is shared.
        pairs = zip(jax.tree.leaves(head), jax.tree.leaves(corner), strict=True)
        return [x for x, many in pairs if many]

    def init(key):
        w = model.init(key)
        stacked = corners(keys.fold(key, Start.CORNERS), w["head"], endpoints)
        shared, own = split.send(w | {"head": stacked})
        server = {
            "w": shared,
            "update": trees.replicate(jax.tree.map(jnp.zeros_like, only(stacked)), n),
            "seen": jnp.zeros(n, bool),
            "center": jnp.full((n, endpoints), 1 / endpoints, jnp.float32),
            "assigned": jnp.zeros(n, bool),
        }
        return State(server, trees.replicate(own, n))

    def predictor(w, alpha):
        return averaging.predictor(model, w | {"head": mix(alpha, w["head"], corner)})

    def assign(server):
        update, seen = server["update"], server["seen"]
        found = centers(trees.gram(update, update), seen, endpoints)
        center = jnp.where(seen[:, None], found, server["center"])
        return {"center": center, "assigned": seen}

    def client(c, server, own):
        center, assigned = server["center"][c.id], server["assigned"][c.id]

        def loss(w, batch, key):
            alpha = draw(key, center, assigned, rho)
            h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            z = model.head(mix(alpha, w["head"], corner), h)
            return losses.of(task)(z, batch.y, batch.mask), stats

        start = split.receive(server["w"], own)
        w, value = sgd(c, start, loss=loss)
        update = jax.tree.map(jnp.subtract, only(start["head"]), only(w["head"]))
        shared, own = split.send(w)
        return Update(shared, own, predictor(w, center), value, sent=update)

    def finish(key, server, w, update, old, rows, cohort):
        # Before the regions are assigned the updates are kept.
        early = ~jnp.any(server["assigned"])
        here = cohort.trained & early
        update = trees.scatter(server["update"], cohort.ids, update, here)
        seen = server["seen"].at[cohort.ids].max(here)
        server = {**server, "w": w, "update": update, "seen": seen}
        now = early & (cohort.round + 1 >= first) & jnp.any(cohort.trained)
        kept = {name: server[name] for name in ("center", "assigned")}
        server |= jax.lax.cond(now, assign, lambda _: kept, server)
        return State(server, rows), Metrics()

    def predict(server, own, c):
        return predictor(split.receive(server["w"], own), server["center"][c.id])

    def sent(state, cohort, metrics):
        size = trees.size(state.server["w"])
        return traffic.both_ways(cohort, size + endpoints, size)

    return averaging.from_client(
        init,
        client,
        predict,
        default=lambda server: server["w"],
        finish=finish,
        traffic=sent,
        stages=(Stage(first, "no client trains in a region"),),
    )
