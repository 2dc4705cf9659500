"""Texts that a client's model continues, token after token."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.data.sources import chat, text
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.experiment import export
from fedjax_pfl.experiment.types import NeedsDataError, Trained
from fedjax_pfl.models import decoding
from fedjax_pfl.types import Array, Model, PyTree, RunState

ROWS = 32  # texts continued at once, a power of two


class Generation(NamedTuple):
    """Options of the continuation of a text.

    Attributes:
      tokens: most new tokens, 1 or more.
      temperature: 0 takes the most probable token; else tokens are drawn with the
        probabilities p^(1 / temperature).
      seed: of the draws.
      stop: token that ends a text; None: none does.
      limited: a text ends with L + 1 tokens, those of a conversation and its last
        label; else it loses its first token with each new one.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: int | None = None
    limited: bool = False


# (texts [n, L], how) -> the next tokens [n, T], of texts with room for them
Cached = Callable[[np.ndarray, Generation], np.ndarray]


def checked(e: Trained, given: Mapping[str, Any]) -> Generation | None:
    """Returns the generation of given options, None without any.

    Raises:
      InputError: a value is out of range, or the run does not predict the next token.
    """
    if not given:
        return None
    if "tokens" not in given:
        raise InputError(f"--{', --'.join(given)} needs --tokens.")
    how = Generation(**given)
    check("tokens", how.tokens, 1, 10**6, whole=True)
    check("temperature", how.temperature, 0, np.inf, open_high=True)
    words = None if e.preparation is None else e.preparation.words
    if words is None or not e.task.label.shape:
        raise InputError("--tokens needs a run that predicts the next token.")
    return how


def continued(
    probabilities: Callable[[np.ndarray, np.ndarray], np.ndarray],
    x: np.ndarray,
    how: Generation,
    cached: Cached | None = None,
) -> np.ndarray:
    """Returns the next tokens [n, T] of texts, `decoding.END` after the last one.

    Args:
      probabilities: texts [n, L] and their numbers of tokens [n] -> those of the token
        after the last one [n, V].
      x: [n, L] tokens, with 0 after the last one.
      cached: continues the texts that have room for the new tokens.
    """
    room = x.shape[1] + 1 - text.lengths(x)
    fits = (room >= how.tokens) | how.limited
    found = np.full((len(x), how.tokens), decoding.END)
    if cached is None:
        fits[:] = False
    elif fits.any():
        found[fits] = cached(x[fits], how)
    if not fits.all():
        found[~fits] = _whole(probabilities, x[~fits], how)
    ended = (np.arange(how.tokens) >= room[:, None]) & how.limited
    if how.stop is not None:
        ended[:, 1:] |= np.cumsum(found == how.stop, axis=1)[:, :-1] > 0
    return np.where(ended, decoding.END, found)


def _whole(
    probabilities: Callable[[np.ndarray, np.ndarray], np.ndarray],
    x: np.ndarray,
    how: Generation,
) -> np.ndarray:
    """Returns the next tokens by the whole text for each of them, until all have
    ended."""
    x, draw, each = x.copy(), np.random.default_rng(how.seed), np.arange(len(x))
    length = text.lengths(x)  # token 0 may be one like others
    room = x.shape[1] + 1 - length
    found = np.full((len(x), how.tokens), decoding.END)
    for i in range(how.tokens):
        ended = (i >= room) & how.limited
        if how.stop is not None:
            ended |= (found == how.stop).any(axis=1)
        if ended.all():
            break
        p = probabilities(x, length)
        if how.temperature:
            with np.errstate(divide="ignore"):  # log 0
                p = np.log(p) / how.temperature + draw.gumbel(size=p.shape)
        new = p.argmax(axis=1)
        full = length == x.shape[1]
        x[full] = np.roll(x[full], -1, axis=1)
        length = np.minimum(length + 1, x.shape[1])
        x[each, length - 1] = new
        found[:, i] = new
    return found


def decoder(e: Trained, model: Model) -> Callable[[PyTree], Cached]:
    """Returns (variables) -> continuation by a model with a cache, compiled once for
    all variables; `ROWS` texts at once."""

    @functools.partial(jax.jit, static_argnames="how")
    def run(
        held: PyTree, variables: PyTree, x: Array, length: Array, how: Generation
    ) -> Array:
        given = model
        if model.frozen is not None:
            features, head, _ = model.frozen.functions(held)
            given = model._replace(features=features, head=head)
        return decoding.continued(
            given,
            variables,
            x,
            length,
            how.tokens,
            stop=how.stop,
            temperature=how.temperature,
            seed=how.seed,
        )

    held = None if model.frozen is None else model.frozen.values

    def cached(variables: PyTree, x: np.ndarray, how: Generation) -> np.ndarray:
        parts = []
        for first in range(0, len(x), ROWS):
            part = x[first : first + ROWS]
            size = 1 << (len(part) - 1).bit_length()
            filled = np.pad(part, ((0, size - len(part)), (0, 0)), mode="edge")
            with e.tracing():
                new = run(held, variables, filled, text.lengths(filled), how)
            parts.append(np.asarray(new)[: len(part)])
        return np.concatenate(parts)

    return lambda variables: functools.partial(cached, variables)


def of_clients(e: Trained, state: RunState, t: int) -> Callable[[int], Cached | None]:
    """Returns (client) -> continuation by its model with a cache, None where it has
    none: a network without attention, or a method that combines several networks.

    Args:
      state: after `t` rounds, rows by client id.
    """
    variables = export.exporter(e, state, t)
    key, models = jax.random.key(0), e.task.models
    decoders = [None if x.cache is None else decoder(e, x) for x in models]
    known: list[Any] = [jax.tree.structure(jax.eval_shape(x.init, key)) for x in models]

    def of(client: int) -> Cached | None:
        group = int(e.task.architecture[client])
        run = decoders[group]
        if run is None:
            return None
        try:
            found = variables(client)
        except NeedsDataError:
            return None
        return run(found) if jax.tree.structure(found) == known[group] else None

    return of


def written(
    tokens: Iterable[Iterable[int]], known: Preparation, dataset: str
) -> list[str]:
    """Returns the texts of tokens, each as far as `decoding.END`, and in conversations
    as far as the end of the answer."""
    assert known.words is not None
    words, name = known.words, str(known.tokenizer)
    kept = ([words[i] for i in row if i != decoding.END] for row in tokens)
    texts = [text.joined(name, row) for row in kept]
    if not dataset.startswith(chat.PREFIX):
        return texts
    end = chat.ending(name)
    return [answer.partition(end)[0] if end else answer for answer in texts]


def prompts(path: str, given: Sequence[Any], known: Preparation) -> np.ndarray:
    """Returns the rows of a file with conversations as tokens [n, L]."""
    assert known.words is not None and known.max_length is not None
    options = str(known.tokenizer), known.words, known.max_length
    return chat.prompts(path, given, *options)
