"""FedCP: a learned gate splits every sample's features between a frozen global head and
the client's own head.

The gate is a conditional policy network (CPN), which sees a sample's features h and a
vector of the client; it sends r * h through the head received from the server and s *
h, s = 1 - r, through the personal one.

Reference: Zhang et al., FedCP: separating feature information for personalized
federated learning via conditional policy (KDD 2023), Algorithm 1; authors' code:
TsingZ0/FedCP.
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
    hyperparameters,
    keys,
    local_training,
    losses,
    models,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.models import layers
from fedjax_pfl.types import (
    Array,
    Method,
    Network,
    PyTree,
    State,
    Task,
    Update,
)

# W_i^fe, W_i^hd and Theta_i: updated by local training
PARTS = ("body", "head", "policy")
HEADS = ("global", "personal")  # prefixes of the scores of one head alone
TINY = 1e-12
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
    """Returns the conditional policy network for K = `task.model.num_features` as
    pure functions."""
    features = task.model.num_features
    return models.network(
        lambda rngs: Policy(features, depth, norm, activation, rngs),
        bn_stats=task.bn_stats,
    )


def client_vector(head: PyTree) -> Array:
    """Computes v_i / ||v_i|| [K]: the sum over the classes of a linear head's
    weights (kernel [K, C]), without the bias."""
    return _unit(jnp.sum(head["kernel"], axis=1))


def _unit(v: Array) -> Array:
    return v / jnp.maximum(jnp.linalg.norm(v), TINY)


def gate(a: Array, key: Array | None = None) -> tuple[Array, Array]:
    """Computes r and s, both [B, K], of the policy's outputs a [B, 2K] (Eq. 4); with a
    key, Gumbel-softmax of temperature 1.

    A softmax over two entries is a sigmoid of their difference, and two Gumbel
    variables differ by a logistic one.
    """
    first, second = jnp.split(a, 2, axis=-1)
    noise = 0 if key is None else jax.random.logistic(key, first.shape)
    r = jax.nn.sigmoid(first - second + noise)
    return r, 1 - r


class Frozen(NamedTuple):
    """Received parts that local training leaves unchanged."""

    body: PyTree  # W^fe, the received extractor
    head: PyTree  # W^hd, the received head; () without it
    vector: Array  # [K], of the client


class Parts(NamedTuple):
    """Parts of the method, each left out by an ablation of the paper's Table 1.

    Args:
      cs: the client's vector as an input of the CPN, true or false; without `cs` and
        `ss` the input is a fixed random vector.
      ss: the sample's features as an input of the CPN, true or false.
      gfm: the MMD between own and global features in the loss, true or false.
      cpn: the CPN, true or false; without it both heads get all features.
      gh: the logits of the global head, true or false.
    """

    cs: bool = True
    ss: bool = True
    gfm: bool = True
    cpn: bool = True
    gh: bool = True


# (variables, frozen, x, mask, train, key) -> logits [B, C], h [B, K], s [B, K], new
# stats
Apply = Callable[
    [PyTree, Frozen, Array, Array, bool, Array],
    tuple[Array, Array, Array | None, PyTree],
]


def gated(task: Task, network: Network | None, policy: str, on: Parts) -> Apply:
    """Returns the personal model.

    Args:
      network: the CPN; None: each head gets the features whole, and s is None.
    """
    model = task.model

    def seen(h, vector):
        # The CPN's input of features h [B, K] of a client with this vector [K].
        if not on.cs and not on.ss:  # one random vector for all clients and runs
            draw = jax.random.normal(jax.random.key(0), vector.shape, jnp.float32)
            vector = _unit(draw)
        if not on.ss:
            return jnp.broadcast_to(vector, h.shape)
        return h * vector[None] if on.cs else h

    def apply(variables, frozen, x, mask, train, key):
        extractor = {"body": variables["body"], "stats": variables["stats"]["model"]}
        h, new = model.features(extractor, x, mask=mask, train=train, key=key)
        stats = {"model": new, "policy": variables["stats"]["policy"]}
        h_global, h_personal, s = h, h, None
        if network is not None:
            theta = {"params": variables["policy"], "stats": stats["policy"]}
            inputs = seen(h, frozen.vector)
            a, stats["policy"] = network.apply(theta, inputs, mask=mask, train=train)
            noise = keys.fold(key, keys.Loss.GUMBEL) if policy == "gumbel" else None
            r, s = gate(a, noise)
            h_global, h_personal = r * h, s * h
        out = model.head(variables["head"], h_personal)
        if on.gh:
            # Eq. 5; both heads add their bias
            out = model.head(frozen.head, h_global) + out
        return out, h, s, stats

    return apply


def objective(
    task: Task, apply: Apply, frozen: Frozen, lam: Numeric | None
) -> local_training.Loss:
    """Returns the client's loss: cross entropy plus lam times the MMD between own and
    global features (None: without).

    Its aux is {"pir": the mean of s []} where there is a gate.
    """

    def loss(variables, batch, key):
        out, h, s, stats = apply(variables, frozen, batch.x, batch.mask, True, key)
        value = losses.of(task)(out, batch.y, batch.mask)
        if lam is not None:
            w = {"body": frozen.body, "stats": variables["stats"]["model"]}
            # The same key: both extractors drop the same features.
            u, _ = task.model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            value += lam * losses.mmd(h, u, batch.mask)
        if s is None:
            return value, stats, {}
        ratio = losses.masked_mean(jnp.mean(s, axis=1), batch.mask)
        return value, stats, {"pir": ratio}

    return loss


@register("fedcp", targets=True)
@hyperparameters.shared(Parts)
def fedcp(
    task: Task,
    *,
    on: Parts,
    lam: Annotated[float, Ge(0)] = 5.0,
    policy: Literal["softmax", "gumbel"] = "softmax",
    depth: Annotated[int, Interval(ge=1, le=4)] = 1,
    norm: Literal["layer", "batch", "group", "none"] = "layer",
    activation: Literal["relu", "tanh", "sigmoid"] = "relu",
) -> Method:
    """Averages extractor, policy network and the midpoint of global and personal head;
    the personal head is unchanged.

    Args:
      lam: weight of the MMD between own and global features (λ) in [0, inf); 5, the
        paper's for its CNN at lr 0.005 (1 for ResNet-18 and fastText at lr 0.1).
      policy: one of softmax (Eq. 4), gumbel (noisy in training and in prediction, as
        the authors' code is).
      depth: linear layers of the CPN (Table 10) in [1, 4]; 1 as in the paper.
      norm: of the CPN's last layer, one of layer, batch, group (two groups), none.
      activation: of the CPN, one of relu, tanh, sigmoid.

    Note:
      Eq. 7 as printed, one kernel's mean over paired features, would separate them:
      the MMD is that of the authors' code (`losses.mmd`). The client's vector is the
      sum over classes of the head's kernel in round 0 too (their code draws it at
      random). It follows from the personal head and is not stored. Only clients of the
      round receive the model (their code sends the extractor to all). The frozen
      extractor normalises by the batch, as in their code; the running statistics of
      extractor and CPN follow bn_stats. `pir` is the paper's personalisation ratio, the
      mean of s over samples and features, averaged over the local steps. `global_acc`
      and `personal_acc` score each head alone, on its gated features; `test_loss` is of
      the model as received and after training (their Figure 6). Each added
      layer of the CPN is followed by the activation. The head must be one linear layer:
      their code's product of several layers' weights is not implemented. With gumbel,
      examples at the same position of different test batches share their noise. The
      reported loss includes the MMD term.
    """
    model, sgd = task.model, local_training.bind(task)
    network = policy_network(task, depth, norm, activation) if on.cpn else None
    apply = gated(task, network, policy, on)

    def start(key):
        # The variables of the personal model.
        w = model.init(key)
        averaging.check_linear_head(w, "fedcp")
        theta: PyTree = {"params": {}, "stats": {}}
        if network is not None:
            theta = network.init(keys.fold(key, keys.Init.POLICY))
        stats = {"model": w["stats"], "policy": theta["stats"]}
        return {**w, "policy": theta["params"], "stats": stats}

    split = averaging.split(task, variables=jax.eval_shape(start, jax.random.key(0)))

    def init(key):
        w = start(key)
        shared, own = split.send(w)
        rows = trees.replicate({"head": w["head"], "own": own}, task.num_clients)
        return State(shared | {"head": w["head"] if on.gh else ()}, rows)

    def receive(server, row):
        # W^fe, W_i^hd and Theta, and the received model, which is frozen; the vector is
        # that of the personal head before training.
        w = split.receive(server | {"head": row["head"]}, row["own"])
        vector = client_vector(row["head"])
        return w, Frozen(server["body"], server["head"], vector)

    def predictor(w, frozen, c):
        def predict(x, mask):
            out, h, s, _ = apply(w, frozen, x, mask, False, c.key)
            if not on.gh:
                return out
            parts = (h, h) if s is None else ((1 - s) * h, s * h)
            heads = frozen.head, w["head"]
            alone = [model.head(*pair) for pair in zip(heads, parts, strict=True)]
            return jnp.stack([out, *alone], axis=-1)

        return predict

    def client(c, server, row):
        # Extractor, personal head and CPN are trained (Eq. 8).
        w, frozen = receive(server, row)
        loss = objective(task, apply, frozen, lam if on.gfm else None)
        w, (value, ratio) = sgd(c, w, loss=loss, train=PARTS, has_aux=True)
        upload, own = split.send(w)
        # The personal head is never sent: its midpoint with the global one is (Eq. 6).
        head = optax.tree.scale(0.5, trees.add(frozen.head, w["head"])) if on.gh else ()
        upload, row = upload | {"head": head}, {"head": w["head"], "own": own}
        return Update(upload, row, predictor(w, frozen, c), value, ratio)

    def predict(server, row, c):
        w, frozen = receive(server, row)
        return predictor(w, frozen, c)

    averages = (*averaging.BODY_AND_HEAD, "policy")

    def score(outputs, y, mask, c):
        if on.gh:
            found = averaging.score_paired(outputs, y, mask, c, names=HEADS)
            outputs = outputs[..., 0]
        else:
            found = evaluation.classification(outputs, y, mask, c)
        if not jnp.issubdtype(y.dtype, jnp.integer):  # targets or several labels
            return found
        return found | {"test_loss": evaluation.cross_entropy(outputs, y, mask)}

    # the policy's batch norm mixes the examples of a batch
    trainings = 0 if norm == "batch" else 1
    return averaging.from_client(
        init, client, predict, score=score, averages=averages, trainings=trainings
    )
