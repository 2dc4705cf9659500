"""Texts that a client's model continues, token after token."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import trees
from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.data.sources import chat, text
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.experiment import export
from fedjax_pfl.experiment.types import NeedsDataError, Trained
from fedjax_pfl.models import decoding
from fedjax_pfl.types import Array, Model, PyTree, RunState

ROWS = 32  # texts of all clients continued at once, a power of two
MOST = 2**27  # trained variables of these clients together, unless it is one


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


# (client -> its variables, texts [n, L] of each client with room for new tokens, how)
# -> the next tokens [n, T] of each
Cached = Callable[
    [Callable[[int], PyTree], Mapping[int, np.ndarray], Generation],
    dict[int, np.ndarray],
]


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
    known: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the next tokens [n, T] of texts, `decoding.END` after the last one.

    Args:
      probabilities: texts [n, L] and their numbers of tokens [n] -> those of the token
        after the last one [n, V].
      x: [n, L] tokens, with 0 after the last one.
      known: [m, T] next tokens of those texts that `fit`, by a cache; None: there is
        none.
    """
    room = x.shape[1] + 1 - text.lengths(x)
    fits = np.zeros(len(x), bool)
    found = np.full((len(x), how.tokens), decoding.END)
    if known is not None:
        fits = fit(x, how)
        found[fits] = known
    if not fits.all():
        found[~fits] = _whole(probabilities, x[~fits], how)
    ended = (np.arange(how.tokens) >= room[:, None]) & how.limited
    if how.stop is not None:
        ended[:, 1:] |= np.cumsum(found == how.stop, axis=1)[:, :-1] > 0
    return np.where(ended, decoding.END, found)


def fit(x: np.ndarray, how: Generation) -> np.ndarray:
    """Returns the texts of x [n, L] that a cache can continue, [n] bool."""
    return (x.shape[1] + 1 - text.lengths(x) >= how.tokens) | how.limited


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


def decoder(e: Trained, model: Model) -> Cached:
    """Returns the continuation of several clients' texts by a model with a cache,
    `ROWS` texts in one call of a compiled function."""

    @functools.partial(jax.jit, static_argnames="how")
    def run(
        held: PyTree, variables: PyTree, x: Array, length: Array, how: Generation
    ) -> Array:
        given = model
        if model.frozen is not None:
            features, head, _ = model.frozen.functions(held)
            given = model._replace(features=features, head=head)
        options: dict[str, Any] = {
            "stop": how.stop,
            "temperature": how.temperature,
            "seed": how.seed,
        }

        def one(variables: PyTree, x: Array, length: Array) -> Array:
            count = how.tokens
            return decoding.continued(given, variables, x, length, count, **options)

        return jax.vmap(one)(variables, x, length)

    held = None if model.frozen is None else model.frozen.values
    size = trees.size(jax.eval_shape(model.init, jax.random.key(0)))
    (length,) = e.task.input.shape

    def cached(
        variables: Callable[[int], PyTree],
        texts: Mapping[int, np.ndarray],
        how: Generation,
    ) -> dict[int, np.ndarray]:
        found = {i: np.zeros((len(x), how.tokens), int) for i, x in texts.items()}
        for rows, parts in calls(texts, MOST // size):
            own = [variables(i) for i, _ in parts]
            stacked = jax.tree.map(lambda *a: np.stack(a), *own)
            filled = (np.resize(texts[i][at], (rows, length)) for i, at in parts)
            x = np.stack([*filled])
            lengths = np.stack([text.lengths(own) for own in x])
            with e.tracing():
                new = run(held, stacked, x, lengths, how)
            for (i, at), tokens in zip(parts, np.asarray(new), strict=True):
                found[i][at] = tokens[: len(texts[i][at])]
        return found

    return cached


def calls(
    texts: Mapping[int, np.ndarray], most: int
) -> Iterator[tuple[int, list[tuple[int, slice]]]]:
    """Returns the calls that continue all texts: the rows R of each client, and clients
    with slices of up to R of their texts.

    R and the number of clients are powers of two, so that few shapes are compiled. Both
    together are at most ROWS, and the clients at most `most`; the last may recur.
    """
    groups: dict[int, list[tuple[int, slice]]] = {}
    for i, x in texts.items():
        for first in range(0, len(x), ROWS):
            at = slice(first, min(first + ROWS, len(x)))
            groups.setdefault(_power(at.stop - first), []).append((i, at))
    for rows, parts in groups.items():
        width = 1 << (max(1, min(ROWS // rows, most)).bit_length() - 1)
        for first in range(0, len(parts), width):
            some = parts[first : first + width]
            yield rows, some + some[-1:] * (_power(len(some)) - len(some))


def _power(count: int) -> int:
    """Returns the least power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def of_clients(
    e: Trained,
    state: RunState,
    t: int,
    texts: Mapping[int, np.ndarray],
    how: Generation,
) -> dict[int, np.ndarray]:
    """Returns the next tokens [m, T] of clients' texts that `fit`, by models with a
    cache.

    There are none of clients whose network has no attention, or whose method combines
    several networks.

    Args:
      state: after `t` rounds, rows by client id.
      texts: {client: [n, L]}.
      how: of all texts.
    """
    variables = export.exporter(e, state, t)
    found: dict[int, np.ndarray] = {}
    for group, model in enumerate(e.task.models):
        own = {
            i: x[fit(x, how)]
            for i, x in texts.items()
            if e.task.architecture[i] == group
        }
        if own and model.cache is not None and _is_of(model, variables, min(own)):
            found |= decoder(e, model)(variables, own, how)
    return found


def _is_of(model: Model, variables: Callable[[int], PyTree], client: int) -> bool:
    """Returns True where a client's exported variables are those of a model."""
    known: Any = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
    try:
        return bool(jax.tree.structure(variables(client)) == known)
    except NeedsDataError:
        return False


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
