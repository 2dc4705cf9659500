"""Texts as rows of token ids: classified texts, and the next token by speaker."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.datasets import Dataset, prepare_integers
from fedjax_pfl.data.preparation import check_missing, words as words_of
from fedjax_pfl.data.sources import rows
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, check, in_one_line

PADDING, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unk>")  # their texts
# tokens of an example: of a classified text, and of a passage of a speaker
LENGTH, PASSAGE = 200, 80
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
Tokenizer = Callable[[str], Sequence[str]]


def tokenizer(name: str, length: int | None = None) -> Tokenizer:
    """Returns a function from a text to its tokens.

    Args:
      length: most tokens; special tokens at the end, such as [SEP], are kept.
      name: `word` (lower case; runs of letters, digits and inner apostrophes; each
        other mark is a token), `char`, or the file of a Hugging Face tokenizer, .json.

    Raises:
      InputError: an unknown name, or the file cannot be read.
    """
    if name == "word":
        return lambda text: _WORD.findall(text.lower())[:length]
    if name == "char":
        return lambda text: list(text[:length])
    made = _hugging_face(name)
    if length is not None:
        check("max_length", length, made.num_special_tokens_to_add(False), math.inf)
        made.enable_truncation(length)
    return lambda text: made.encode(text).tokens


def places(name: str) -> Callable[[str], tuple[list[str], list[int]]]:
    """Returns a function from a text to its tokens and where each begins; no special
    token is added to the text's own.

    Args:
      name: as of `tokenizer`.

    Raises:
      InputError: as `tokenizer`.
    """
    if name == "char":
        return lambda text: (list(text), list(range(len(text))))
    if name == "word":
        return _words

    made = _hugging_face(name)

    def tokens(text: str) -> tuple[list[str], list[int]]:
        found = made.encode(text, add_special_tokens=False)
        return found.tokens, [start for start, _ in found.offsets]

    return tokens


def lengths(x: np.ndarray) -> np.ndarray:
    """Returns the numbers of tokens [n] of rows [n, L] that end in padding; 1 or more.

    Padding is 0, which in a vocabulary of Hugging Face is also a token like others.
    """
    last = x.shape[1] - np.argmax(x[:, ::-1] != PADDING, axis=1)
    return np.where((x != PADDING).any(axis=1), last, 1)


def joined(name: str, tokens: Sequence[str]) -> str:
    """Returns the text of tokens.

    Args:
      name: as of `tokenizer`.
    """
    if name == "char":
        return "".join(tokens)
    decoder = None if name == "word" else _hugging_face(name).decoder
    return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))


def _words(text: str) -> tuple[list[str], list[int]]:
    found = list(_WORD.finditer(text.lower()))
    return [word.group() for word in found], [word.start() for word in found]


def _hugging_face(name: str) -> Any:
    """Returns the tokenizer of a tokenizer.json, without truncation and padding."""
    if not name.endswith(".json"):
        raise InputError(f"`tokenizer` must be word, char or a .json file, got {name}.")
    try:
        from tokenizers import Tokenizer as HuggingFace

        made = HuggingFace.from_file(str(Path(name).expanduser()))
        made.no_truncation()  # of the file
        made.no_padding()
    except ImportError:
        raise InputError(
            f"tokenizer={name} needs tokenizers: pip install -e '.[data]' adds it."
        ) from None
    except Exception as error:  # of the library, which has no other type
        raise InputError(f"{name} cannot be read ({in_one_line(error)}).") from error
    return made


def classified(
    name: str,
    texts: Sequence[str],
    labels: np.ndarray,
    *,
    num_train: int | None = None,
    num_classes: int | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    tokens: str | None = None,
    max_length: int | None = None,
) -> Dataset:
    """Returns a data set of classified texts.

    Args:
      texts: [n]; of each the first `max_length` tokens are kept.
      labels: [n] integers, counted from 0.
      num_train: number of training texts, which come first; default: all.
      num_classes: C; default: the largest label + 1.
      columns: further values per text.
      tokens: name of the tokenizer, default `word`.
      max_length: L; default 200.
    """
    split = tokenizer(tokens or "word", max_length or LENGTH)
    rows, words = numbered(map(split, texts))
    x = padded(rows, max([1, *map(len, rows)]))
    y = np.asarray(labels, np.int32)
    return Dataset(
        name,
        x,
        y,
        len(y) if num_train is None else num_train,
        num_classes or int(y.max()) + 1,
        prepare_integers,
        words=words,
        columns=columns or {},
    )


def spoken(
    name: str,
    texts: Mapping[str, str],
    *,
    tokens: str | None = None,
    max_length: int | None = None,
) -> Dataset:
    """Returns passages of speakers, each position's label being the next token.

    A speaker's text is cut into passages of L tokens without overlap, the last one
    padded. Padding has the label -1.

    Args:
      texts: speaker -> text. Each speaker is a value of the column `speaker`.
      tokens: name of the tokenizer, default `char`.
      max_length: L; default 80.
    """
    length, split = max_length or PASSAGE, tokenizer(tokens or "char")
    each, words = numbered(split(text) for text in texts.values())
    x, y, speakers = list[np.ndarray](), list[np.ndarray](), list[str]()
    for speaker, ids in zip(texts, each, strict=True):
        count = -(-(len(ids) - 1) // length) if len(ids) > 1 else 0
        for found, part, fill in ((x, ids[:-1], PADDING), (y, ids[1:], -1)):
            filled = np.full(count * length, fill, np.int32)
            filled[: len(part)] = part if count else ()
            found.append(filled.reshape(count, length))
        speakers += [speaker] * count
    if not speakers:
        raise InputError(f"{name} must have a speaker with two tokens or more.")
    silent = [speaker for speaker in texts if speaker not in set(speakers)]
    return Dataset(
        name,
        np.concatenate(x),
        np.concatenate(y),
        len(speakers),
        len(words),
        prepare_integers,
        words=words,
        columns={"speaker": np.array(speakers)},
        note=f"without two tokens and left out: {', '.join(silent)}" if silent else "",
    )


def numbered(
    rows: Iterable[Sequence[str]],
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Numbers tokens in the order of their first occurrence, from 2."""
    number = {word: i for i, word in enumerate(SPECIAL)}
    found = [
        np.array([number.setdefault(token, len(number)) for token in row], np.int32)
        for row in rows
    ]
    return found, tuple(number)


def restricted(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """Returns the data set with the vocabulary of some rows; all other tokens are
    unknown.

    Args:
      dataset: has `words`; where labels are tokens they are renumbered, too.
      rows: training examples of the clients that train.
    """
    assert dataset.words is not None
    used = np.zeros(len(dataset.words), bool)
    used[[PADDING, UNKNOWN]] = True
    used[unmarked(dataset.x[rows])] = True
    if dataset.positions is not None:
        labels = dataset.y[rows]
        used[labels[labels >= 0]] = True
    pairs = zip(dataset.words, used, strict=True)
    return using(dataset, tuple(word for word, kept in pairs if kept))


def using(dataset: Dataset, words: tuple[str, ...]) -> Dataset:
    """Returns the data set with its tokens numbered by another vocabulary."""
    assert dataset.words is not None
    known = {word: i for i, word in enumerate(words)}
    number = np.array([known.get(w, UNKNOWN) for w in dataset.words], np.int32)
    number[PADDING] = PADDING
    x = number[unmarked(dataset.x)]
    found = dataset._replace(x=np.where(dataset.x < 0, ~x, x), words=words)
    if dataset.positions is not None:
        y = np.where(dataset.y >= 0, number[dataset.y], -1)
        found = found._replace(y=y, num_classes=len(words))
    return found


def unmarked(x: np.ndarray) -> np.ndarray:
    """Returns tokens without the marks of `packing.packed`."""
    return np.where(x < 0, ~x, x)


def like(dataset: Dataset, words: tuple[str, ...], length: int) -> Dataset:
    """Returns the data set with the vocabulary and the number of tokens of another one,
    whose network it takes.

    Raises:
      InputError: the other one has shorter texts.
    """
    own = dataset.x.shape[1]
    if own > length:
        raise InputError(
            f"{dataset.name} has texts of {own} tokens, the base takes {length}: give "
            f"--max_length={length}."
        )
    found, more = using(dataset, words), ((0, 0), (0, length - own))
    found = found._replace(x=np.pad(found.x, more, constant_values=PADDING))
    if dataset.positions is not None:
        found = found._replace(y=np.pad(found.y, more, constant_values=-1))
    return found


def encode(
    texts: Sequence[str], words: Sequence[str], length: int, tokens: str = "word"
) -> np.ndarray:
    """Returns texts as ids in a vocabulary, padded to L tokens: [n, L] int32."""
    number, split = {w: i for i, w in enumerate(words)}, tokenizer(tokens, length)
    ids = [[number.get(token, UNKNOWN) for token in split(text)] for text in texts]
    return padded(ids, length)


def padded(rows: Sequence[Sequence[int] | np.ndarray], length: int) -> np.ndarray:
    """Returns ids of texts, padded to L tokens: [n, L] int32."""
    x = np.full((len(rows), length), PADDING, np.int32)
    for row, ids in zip(x, rows, strict=True):
        row[: len(ids)] = ids
    return x


@register(
    "text:PATH",
    "texts: a JSON object {speaker: text} for the next character, or .csv, .json "
    "or .jsonl rows of text and label (.gz too)",
)
def load(
    path: str, tokenizer: str | None = None, max_length: int | None = None
) -> Dataset:
    """Reads texts from a file, .gz or not.

    Args:
      path: a JSON object {speaker: text}; or .csv, .tsv, .json or .jsonl rows with the
        columns `text` and `label`, optionally `split` (train, val or test) and others.
      tokenizer: as `tokens` of `classified` and `spoken`.
      max_length: as there.

    Raises:
      InputError: the file cannot be read, or has other content.
    """
    name, content = f"text:{path}", rows.read(path, lambda column: True)
    if isinstance(content, dict):
        if not all(isinstance(text, str) for text in content.values()):
            raise InputError(f"{path} must be an object of speakers and their texts.")
        return spoken(name, content, tokens=tokenizer, max_length=max_length)
    for column in ("text", "label"):
        if column not in content:
            found = ", ".join(map(repr, content))
            raise InputError(f"{path} must have a column {column}, got {found}.")
    columns = {column: words_of(content[column]) for column in content}
    check_missing(f"{path}: text", columns["text"])
    y, classes, names = rows.classes(f"{path}: label", columns.pop("label"))
    order, num_train, validation = rows.split(path, content)
    if order is not None:
        columns = {column: cells[order] for column, cells in columns.items()}
        y, _ = y[order], columns.pop("split")
    made = classified(
        name,
        columns.pop("text").tolist(),
        y,
        num_train=num_train,
        num_classes=classes,
        columns=columns,
        tokens=tokenizer,
        max_length=max_length,
    )
    return made._replace(validation=validation, classes=names)
