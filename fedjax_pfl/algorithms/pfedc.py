"""pFedC: the classifier is split into class branches, each averaged over the clients that hold its classes only.

A branch (a task t) owns the rows of the last layer of its classes G_t, so the branches of all tasks together are one
ordinary head: kernel [K, C] and bias [C]. A client trains the branches it has labels for, and weighs their losses by
the minimum-norm point of their gradients in the feature space (MGDA-UB).

Reference: the pFedC paper; journal version: Zhang et al., Model decomposition and reassembly for purified knowledge
transfer in personalized federated learning (IEEE TMC 2025). MGDA-UB: Sener & Koltun (NeurIPS 2018).
"""

import jax
import jax.numpy as jnp

from fedjax_pfl import evaluate, local, min_norm, trees
from fedjax_pfl.checks import BadInput, choose
from fedjax_pfl.sharing import predictor
from fedjax_pfl.tasks import Branches, branches, scores, task_losses
from fedjax_pfl.types import Algorithm, Array, Batch, Client, PyTree, Scores, State, Task, Traffic

NEGLIGIBLE = 1e-12  # a task with less than this share of the largest squared gradient norm counts as solved


def gram(b: Branches, residual: Array, kernel: Array) -> Array:
    """<D_s, D_t> of the tasks' gradients in the feature space, D_t = R_t W_t^T, in closed form for a linear head.

    Args:
      residual: R [B, C], the gradient of each class's own task loss by its logit; kernel: W [K, C].

    Returns:
      [T, T]: the sums over the groups' blocks of (R^T R) * (W^T W).
    """
    member = b.member.astype(residual.dtype)
    return member @ ((residual.T @ residual) * (kernel.T @ kernel)) @ member.T


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
        z = model.head(variables["head"], h)
        alpha, on = jax.lax.stop_gradient(weights(*jax.lax.stop_gradient((variables, batch, z, key))))
        if head_grad == "scaled":
            return alpha @ task_losses(b, z, batch.y, batch.mask)[0], stats
        by_body = model.head(jax.lax.stop_gradient(variables["head"]), h)
        by_head = model.head(variables["head"], jax.lax.stop_gradient(h))
        apart = task_losses(b, by_head, batch.y, batch.mask)[0] @ on.astype(z.dtype)
        value = alpha @ task_losses(b, by_body, batch.y, batch.mask)[0]
        return value + apart - jax.lax.stop_gradient(apart), stats

    return loss


def _body_gram(task: Task, b: Branches, variables: PyTree, batch: Batch, key: Array) -> Array:
    """<grad l_s, grad l_t> by the body's parameters, [T, T]: MGDA proper, at T backward passes."""

    def by_body(body: PyTree) -> Array:
        z, _ = task.model.apply({**variables, "body": body}, batch.x, mask=batch.mask, train=True, key=key)
        return task_losses(b, z, batch.y, batch.mask)[0]

    rows = [g.reshape(g.shape[0], -1) for g in jax.tree.leaves(jax.jacrev(by_body)(variables["body"]))]
    return sum((g @ g.T for g in rows), jnp.zeros((len(b.member),) * 2))


def pfedc(
    task: Task,
    *,
    tasks: str = "class",
    weighting: str = "mgda_ub",
    solver: str = "fista",
    normalise: str = "none",
    head_grad: str = "scaled",
    head_weighting: str = "uniform",
    comm: str = "sparse",
) -> Algorithm:
    """Averages the body over all clients and each class branch over those that hold it (Algorithm 1, Eqs. 3-7).

    Args:
      tasks: one of class (T = C), single (T = 1), consecutive:T, superclass.
      weighting: of the task losses, one of mgda_ub (the paper's), mgda (gradients by the body), uniform, sum.
      solver: of the minimum-norm point, one of fista, fw (the paper's Frank-Wolfe).
      normalise: gradients before solving, one of none, l2, loss, loss+.
      head_grad: one of scaled (by alpha, Eq. 5), unscaled (Sener & Koltun's Algorithm 2).
      head_weighting: of a branch's holders, one of uniform (Eq. 7), data, task_count.
      comm: what travels, one of sparse (the client's own branches), full (all).

    Note:
      A task of one class is binary and sees all samples: over its own class only, as Eq. 3 prints, it would have no
      negatives. A larger group is a softmax over its samples. Branches a client does not hold keep their start.
      `post`, right after local training, is the paper's evaluation point. Holders' presence (T bits each, once) is
      not counted in the traffic.
    """
    choose("weighting", weighting, ("mgda_ub", "mgda", "uniform", "sum"))
    choose("solver", solver, ("fista", "fw"))
    choose("normalise", normalise, ("none", "l2", "loss", "loss+"))
    choose("head_grad", head_grad, ("scaled", "unscaled"))
    choose("head_weighting", head_weighting, ("uniform", "data", "task_count"))
    choose("comm", comm, ("sparse", "full"))
    b = branches(task, tasks)
    model = task.model
    own_stats = task.bn_stats == "local"

    def held(class_counts: Array) -> Array:  # [..., C] -> [..., T], training examples of each task
        return class_counts @ b.member.T

    def compose(server: PyTree, own: PyTree, c: Client) -> PyTree:
        """The client's model: the received branches it holds, and the others as they started."""
        holds = (held(c.class_counts) > 0)[b.of]
        head = trees.choose(holds, server["head"], server["start"])
        return {"body": server["body"], "head": head, "stats": own if own_stats else server["stats"]}

    def score(z: Array, y: Array, mask: Array, c: Client) -> Scores:
        return scores(b, z, y, mask, c)

    def init(key: Array) -> State:
        w = model.init(key)
        if set(w["head"]) != {"kernel", "bias"} or w["head"]["kernel"].ndim != 2:
            raise BadInput("pfedc needs a model whose head is one linear layer with a kernel [K, C] and a bias [C].")
        own, shared = (w["stats"], ()) if own_stats else ((), w["stats"])
        server = {"body": w["body"], "head": w["head"], "start": w["head"], "stats": shared}
        return State(server, trees.replicate(own, task.num_clients))

    def round(key: Array, state: State, cohort) -> tuple[State, PyTree]:
        def client(c: Client, own: PyTree):
            received = compose(state.server, own, c)
            holds = held(c.class_counts) > 0
            loss = branch_loss(task, b, holds, weighting, solver, normalise, head_grad)
            w, value = local.sgd(c.key, c.train, loss, received, task)
            w["head"] = trees.choose(holds[b.of], w["head"], received["head"])  # weight decay moves what is not held
            own, shared = (w["stats"], ()) if own_stats else ((), w["stats"])
            post = evaluate.post(cohort, c, predictor(task, w), score)
            return {"body": w["body"], "head": w["head"], "stats": shared}, own, value, post

        n = held(cohort.class_counts)[:, b.of]  # [S, C], of the task of each class
        holders = n > 0
        by_branch = {"uniform": holders, "data": cohort.sizes[:, None] * holders, "task_count": n}[head_weighting]
        weight = {"body": cohort.sizes, "head": by_branch, "stats": cohort.sizes}
        last = {part: state.server[part] for part in weight}  # what nobody holds keeps its last value
        mean, (own, value, post) = cohort.mean(client, state.clients, weight=weight, empty=last)
        tasks_held = jnp.sum(held(cohort.class_counts) > 0, axis=-1)
        return State(state.server | mean, own), {"loss": value, "post": post, "tasks": tasks_held}

    def sent(state: State, cohort, metrics: PyTree) -> Traffic:
        shared = trees.size((state.server["body"], state.server["stats"]))
        a_class = trees.size(state.server["head"]) // task.num_classes
        classes = jnp.sum((held(cohort.class_counts) > 0)[:, b.of], axis=-1) if comm == "sparse" else task.num_classes
        scalars = (shared + a_class * classes) * cohort.active
        return Traffic(scalars, scalars, 0 * scalars, 2 * cohort.active.astype(jnp.int32))

    return Algorithm(init, round, lambda server, own, c: predictor(task, compose(server, own, c)), score, sent)
