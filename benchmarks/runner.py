"""One method, compiled, round by round."""

import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import report
from fedjax_pfl import simulate
from fedjax_pfl.types import Context


class Runner:
    """One method, compiled; each call runs a round from where the last one ended."""

    def __init__(self, factory, task, federation, width: int, devices: int, **more):
        given = {"width": width, "devices": devices} | more
        self.program = simulate.program(factory, task, **given)
        self.federation = federation
        if self.program.mesh is not None:
            self.federation = jax.device_put(
                federation, NamedSharding(self.program.mesh, PartitionSpec())
            )
        self.traced = {
            name: jnp.asarray(x, float) for name, x in self.program.traced.items()
        }
        self.key, self.round = jax.random.key(0), 0
        self.state = jax.jit(self.program.init)(self.key, self.traced)
        options = {"compiler_options": simulate.compiler_options()}
        begin = time.perf_counter()
        self.step = (
            jax.jit(self.program.round, donate_argnums=1, **options)
            .lower(*self._arguments())
            .compile()
        )
        self.compile = time.perf_counter() - begin
        self.bytes = report.account(self.step) - sum(
            x.nbytes for x in jax.tree.leaves(federation)
        )
        self._evaluate = jax.jit(self.program.evaluate, **options)

    def _arguments(self, evaluated: bool = False) -> tuple:
        t, wanted = jnp.int32(self.round), jnp.bool(evaluated)
        return Context(self.key, self.traced, self.federation, t), self.state, wanted

    def __call__(self, evaluated: bool = False, before: bool = False) -> float:
        """Seconds of a round; if it is evaluated, with the scores before and after
        local training, or with those `before` it only."""
        given = self._arguments(evaluated)
        begin = time.perf_counter()
        if evaluated or before:
            jax.block_until_ready(self._evaluate(*given[:-1]))
        self.state, _ = jax.block_until_ready(self.step(*given))
        self.round += 1
        return time.perf_counter() - begin
