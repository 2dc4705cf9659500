"""Partitioners: divide a data set among clients and hold test examples out.

A rule takes `(rng, totals, num_clients, ...)`, totals [C] being the examples of each
class, and returns counts [N, C] whose columns sum to `totals`: every example is
assigned exactly once (except by pathological_subset).
"""

import heapq
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging
from scipy.special import softmax

from fedjax_pfl import user_code
from fedjax_pfl.data.datasets import Dataset, checked, strata
from fedjax_pfl.data.partition import (
    Partition,
    build,
    checked as checked_partition,
    load_file,
    tally,
)
from fedjax_pfl.errors import InputError, check, choose

Rng = np.random.Generator
Owned = tuple[np.ndarray, np.ndarray]  # flat rows, client after client, and sizes [N]

PARTITIONS: dict[str, str] = {
    "iid": "random parts of equal size",
    "shards": (
        "McMahan 2017: sorted by class, cut into shards, classes_per_client shards a "
        "client"
    ),
    "pathological": (
        "classes_per_client random classes a client, every class in equal parts over "
        "its holders"
    ),
    "pathological_subset": (
        "as pathological, but few clients leave classes out, random ones, where they "
        "must"
    ),
    "round_robin": (
        "FedDVA's CelebA: client k holds class k mod C, every class in equal parts "
        "over its holders"
    ),
    "label_groups": (
        "FedCP / PFLlib pathological: groups of clients share classes_per_client "
        "classes, unequal parts"
    ),
    "dirichlet": (
        "FedCP / PFLlib practical: per class over clients Dir(alpha), full clients "
        "left out, a minimum size"
    ),
    "dirichlet_class": "per class over clients Dir(alpha)",
    "dirichlet_total": "FedDVA: per class over clients Dir(alpha / N), alpha in total",
    "dirichlet_hsu": (
        "Hsu 2019: per client over classes Dir(alpha p), p the classes' shares of the "
        "data, equal sizes"
    ),
    "lognormal": (
        "pFedMe: client k has classes_per_client consecutive classes, sizes with "
        "lognormal shares"
    ),
    "natural:COLUMN": (
        "a client per value of a column of the data set, such as its speaker; more "
        "clients than values share them in equal parts"
    ),
    "file:PATH": (
        "an .npz with flat int arrays train, train_sizes, test, test_sizes (optional "
        "val, val_sizes)"
    ),
}
user_code.reserve(PARTITIONS)


def partition(
    dataset: Dataset,
    spec: str,
    *,
    num_clients: int | None,
    seed: int,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    test_split: str = "pool",
    test_fraction: float = 0.25,
    val_fraction: float = 0.0,
    min_size: int | None = None,
) -> Partition:
    """Divides a data set among clients, every example to exactly one of them.

    Only pathological_subset leaves examples to nobody. While a client is below the
    minimum, a random example moves to it from the largest client.

    Args:
      dataset: the examples to divide.
      spec: a key of `PARTITIONS`, or a function of your own, FILE.py:NAME or
        package.module:NAME, called with the data set, `num_clients` and `seed`. A file
        is only checked against `num_clients`.
      num_clients: N; of a natural partition N values drawn at random, None for all that
        have the minimum. With more clients than values client i has a random part of
        value i mod the number of values.
      seed: equal seeds give equal partitions. The rows of every client are shuffled, so
        that any tail of them is a random holdout.
      alpha: Dirichlet concentration, in [1e-6, 1e6].
      classes_per_client: k, in [1, C] (shards: shards a client, in [1, n]).
      test_split: `pool`: official train and test examples together, each client's rows
        split at random (PFLlib's protocol); `official`: training examples are assigned,
        test examples in the same per-class proportions.
      test_fraction: of a client's rows, in (0, 1), rounded up; only for `pool`.
      val_fraction: of a client's training rows, in [0, 1), taken from them, at least
        one row if not 0.
      min_size: least examples of a client (with `pool` train and test together; with
        `official` train only). Default: for `dirichlet` PFLlib's min(40, n / N / 2)
        (its 10 / (1 - 0.75) for batches of 10), else one for each of the parts.

    Raises:
      InputError: a value is out of its range, or there are too few examples for so many
        clients.
    """
    checked(dataset)
    choose("test_split", test_split, ("pool", "official"))
    check("test_fraction", test_fraction, 0, 1, open_low=True, open_high=True)
    check("val_fraction", val_fraction, 0, 1, open_high=True)
    check("seed", seed, 0, 2**63 - 1, whole=True)
    if user_code.named(spec) or str(spec).startswith("file:"):
        return _given(spec, dataset, num_clients, seed)
    natural = str(spec).startswith("natural:")
    choose("partition", "natural:COLUMN" if natural else spec, PARTITIONS)
    parts, held_out = [np.arange(len(dataset.y))], dataset.validation
    if test_split == "official":
        parts = np.split(parts[0], [dataset.num_train])
        if held_out is not None:
            parts[:1] = [parts[0][~held_out], parts[0][held_out]]
    if len(parts) == 3 and val_fraction:
        raise InputError(
            f"`val_fraction` must be 0, since {dataset.name} has its own validation "
            f"examples, got {val_fraction}."
        )
    n = len(parts[0])
    if num_clients is not None or not natural:
        check("clients", num_clients, 1, n, whole=True)
    # one example for each part that is cut from these
    need = 1 + (test_split == "pool") + (val_fraction > 0)
    least, minimum = min(40, n // (num_clients or 1) // 2), need
    if min_size is not None:
        check("min_size", min_size, 0, n, whole=True)
        least = min_size
    if spec == "dirichlet" or min_size is not None:
        minimum = max(need, least)
    rng = np.random.default_rng(seed)
    if natural:
        column = spec.removeprefix("natural:")
        found, moved = _by_column(rng, dataset, column, num_clients, minimum, parts), 0
    else:
        options = (num_clients, alpha, classes_per_client, least)
        found, moved = _by_class(rng, dataset, spec, options, minimum, parts)
    (train, sizes), (held, held_sizes) = found[0], found[-1]
    if test_split == "pool":
        rest = np.clip(_floor(sizes * (1 - test_fraction)), need - 1, sizes - 1)
        train, held = _cut(train, sizes, sizes - rest)
        sizes, held_sizes = rest, sizes - rest
    if len(parts) == 3:
        return build(train, sizes, held, held_sizes, *found[1], moved)
    val_sizes = np.maximum(_floor(sizes * val_fraction), int(val_fraction > 0))
    train, val = _cut(train, sizes, val_sizes)
    return build(train, sizes - val_sizes, held, held_sizes, val, val_sizes, moved)


def _by_class(
    rng: Rng,
    dataset: Dataset,
    spec: str,
    options: tuple[Any, ...],
    minimum: int,
    parts: list[np.ndarray],
) -> tuple[list[Owned], int]:
    """Divides the rows of the first part by a rule, and those of the others in
    proportion: flat rows and sizes of each part, and examples moved."""
    classes = dataset.num_classes if dataset.y.ndim == 1 else 1
    y, num_clients = strata(dataset), options[0]
    first, *others = parts
    totals = np.bincount(y[first], minlength=classes)
    _check_enough(num_clients, minimum, len(first))
    counts = _assign(rng, spec, totals, *options)
    _check_enough(num_clients, minimum, int(counts.sum()))
    if left_out := int((counts.sum(axis=0) < totals).sum()):
        logging.warning("%s: %d classes are left out.", spec, left_out)
    counts, moved = fill_up(rng, counts, minimum)
    rows, sizes = _rows(rng, y[first], counts)
    found = [(first[rows], sizes)]
    for part in others:
        tests = np.bincount(y[part], minlength=classes)
        test_counts, more = _official_counts(counts, totals, tests)
        rows, sizes = _rows(rng, y[part], test_counts)
        found.append((part[rows], sizes))
        moved += more
    return found, moved


def _by_column(
    rng: Rng,
    dataset: Dataset,
    column: str,
    num_clients: int | None,
    minimum: int,
    parts: list[np.ndarray],
) -> list[Owned]:
    """Divides all rows by the values of a column, as `_by_class`."""
    # imported here: pandas takes half a second
    import pandas as pd

    choose(f"column of {dataset.name}", column, dataset.columns)
    group, values = pd.factorize(np.asarray(dataset.columns[column]), sort=True)
    if group.min() < 0 or str(values[0]) == "":
        raise InputError(f"{dataset.name}: {column} has no value of some examples.")
    sizes = np.bincount(group[parts[0]], minlength=len(values))
    tests = np.bincount(group[parts[-1]], minlength=len(values))
    eligible = np.flatnonzero((sizes >= minimum) & (tests > 0))
    if not len(eligible):
        raise InputError(
            f"partition=natural:{column} needs a value of at least {minimum} examples, "
            f"the largest has {sizes.max()}."
        )
    count = num_clients or len(eligible)
    if count < len(eligible):
        eligible = np.sort(rng.permutation(eligible)[:count])
    owner = np.full(len(group), -1)
    for part in parts:
        for i, value in enumerate(eligible):
            rows = part[group[part] == value]
            clients = np.arange(i, count, len(eligible))
            owner[rng.permutation(rows)] = clients[_blocks(len(rows), len(clients))]
    found = [_owned(rng, owner, part, count) for part in parts]
    sizes = found[0][1]
    if sizes.min() < minimum or not found[-1][1].all():
        raise InputError(
            f"`clients` must be at most {len(eligible)} or the values larger: client "
            f"{sizes.argmin()} has {sizes.min()} examples, and {minimum} are needed."
        )
    return found


def _owned(rng: Rng, owner: np.ndarray, part: np.ndarray, count: int) -> Owned:
    """Divides the rows of a part by their owners, shuffled within each client."""
    order = rng.permutation(part)
    order = order[np.argsort(owner[order], kind="stable")]
    mine = owner[part][owner[part] >= 0]
    return order[len(part) - len(mine) :], np.bincount(mine, minlength=count)


def _given(
    spec: str, dataset: Dataset, num_clients: int | None, seed: int
) -> Partition:
    """The partition of a file or of a user's function."""
    if spec.startswith("file:"):
        p = load_file(spec.removeprefix("file:"), dataset)
    else:
        made = user_code.call(
            "partition", spec, dataset=dataset, num_clients=num_clients, seed=seed
        )
        with user_code.blamed("partition", spec):
            p = checked_partition(f"partition={spec}", made, dataset)
    if num_clients is not None and len(p.train) != num_clients:
        raise InputError(
            f"`clients` must be {len(p.train)}, as in partition={spec}, got "
            f"{num_clients}."
        )
    return p


def _assign(
    rng: Rng,
    spec: str,
    totals: np.ndarray,
    num_clients: int,
    alpha: float,
    k: int,
    least: int,
) -> np.ndarray:
    """Counts [N, C] by the named rule."""
    rule, given = RULES[spec], {"alpha": alpha, "per_client": k, "least": least}
    used = {x: given[x] for x in inspect.signature(rule).parameters if x in given}
    if "alpha" in used:
        check("alpha", alpha, 1e-6, 1e6)
    if "per_client" in used:
        most = int(totals.sum()) if spec == "shards" else len(totals)
        check("classes_per_client", k, 1, most, whole=True)
    return rule(rng, totals, num_clients, **used)


def _official_counts(
    counts: np.ndarray, train_totals: np.ndarray, test_totals: np.ndarray
) -> tuple[np.ndarray, int]:
    """Test examples per client and class [N, C], in the proportions of the training
    counts, at least one a client; of totals [C] of the data set."""
    totals = counts.sum(axis=0)
    left_out = train_totals > totals
    test_totals = np.where(left_out & (totals == 0), 0, test_totals)
    if test_totals.sum() < len(counts):
        raise InputError(
            f"`clients` must be at most {test_totals.sum()}, the size of the official "
            f"test set, got {len(counts)}. Use test_split=pool."
        )
    by_size = np.broadcast_to(
        counts.sum(axis=1, keepdims=True) / counts.sum(), counts.shape
    )
    # by size: classes seen only in the test set
    shares = np.where(totals > 0, counts / np.maximum(totals, 1), by_size)
    return _one_each(apportion(shares, test_totals), counts)


def _one_each(tests: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Gives clients without a test example one of a class they train on, from the
    client with most of that class."""
    needy = np.flatnonzero(tests.sum(axis=1) == 0)
    for client in needy:
        spare = np.where(tests.sum(axis=1, keepdims=True) > 1, tests, 0)
        own = spare * (counts[client] > 0)
        # where nobody can spare one of these classes, any
        spare = own if own.any() else spare
        donor, label = np.unravel_index(np.argmax(spare), spare.shape)
        tests[[donor, client], label] += [-1, 1]
    return tests, len(needy)


def _rows(rng: Any, y: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Random rows of y for these counts [N, C]: flat [n], client after client and
    shuffled within, and sizes [N]."""
    by_class = rng.permutation(len(y))
    by_class = by_class[np.argsort(y[by_class], kind="stable")]
    # of one client more, the last
    nobodys = np.bincount(y, minlength=counts.shape[1]) - counts.sum(axis=0)
    everything = np.vstack([counts, nobodys])
    # of by_class
    owner = np.repeat(
        np.tile(np.arange(len(everything)), counts.shape[1]), everything.T.ravel()
    )
    order = rng.permutation(len(y))
    order = order[np.argsort(owner[order], kind="stable")]
    return by_class[order[: counts.sum()]], counts.sum(axis=1)


def _floor(x: np.ndarray) -> np.ndarray:
    # 0.75 * 4 = 2.9999999999999996 counts as 3
    return np.floor(x + 1e-9).astype(np.int64)


def _cut(
    flat: np.ndarray, sizes: np.ndarray, tails: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Splits the last `tails` [N] rows of every client off the flat rows."""
    ends = np.repeat(np.cumsum(sizes), sizes)
    is_tail = ends - np.arange(len(flat)) <= np.repeat(tails, sizes)
    return flat[~is_tail], flat[is_tail]


def _check_enough(num_clients: int, minimum: int, n: int) -> None:
    if num_clients * minimum > n:
        raise InputError(
            f"{num_clients} clients need at least {minimum} examples each, "
            f"{num_clients * minimum} in all, got {n}."
        )


def iid(rng: Rng, totals: np.ndarray, num_clients: int) -> np.ndarray:
    """Draws random parts of equal size (sizes differ by at most one)."""
    labels = rng.permutation(np.repeat(np.arange(len(totals)), totals))
    return tally(_blocks(len(labels), num_clients), labels, num_clients, len(totals))


def shards(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """Sorts by class, cuts into N * per_client equal shards and deals them at random
    (McMahan et al. 2017).

    A shard may straddle two classes, so a client holds about `per_client` classes.
    """
    slots = num_clients * per_client
    _check_enough(slots, 1, totals.sum())
    labels = np.repeat(np.arange(len(totals)), totals)
    client_of_shard = rng.permutation(slots) // per_client
    return tally(
        client_of_shard[_blocks(len(labels), slots)], labels, num_clients, len(totals)
    )


def pathological(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """Draws k = `per_client` classes per client, every class in equal parts over floor
    or ceil(N k / C) clients."""
    present = _present(totals, num_clients, per_client)
    capacity = np.full(len(present), num_clients * per_client // len(present))
    extra = num_clients * per_client - capacity.sum()
    capacity[rng.permutation(len(present))[:extra]] += 1
    holds = np.zeros((num_clients, len(totals)))
    noise = rng.gumbel(size=(num_clients, len(present)))
    for client in range(num_clients):
        # The k largest of log(capacity) + Gumbel noise: a draw without replacement,
        # weighted by the remaining capacity.
        with np.errstate(divide="ignore"):
            score = np.log(capacity) + noise[client]
        # A class with as much capacity as clients are left must be taken now, so that
        # the assignment always succeeds.
        score[capacity == num_clients - client] = np.inf
        picked = np.argpartition(-score, per_client - 1)[:per_client]
        capacity[picked] -= 1
        holds[client, present[picked]] = 1
    return apportion(holds / np.maximum(holds.sum(axis=0), 1), totals)


def pathological_subset(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """Draws as `pathological`, but leaves random classes out where N k < C."""
    present, room = np.flatnonzero(totals), num_clients * per_client
    if room < len(present):
        chosen = rng.choice(present, room, replace=False)
        totals = np.where(np.isin(np.arange(len(totals)), chosen), totals, 0)
    return pathological(rng, totals, num_clients, per_client)


def round_robin(rng: Rng, totals: np.ndarray, num_clients: int) -> np.ndarray:
    """Assigns class k mod C to client k in equal parts over its clients (FedDVA's
    CelebA).

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
    """Draws PFLlib's unbalanced pathological split, used by FedCP: consecutive clients
    share classes.

    Class after class goes to the first ceil(N k / C) clients that still want one; all
    but the last of them get a random number in [max(mean / 10, least / C), mean) of its
    examples, the last one the rest.

    Note: PFLlib divides by zero where the clients' wishes run out before the classes;
    here the last classes then have fewer holders, at least one.
    """
    present = _present(totals, num_clients, per_client)
    wanted = np.full(num_clients, per_client)
    counts = np.zeros((num_clients, len(totals)), np.int64)
    for i, label in enumerate(present):
        later = len(present) - i - 1
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
    """Draws the "practical" split of FedCP and PFLlib: per class, shares over clients ~
    Dir(alpha).

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
    """Draws shares over clients ~ Dir(alpha) for every class; client sizes vary
    freely."""
    return apportion(
        softmax(_log_gamma(rng, alpha, (num_clients, len(totals))), axis=0), totals
    )


def dirichlet_total(
    rng: Rng, totals: np.ndarray, num_clients: int, alpha: float
) -> np.ndarray:
    """Draws FedDVA's split: shares over clients ~ Dir(alpha / N) for every class.

    alpha is the total concentration; 10,000 gives the balanced case.
    """
    return dirichlet_class(rng, totals, num_clients, alpha / num_clients)


def dirichlet_hsu(
    rng: Rng, totals: np.ndarray, num_clients: int, alpha: float
) -> np.ndarray:
    """Draws equal client sizes with class shares of each client ~ Dir(alpha p) (Hsu, Qi
    and Brown 2019).

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


def lognormal(
    rng: Rng, totals: np.ndarray, num_clients: int, per_client: int
) -> np.ndarray:
    """Draws pFedMe's split: client k holds the classes k, ..., k + L - 1 modulo C, L =
    `per_client`, and sizes vary by lognormal shares.

    Half of a class is divided equally over its holders, half by their shares of
    lognormal(0, 2) draws. With fewer clients than classes the first classes of clients
    are spread evenly.

    Note: pFedMe has 300 to 600 examples (twice as many with up to 20 clients) in place
    of the equal half, and assigns examples while they last.
    """
    present = _present(totals, num_clients, per_client)
    first = np.arange(num_clients)
    if num_clients < len(present):
        first = first * len(present) // num_clients
    held = present[(first[:, None] + np.arange(per_client)) % len(present)]
    holds = np.zeros((num_clients, len(totals)))
    np.put_along_axis(holds, held, 1.0, axis=1)
    drawn = holds * rng.lognormal(0, 2, holds.shape)
    parts = [x / np.maximum(x.sum(axis=0), 1e-300) for x in (holds, drawn)]
    return apportion((parts[0] + parts[1]) / 2, totals)


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
    """Moves random examples from the largest clients to those with fewer than
    `minimum`.

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
            # a donor has more than the mean, hence more than the minimum
            size, donor = heap[0]
            heapq.heapreplace(heap, (size + 1, donor))
            example = rng.integers(sizes[donor])
            label = np.searchsorted(np.cumsum(counts[donor]), example, side="right")
            counts[donor, label] -= 1
            counts[needy, label] += 1
            sizes[donor] -= 1
            sizes[needy] += 1
            moved += 1
    return counts, moved


def _present(totals: np.ndarray, num_clients: int, per_client: int) -> np.ndarray:
    """The classes with examples, if the clients can hold them."""
    present = np.flatnonzero(totals)
    check("classes_per_client", per_client, 1, len(present))
    if num_clients * per_client < len(present):
        raise InputError(
            f"`classes_per_client` must be at least "
            f"{math.ceil(len(present) / num_clients)} for {len(present)} classes and "
            f"{num_clients} clients, got {per_client}."
        )
    return present


def _blocks(num_items: int, num_blocks: int) -> np.ndarray:
    """[num_items] block numbers 0, 0, ..., 1, 1, ...: sizes differ by at most one."""
    return np.arange(num_items) * num_blocks // num_items


def _log_gamma(
    rng: Rng, alpha: float | np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Logarithms of Gamma(alpha) draws, whose softmax over any subset is Dirichlet.

    In logarithms because at alpha = 0.01 most draws underflow to zero; by Gamma(a) =
    Gamma(a + 1) * U^(1 / a).
    """
    return (
        np.log(rng.standard_gamma(np.add(alpha, 1), size=shape))
        + np.log1p(-rng.random(shape)) / alpha
    )


RULES: dict[str, Callable[..., np.ndarray]] = {
    rule.__name__: rule
    for rule in (
        iid,
        shards,
        pathological,
        pathological_subset,
        round_robin,
        label_groups,
        dirichlet,
        dirichlet_class,
        dirichlet_total,
        dirichlet_hsu,
        lognormal,
    )
}


def rules_of(argument: str) -> list[str]:
    """Returns the names of the rules that take an argument."""
    return [
        name
        for name, rule in RULES.items()
        if argument in inspect.signature(rule).parameters
    ]
