"""Texts that a causal transformer continues, with a cache of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.errors import InputError
from fedjax_pfl.models.text import Step
from fedjax_pfl.types import Array, Model, PyTree

END = -1  # fills the rows after their last token


@jax.custom_batching.custom_vmap
def _some(left: Array) -> Array:
    """Returns `left` []; of several clients whether any is True, so that they share a
    loop, which would otherwise copy their caches in every turn."""
    return left


@_some.def_vmap
def _some_of_clients(
    count: int, batched: list[bool], left: Array
) -> tuple[Array, bool]:
    return _some(jnp.any(left)), False


class State(NamedTuple):
    """The carry of the loop over new tokens."""

    i: Array  # [] number of new tokens
    cache: PyTree
    new: Array  # [B] the last of them
    found: Array  # [B, count] all of them
    ended: Array  # [B]


def continued(
    model: Model,
    variables: PyTree,
    x: Array,
    length: Array,
    count: int,
    *,
    stop: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Array:
    """Returns the next tokens [B, count] of texts, END after the last one.

    The prompts are computed at once, then one token a step. A row ends with the token
    `stop`, or where the text has L + 1 tokens. Under `jax.vmap` over clients the steps
    go on until all rows of all clients have ended.

    Args:
      model: its `cache` is not None.
      variables: of the model.
      x: [B, L] tokens of the prompts, with any after the last one.
      length: [B] numbers of tokens of the prompts, 1 to L.
      count: most new tokens, 1 or more.
      stop: None: no token ends a row.
      temperature: 0 takes the most probable token; else tokens are drawn with the
        probabilities p^(1 / temperature).
      seed: of the draws.

    Raises:
      InputError: the model has no cache.
    """
    if model.cache is None:
        raise InputError("`model` must be a causal transformer without prompts.")
    rows, size = x.shape

    def after(step: Step) -> tuple[Array, PyTree]:
        (h, cache), _ = model.features(variables, step)
        return model.head(variables["head"], h[:, 0]), cache

    def written(state: State, logits: Array, cache: PyTree) -> State:
        """Writes the token after the last one."""
        i, _, _, found, ended = state
        if temperature:
            key = jax.random.fold_in(jax.random.key(seed), i)
            new = jax.random.categorical(key, logits / temperature)
        else:
            new = jnp.argmax(logits, axis=-1)
        found = found.at[:, i].set(jnp.where(ended, END, new))
        ended = ended | (length + i >= size)
        if stop is not None:
            ended = ended | (new == stop)
        return State(i + 1, cache, new, found, ended)

    def following(state: State) -> State:
        at = length + state.i - 1
        step = Step(state.new[:, None], at, jnp.zeros_like(at), state.cache)
        return written(state, *after(step))

    def goes_on(state: State) -> Array:
        return (state.i < count) & _some(~jnp.all(state.ended))

    none, found = jnp.zeros(rows, jnp.int32), jnp.full((rows, count), END)
    start = State(jnp.int32(0), None, none, found, jnp.zeros(rows, bool))
    prompt = Step(x, none, length - 1, model.cache(rows, size))
    first = written(start, *after(prompt))
    return jax.lax.while_loop(goes_on, following, first).found
