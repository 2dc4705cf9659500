"""pFedC: the classifier is split into class branches, each averaged over the clients that hold its classes only.

A branch (a task t) owns columns of the last layer, those of its classes G_t, so the branches of all tasks together are
one ordinary head: kernel [K, L] and bias [L], L = C unless groups have another head (`tasks.py`). A client trains the
branches it has labels for, and weighs their losses by the minimum-norm point of their gradients in the feature space
(MGDA-UB).

Reference: the pFedC paper; journal version: Zhang et al., Model decomposition and reassembly for purified knowledge
transfer in personalized federated learning (IEEE TMC 2025). MGDA-UB: Sener & Koltun (NeurIPS 2018).
"""

import jax
import jax.numpy as jnp

from fedjax_pfl import evaluate, local, min_norm, trees
from fedjax_pfl.checks import BadInput, choose
from fedjax_pfl.tasks import Branches, branches, class_logits, columns, gram, scores, task_losses
from fedjax_pfl.types import Algorithm, Array, Batch, Client, Predictor, PyTree, Scores, State, Task, Traffic

REJECT = 31  # stream of the reject logits' start, beside the key of the model's
NEGLIGIBLE = 1e-12  # a task with less than this share of the largest squared gradient norm counts as solved


def min_norm_weights(m: Array, losses: Array, active: Array, solver: str, normalise: str) -> Array:
    """alpha [T] on the simplex over `active` [T]; tasks with a negligible gradient are left out (26.2, step 2)."""
    norms = jnp.diag(m)
    scale = {"none": jnp.ones_like(norms), "l2": jnp.sqrt(norms), "loss": losses, "loss+": losses * jnp.sqrt(norms)}
    moving = active & (norms > NEGLIGIBLE * jnp.max(jnp.where(active, norms, 0)))
    s = jnp.where(moving & (scale[normalise] > 0), scale[normalise], 1)
    solve = {"fista": min_norm.fista, "fw": min_norm.frank_wolfe}[solver]
    return jnp.where(jnp.any(moving), solve(m / (s[:, None] * s[None, :]), moving), _uniform(active))


def _uniform(active: Array) -> Array:
    return active / jnp.maximum(jnp.sum(active), 1)


def branch_loss(task: Task, b: Branches, active: Array, weighting: str, solver: str, normalise: str, head_grad: str):
    """The weighted sum of a client's task losses (Eq. 5 with MGDA-UB's weights), as `local.sgd` takes it.

    Args:
      active: [T] bool, the tasks the client holds.
    """
    model = task.model

    @jax.default_matmul_precision("highest")  # a duality gap of 1e-5 is below the noise of shorter products
    def weights(variables: PyTree, batch: Batch, z: Array, key: Array) -> tuple[Array, Array]:
        """alpha [T], and which tasks learn from this batch, [T] bool."""
        values, usable = task_losses(b, z, batch.y, batch.mask)
        on = active & usable
        if weighting in ("uniform", "sum"):
            return _uniform(on) if weighting == "uniform" else on.astype(z.dtype), on
        if weighting == "mgda_ub":
            residual = jax.grad(lambda z: jnp.sum(task_losses(b, z, batch.y, batch.mask)[0]))(z)
            m = gram(b, residual, variables["head"]["kernel"])
        else:
            m = _body_gram(task, b, variables, batch, key)
        return min_norm_weights(m, values, on, solver, normalise), on

    def loss(variables: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        h, stats = model.features(variables, batch.x, mask=batch.mask, train=True, key=key)
        z = columns(variables["head"], h)
        alpha, on = jax.lax.stop_gradient(weights(*jax.lax.stop_gradient((variables, batch, z, key))))
        if head_grad == "scaled":
            return alpha @ task_losses(b, z, batch.y, batch.mask)[0], stats
        by_body = columns(jax.lax.stop_gradient(variables["head"]), h)
        by_head = columns(variables["head"], jax.lax.stop_gradient(h))
        apart = task_losses(b, by_head, batch.y, batch.mask)[0] @ on.astype(z.dtype)
        value = alpha @ task_losses(b, by_body, batch.y, batch.mask)[0]
        return value + apart - jax.lax.stop_gradient(apart), stats

    return loss


def _body_gram(task: Task, b: Branches, variables: PyTree, batch: Batch, key: Array) -> Array:
    """<grad l_s, grad l_t> by the body's parameters, [T, T]: MGDA proper, at T backward passes."""

    def by_body(body: PyTree) -> Array:
        h, _ = task.model.features({**variables, "body": body}, batch.x, mask=batch.mask, train=True, key=key)
        return task_losses(b, columns(variables["head"], h), batch.y, batch.mask)[0]

    rows = [g.reshape(g.shape[0], -1) for g in jax.tree.leaves(jax.jacrev(by_body)(variables["body"]))]
    return sum((g @ g.T for g in rows), jnp.zeros((len(b.member),) * 2))


def pfedc(
    task: Task,
    *,
    tasks: str = "class",
    head: str = "group_softmax",
    weighting: str = "mgda_ub",
    solver: str = "fista",
    normalise: str = "none",
    head_grad: str = "scaled",
    head_weighting: str = "uniform",
    download: str = "bank",
    comm: str = "sparse",
) -> Algorithm:
    """Averages the body over all clients and each class branch over those that hold it (Algorithm 1, Eqs. 3-7).

    Args:
      tasks: one of class (T = C), single (T = 1), consecutive:T, superclass, file:PATH (your own map: a text with the
        task of each class, numbered from 0), or such a map itself as map:0,0,1.
      head: of a task of several classes, one of group_softmax (samples of its classes only), group_reject (all
        samples, and a further logit for none of its classes), group_binary (one logit, whether it is one of them).
      weighting: of the task losses, one of mgda_ub (the paper's), mgda (gradients by the body), uniform, sum.
      solver: of the minimum-norm point, one of fista, fw (the paper's Frank-Wolfe).
      normalise: gradients before solving, one of none, l2, loss, loss+.
      head_grad: one of scaled (by alpha, Eq. 5), unscaled (Sener & Koltun's Algorithm 2).
      head_weighting: of a branch's holders, one of uniform (Eq. 7), data, task_count.
      download: the branches a client begins a round with, one of bank (the server's last), stale (Eq. 7 to the letter:
        only the round's clients receive its means, and the others keep their own last ones).
      comm: what travels, one of sparse (the client's own branches), full (all).

    Note:
      A task of one class is binary and sees all samples: over its own class only, as Eq. 3 prints, it would have no
      negatives. A larger group is a softmax over its samples, so that T = 1 is an ordinary classifier. Classes of
      different groups are compared by their logits, of group_reject less the reject logit; group_binary is what the
      paper's count of parameters implies, and knows no classes within a group. Branches a client does not hold keep
      their start. With full participation bank and stale are the same.
      `post`, right after local training, is the paper's evaluation point. Holders' presence (T bits each, once) is
      not counted in the traffic.
    """
    choose("weighting", weighting, ("mgda_ub", "mgda", "uniform", "sum"))
    choose("solver", solver, ("fista", "fw"))
    choose("normalise", normalise, ("none", "l2", "loss", "loss+"))
    choose("head_grad", head_grad, ("scaled", "unscaled"))
    choose("head_weighting", head_weighting, ("uniform", "data", "task_count"))
    choose("download", download, ("bank", "stale"))
    choose("comm", comm, ("sparse", "full"))
    b = branches(task, tasks, head)
    model = task.model
    own_stats, stale = task.bn_stats == "local", download == "stale"

    def held(class_counts: Array) -> Array:  # [..., C] -> [..., T], training examples of each task
        return class_counts @ b.member.T

    def compose(server: PyTree, own: PyTree, c: Client) -> PyTree:
        """The client's model: the received branches it holds, and the others as they started."""
        holds = (held(c.class_counts) > 0)[b.column]
        mine = own["head"] if stale else trees.choose(holds, server["head"], server["start"])
        return {"body": server["body"], "head": mine, "stats": own["stats"] if own_stats else server["stats"]}

    def predictor(w: PyTree) -> Predictor:
        return lambda x, mask: class_logits(b, columns(w["head"], model.features(w, x, mask=mask, train=False)[0]))

    def score(z: Array, y: Array, mask: Array, c: Client) -> Scores:
        return scores(b, z, y, mask, c)

    def init(key: Array) -> State:
        w = model.init(key)
        if set(w["head"]) != {"kernel", "bias"} or w["head"]["kernel"].ndim != 2:
            raise BadInput("pfedc needs a model whose head is one linear layer with a kernel [K, C] and a bias [C].")
        reject = model.init(jax.random.fold_in(key, REJECT))["head"]
        widest = jax.tree.map(lambda x, more: jnp.concatenate([x, more], axis=-1), w["head"], reject)
        start = jax.tree.map(lambda x: x[..., : len(b.column)], widest)
        own, shared = (w["stats"], ()) if own_stats else ((), w["stats"])
        server = {"body": w["body"], "head": start, "start": start, "stats": shared}
        return State(server, trees.replicate({"head": start if stale else (), "stats": own}, task.num_clients))

    def round(key: Array, state: State, cohort) -> tuple[State, PyTree]:
        def client(c: Client, own: PyTree):
            received = compose(state.server, own, c)
            holds = held(c.class_counts) > 0
            loss = branch_loss(task, b, holds, weighting, solver, normalise, head_grad)
            w, value = local.sgd(c.key, c.train, loss, received, task)
            w["head"] = trees.choose(holds[b.column], w["head"], received["head"])  # weight decay moves all
            own, shared = (w["stats"], ()) if own_stats else ((), w["stats"])
            post = evaluate.post(cohort, c, predictor(w), score)
            return {"body": w["body"], "head": w["head"], "stats": shared}, own, value, post

        n = held(cohort.class_counts)[:, b.column]  # [S, L], of the task of each logit
        holders = n > 0
        by_branch = {"uniform": holders, "data": cohort.sizes[:, None] * holders, "task_count": n}[head_weighting]
        weight = {"body": cohort.sizes, "head": by_branch, "stats": cohort.sizes}
        last = {part: state.server[part] for part in weight}  # what nobody holds keeps its last value
        mean, (stats, value, post) = cohort.mean(client, state.clients, weight=weight, empty=last)
        receive = jax.vmap(lambda holds, old: trees.choose(holds, mean["head"], old))
        own = {"head": receive(holders, state.clients["head"]) if stale else (), "stats": stats}
        tasks_held = jnp.sum(held(cohort.class_counts) > 0, axis=-1)
        return State(state.server | mean, own), {"loss": value, "post": post, "tasks": tasks_held}

    def sent(state: State, cohort, metrics: PyTree) -> Traffic:
        shared = trees.size((state.server["body"], state.server["stats"]))
        a_logit = trees.size(state.server["head"]) // len(b.column)
        logits = jnp.sum((held(cohort.class_counts) > 0)[:, b.column], axis=-1) if comm == "sparse" else len(b.column)
        scalars = (shared + a_logit * logits) * cohort.active
        return Traffic(scalars, scalars, 0 * scalars, 2 * cohort.active.astype(jnp.int32))

    return Algorithm(init, round, lambda server, own, c: predictor(compose(server, own, c)), score, sent)
