"""How an experiment is laid out on this machine: the form of convolutions, devices,
width, and whether it has room."""

import jax

from experiments.build import Experiment
from experiments.recorded import Devices, Layout
from fedjax_pfl import simulate
from fedjax_pfl.engine import memory, placement
from fedjax_pfl.errors import check
from fedjax_pfl.models import layers


def choose(
    experiment: Experiment, spread: int, recorded: Layout | None = None
) -> Layout:
    """How an experiment is laid out over `spread` devices: as its settings say, and
    where they say auto as is recorded, or chosen here.

    Args:
      recorded: the layout of the run that goes on, or of another seed.
    """
    conv, given = experiment.config.conv, experiment.config.width
    if conv == "auto":
        conv = recorded.conv if recorded else layers.form("auto")
    if given != "auto":
        width = int(given)
    elif recorded:
        width = recorded.width
    else:
        task = experiment.in_form(experiment.task, conv)
        width = placement.automatic_width(task, *_part(experiment, spread))
    # more clients at once there are not
    width = min(width, max(experiment.task.cohort_sizes))
    return Layout(
        width,
        conv,
        Devices(jax.default_backend(), jax.devices()[0].device_kind, spread),
    )


def program(experiment: Experiment, laid: Layout) -> simulate.Program:
    """The pure functions of an experiment in a layout."""
    return experiment.program(laid.width, laid.devices.count, laid.conv)


def say(laid: Layout, chosen: bool) -> str:
    """A layout in words; `chosen`: its width was not given."""
    devices, how = laid.devices, " (chosen here; --width=N sets it)" if chosen else ""
    several = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"width {laid.width}{how} on {devices.count} x {devices.kind}{several}"


def check_memory(found: memory.Memory, experiment: Experiment, laid: Layout) -> None:
    """Raises NoRoomError if the compiled run takes more memory than there is, with what
    would take less."""
    cohort, width, spread = (
        max(experiment.task.cohort_sizes),
        laid.width,
        laid.devices.count,
    )
    ways = (
        [f"less than --width={width}"] if min(width, -(-cohort // spread)) > 1 else []
    )
    if jax.default_backend() == "cpu":
        ways += [f"less than --devices={spread}"] if spread > 1 else []
    elif (
        cohort < experiment.task.num_clients
        and experiment.config.client_memory == "device"
    ):
        ways += ["--client_memory=host"]
    memory.check(
        found,
        "take "
        f"{' or '.join(ways) if ways else 'fewer --clients, or a smaller --model'}",
    )


def _part(experiment: Experiment, spread: int) -> tuple[int, int]:
    """What process 0 tries with, for all: its part of the clients of a round and of the
    devices."""
    processes = jax.process_count()
    return -(-max(experiment.task.cohort_sizes) // processes), spread // processes


def devices(count: str, experiment: Experiment, recorded: int | None = None) -> int:
    """How many devices to use: as given, or on a resume as recorded, or as many as have
    clients to train.

    Of several processes each has equally many, so their number is rounded up.

    Raises:
      InputError: there are not that many, or they cannot be shared by the processes.
    """
    if count not in ("auto", "all"):
        check(
            "devices",
            int(count),
            1,
            jax.device_count(),
            why=f"JAX finds so many here ({jax.default_backend()})",
        )
        placement.take(int(count))
        return int(count)
    most = min(jax.device_count(), max(experiment.task.cohort_sizes))
    wanted = min(most, recorded) if recorded and count == "auto" else most
    return -(-wanted // jax.process_count()) * jax.process_count()
