"""Differential privacy of clients: clipped uploads, and Gaussian noise on their sum.

References: McMahan, Ramage, Talwar & Zhang, Learning differentially private recurrent
language models (ICLR 2018, arXiv 1710.06963); Andrew, Thakkar, McMahan & Ramaswamy,
Differentially private learning with adaptive clipping (NeurIPS 2021, arXiv 1905.03871).
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import keys, local_training, trees
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.types import Array, Client, PyTree, Task, Upload
from fedjax_pfl.uploads.chain import option, random_like


class Program(Protocol):
    """A `Program`, as far as the accountant reads it."""

    @property
    def setting(self) -> Any: ...

    @property
    def traced(self) -> dict[str, float]: ...


SAMPLINGS = ("fixed", "poisson")
MOST_NOISE = 2.0**14  # that is tried for an epsilon
# of the number of clipped clients, in clients of the cohort (Andrew et al., 3.1)
COUNT_NOISE = 1 / 20


@option("private")
def private(
    clip: Annotated[float, Gt(0)] = 1.0,
    noise: Annotated[float, Ge(0)] = 1.0,
    *,
    adaptive: bool = False,
    quantile: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    rate: Annotated[float, Ge(0)] = 0.2,
) -> Upload:
    """Clips each client's update and makes their mean noisy: client-level differential
    privacy, of which `epsilon` gives the guarantee.

    An update is clipped to the norm C over all its leaves. Updates are averaged with
    equal weights over the m active clients, and noise of standard deviation noise C / m
    is added to every number of the mean. A client whose weight in the method is 0 sends
    zeros. Losses, scores and `dp_clipped` are those of a simulation: they are exact,
    and not covered.

    Args:
      clip: C in (0, inf); with `adaptive` that of the first round.
      noise: standard deviation of the noise on the sum, in units of C, in [0, inf).
      adaptive: moves C towards a quantile of the norms of the updates: C exp(-rate (b -
        quantile)), where b is the fraction of updates within C with noise of standard
        deviation 1/20 (Andrew et al.). The noise on the sum is increased, so that both
        together cost what `noise` costs; `noise` must be below m / 10.
      quantile: fraction of clients left unclipped, in [0, 1].
      rate: of the norm's moves, in [0, inf).
    """

    def init(like: PyTree) -> tuple[PyTree, PyTree]:
        return jnp.asarray(clip, jnp.float32), ()

    def client(
        c: Client, update: PyTree, norm: Array, row: PyTree
    ) -> tuple[PyTree, PyTree, Array]:
        length = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), update))
        fits = length <= norm
        scaled = optax.tree.scale(norm / jnp.where(fits, 1, length), update)
        return (
            trees.choose(fits, update, optax.tree.cast_like(scaled, update)),
            row,
            fits,
        )

    def server(
        key: Array, mean: PyTree, fits: Array, active: Array, norm: Array
    ) -> tuple[PyTree, Array, dict[str, Array]]:
        count = jnp.sum(active)
        some = jnp.maximum(count, 1)
        scale = jnp.where(count > 0, multiplier(count) * norm / some, 0)
        draw = random_like(keys.fold(key, keys.Server.NOISE), mean)
        noisy = optax.tree.cast_like(optax.tree.add_scale(mean, scale, draw), mean)
        within = jnp.sum(fits & active) / some
        shown = {"dp_clip": norm, "dp_clipped": 1 - within}
        if adaptive:
            z = jax.random.normal(keys.fold(key, keys.Server.QUANTILE), (), jnp.float32)
            seen = within + jnp.where(noise > 0, COUNT_NOISE * z, 0)
            moved = norm * jnp.exp(-rate * (seen - quantile))
            norm = jnp.where(count > 0, moved, norm)
        return noisy, norm, shown

    def multiplier(count: Array) -> Array:
        # NaN if the count of clipped clients alone costs more than `noise`
        z = jnp.asarray(noise, jnp.float32)
        if not adaptive:
            return z
        spread = 2 * COUNT_NOISE * count
        return z / jnp.sqrt(1 - (z / jnp.maximum(spread, 1e-9)) ** 2)

    def equal(weight: Array, active: Array) -> Array:
        return active

    def enough(task: Task) -> None:
        least = task.cohort_sizes[0]
        if adaptive and noise >= 2 * COUNT_NOISE * least:
            raise InputError(
                f"Adaptive clipping needs a `noise` below a tenth of the clients of a "
                f"round, {least} at least, got {noise}."
            )

    return Upload(init, client, server, equal, check=enough)


class PerExample(NamedTuple):
    """The rule of DP-SGD, as `Task.per_example`: gradients clipped per example, and
    Gaussian noise on their sum. Made by `per_example`."""

    clip: float
    noise: float

    def __call__(self, key: Array, gradients: PyTree, mask: Array) -> PyTree:
        """Returns the noisy mean of a batch's gradients [B, ...]."""
        leaves, structure = jax.tree.flatten(gradients)
        valid = [jnp.where(trees.expand(mask, x.ndim), x, 0) for x in leaves]
        total, _ = optax.per_example_global_norm_clip(valid, self.clip)
        draws = random_like(key, total)
        count = jnp.maximum(jnp.sum(mask), 1)
        noisy = [
            (x + self.noise * self.clip * z) / count
            for x, z in zip(total, draws, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy)


def per_example(clip: float, noise: float) -> PerExample:
    """Returns the rule of DP-SGD, of which `guarantee` gives the guarantee.

    It needs a method whose `Method.trainings` is given, and no `mix`.

    Args:
      clip: largest L2 norm of the gradient of one example.
      noise: standard deviation of the noise on the sum, in clipping norms.
    """
    check("clip", clip, 0, math.inf, open_low=True)
    check("noise", noise, 0, math.inf)
    return PerExample(clip, noise)


class Guarantee(NamedTuple):
    """(epsilon, delta)-differential privacy of clients or examples."""

    unit: str  # "clients" or "examples"
    epsilon: float
    delta: float
    sampling: str  # as of `guarantee`

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:.3g} of {self.unit}, delta {self.delta:.2g}, "
            f"{self.sampling} sampling"
        )


def guarantee(
    program: Program,
    rounds: int,
    *,
    delta: float | None = None,
    sampling: Literal["fixed", "poisson"] = "fixed",
) -> Guarantee:
    """Computes the differential privacy of a program's rounds, by the Renyi accountant
    of dp-accounting.

    Of examples it is the largest epsilon over the clients, each of which is taken to be
    in all rounds. Each step is taken to draw every example of a client independently
    with probability B / n (Poisson), as is usual for DP-SGD: batches of shuffled
    examples have no better bound that is known.

    Args:
      program: with the option `private`, or a task with `per_example`.
      rounds: communication rounds so far.
      delta: default n^-1.1, n the number of clients, or of the examples of the largest
        client.
      sampling: of clients. "fixed": drawn without replacement as in a run, and one
        client may be replaced by another, which moves the sum by two clipping norms
        (Wang, Balle & Kasiviswanathan, 2019). "poisson": as if each client took part
        with probability cohort / N, and one client may be added or removed (Mironov,
        Talwar & Zhang, 2019), as most papers report.

    Returns:
      the guarantee; epsilon is inf without noise.

    Raises:
      InputError: the program is not private.
    """
    setting = program.setting
    choose("sampling", sampling, SAMPLINGS)
    noise = program.traced.get("private.noise")
    if setting is not None and noise is not None:
        return of_clients(
            setting.task, rounds, noise=noise, delta=delta, sampling=sampling
        )
    rule = None if setting is None else setting.task.per_example
    if setting is None or not isinstance(rule, PerExample):
        raise InputError(
            "The program has no differential privacy: use `uploads.private` or "
            "`Task.per_example`."
        )
    task = setting.task
    sizes = np.asarray(task.sizes)
    steps, _ = local_training.planned(task, sizes)
    delta = float(np.max(sizes)) ** -1.1 if delta is None else delta
    found = [
        _epsilon(
            rounds * int(count) * setting.trainings,
            _event(rule.noise, int(n), min(task.batch_size, int(n)), "poisson"),
            delta,
        )
        for n, count in {*zip(sizes.tolist(), steps.tolist(), strict=True)}
        if count
    ]
    return Guarantee("examples", max(found, default=0.0), delta, "poisson")


def of_clients(
    task: Task,
    rounds: int,
    *,
    noise: float,
    delta: float | None = None,
    sampling: str = "fixed",
) -> Guarantee:
    """Computes the guarantee of `private` with this noise on a task; the arguments are
    those of `guarantee`.

    Of a range of participation the largest cohort counts.
    """
    n, cohort = task.num_clients, max(task.cohort_sizes)
    delta = n**-1.1 if delta is None else delta
    event = _event(noise, n, cohort, sampling)
    return Guarantee("clients", _epsilon(rounds, event, delta), delta, sampling)


def noise_for(
    target: float,
    task: Task,
    rounds: int,
    *,
    delta: float | None = None,
    sampling: str = "fixed",
) -> float:
    """Computes the smallest noise of `private`, to 1e-3, whose epsilon after some
    rounds is at most `target`; the other arguments are those of `guarantee`."""
    check("epsilon", target, 0, math.inf, open_low=True)
    n, cohort = task.num_clients, max(task.cohort_sizes)
    return _least_noise(target, n, cohort, rounds, delta or n**-1.1, sampling)


@functools.lru_cache  # a run makes its program several times
def _least_noise(
    target: float, n: int, cohort: int, rounds: int, delta: float, sampling: str
) -> float:
    def enough(noise: float) -> bool:
        return _epsilon(rounds, _event(noise, n, cohort, sampling), delta) <= target

    high = 1.0
    while not enough(high):
        high *= 2
        if high > MOST_NOISE:
            raise InputError(
                f"An epsilon of {target:g} cannot be reached with delta {delta:.2g}: "
                "more noise does not lower it."
            )
    low = 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _epsilon(count: int, event: tuple[Callable[[], Any], Any], delta: float) -> float:
    """Returns epsilon after `count` events of `_event`."""
    if not count:
        return 0.0
    accountant, one = event
    if one is None:
        return math.inf
    return float(accountant().compose(one, count).get_epsilon(delta))


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


def _event(
    noise: float, clients: int, cohort: int, sampling: str
) -> tuple[Callable[[], Any], Any]:
    """Returns the accountant of one release, and the release; None without noise."""
    dp, q = accounting(), cohort / clients
    if not noise:
        return dp.rdp.RdpAccountant, None
    if sampling == "poisson":
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(noise))
        return dp.rdp.RdpAccountant, event
    relation = dp.NeighboringRelation.REPLACE_ONE
    event = dp.GaussianDpEvent(noise / 2)
    if cohort < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    return lambda: dp.rdp.RdpAccountant(neighboring_relation=relation), event
