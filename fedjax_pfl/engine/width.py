"""Clients per vmapped batch, chosen by the platform and the networks without timing.

On a CPU the numbers were measured; on accelerators they follow the compilers' estimates
of `benchmarks.ahead` (docs/performance.md).
"""

import jax

from fedjax_pfl.kernels.packed import LANES
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array, Model, Task

SMALL = 50_000  # parameters
# per platform: of small networks without convolutions, of all others; on a TPU the
# second is the least of a network that does not fill half of the lanes
WIDTHS = {"cpu": (4, 1), "gpu": (128, 128), "tpu": (64, 4)}


def automatic_width(task: Task, clients: int, devices: int = 1) -> int:
    """Returns the clients to train at once on each device.

    On a TPU as many clients of a convolutional network as fill the lanes with the
    channels of its narrowest hidden layer, or one where these fill half of them.
    Results do not depend on the width beyond rounding.

    Args:
      clients: S, the clients of a round.
      devices: over which they are spread.
    """
    small, other = WIDTHS[platform()]
    kernels = [_leaves(model) for model in task.models]
    if all(map(_is_small, kernels)):
        width = small
    elif platform() == "tpu":
        channels = min(map(_narrowest, kernels))
        # the weights of one ResNet-18 stay on chip while it is trained
        width = 1 if 2 * channels >= LANES else max(other, LANES // channels)
    else:
        width = other
    return min(width, -(-clients // devices))


def _leaves(model: Model) -> list[Array]:
    return jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))


def _is_small(leaves: list[Array]) -> bool:
    """True for less than SMALL parameters and no convolution."""
    return sum(x.size for x in leaves) < SMALL and all(x.ndim < 4 for x in leaves)


def _narrowest(leaves: list[Array]) -> int:
    """The least channels out of a convolution; without one, for the largest width."""
    channels = (x.shape[-1] for x in leaves if x.ndim == 4)
    return min(channels, default=LANES // WIDTHS["tpu"][0])
