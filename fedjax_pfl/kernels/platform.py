"""The platform for which kernels are traced."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from fedjax_pfl.errors import choose

PLATFORMS = ("cpu", "gpu", "tpu")
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "platform", default=None
)


def platform() -> str:
    """Returns the platform chosen by `on`, else that of JAX's default backend."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def on(name: str) -> Iterator[None]:
    """Traces the kernels of another platform inside the `with` block.

    Args:
      name: cpu, gpu or tpu.

    Raises:
      InputError: for another name.
    """
    token = _platform.set(choose("platform", name, PLATFORMS))
    try:
        yield
    finally:
        _platform.reset(token)
