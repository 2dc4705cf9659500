"""Texts that a client's model continues, token after token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.data.sources import chat, text
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.experiment.types import Trained


class Generation(NamedTuple):
    """Options of the continuation of a text.

    Attributes:
      tokens: most new tokens, 1 or more.
      temperature: 0 takes the most probable token; else tokens are drawn with the
        probabilities p^(1 / temperature).
      seed: of the draws.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0


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
) -> np.ndarray:
    """Returns the next tokens [n, T] of texts.

    Args:
      probabilities: texts [n, L] and their numbers of tokens [n] -> those of the token
        after the last one [n, V].
      x: [n, L] tokens, with 0 after the last one. A text of L tokens loses its first
        one with each new one.
    """
    x, draw, each = x.copy(), np.random.default_rng(how.seed), np.arange(len(x))
    length, found = text.lengths(x), []  # token 0 may be one like others
    for _ in range(how.tokens):
        p = probabilities(x, length)
        if how.temperature:
            with np.errstate(divide="ignore"):  # log 0
                p = np.log(p) / how.temperature + draw.gumbel(size=p.shape)
        new = p.argmax(axis=1)
        full = length == x.shape[1]
        x[full] = np.roll(x[full], -1, axis=1)
        length = np.minimum(length + 1, x.shape[1])
        x[each, length - 1] = new
        found.append(new)
    return np.stack(found, axis=1)


def written(tokens: np.ndarray, known: Preparation, dataset: str) -> list[str]:
    """Returns tokens [n, T] as texts; in conversations up to the end of the answer."""
    assert known.words is not None
    words, name = known.words, str(known.tokenizer)
    texts = [text.joined(name, [words[i] for i in row]) for row in tokens]
    if not dataset.startswith(chat.PREFIX):
        return texts
    end = chat.ending(name)
    return [answer.partition(end)[0] if end else answer for answer in texts]


def prompts(path: str, given: Sequence[Any], known: Preparation) -> np.ndarray:
    """Returns the rows of a file with conversations as tokens [n, L]."""
    assert known.words is not None and known.max_length is not None
    options = str(known.tokenizer), known.words, known.max_length
    return chat.prompts(path, given, *options)
