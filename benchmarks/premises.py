"""What the mechanism of a method does in a finished run, as numbers.

    python -m benchmarks.premises RUN RUN ...

A claim about a method holds where its mechanism acts. The numbers show whether it does:
the coefficients of `mnfl` and `mnfl_het`, the mixture of `pfedafm`, the latent c of
`feddva`, the policy of `fedcp` and the gradients of the tasks of `pfedc`.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from benchmarks import latents
from fedjax_pfl import trees
from fedjax_pfl.algorithms.fedcp import (
    Frozen,
    Parts,
    client_vector,
    gated,
    policy_network,
)
from fedjax_pfl.algorithms.pfedc.class_groups import columns, task_losses
from fedjax_pfl.algorithms.pfedc.task_maps import branches
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import results
from fedjax_pfl.experiment.results import Run
from fedjax_pfl.types import Array, PyTree

EXAMPLES = 200  # test examples of a client that are looked at


def concepts(run: Run) -> np.ndarray:
    """Returns the number [N] of each client's concept: the value of `--shift`."""
    shift, n = run.config["shift"], run.experiment.task.num_clients
    values = shift.split(":", 1)[1].split(",") if shift else [""]
    return np.arange(n) % len(values)


def coefficients(run: Run) -> dict[str, float]:
    """Measures a matrix of knowledge coefficients [N, N].

    Returns:
      own_concept: mean weight of the clients of the same concept, itself included;
      uniform: that of weights 1/N; self: mean weight of a client's own knowledge;
      farthest: largest difference from 1/N;
      common: mean weight of another client with a class in common, disjoint: of one
        without; NaN where there are none.
    """
    a = np.asarray(run.state().server["coefficients"])
    of = concepts(run)
    same = of[:, None] == of
    held = np.asarray(run.experiment.task.class_counts) > 0
    common = held @ held.T
    weight = lambda pairs: a[pairs].mean() if pairs.any() else np.nan
    return {
        "own_concept": np.where(same, a, 0).sum(axis=1).mean(),
        "uniform": same.mean(),
        "self": np.diag(a).mean(),
        "farthest": np.abs(a - 1 / len(a)).max(),
        "common": weight(common & ~np.eye(len(a), dtype=bool)),
        "disjoint": weight(~common),
    }


def mixture(run: Run) -> dict[str, float]:
    """Measures pFedAFM's mixture: alpha, the mean weight of own features, and the mean
    accuracies of mixed, own and shared features."""
    alpha = np.asarray(run.state().clients["alpha"])
    scores = run.summary["scores"]
    names = {"mixed": "acc", "own": "large_acc", "shared": "small_acc"}
    return {"alpha": alpha.mean(), "alpha_std": alpha.std()} | {
        name: scores[f"post/{score}"] for name, score in names.items()
    }


def personal_latent(run: Run) -> dict[str, float]:
    """Measures what FedDVA's c holds beyond the identity of its client.

    Probes are logistic regressions on c of the test images of all clients of a kind but
    one, scored on that client.

    Returns:
      spread: standard deviation of c over the images of a client, divided by that over
      all images; kind: accuracy of the probe of the mark's type; kind_chance; client:
      accuracy of a probe of the client, fitted on half of the images; bits: lower bound
      of the mutual information of c and the kind, from the probe's log loss.
    """
    of = latents.views(run)
    c = np.stack(of["c"])
    within = np.sqrt(of.assign(v=list(c)).groupby("client")["v"].apply(_variance))
    total = np.sqrt(_variance(list(c)))
    held = of["client"].map(of.groupby("client")["kind"].first().map(str)).to_numpy()
    rank = of.groupby("kind")["client"].rank(method="dense").astype(int).to_numpy()
    accuracy, loss = [], []
    for turn in np.unique(rank):
        scored = rank == turn
        found = _probe(c[~scored], held[~scored], c[scored], held[scored])
        accuracy.append(found[0])
        loss.append(found[1])
    _, counts = np.unique(held, return_counts=True)
    share = counts / counts.sum()
    half = np.random.default_rng(0).permutation(len(c)) % 2 == 0
    who = of["client"].to_numpy()
    return {
        "spread": float(within.mean() / total),
        "std": float(total),
        "kind": float(np.mean(accuracy)),
        "kind_chance": float(share.max()),
        "bits": float(-share @ np.log2(share) - np.mean(loss)),
        "client": _probe(c[half], who[half], c[~half], who[~half])[0],
        "client_chance": 1 / len(np.unique(who)),
    }


def _variance(rows: list[np.ndarray]) -> float:
    """Returns the variance of vectors, a mean over their dimensions."""
    return float(np.var(np.stack(list(rows)), axis=0).mean())


def _probe(
    x: np.ndarray, y: np.ndarray, x_held: np.ndarray, y_held: np.ndarray
) -> tuple[float, float]:
    """Returns accuracy and log loss in bits of a logistic regression on held rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    model.fit(x, y)
    column = {name: i for i, name in enumerate(model.classes_)}
    p = model.predict_proba(x_held)
    at = p[np.arange(len(p)), [column[name] for name in y_held]]
    return float(model.score(x_held, y_held)), float(-np.mean(np.log2(at + 1e-12)))


def policy(run: Run) -> dict[str, float]:
    """Measures FedCP's policy s [K] per test example, and what it is worth.

    Returns:
      ratio: mean of s; entropy: mean binary entropy of s in bits; by_sample: standard
      deviation of s over the examples of a client, a mean over features and clients;
      by_client: that of the clients' means; own, mean: accuracies over all examples by
      each example's policy, and by its client's mean policy; own_rare, mean_rare: the
      same over examples that are not of their client's most frequent class.
    """
    clients, predict = run.state().clients, _personal_model(run)
    n = run.experiment.task.num_clients
    found = [_gates(run, predict, trees.gather(clients, k), k) for k in range(n)]
    gates = [g.s for g in found]
    s = np.concatenate(gates)
    entropy = -s * np.log2(s + 1e-12) - (1 - s) * np.log2(1 - s + 1e-12)
    means = np.stack([g.mean(axis=0) for g in gates])
    rare = np.concatenate([g.rare for g in found])
    right = {
        "own": np.concatenate([g.own for g in found]),
        "mean": np.concatenate([g.mean for g in found]),
    }
    return {
        "ratio": s.mean(),
        "entropy": entropy.mean(),
        "by_sample": np.mean([g.std(axis=0).mean() for g in gates]),
        "by_client": means.std(axis=0).mean(),
        **{name: hit.mean() for name, hit in right.items()},
        **{f"{name}_rare": hit[rare].mean() for name, hit in right.items()},
    }


class Gates(NamedTuple):
    """The policy for the test examples of a client."""

    s: np.ndarray  # [n, K], the share that goes to the personal head
    own: np.ndarray  # [n], whether the prediction by s is right
    mean: np.ndarray  # [n], whether that by the mean of s over the examples is
    rare: np.ndarray  # [n], whether of another class than the client's most frequent


# (head of the client, images, mask) -> s [B, K], logits by s and by its mean [B, C]
Personal = Callable[[PyTree, Array, Array], tuple[Array, Array, Array]]


def _personal_model(run: Run) -> Personal:
    """Returns the compiled personal model of a client at the end of the run.

    Raises:
      InputError: an ablation without the policy.
    """
    e, server = run.experiment, run.state().server
    options = {"depth": 1, "norm": "layer", "activation": "relu"}
    given = run.config["hparams"]
    options = {name: given.get(name, x) for name, x in options.items()}
    on = Parts(**{name: given[name] for name in Parts._fields if name in given})
    if not on.cpn:
        raise InputError(f"{run.path} has no policy: it was run without cpn.")
    apply = gated(e.task, policy_network(e.task, **options), "softmax", on)

    def predict(head: PyTree, x: Array, mask: Array) -> tuple[Array, Array, Array]:
        w = {**server, "head": head}
        frozen = Frozen(server["body"], server["head"], client_vector(head))
        own, h, s, _ = apply(w, frozen, x, mask, False, jax.random.key(0))
        mean = jnp.mean(s, axis=0, where=mask[:, None], keepdims=True)
        layer = e.task.model.head
        by_mean = layer(head, mean * h)
        if on.gh:
            by_mean = layer(server["head"], (1 - mean) * h) + by_mean
        return s, own, by_mean

    return jax.jit(predict)


def _gates(run: Run, predict: Personal, row: PyTree, k: int) -> Gates:
    """Returns the policy of client k, whose state is `row`."""
    e = run.experiment
    rows = e.partition.test[k, :EXAMPLES]  # as many for all clients: one shape
    valid = np.arange(len(rows)) < e.partition.test_sizes[k]
    x, y = e.dataset.prepare(e.dataset.x[rows]), np.asarray(e.dataset.y[rows])[valid]
    s, own, mean = map(np.asarray, predict(row["head"], x, jnp.asarray(valid)))
    right = (np.argmax(logits, axis=1)[valid] == y for logits in (own, mean))
    return Gates(s[valid], *right, y != np.argmax(e.task.class_counts[k]))


def conflict(run: Run) -> dict[str, float]:
    """Measures whether the tasks of a client of pFedC ask for opposite steps of the
    body, at the server's model.

    Gradients of the task losses by the body are on training images of the client.

    Returns:
      cosine: mean cosine of the gradients of two tasks, over pairs and clients;
      negative: share of pairs below 0; norms: largest norm of a client's gradients
      divided by the smallest, a median over clients.
    """
    e, server, of = run.experiment, run.state().server, run.config["hparams"]
    usual = {"tasks": "class", "head": "group_softmax", "task_loss": "class"}
    of = usual | {name: of[name] for name in usual if name in of}
    b, model = branches(e.task, of["tasks"], of["head"]), e.task.model

    def losses(body: PyTree, x: Array, y: Array, mask: Array) -> Array:
        w = {**server, "body": body}
        h, _ = model.features(w, x, mask=mask, train=False)
        z = columns(server["head"], h)
        return task_losses(b, z, y, mask, of["task_loss"])[0]

    jacobian = jax.jit(jax.jacrev(losses))
    cosines, ratios = [], []
    for k in range(e.task.num_clients):
        rows = e.partition.train[k, :EXAMPLES]  # as many for all clients: one shape
        mask = jnp.arange(len(rows)) < e.partition.train_sizes[k]
        x, y = e.dataset.prepare(e.dataset.x[rows]), jnp.asarray(e.dataset.y[rows])
        slopes = jax.tree.leaves(jacobian(server["body"], x, y, mask))
        g = np.concatenate([np.asarray(s).reshape(len(s), -1) for s in slopes], axis=1)
        held = np.asarray(b.member) @ np.asarray(e.task.class_counts[k]) > 0
        norms = np.linalg.norm(g, axis=1)
        here = held & (norms > 0)
        g, norms = g[here], norms[here]
        if len(g) > 1:
            gram = (g @ g.T) / np.outer(norms, norms)
            cosines.append(gram[np.triu_indices(len(g), 1)])
            ratios.append(norms.max() / norms.min())
    found = np.concatenate([*cosines, []])  # without any the means are NaN
    return {
        "cosine": found.mean(),
        "negative": (found < 0).mean(),
        "norms": float(np.median(ratios)),
    }


MEASURED: dict[str, Callable[[Run], dict[str, float]]] = {
    "mnfl": coefficients,
    "mnfl_het": coefficients,
    "pfedafm": mixture,
    "feddva": personal_latent,
    "fedcp": policy,
    "pfedc": conflict,
}


def main() -> None:
    """Prints a row for each run of the command line."""
    rows = {}
    for path in sys.argv[1:]:
        run = results.load(path)
        rows[path] = MEASURED[run.config["algo"]](run)
    table = pd.DataFrame(rows).T
    if len(table) > 1:
        table.loc["mean"] = table.mean()
    print(table.round(4).to_string())


if __name__ == "__main__":
    main()
