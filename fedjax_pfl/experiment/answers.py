"""Scores of the answers that clients' models generate to their test conversations."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedjax_pfl.data.sources import chat, text
from fedjax_pfl.evaluation import GENERATED
from fedjax_pfl.experiment import generation, predict
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.types import RunState

_WORD = re.compile("[a-z0-9]+")


def exact_match(found: str, wanted: str) -> float:
    """Returns 1 for equal texts, without spaces around them, else 0."""
    return float(found.strip() == wanted.strip())


def rouge_l(found: str, wanted: str) -> float:
    """Returns the F-measure of the longest common subsequence of words, 0 without words
    (Lin, ROUGE, 2004).

    Words are runs of a-z and 0-9 in lower case, without stemming, as in the package
    rouge_score.
    """
    a, b = (_WORD.findall(x.lower()) for x in (found, wanted))
    before = [0] * (len(b) + 1)
    for word in a:
        row = [0]
        for j, other in enumerate(b):
            most = before[j] + 1 if word == other else max(before[j + 1], row[j])
            row.append(most)
        before = row
    return 2 * before[-1] / (len(a) + len(b)) if a and b else 0.0


SCORES: dict[str, Callable[[str, str], float]] = dict(
    zip(GENERATED, (exact_match, rouge_l), strict=True)
)


def asked(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens before each answer of a row, and those of the answer.

    Args:
      x: [L] tokens of one conversation, or of several as of `data.packing`.
      y: [L] next tokens of answers, -1 elsewhere.
    """
    tokens, first = np.where(x < 0, ~x, x), x < 0
    begins = (y >= 0) & (first | (np.append(-1, y[:-1]) < 0))
    for at in np.flatnonzero(begins):
        start = np.flatnonzero(first[: at + 1])
        rest = (y[at:] < 0) | np.append(False, begins[at + 1 :])
        size = int(np.argmax(rest)) if rest.any() else len(rest)
        yield tokens[start[-1] if len(start) else 0 : at + 1], y[at : at + size]


def scores(e: Experiment, state: RunState, t: int) -> dict[str, np.ndarray]:
    """Returns the scores of --metrics that are of generated answers, {name: [N]}: means
    over the answers of a client's test conversations, NaN without any.

    An answer continues the conversation before it by the most probable tokens, up to
    the end of an answer or L + 1 tokens in all.

    Args:
      state: after `t` rounds, rows by client id.
    """
    known, names = e.preparation, e.config.evaluation.generated
    assert known is not None and known.words is not None
    length, dataset = e.task.input.shape[0], e.config.data.dataset
    stop = _stop(str(known.tokenizer), known.words)
    how = generation.Generation(length, stop=stop, limited=True)
    found = {name: np.full(e.task.num_clients, np.nan, np.float32) for name in names}
    prompts, answers = {}, {}
    for i, (rows, size) in enumerate(
        zip(e.partition.test, e.partition.test_sizes, strict=True)
    ):
        data = e.dataset
        pairs = [x for row in rows[:size] for x in asked(data.x[row], data.y[row])]
        if pairs:
            prompts[i] = text.padded([prompt for prompt, _ in pairs], length)
            answers[i] = [answer for _, answer in pairs]
    cached = generation.of_clients(e, state, t, prompts, how)
    for i, x in prompts.items():
        new = generation.continued(_by_whole(e, state, t, i), x, how, cached.get(i))
        own, wanted = (generation.written(a, known, dataset) for a in (new, answers[i]))
        for name in names:
            each = map(SCORES[name], own, wanted)
            found[name][i] = np.mean(list(each))
    return found


def _stop(tokenizer: str, words: Sequence[str]) -> int | None:
    """Returns the token that ends an answer, None where several do together."""
    end, _ = text.places(tokenizer)(chat.ending(tokenizer))
    return words.index(end[0]) if len(end) == 1 and end[0] in words else None


def _by_whole(
    e: Experiment, state: RunState, t: int, client: int
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns a client's probabilities of the next token, made at the first call."""
    predictor = functools.cache(functools.partial(e.predictor, state, t, client))
    return lambda x, length: predict.scores(e, predictor(), x, length)
