"""What software and which machine made a run, and how long it compiled."""

import contextlib
import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import fedjax_pfl
from fedjax_pfl.errors import InputError

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# which random numbers a key gives
_DRAWS = ("jax_default_prng_impl", "jax_threefry_partitionable")
_OPTIONS = ("jax_enable_x64", *_DRAWS)


def versions() -> dict[str, Any]:
    """Versions of what decides the numbers, JAX's options that do, the device, and the
    git revision of the source, if it has one."""
    return {
        "fedjax_pfl": fedjax_pfl.__version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        **{name: getattr(jax.config, name) for name in _OPTIONS},
        "platform": platform.platform(),
        "device": (
            f"{jax.device_count()} x {jax.devices()[0].device_kind} "
            f"({jax.default_backend()})"
        ),
    }


def _git_revision() -> str | None:
    package, experiments = Path(fedjax_pfl.__file__).parent, Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *words],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    try:
        changes = git("status", "--porcelain", "--", ".", str(experiments)).strip()
        return git("rev-parse", "HEAD").strip() + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def changed(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs in a way that may change a result, most often in its last bits."""
    # of a version that did not record them
    earlier = [name for name in _OPTIONS if name not in recorded]
    names = [name for name in now if name not in ("platform", "python", *earlier)]
    return [
        f"{name} {recorded.get(name)} -> {now[name]}"
        for name in names
        if recorded.get(name) != now[name]
    ]


def check_draws(recorded: dict[str, Any]) -> None:
    """Raises InputError where a key would give other random numbers than it gave the
    run so far."""
    for name in _DRAWS:
        if recorded.get(name, now := getattr(jax.config, name)) != now:
            raise InputError(
                f"{name} was {recorded[name]} when the run began and is {now}: the "
                "rest of it would draw other random "
                f"numbers, so set {name.upper()}={recorded[name]}."
            )


@contextlib.contextmanager
def compile_clock() -> Iterator[Callable[[], float]]:
    """Counts, within the block, the seconds in which JAX traced or compiled; the spans
    nest, so their union counts."""
    spans: list[tuple[float, float]] = []

    def remember(event: str, start_time: float, end_time: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            spans.append((start_time, end_time))

    def seconds() -> float:
        total, until = 0.0, 0.0
        for start, end in sorted(spans):
            total += max(end - max(start, until), 0)
            until = max(until, end)
        return total

    jax.monitoring.register_event_time_span_listener(remember)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_time_span_listener(remember)
