"""FedCP: a learned gate splits every sample's features between a frozen global head and
the client's own head.

The gate is a conditional policy network (CPN), which sees a sample's features h and a
vector of the client; it sends r * h through the head received from the server and s *
h, s = 1 - r, through the personal one.

Reference: Zhang et al., FedCP: separating feature information for personalized
federated learning via conditional policy (KDD 2023), Algorithm 1.
"""

import itertools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from chex import Numeric
from flax import nnx

from fedjax_pfl import (
    averaging,
    evaluation,
    keys,
    local_training,
    losses,
    models,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.models import layers
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Network,
    Predictor,
    PyTree,
    State,
    Task,
)

# W_i^fe, W_i^hd and Theta_i: what local training updates
PARTS = ("body", "head", "policy")
TINY = 1e-12
Ablation = Literal[
    "none", "cs", "ss", "cs_ss", "gfm", "cpn", "cpn_gfm", "cpn_gh", "cpn_gfm_gh"
]
NORMS: dict[str, Callable[..., Any]] = {
    "layer": lambda size, rngs: nnx.LayerNorm(
        size, epsilon=1e-5, use_fast_variance=False, rngs=rngs
    ),
    "batch": lambda size, rngs: layers.BatchNorm(size, rngs=rngs),
    "group": lambda size, rngs: nnx.GroupNorm(
        size, 2, epsilon=1e-5, use_fast_variance=False, rngs=rngs
    ),
    "none": lambda size, rngs: None,
}
ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid}


class Policy(nnx.Module):
    """The CPN before its softmax: [B, K] -> [B, 2K]. Deeper ones begin with further
    linear layers K -> K."""

    def __init__(
        self, features: int, depth: int, norm: str, activation: str, rngs: nnx.Rngs
    ):
        sizes = [*[features] * depth, 2 * features]
        self.layers = nnx.List(
            [layers.linear(a, b, rngs) for a, b in itertools.pairwise(sizes)]
        )
        self.norm = nnx.data(NORMS[norm](2 * features, rngs))
        self.activation = activation

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        act = ACTIVATIONS[self.activation]
        for layer in self.layers[:-1]:
            x = act(layer(x))
        x = self.layers[-1](x)
        if self.norm is not None:
            x = (
                self.norm(x, mask, train)
                if isinstance(self.norm, layers.BatchNorm)
                else self.norm(x)
            )
        return act(x)


def policy_network(
    task: Task, depth: int = 1, norm: str = "layer", activation: str = "relu"
) -> Network:
    """The conditional policy network for K = `task.model.num_features` as pure
    functions."""
    features = task.model.num_features
    return models.network(
        lambda rngs: Policy(features, depth, norm, activation, rngs),
        bn_stats=task.bn_stats,
    )


def client_vector(head: PyTree) -> Array:
    """v_i / ||v_i|| [K]: the sum over the classes of a linear head's weights (kernel
    [K, C]), without the bias."""
    return _unit(jnp.sum(head["kernel"], axis=1))


def _unit(v: Array) -> Array:
    return v / jnp.maximum(jnp.linalg.norm(v), TINY)


def gate(a: Array, key: Array | None = None) -> tuple[Array, Array]:
    """r and s, both [B, K], of the policy's outputs a [B, 2K] (Eq. 4); with a key,
    Gumbel-softmax of temperature 1.

    A softmax over two entries is a sigmoid of their difference, and two Gumbel
    variables differ by a logistic one.
    """
    first, second = jnp.split(a, 2, axis=-1)
    noise = 0 if key is None else jax.random.logistic(key, first.shape)
    r = jax.nn.sigmoid(first - second + noise)
    return r, 1 - r


class Frozen(NamedTuple):
    """What is frozen during local training."""

    body: PyTree  # W^fe, the received extractor
    head: PyTree  # W^hd, the received head; () without it
    vector: Array  # [K], of the client


# (variables, frozen, x, mask, train, key) -> logits [B, C], h [B, K], s [B, K], new
# stats
Apply = Callable[
    [PyTree, Frozen, Array, Array, bool, Array],
    tuple[Array, Array, Array | None, PyTree],
]


def gated(task: Task, network: Network | None, policy: str, off: set[str]) -> Apply:
    """The personal model.

    Args:
      network: the CPN; without it (None) features go whole through each head, and s is
        None.
      off: parts of the method that are left out, of which cs, ss and gh matter here.
    """
    model = task.model

    def seen(h: Array, vector: Array) -> Array:
        """The CPN's input of features h [B, K] of a client with this vector [K]."""
        if {"cs", "ss"} <= off:  # one random vector for all clients and runs
            vector = _unit(
                jax.random.normal(jax.random.key(0), vector.shape, jnp.float32)
            )
        if "ss" in off:
            return jnp.broadcast_to(vector, h.shape)
        return h if "cs" in off else h * vector[None]

    def apply(
        variables: PyTree,
        frozen: Frozen,
        x: Array,
        mask: Array,
        train: bool,
        key: Array,
    ) -> tuple[Array, Array, Array | None, PyTree]:
        extractor = {"body": variables["body"], "stats": variables["stats"]["model"]}
        h, new = model.features(extractor, x, mask=mask, train=train, key=key)
        stats = {"model": new, "policy": variables["stats"]["policy"]}
        h_global, h_personal, s = h, h, None
        if network is not None:
            theta = {"params": variables["policy"], "stats": stats["policy"]}
            a, stats["policy"] = network.apply(
                theta, seen(h, frozen.vector), mask=mask, train=train
            )
            r, s = gate(
                a, keys.fold(key, keys.Loss.GUMBEL) if policy == "gumbel" else None
            )
            h_global, h_personal = r * h, s * h
        out = model.head(variables["head"], h_personal)
        if "gh" not in off:
            # Eq. 5; both heads add their bias
            out = model.head(frozen.head, h_global) + out
        return out, h, s, stats

    return apply


def objective(
    task: Task, apply: Apply, frozen: Frozen, lam: Numeric | None
) -> local_training.Loss:
    """The loss of a client: cross entropy and lam times the MMD between own and global
    features (None: without).

    Returns:
      As `local_training.sgd` takes it, with the aux {"pir": the mean of s []} where
      there is a gate.
    """

    def loss(
        variables: PyTree, batch: Batch, key: Array
    ) -> tuple[Array, PyTree, PyTree]:
        out, h, s, stats = apply(variables, frozen, batch.x, batch.mask, True, key)
        value = losses.cross_entropy(out, batch.y, batch.mask)
        if lam is not None:
            received = {"body": frozen.body, "stats": variables["stats"]["model"]}
            # the same key: both extractors drop the same features
            u, _ = task.model.features(
                received, batch.x, mask=batch.mask, train=True, key=key
            )
            value += lam * losses.mmd(h, u, batch.mask)
        ratio = (
            {}
            if s is None
            else {"pir": losses.masked_mean(jnp.mean(s, axis=1), batch.mask)}
        )
        return value, stats, ratio

    return loss


@register("fedcp")
def fedcp(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 5.0,
    policy: Literal["softmax", "gumbel"] = "softmax",
    without: Ablation = "none",
    depth: Annotated[int, Interval(ge=1, le=4)] = 1,
    norm: Literal["layer", "batch", "group", "none"] = "layer",
    activation: Literal["relu", "tanh", "sigmoid"] = "relu",
) -> Algorithm:
    """Averages extractor, policy network and the midpoint of global and personal head;
    the personal head stays.

    Args:
      lam: weight of the MMD between own and global features (λ) in [0, inf); 5, the
        paper's for its CNN at lr 0.005 (1 for ResNet-18 and fastText at lr 0.1; 5 at lr
        0.1 collapses on the digits).
      policy: one of softmax (Eq. 4), gumbel (noisy in training and in prediction, as
        the authors' code is).
      without: what Table 1 leaves out, one of none, cs (the client's vector at the
        CPN), ss (the sample there), cs_ss (both, in their place a fixed random vector),
        gfm (MMD), cpn, cpn_gfm, cpn_gh (no global head), cpn_gfm_gh.
      depth: linear layers of the CPN (Table 10) in [1, 4]; 1 as in the paper.
      norm: of the CPN's last layer, one of layer, batch, group (two groups), none.
      activation: of the CPN, one of relu, tanh, sigmoid.

    Note:
      Eq. 7 as printed, one kernel's mean over paired features, would push them apart:
      the MMD is that of the authors' code (`losses.mmd`). The client's vector is the
      sum over classes of the head's kernel in round 0 too (their code draws it at
      random), and follows from the personal head at any time, so it is not stored. Only
      clients of the round receive (their code sends the extractor to all). The frozen
      extractor normalises by the batch, as in their code; the running statistics of
      extractor and CPN follow bn_stats. `pir` is the paper's personalisation ratio, the
      mean of s over samples and features, averaged over the local steps. Each added
      layer of the CPN is followed by the activation. The head must be one linear layer:
      their code's product of several layers' weights is not implemented. With gumbel,
      examples at the same position of different test batches share their noise. The
      reported loss includes the MMD term.

      Under SGD, momentum and weight decay included, all clients keep the vector that
      they begin with, which is one for all: the gradients of a cross entropy by the
      logits sum to 0 over the classes, so training scales a head's sums over the
      classes and does not turn them. It takes an optimizer such as Adam for the vectors
      to differ.
    """
    off = set(without.split("_"))
    model = task.model
    network = None if "cpn" in off else policy_network(task, depth, norm, activation)
    apply = gated(task, network, policy, off)

    def start(key: Array) -> PyTree:
        """The variables of the personal model."""
        w = model.init(key)
        averaging.check_linear_head(w, "fedcp")
        theta = (
            {"params": {}, "stats": {}}
            if network is None
            else network.init(keys.fold(key, keys.Init.POLICY))
        )
        stats = {"model": w["stats"], "policy": theta["stats"]}
        return {
            "body": w["body"],
            "head": w["head"],
            "policy": theta["params"],
            "stats": stats,
        }

    split = averaging.split(task, variables=jax.eval_shape(start, jax.random.key(0)))

    def init(key: Array) -> State:
        w = start(key)
        shared, own = split.send(w)
        head = () if "gh" in off else w["head"]
        return State(
            shared | {"head": head},
            trees.replicate({"head": w["head"], "own": own}, task.num_clients),
        )

    def receive(server: PyTree, mine: PyTree) -> tuple[PyTree, Frozen]:
        """The personal model at the start of a round, W^fe, W_i^hd and Theta, and what
        is frozen in it."""
        variables = split.receive(server | {"head": mine["head"]}, mine["own"])
        return variables, Frozen(
            server["body"], server["head"], client_vector(mine["head"])
        )

    def predictor(variables: PyTree, frozen: Frozen, c: Client) -> Predictor:
        return lambda x, mask: apply(variables, frozen, x, mask, False, c.key)[0]

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array], dict[str, Array]]:
            # the vector is that of the head before training
            w, frozen = receive(state.server, mine)
            loss = objective(task, apply, frozen, None if "gfm" in off else lam)
            w, (value, ratio) = local_training.sgd(
                c.key, c.train, loss, w, task, train=PARTS, has_aux=True
            )
            post = evaluation.post(cohort, c, predictor(w, frozen, c))
            # Eq. 6
            head = (
                ()
                if "gh" in off
                else optax.tree.scale(0.5, trees.add(frozen.head, w["head"]))
            )
            shared, own = split.send(w)
            # in place of the personal head, which is never sent, its midpoint with the
            # global one
            return (
                shared | {"head": head},
                {"head": w["head"], "own": own},
                value,
                ratio,
                post,
            )

        server, (mine, value, ratio, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(server, mine), Metrics(value, post, ratio)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return predictor(*receive(server, mine), c)

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        averages=(*averaging.BODY_AND_HEAD, "policy"),
    )
