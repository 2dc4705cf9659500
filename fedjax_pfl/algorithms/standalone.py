"""Local: every client trains alone from the common start; the floor that federation has
to beat."""

from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import BODY_AND_HEAD, partial_averaging, split
from fedjax_pfl.types import Method, Task


@register("local", several_architectures=True, targets=True, trainings=1)
def local(task: Task) -> Method:
    """Trains each participant's own model; nothing is sent."""
    return partial_averaging(task, split(task, BODY_AND_HEAD))
