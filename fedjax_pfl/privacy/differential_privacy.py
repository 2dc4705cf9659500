"""Differential privacy of clients: clipped uploads, and Gaussian noise on their sum.

References: McMahan, Ramage, Talwar & Zhang, Learning differentially private recurrent
language models (ICLR 2018, arXiv 1710.06963); Andrew, Thakkar, McMahan & Ramaswamy,
Differentially private learning with adaptive clipping (NeurIPS 2021, arXiv 1905.03871).
"""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import architectures, keys, local_training, trees, uploads
from fedjax_pfl.engine import exposure, program, validate
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.hyperparameters import method_name, shared
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    PyTree,
    State,
    Task,
)

SAMPLINGS = ("fixed", "poisson")
# of the number of clipped clients, in clients of the cohort (Andrew et al., 3.1)
COUNT_NOISE = 1 / 20


class Private(NamedTuple):
    """State.server of a method with differential privacy."""

    method: PyTree  # the method's own
    clip: Array  # [], the clipping norm of the next round


class Options(NamedTuple):
    """Hyperparameters of client-level differential privacy.

    Args:
      dp_noise: standard deviation of the noise on the sum of the uploads, in clipping
        norms, in [0, inf).
      dp_clip: largest L2 norm of a client's update in (0, inf); with adaptive clipping
        that of the first round.
      dp_quantile: adaptive clipping: the fraction of clients left unclipped, in [0, 1].
      dp_rate: adaptive clipping: rate at which the norm moves, in [0, inf).
    """

    dp_noise: Annotated[float, Ge(0)] = 1.0
    dp_clip: Annotated[float, Gt(0)] = 1.0
    dp_quantile: Annotated[float, Interval(ge=0, le=1)] = 0.5
    dp_rate: Annotated[float, Ge(0)] = 0.2


def private(
    factory: Callable[..., Algorithm] | str, *, adaptive: bool = False
) -> Callable[..., Algorithm]:
    """Returns the method with client-level differential privacy of its mean.

    The update of each active client, upload - default, is clipped to the norm C over
    all its leaves. The updates are averaged with equal weights over the m active
    clients, and noise of standard deviation dp_noise C / m is added to every number of
    the mean. A client whose weight in the method is 0 sends no update. `epsilon` gives
    the guarantee. Losses, scores and `dp_clipped` are those of a simulation: they are
    exact, and not covered.

    Args:
      factory: a method or its name.
      adaptive: moves C towards a quantile of the norms of the updates: C exp(-dp_rate
        (b - dp_quantile)), where b is the fraction of updates within C with noise of
        standard deviation 1/20. The noise on the sum is increased, so that both
        together cost what dp_noise costs; dp_noise must be below m / 10.

    Returns:
      a factory with the hyperparameters of `Options`, all traced.

    Raises:
      InputError: data of clients reach the server or other clients by a way that is
        not covered. The message names the method and the way.
    """
    factory = validate.method(factory)
    name = method_name(factory)

    @functools.wraps(factory)
    def make(task: Task, *, on: Options, **hparams: Any) -> Algorithm:
        if task.sampling is not None:
            raise InputError(
                f"{name} cannot have differential privacy: its epsilon needs clients "
                "that are sampled uniformly, got `sampling`."
            )
        if isinstance(task.lr, numbers.Real):  # else in a trace
            check_covered(factory, task, hparams)
        return _private(name, factory(task, **hparams), on, adaptive)

    made = shared(Options)(make)
    made.__name__ = name
    return made


def check_covered(
    factory: Callable[..., Algorithm], task: Task, hparams: dict[str, Any]
) -> None:
    """Raises InputError unless all that clients send is one upload of `Cohort.mean`."""
    name, found = (
        method_name(factory),
        exposure.exposed(program.parts, factory, task, hparams),
    )
    refused = f"{name} cannot have differential privacy: "
    if not any(jax.tree.leaves(found.uploads)):
        raise InputError(f"{refused}clients send nothing through cohort.mean.")
    if found.server:
        raise InputError(
            f"{refused}the server's {found.server[0]!r} depends on clients' data "
            "outside the upload of cohort.mean."
        )
    if len(found.uploads) > 1:
        raise InputError(f"{refused}it averages {len(found.uploads)} times a round.")
    sent = max(trees.size(upload) for upload in found.uploads[0])
    if found.encrypted or found.up > sent:
        raise InputError(
            f"{refused}a client sends {found.up:,} numbers, of which cohort.mean "
            f"averages {sent:,}."
        )


def _private(name: str, method: Algorithm, on: Options, adaptive: bool) -> Algorithm:
    def init(key: Array) -> State:
        state = method.init(key)
        clip = jnp.asarray(on.dp_clip, jnp.float32)
        return State(Private(state.server, clip), state.clients)

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        clip, within = state.server.clip, []

        def mean(client: Any, *rows: PyTree, **options: Any) -> Any:
            noise = keys.fold(key, keys.Server.NOISE)
            result, fits = _noisy_mean(
                name, cohort, noise, clip, _multiplier(on, cohort, adaptive), client,
                rows, **options,
            )  # fmt: skip
            within.append(fits)
            return result

        through = uploads.Through(cohort, mean)
        inner = State(state.server.method, state.clients)
        new, metrics = method.round(key, inner, through)
        uploads.must_send(name, through.means)
        count = jnp.maximum(jnp.sum(cohort.active), 1)
        fit = jnp.sum(within[0] & cohort.active) / count
        shown = {"dp_clip": clip, "dp_clipped": 1 - fit}
        if adaptive:
            draw = jax.random.normal(keys.fold(key, keys.Server.QUANTILE))
            seen = fit + jnp.where(on.dp_noise > 0, COUNT_NOISE * draw, 0)
            moved = clip * jnp.exp(-on.dp_rate * (seen - on.dp_quantile))
            clip = jnp.where(jnp.any(cohort.active), moved, clip)
        metrics = metrics._replace(server=metrics.server | shown)
        return State(Private(new.server, clip), new.clients), metrics

    return uploads.over(method, init=init, round=round)


def _multiplier(on: Options, cohort: Cohort, adaptive: bool) -> Array:
    """Returns the noise on the sum in clipping norms; NaN if the count of clipped
    clients alone costs more than dp_noise."""
    z = jnp.asarray(on.dp_noise, jnp.float32)
    if not adaptive:
        return z
    count = 2 * COUNT_NOISE * jnp.sum(cohort.active)
    return z / jnp.sqrt(1 - (z / jnp.maximum(count, 1e-9)) ** 2)


def _noisy_mean(
    name: str,
    cohort: Cohort,
    key: Array,
    clip: Array,
    multiplier: Array,
    client: uploads.Sends,
    rows: tuple[PyTree, ...],
    *,
    default: PyTree,
    weight: PyTree = None,
    phase: int | None = 0,
    combine: Any = None,
) -> tuple[tuple[PyTree, tuple[PyTree, ...]], Array]:
    """Returns the result of `Cohort.mean`, and which updates were within the norm,
    [S]."""
    _check_mean(name, weight, default, combine)
    taken = cohort.active if weight is None else jax.tree.leaves(weight)[0] > 0

    def clipped(c: Client, taken: Array, *rows: PyTree) -> tuple[PyTree, ...]:
        fits = jnp.bool(True)

        def change(c: Client, row: PyTree, upload: PyTree, default: PyTree) -> PyTree:
            nonlocal fits
            update = jax.tree.map(jnp.subtract, upload, default)
            norm = optax.tree.norm(
                jax.tree.map(lambda x: x.astype(jnp.float32), update)
            )
            fits = norm <= clip
            scaled = optax.tree.cast_like(
                optax.tree.scale(clip / jnp.where(fits, 1, norm), update), upload
            )
            sent = trees.choose(fits, upload, trees.add(default, scaled))
            fits |= ~taken
            return trees.choose(taken, sent, default)

        results = uploads.sending(client, change, default)(c, (), *rows)
        return *results, fits

    total, (*rest, fits) = cohort.mean(
        clipped, taken, *rows, default=default, phase=phase
    )
    count = jnp.sum(cohort.active)
    scale = jnp.where(count > 0, multiplier * clip / jnp.maximum(count, 1), 0)
    noisy = optax.tree.add_scale(total, scale, uploads.random_like(key, total))
    return (optax.tree.cast_like(noisy, total), tuple(rest)), fits


def _check_mean(name: str, weight: PyTree, default: PyTree, combine: Any) -> None:
    refused = f"{name} cannot have differential privacy: "
    if combine is not None:
        raise InputError(f"{refused}its noise needs the mean, got a robust rule.")
    if architectures.is_grouped(default):
        raise InputError(f"{refused}it averages within each architecture.")
    leaves = jax.tree.leaves(weight)
    if len(leaves) > 1 or any(jnp.ndim(x) > 1 for x in leaves):
        raise InputError(f"{refused}its weights depend on the classes of a client.")
    if any("stats" in path.split("/") for path, _ in trees.named_shapes(default)):
        raise InputError(
            f"{refused}it averages running statistics, which noise makes negative: "
            "use bn_stats='local'."
        )


def per_example(clip: float, noise: float) -> Callable[[Array, PyTree, Array], PyTree]:
    """Returns the rule of DP-SGD, as `Task.per_example`: gradients clipped per example,
    and Gaussian noise on their sum.

    `simulate.program` refuses a method whose server sees examples by another way.
    Running statistics are not covered. `example_epsilon` gives the guarantee.

    Args:
      clip: largest L2 norm of the gradient of one example.
      noise: standard deviation of the noise on the sum, in clipping norms.
    """
    check("clip", clip, 0, math.inf, open_low=True)
    check("noise", noise, 0, math.inf)

    def rule(key: Array, gradients: PyTree, mask: Array) -> PyTree:
        leaves, structure = jax.tree.flatten(gradients)
        valid = [jnp.where(trees.expand(mask, x.ndim), x, 0) for x in leaves]
        total, _ = optax.per_example_global_norm_clip(valid, clip)
        draws = uploads.random_like(key, total)
        count = jnp.maximum(jnp.sum(mask), 1)
        noisy = [
            (x + noise * clip * z) / count for x, z in zip(total, draws, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy)

    return rule


def example_epsilon(
    task: Task,
    rounds: int,
    *,
    noise: float,
    delta: float | None = None,
    trainings: int = 1,
) -> float:
    """Computes the epsilon of (epsilon, delta)-differential privacy of examples, the
    largest over the clients.

    Each client is taken to be in all rounds, and each step to draw every example of a
    client independently with probability B / n (Poisson), as is usual for DP-SGD:
    batches of shuffled examples have no better bound that is known.

    Args:
      noise: as of `per_example`.
      delta: default n^-1.1 of the client with the most examples.
      trainings: runs of the task's local work in one round of the method, 2 for Ditto.
    """
    sizes = np.asarray(task.sizes)
    steps, _ = local_training.planned(task, sizes)
    delta = float(np.max(sizes)) ** -1.1 if delta is None else delta
    of = {(int(n), int(count)) for n, count in zip(sizes, steps, strict=True) if count}
    options: dict[str, Any] = {"delta": delta, "sampling": "poisson", "noise": noise}
    return max(
        epsilon(rounds * count * trainings, clients=n, cohort=min(task.batch_size, n),
                **options)
        for n, count in of
    )  # fmt: skip


def accounting() -> Any:
    """Returns the module dp_accounting.

    Raises:
      InputError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise InputError(
            f"epsilon needs dp-accounting, which cannot be imported ({error}): "
            "pip install -e '.[privacy]' adds it."
        ) from None
    return dp_accounting


def epsilon(
    rounds: int,
    *,
    noise: float,
    clients: int,
    cohort: int,
    delta: float | None = None,
    sampling: str = "fixed",
) -> float:
    """Computes the epsilon of (epsilon, delta)-differential privacy of clients.

    Args:
      rounds: communication rounds so far.
      noise: standard deviation of the noise on the sum of the updates, in clipping
        norms (`dp_noise`).
      clients: N.
      cohort: clients in a round, the largest number if it is drawn.
      delta: default N^-1.1.
      sampling: "fixed", clients drawn without replacement as in a run: one client may
        be replaced by another, which moves the sum by two clipping norms (Wang, Balle &
        Kasiviswanathan, 2019). "poisson": as if each client took part with
        probability cohort / N, and one client may be added or removed (Mironov, Talwar
        & Zhang, 2019), as most papers report.

    Returns:
      epsilon by the Renyi accountant of dp-accounting; inf without noise.
    """
    if not noise or not rounds:
        return math.inf if rounds else 0.0
    delta = clients**-1.1 if delta is None else delta
    accountant, event = _event(noise, clients, cohort, sampling)
    return float(accountant().compose(event, rounds).get_epsilon(delta))


def noise_for(
    target: float,
    rounds: int,
    *,
    clients: int,
    cohort: int,
    delta: float | None = None,
    sampling: str = "fixed",
) -> float:
    """Computes the smallest `dp_noise`, to 1e-3, whose `epsilon` after some rounds is
    at most `target`; the other arguments are those of `epsilon`."""
    if not target > 0:
        raise InputError(f"`target` must be in (0, inf), got {target}.")
    options: dict[str, Any] = {"clients": clients, "cohort": cohort}
    options |= {"delta": delta, "sampling": sampling}
    high = 1.0
    while epsilon(rounds, noise=high, **options) > target:
        high *= 2
    low = 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        enough = epsilon(rounds, noise=middle, **options) <= target
        low, high = (low, middle) if enough else (middle, high)
    return high


def _event(
    noise: float, clients: int, cohort: int, sampling: str
) -> tuple[Callable[[], Any], Any]:
    dp, q = accounting(), cohort / clients
    if choose("sampling", sampling, SAMPLINGS) == "poisson":
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(noise))
        return dp.rdp.RdpAccountant, event
    relation = dp.NeighboringRelation.REPLACE_ONE
    event = dp.GaussianDpEvent(noise / 2)
    if cohort < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    return lambda: dp.rdp.RdpAccountant(neighboring_relation=relation), event
