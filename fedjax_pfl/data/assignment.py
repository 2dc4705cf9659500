"""Partitioners: how many examples of each class every client gets, as one table of
counts [N, C].

Each takes `(rng, totals, num_clients, ...)`, totals [C] being the examples of each
class, and returns counts [N, C] whose columns sum to `totals`: every example is
assigned exactly once (but see pathological_subset). None of them retries, so all of
them end.
"""

import heapq
import math

import numpy as np
from scipy.special import softmax

from fedjax_pfl.errors import InputError, check

Rng = np.random.Generator


def iid(rng: Rng, totals: np.ndarray, num_clients: int) -> np.ndarray:
    """Random parts of equal size (sizes differ by at most one)."""
    labels = rng.permutation(np.repeat(np.arange(len(totals)), totals))
    return tally(_blocks(len(labels), num_clients), labels, num_clients, len(totals))


def shards(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """McMahan et al. 2017: sort by class, cut into N * per_client equal shards, give
    each client that many at random.

    A shard may straddle two classes, so a client holds about `per_client` classes.
    """
    slots = num_clients * per_client
    if slots > totals.sum():
        raise InputError(
            f"{slots} shards need {slots} examples, but there are {totals.sum()}: take "
            "fewer clients or shards."
        )
    labels = np.repeat(np.arange(len(totals)), totals)
    client_of_shard = rng.permutation(slots) // per_client
    return tally(
        client_of_shard[_blocks(len(labels), slots)], labels, num_clients, len(totals)
    )


def pathological(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """k = `per_client` random classes a client; every class in equal parts over floor
    or ceil(N k / C) holders."""
    present = _present(totals, num_clients, per_client)
    capacity = np.full(len(present), num_clients * per_client // len(present))
    extra = num_clients * per_client - capacity.sum()
    capacity[rng.permutation(len(present))[:extra]] += 1
    holds = np.zeros((num_clients, len(totals)))
    noise = rng.gumbel(size=(num_clients, len(present)))
    for client in range(num_clients):
        # The k largest of log(capacity) + Gumbel noise: a draw without replacement,
        # weighted by the places left.
        with np.errstate(divide="ignore"):
            score = np.log(capacity) + noise[client]
        # A class with as many places as clients are left must be taken now:
        # with this rule the assignment always succeeds.
        score[capacity == num_clients - client] = np.inf
        picked = np.argpartition(-score, per_client - 1)[:per_client]
        capacity[picked] -= 1
        holds[client, present[picked]] = 1
    return apportion(holds / np.maximum(holds.sum(axis=0), 1), totals)


def pathological_subset(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """As `pathological`; where clients cannot hold all classes, N k random ones are
    assigned, the others left out."""
    present = np.flatnonzero(totals)
    check("classes_per_client", per_client, 1, len(present))
    if num_clients * per_client < len(present):
        chosen = np.isin(
            np.arange(len(totals)),
            rng.choice(present, num_clients * per_client, replace=False),
        )
        totals = np.where(chosen, totals, 0)
    return pathological(rng, totals, num_clients, per_client)


def round_robin(rng: Rng, totals: np.ndarray, num_clients: int) -> np.ndarray:
    """Classes go round: class k mod C to client k, k < N, in equal parts over its
    holders (FedDVA's CelebA).

    Where there are more classes than clients, class c goes to client c mod N.
    """
    present = np.flatnonzero(totals)
    pair = np.arange(max(num_clients, len(present)))
    holds = np.zeros((num_clients, len(totals)))
    holds[pair % num_clients, present[pair % len(present)]] = 1
    return apportion(holds / np.maximum(holds.sum(axis=0), 1), totals)


def label_groups(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int, least: int
) -> np.ndarray:
    """PFLlib's unbalanced pathological split, used by FedCP: consecutive clients share
    the same classes.

    Class after class goes to the first ceil(N k / C) clients that still want one; all
    but the last of them get a random number in [max(mean / 10, least / C), mean) of its
    examples, the last one the rest.

    Note: PFLlib divides by zero where the clients' wishes run out before the classes;
    here the last classes then have fewer holders, at least one.
    """
    present = _present(totals, num_clients, per_client)
    wanted = np.full(num_clients, per_client)
    counts = np.zeros((num_clients, len(totals)), np.int64)
    for place, label in enumerate(present):
        later = len(present) - place - 1
        limit = min(
            math.ceil(num_clients * per_client / len(present)), wanted.sum() - later
        )
        holders = np.flatnonzero(wanted)[:limit]
        wanted[holders] -= 1
        mean = totals[label] / len(holders)
        low = int(min(max(mean / 10, least / len(present)), mean))
        parts = rng.integers(low, max(int(mean), low + 1), size=len(holders) - 1)
        counts[holders, label] = [*parts, totals[label] - parts.sum()]
    return counts


def dirichlet(
    rng: Rng, totals: np.ndarray, num_clients: int, alpha: float
) -> np.ndarray:
    """The "practical" split of FedCP and PFLlib: per class, shares over clients ~
    Dir(alpha), full clients left out.

    Before class c is cut, the shares of clients that own n / N examples or more are set
    to zero and the others renormalised.
    """
    counts = np.zeros((num_clients, len(totals)), np.int64)
    log_gamma = _log_gamma(rng, alpha, (num_clients, len(totals)))
    for label in np.flatnonzero(totals):
        open_ = counts.sum(axis=1) < totals.sum() / num_clients
        shares = softmax(np.where(open_, log_gamma[:, label], -np.inf)[:, None], axis=0)
        counts[:, [label]] = apportion(shares, totals[[label]])
    return counts


def dirichlet_class(
    rng: Rng, totals: np.ndarray, num_clients: int, alpha: float
) -> np.ndarray:
    """The plain split: of every class, shares over clients ~ Dir(alpha); client sizes
    vary freely."""
    return apportion(
        softmax(_log_gamma(rng, alpha, (num_clients, len(totals))), axis=0), totals
    )


def dirichlet_total(
    rng: Rng, totals: np.ndarray, num_clients: int, alpha: float
) -> np.ndarray:
    """FedDVA's split: of every class, shares over clients ~ Dir(alpha / N), so alpha is
    the total concentration.

    FedDVA's sheet calls it Hsu-style; alpha = 10,000 gives the balanced case.
    """
    return dirichlet_class(rng, totals, num_clients, alpha / num_clients)


def dirichlet_hsu(
    rng: Rng, totals: np.ndarray, num_clients: int, alpha: float
) -> np.ndarray:
    """Hsu, Qi and Brown 2019: equal client sizes, the class shares of each client ~
    Dir(alpha p).

    p are the class shares of the whole data set. Clients draw in turn without
    replacement; where a class runs out, the rest of a client is drawn from the others.
    """
    left = totals.copy()
    concentration = alpha * np.maximum(totals, 1) / totals.sum()
    log_shares = _log_gamma(rng, concentration, (num_clients, len(totals)))
    sizes = np.bincount(_blocks(totals.sum(), num_clients), minlength=num_clients)
    counts = np.zeros((num_clients, len(totals)), np.int64)
    for client in range(num_clients):
        missing = sizes[client]
        # each pass fills the client or empties a class: at most C passes
        while missing:
            shares = softmax(np.where(left > 0, log_shares[client], -np.inf))
            drawn = np.minimum(rng.multinomial(missing, shares), left)
            counts[client] += drawn
            left -= drawn
            missing -= drawn.sum()
    return counts


def apportion(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Cuts each class at its cumulative shares: integer counts that sum exactly, each
    within one of share * total.

    Args:
      shares: [N, C], columns sum to 1; a column of zeros only where the total is 0.
      totals: [C] examples of each class.

    Returns:
      [N, C] int64; a client with share 0 gets none.
    """
    # the last one is `totals`, up to 1e-12
    edges = np.rint(np.cumsum(shares, axis=0) * totals).astype(np.int64)
    return np.diff(edges, axis=0, prepend=0)


def fill_up(rng: Rng, counts: np.ndarray, minimum: int) -> tuple[np.ndarray, int]:
    """While a client has fewer than `minimum` examples, moves a random example to it
    from the largest client.

    Args:
      counts: [N, C] with at least N * minimum examples.
      minimum: examples every client shall have.

    Returns:
      the new counts [N, C] and the number of examples moved.
    """
    counts, sizes = counts.copy(), counts.sum(axis=1)
    heap = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(heap)
    moved = 0
    for needy in np.flatnonzero(sizes < minimum):
        while sizes[needy] < minimum:
            # A donor has more than the mean, hence more than the minimum, so it never
            # becomes needy itself.
            size, donor = heap[0]
            heapq.heapreplace(heap, (size + 1, donor))
            place = rng.integers(sizes[donor])
            label = np.searchsorted(np.cumsum(counts[donor]), place, side="right")
            counts[donor, label] -= 1
            counts[needy, label] += 1
            sizes[donor] -= 1
            sizes[needy] += 1
            moved += 1
    return counts, moved


def _present(totals: np.ndarray, num_clients: int, per_client: int) -> np.ndarray:
    """The classes that have examples, after checking that the clients' places can hold
    them."""
    present = np.flatnonzero(totals)
    check("classes_per_client", per_client, 1, len(present))
    if num_clients * per_client < len(present):
        raise InputError(
            f"{num_clients} clients with {per_client} classes each cannot hold all "
            f"{len(present)} classes: "
            f"take at least {math.ceil(len(present) / num_clients)} classes per "
            "client, or more clients."
        )
    return present


def _blocks(num_items: int, num_blocks: int) -> np.ndarray:
    """[num_items] block numbers 0, 0, ..., 1, 1, ...: sizes differ by at most one."""
    return np.arange(num_items) * num_blocks // num_items


def tally(
    client: np.ndarray, label: np.ndarray, num_clients: int, num_classes: int
) -> np.ndarray:
    """Counts [N, C] of (client, label) pairs."""
    return np.bincount(
        client * num_classes + label, minlength=num_clients * num_classes
    ).reshape(num_clients, -1)


def _log_gamma(
    rng: Rng, alpha: float | np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Logarithms of Gamma(alpha) draws: their softmax is Dirichlet, and stays so on a
    subset however small alpha is.

    In logarithms because at alpha = 0.01 most draws underflow to zero; by Gamma(a) =
    Gamma(a + 1) * U^(1 / a).
    """
    return (
        np.log(rng.standard_gamma(np.add(alpha, 1), size=shape))
        + np.log1p(-rng.random(shape)) / alpha
    )
