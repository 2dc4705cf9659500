"""pFedC: the classifier is split into class branches, each averaged over the clients
that hold its classes only.

A branch (a task t) owns columns of the last layer, those of its classes G_t, so the
branches of all tasks together are one ordinary head: kernel [K, L] and bias [L], L = C
unless groups have another head (see `task_maps`). A client trains the branches it has
labels for, and weighs their losses by the minimum-norm point of their gradients in the
feature space (MGDA-UB). In Privacy-pFedC who holds which classes is secret: branches
and holders are added under encryption.

Reference: the pFedC paper, whose equations are meant; its journal version seems to be
Zhang et al., Model decomposition and reassembly for purified knowledge transfer in
personalized federated learning (IEEE TMC 2025). MGDA-UB: Sener & Koltun (NeurIPS 2018).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import (
    aggregate,
    averaging,
    hyperparameters,
    keys,
    local_training,
    optimizers,
    trees,
)
from fedjax_pfl.algorithms.pfedc import encryption
from fedjax_pfl.algorithms.pfedc.class_groups import (
    branch_loss,
    class_logits,
    columns,
    scores,
)
from fedjax_pfl.algorithms.pfedc.task_maps import Branches, branches
from fedjax_pfl.algorithms.registry import OWN_LOSS, READS_LABELS, register
from fedjax_pfl.types import (
    Array,
    Client,
    Cohort,
    Method,
    Metrics,
    Predictor,
    PyTree,
    Scores,
    State,
    Task,
    Traffic,
    Update,
)


class Branching(NamedTuple):
    """How the classifier is split into branches, and how these are trained and
    averaged.

    Args:
      tasks: one of class (T = C), single (T = 1), consecutive:T, superclass, or the
        task of each class, numbered from 0, as map:0,0,1.
      head: of a task of several classes, one of group_softmax (samples of its classes
        only), group_reject (all samples, and a further logit for none of its classes),
        group_binary (one logit, whether it is one of them).
      task_loss: what the sum over a task's samples in a minibatch is divided by, one of
        class (those of its classes, D_i^c of Eq. 3; a task without one is left out),
        balanced (likewise, and the others' losses by their own number), batch (all of
        them).
      weighting: of the task losses, one of uniform, mgda_ub (the paper's).
      weight_scale: of these weights, one of mean_one (their mean over the tasks that
        learn from the batch is 1; with uniform the plain sum), simplex (they sum to 1).
      normalise: gradients before solving, one of none, loss+ (by their norm and the
        task's loss).
      head_grad: one of scaled (by alpha, Eq. 5), unscaled (Sener & Koltun's Algorithm
        2).
      train: the branches a client trains, one of held (of the tasks it holds), all
        (those of the other open tasks, too: they learn to answer no to the client's
        samples, at weight 1 and without a gradient by the body, and stay with it).
      head_weighting: of a branch's holders, one of uniform (Eq. 7), data.
    """

    tasks: str = "class"
    head: Literal["group_softmax", "group_reject", "group_binary"] = "group_softmax"
    task_loss: Literal["class", "balanced", "batch"] = "class"
    weighting: Literal["uniform", "mgda_ub"] = "uniform"
    weight_scale: Literal["mean_one", "simplex"] = "mean_one"
    normalise: Literal["none", "loss+"] = "none"
    head_grad: Literal["scaled", "unscaled"] = "scaled"
    train: Literal["held", "all"] = "held"
    head_weighting: Literal["uniform", "data"] = "uniform"


class Branched(NamedTuple):
    """A model with branches, and its training by one client."""

    b: Branches
    # key -> the model's variables, with a head of the map's logits
    start: Callable[[Array], PyTree]
    # (client, received variables) -> trained ones, and means over the steps: the loss,
    # and what else is reported
    train: Callable[[Client, PyTree], tuple[PyTree, Array, dict[str, Array]]]
    predictor: Callable[[PyTree], Predictor]
    score: Callable[[Array, Array, Array, Client], Scores]

    def held(self, class_counts: Array) -> Array:
        """Counts the training examples of each task: [..., C] -> [..., T]."""
        return class_counts @ self.b.member.T

    def shares(self, by: str, cohort: Cohort) -> Array:
        """Returns the weights of a branch's holders, [S, T], not normalised."""
        holds = self.held(cohort.class_counts) > 0
        return cohort.sizes[:, None] * holds if by == "data" else holds


def branched(task: Task, on: Branching) -> Branched:
    """Returns the parts that both methods share, for a task's first model.

    Raises:
      InputError: the tasks are not a map of the classes; from `start`, the head is not
        one linear layer.
    """
    b, model = branches(task, on.tasks, on.head), task.model

    def start(key):
        w = model.init(key)
        averaging.check_linear_head(w, "pfedc")
        reject = model.init(keys.fold(key, keys.Init.REJECT))["head"]

        def widened(x, more):
            return jnp.concatenate([x, more], axis=-1)[..., : len(b.column)]

        return {**w, "head": jax.tree.map(widened, w["head"], reject)}

    def train(c, received):
        classes = jnp.sign(c.class_counts) @ b.member.T  # [T]
        holds = classes > 0
        absent = ~holds & b.open if on.train == "all" else None
        trained = (holds if absent is None else holds | absent)[b.column]
        how = on.weighting, on.weight_scale, on.normalise, on.head_grad, on.task_loss
        loss = branch_loss(task, b, holds, *how, classes == 1, absent)

        def optimizer(lr):
            return optimizers.without_columns(~trained, task.optimizer(lr))

        sgd = local_training.bind(task._replace(optimizer=optimizer), loss)
        w, (value, seen) = sgd(c, received, has_aux=True)
        # Branches that are not trained are returned as they came.
        w["head"] = trees.choose(trained, w["head"], received["head"])
        return w, value, seen

    def predictor(w):
        def predict(x, mask):
            h, _ = model.features(w, x, mask=mask, train=False)
            return class_logits(b, columns(w["head"], h))

        return predict

    def score(z, y, mask, c):
        return scores(b, z, y, mask, c)

    return Branched(b, start, train, predictor, score)


@register("pfedc", excludes={"loss": OWN_LOSS, "mix": READS_LABELS})
@hyperparameters.shared(Branching)
def pfedc(
    task: Task,
    *,
    on: Branching,
    download: Literal["bank", "stale"] = "bank",
) -> Method:
    """Averages the body over all clients and each class branch over those that hold it
    (Algorithm 1, Eqs. 3-7).

    Args:
      download: the branches a client begins a round with, one of bank (the server's
        last), stale (Eq. 7 to the letter: only the round's clients receive its means,
        and the others keep their own last ones).

    Note:
      A task of one class is binary and sees all samples. Eq. 3 sums over the D_i^c
      samples of the class alone, which leaves no negatives, and divides by their
      number; here the sum is over the minibatch, and task_loss says which of the two is
      divided by. A larger group is a softmax over its samples, the same under both, so
      that T = 1 is an ordinary classifier. Classes of different groups are compared by
      their logits, of group_reject less the reject logit; group_binary is what the
      paper's count of parameters implies, and knows no classes within a group. Branches
      a client does not hold keep their start, unless train=all. With full participation
      bank and stale are the same.

      The minimum-norm point is close to the shortest gradients. With task_loss=batch
      these belong to tasks that only answer "no" to the batch, so that the other tasks
      do not learn (metric `weight_on_positives`). group_reject and group_binary follow
      the same rule: a positive is a sample of the group.

      The paper solves for the weights (lambda of Eq. 3) by MGDA-UB, on the simplex.
      Weights that sum to 1 divide the learning rate by the number of tasks in the
      minibatch. By default every weight is 1, which Eq. 3 allows.

      Groups of group_softmax share no samples. Their gradients are orthogonal, and the
      weights are in inverse proportion to the squared norms: the largest weights are
      those of groups already learnt. The reported loss is the weighted one;
      `unweighted_loss` is the mean of the tasks' losses. `weight_on_one_class` is the
      weight on groups of which a client holds one class.

      `post`, right after local training, is the paper's evaluation point. Holders'
      presence (T bits each, once) is not counted in the traffic.
    """
    of = branched(task, on)
    b, held = of.b, of.held
    split, stale = averaging.split(task), download == "stale"
    keeps = stale or on.train == "all"  # the client has a head of its own

    def compose(server, mine, c):
        # The received branches that the client holds, and the others as it has them.
        holds = (held(c.class_counts) > 0)[b.column]
        kept = mine["head"] if keeps else server["start"]
        head = kept if stale else trees.choose(holds, server["head"], kept)
        received = {"body": server["body"], "head": head, "stats": server["stats"]}
        return split.receive(received, mine["own"])

    def init(key):
        w = of.start(key)
        shared, own = split.send(w)
        mine = {"head": w["head"] if keeps else (), "own": own}
        server = shared | {"start": w["head"]}
        return State(server, trees.replicate(mine, task.num_clients))

    def client(c, server, mine):
        # Each client trains its branches and the body (Eqs. 3-5).
        w, value, seen = of.train(c, compose(server, mine, c))
        shared, own = split.send(w)
        # It has no part in the other branches.
        present = held(c.class_counts) > 0
        shared["head"] = trees.choose(present[b.column], w["head"], server["head"])
        after = {"head": w["head"] if keeps else (), "own": own}
        metrics = {"tasks": jnp.sum(present, axis=-1), **seen}
        return Update(shared, after, of.predictor(w), value, metrics)

    def weight(cohort):
        # A branch is averaged over its holders (Eqs. 6 and 7): [S, L], by the task of
        # each logit. Branches without a holder keep their last value.
        by_branch = of.shares(on.head_weighting, cohort)[:, b.column]
        return {"body": cohort.sizes, "head": by_branch, "stats": cohort.sizes}

    def default(server):
        return {part: server[part] for part in ("body", "head", "stats")}

    def finish(key, server, mean, sent, old, mine, cohort):
        # The holders take over the branches of the round.
        holds = weight(cohort)["head"] > 0
        heads = received(holds, mean["head"], mine["head"])
        return State(server | mean, {**mine, "head": heads}), Metrics()

    def sent(state, cohort, metrics):
        shared = trees.size((state.server["body"], state.server["stats"]))
        a_logit = trees.size(state.server["head"]) // len(b.column)
        logits = jnp.sum((held(cohort.class_counts) > 0)[:, b.column], axis=-1)
        scalars = (shared + a_logit * logits) * cohort.active
        messages = 2 * cohort.active.astype(jnp.int32)
        return Traffic(scalars, scalars, 0 * scalars, messages)

    def predict(server, mine, c):
        return of.predictor(compose(server, mine, c))

    # A branch is averaged over the holders of its task only.
    return averaging.from_client(
        init,
        client,
        predict,
        score=of.score,
        weight=weight,
        default=default,
        update=lambda key, server, mean, mass: server | mean,
        finish=finish if stale else None,
        traffic=sent,
        averages=("body",),
    )


def received(holds: Array, mean: PyTree, own: PyTree) -> PyTree:
    """Returns the branches of the round's clients, [S, ...]: the mean of those they
    hold [S, L], else their own."""
    return jax.vmap(lambda holds, own: trees.choose(holds, mean, own))(holds, own)


@register("privacy_pfedc", excludes={"loss": OWN_LOSS, "mix": READS_LABELS})
@hyperparameters.shared(Branching)
def privacy_pfedc(
    task: Task,
    *,
    on: Branching,
    backend: Literal["ckks", "plain"] = "ckks",
) -> Method:
    """pFedC whose server adds encrypted branches and encrypted counts of their holders
    (Algorithm 2).

    Args:
      backend: of the sums, one of ckks (encrypted by TenSEAL, an optional dependency),
        plain (the same in the clear).

    Note:
      A client sends its weights of all T tasks (0 where it holds none), and all
      branches multiplied by them. It divides the sums itself; Algorithm 2 does not,
      which multiplies a branch by the number of its holders in every round. So clients,
      not the server, come to know how many hold a task. The body goes in the clear, as
      in Algorithm 2, and its change may tell of labels. The paper's text encrypts the
      body, too, and its Pi = [1, pi_1, ...] has an entry for it. All clients share the
      secret key: one that colludes with the server breaks the secrecy. Only the clients
      of a round receive its sums, and the server keeps nothing of a branch: without the
      holders it cannot tell which branches are to keep their last value. So this is
      pfedc with download=stale, and with full participation just pfedc. Clients'
      numbers of examples are public. Traffic has ciphertexts in bytes, and in scalars
      what goes in the clear; keys, sent once, are not counted. The simulator runs all
      parties in one process, and its state is what the clients decrypt. Options
      on uploads are of what goes in the clear alone.
    """
    encryption.check_backend(backend)
    of = branched(task, on)
    b, split, plain = of.b, averaging.split(task), backend == "plain"

    def compose(server, mine):
        return split.receive(server | {"head": mine["head"]}, mine["own"])

    def init(key):
        w = of.start(key)
        shared, own = split.send(w)
        server = {"body": shared["body"], "stats": shared["stats"]}
        rows = trees.replicate({"head": w["head"], "own": own}, task.num_clients)
        return State(server, rows)

    def client(c, server, mine):
        w, value, seen = of.train(c, compose(server, mine))
        shared, own = split.send(w)
        # The body is averaged in the clear.
        phi = {"body": shared["body"], "stats": shared["stats"]}
        row = {"head": mine["head"], "own": own}
        return Update(phi, row, of.predictor(w), value, seen, sent=w["head"])

    def finish(key, server, mean, heads, old, rows, cohort):
        # Branches and the numbers of their holders are added under encryption.
        weight = of.shares(on.head_weighting, cohort).astype(float)  # [S, T]
        by_branch = weight[:, b.column]
        weighed = jax.vmap(aggregate.weigh)(by_branch, heads)
        upload = cohort.replicated({"branches": weighed, "weight": weight})
        total, up, down = encryption.total(upload, cohort.ids, cohort.active, backend)
        # Each client divides the sums, and takes over the branches that it holds.
        branches = _ratio(total["branches"], total["weight"][b.column], heads)
        mine = {**rows, "head": received(by_branch > 0, branches, heads)}
        seen = {"tasks": jnp.sum(weight > 0, axis=-1)}
        seen |= {} if plain else {"encrypted_up": up, "encrypted_down": down}
        return State(mean, mine), Metrics(clients=seen)

    def sent(state, cohort, metrics):
        here, clear = cohort.active.astype(jnp.int32), trees.size(state.server)
        if plain:
            clear += trees.size(state.clients["head"]) // len(cohort.ids)
            clear += len(b.member)
        sides = ("encrypted_up", "encrypted_down")
        encrypted = None if plain else sum(metrics.clients[side] for side in sides)
        scalars = clear * cohort.active
        return Traffic(scalars, scalars, 0 * scalars, 2 * here, encrypted)

    def predict(server, mine, c):
        return of.predictor(compose(server, mine))

    secret = (
        "the branches' sums are only for the clients of the round, and the server "
        "keeps nothing of them"
    )
    return averaging.from_client(
        init,
        client,
        predict,
        score=of.score,
        finish=finish,
        traffic=sent,
        no_unseen=secret,
        averages=("body",),
    )


def _ratio(total: PyTree, weight: Array, like: PyTree) -> PyTree:
    """Computes total / weight over the last axes, in the types of another tree;
    total where the weight is 0."""
    safe = jnp.where(weight > 0, weight, 1)
    return optax.tree.cast_like(
        jax.tree.map(lambda x: x / trees.align(safe, x.ndim), total), like
    )
