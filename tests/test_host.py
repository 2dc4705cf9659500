"""A step on the host, from inside a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import host_callback


def test_a_step_on_the_host_gets_whole_arrays_that_came_in_small_pieces():
    """XLA copies larger operands in a thread pool, whose threads may all be waiting for
    the step."""
    rows, number = jnp.arange(90_000.0).reshape(300, 300), jnp.int32(7)
    result = jax.ShapeDtypeStruct((300,), jnp.float32)
    step = lambda rows, number: host_callback.call(
        lambda x, n: x[n] + x.sum(axis=0, dtype=x.dtype), result, rows, number
    )
    np.testing.assert_array_equal(
        jax.jit(step)(rows, number), np.asarray(rows)[7] + np.asarray(rows).sum(axis=0)
    )
    (call,) = [
        e
        for e in jax.make_jaxpr(step)(rows, number).eqns
        if e.primitive.name == "pure_callback"
    ]
    assert (
        len(call.invars) == 5
        and max(x.aval.size * x.aval.dtype.itemsize for x in call.invars) <= 100 * 1024
    )
    both = jax.jit(jax.vmap(step, (None, 0)))(rows, jnp.array([7, 8]))
    np.testing.assert_array_equal(both[1] - both[0], np.full(300, 300))
