"""pFedFDA: the body is trained under a classifier made of global Gaussians of the
features, and each client predicts with Gaussians between its own and the global ones.

Reference: McLaughlin & Su, Personalized federated learning via feature distribution
adaptation (NeurIPS 2024), Algorithm 1; authors' code: cj-mclaughlin/pFedFDA.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Gt, Interval
from chex import Numeric

from fedjax_pfl import averaging, evaluation, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import ROW_TARGETS, register
from fedjax_pfl.types import Array, Method, PyTree, State, Task, Update

FOLDS = 2  # of the cross-validation
JITTER = 1e-4  # added to all entries of a covariance, as in the authors' code
HALVINGS = 6  # of the search for beta, which ends on a grid of 1/64


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    MEANS = 50, "the class means"


class Gaussians(NamedTuple):
    """Class means [K, C] of the features, and their common covariance [K, K]."""

    mean: Array
    cov: Array


def estimate(h: Array, y: Array, use: Array, ridge: Numeric, other: Array) -> Gaussians:
    """Returns the Gaussians of features h [M, K] of classes y [M], where `use` [M].

    A class without examples has the mean in `other` [K, C].
    """
    member = jax.nn.one_hot(y, other.shape[1]) * use[:, None]
    count = jnp.sum(member, axis=0)
    total = jnp.dot(h.T, member, precision=jax.lax.Precision.HIGHEST)
    mean = jnp.where((count > 0)[None], total / jnp.maximum(count, 1)[None], other)
    centred = jnp.where(use[:, None], h - mean.T[y], 0)
    scatter = jnp.dot(centred.T, centred, precision=jax.lax.Precision.HIGHEST)
    cov = scatter / jnp.maximum(jnp.sum(use) - 1, 1)
    return Gaussians(mean, cov + ridge * jnp.eye(len(cov)) + JITTER)


def between(beta: Array, mine: Gaussians, other: Gaussians) -> Gaussians:
    """Returns beta mine + (1 - beta) other, with beta [2] for means and covariance."""
    mean = trees.lerp(beta[0], mine.mean, other.mean)
    return Gaussians(mean, trees.lerp(beta[1], mine.cov, other.cov))


def classifier(g: Gaussians, prior: Array, eps: Numeric) -> PyTree:
    """Returns the head of the posterior p(y | h) of Gaussians with the class
    probabilities prior [C]; eps shrinks the covariance to a multiple of I."""
    eye = jnp.eye(len(g.cov))
    cov = (1 - eps) * g.cov + eps * jnp.trace(g.cov) / len(g.cov) * eye
    kernel = jax.scipy.linalg.solve(cov, g.mean, assume_a="pos")
    bias = jnp.log(prior) - jnp.sum(g.mean * kernel, axis=0) / 2
    return {"kernel": kernel, "bias": bias}


def logits(head: PyTree, h: Array) -> Array:
    """Returns the logits [B, C] of a linear head on features h [B, K]."""
    return h @ head["kernel"] + head["bias"][None]


def search(loss: Callable[[Array], Array]) -> Array:
    """Returns where loss(beta [2]) is small in [0, 1]^2: a search from the middle over
    the 8 neighbours, whose distance is halved in each step."""
    around = jnp.array([(0, 0), *((a, b) for a in (-1, 0, 1) for b in (-1, 0, 1))])

    def step(i, beta):
        at = jnp.clip(beta[None] + around * 0.5 ** (i + 1), 0, 1).astype(beta.dtype)
        # one after another: a batch of LAPACK's solutions hangs XLA's CPU client after
        # convolutions (JAX 0.10)
        return at[jnp.argmin(jax.lax.map(loss, at))]

    return jax.lax.fori_loop(0, HALVINGS, step, jnp.full(2, 0.5, jnp.float32))


@register("pfedfda", excludes={"positions": ROW_TARGETS})
def pfedfda(
    task: Task,
    *,
    ridge: Annotated[float, Gt(0)] = 1.0,
    eps: Annotated[float, Interval(gt=0, lt=1)] = 0.0001,
) -> Method:
    """Trains the body under the head of the global Gaussians N(mu_c, Sigma), then sends
    body and beta (mu_i, Sigma_i) + (1 - beta) (mu, Sigma), which the server averages.

    beta, for means and covariance, minimises the cross entropy of the head in a 2-fold
    cross-validation on the client's features.

    Args:
      ridge: added to the diagonal of a client's covariance, in (0, inf); 1 as in the
        authors' code.
      eps: added to the client's class frequencies, and shrinkage of the covariance, in
        (0, 1); 0.0001 as in the authors' code.

    Note:
      Features are those of the trained body, in the authors' code those of the training
      steps. A prediction, after training too, takes the global mean of a class with two
      examples or fewer; what is sent takes that of a class without examples, as there.
      The folds alternate over the rows of a class, and beta is searched on a grid of
      1/64 instead of by L-BFGS. Classes with a single example are left out of the
      folds; a client with no other class has beta = 0. Before a prediction, beta and
      the Gaussians are estimated on the received body. The model's own head is not
      used.
    """
    model, split = task.model, averaging.split(task)
    sgd, batch_size = local_training.bind(task), evaluation.pass_size(task.sizes)
    classes, width = task.num_classes, model.num_features

    def sent(w):
        shared, own = split.send(w)
        return {part: shared[part] for part in ("body", "stats")}, own

    def init(key):
        shared, own = sent(model.init(key))
        mean = jax.random.uniform(
            keys.fold(key, Start.MEANS), (width, classes), jnp.float32
        )
        gaussians = Gaussians(mean, jnp.eye(width, dtype=jnp.float32))
        server = shared | {"gaussians": gaussians}
        return State(server, trees.replicate(own, task.num_clients))

    def prior(c):
        share = c.class_counts / jnp.maximum(c.train.size, 1) + eps
        return share / jnp.sum(share)

    def adapted(c, w, server):
        # The client's Gaussians to send and to predict with, and beta [2].

        def features(batch):
            return model.features(w, batch.x, mask=batch.mask, train=False)[0]

        h, y = local_training.collect(c.train, features, width, batch_size)
        other = server["gaussians"]
        # The folds.
        member = jax.nn.one_hot(y, classes, dtype=jnp.int32)
        rank = jnp.sum((jnp.cumsum(member, axis=0) - 1) * member, axis=1)
        use = (y >= 0) & (c.class_counts[y] >= FOLDS)
        folds = [use & (rank % FOLDS == fold) for fold in range(FOLDS)]
        mine = [estimate(h, y, use & ~fold, ridge, other.mean) for fold in folds]

        def loss(beta):
            total = jnp.zeros(())
            for g, fold in zip(mine, folds, strict=True):
                head = classifier(between(beta, g, other), prior(c), eps)
                total += losses.cross_entropy(logits(head, h), jnp.maximum(y, 0), fold)
            return total

        beta = jnp.where(jnp.any(use), search(loss), 0)
        found = estimate(h, y, y >= 0, ridge, other.mean)
        enough = (c.class_counts > FOLDS)[None]
        scored = found._replace(mean=jnp.where(enough, found.mean, other.mean))
        return between(beta, found, other), between(beta, scored, other), beta

    def predictor(c, w, g):
        head = classifier(g, prior(c), eps)

        def predict(x, mask):
            h, _ = model.features(w, x, mask=mask, train=False)
            return logits(head, h)

        return predict

    def client(c, server, own):
        head = classifier(server["gaussians"], prior(c), eps)

        def loss(w, batch, key):
            h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            return losses.of(task)(logits(head, h), batch.y, batch.mask), stats

        w, value = sgd(c, split.receive(server, own), loss=loss, train=("body",))
        g, scored, beta = adapted(c, w, server)
        shared, own = sent(w)
        metrics = {"beta_mean": beta[0], "beta_cov": beta[1]}
        upload = shared | {"gaussians": g}
        return Update(upload, own, predictor(c, w, scored), value, metrics)

    def predict(server, own, c):
        w = split.receive(server, own)
        return predictor(c, w, adapted(c, w, server)[1])

    return averaging.from_client(init, client, predict, averages=("body",))
