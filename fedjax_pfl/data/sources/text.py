"""Texts as rows of token ids: classified texts, and the next token by speaker."""

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.datasets import Dataset, prepare_integers
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, in_one_line

PADDING, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unk>")  # their texts
# tokens of an example: of a classified text, and of a passage of a speaker
LENGTH, PASSAGE = 200, 80
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
Tokenizer = Callable[[str], Sequence[str]]


def tokenizer(name: str) -> Tokenizer:
    """Returns a function from a text to its tokens.

    Args:
      name: `word` (lower case; runs of letters, digits and inner apostrophes; each
        other mark is a token), `char`, or the file of a Hugging Face tokenizer, .json.

    Raises:
      InputError: an unknown name, or the file cannot be read.
    """
    if name == "word":
        return lambda text: _WORD.findall(text.lower())
    if name == "char":
        return list
    if not name.endswith(".json"):
        raise InputError(f"`tokenizer` must be word, char or a .json file, got {name}.")
    try:
        from tokenizers import Tokenizer as HuggingFace

        made = HuggingFace.from_file(str(Path(name).expanduser()))
    except ImportError:
        raise InputError(
            f"tokenizer={name} needs tokenizers: pip install -e '.[data]' adds it."
        ) from None
    except Exception as error:  # of the library, which has no other type
        raise InputError(f"{name} cannot be read ({in_one_line(error)}).") from error
    return lambda text: made.encode(text).tokens


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
    length, split = max_length or LENGTH, tokenizer(tokens or "word")
    rows, words = _numbered(split(text)[:length] for text in texts)
    longest = max(map(len, rows), default=0)
    x = np.zeros((len(rows), max(longest, 1)), np.int32)
    for row, ids in zip(x, rows, strict=True):
        row[: len(ids)] = ids
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
    numbered, words = _numbered(split(text) for text in texts.values())
    x, y, speakers = list[np.ndarray](), list[np.ndarray](), list[str]()
    for speaker, ids in zip(texts, numbered, strict=True):
        count = -(-(len(ids) - 1) // length) if len(ids) > 1 else 0
        for rows, part, fill in ((x, ids[:-1], PADDING), (y, ids[1:], -1)):
            padded = np.full(count * length, fill, np.int32)
            padded[: len(part)] = part if count else ()
            rows.append(padded.reshape(count, length))
        speakers += [speaker] * count
    if not speakers:
        raise InputError(f"{name} must have a speaker with two tokens or more.")
    return Dataset(
        name,
        np.concatenate(x),
        np.concatenate(y),
        len(speakers),
        len(words),
        prepare_integers,
        words=words,
        columns={"speaker": np.array(speakers)},
    )


def _numbered(
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
    used[dataset.x[rows]] = True
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
    found = dataset._replace(x=number[dataset.x], words=words)
    if dataset.positions is not None:
        y = np.where(dataset.y >= 0, number[dataset.y], -1)
        found = found._replace(y=y, num_classes=len(words))
    return found


def encode(
    texts: Sequence[str], words: Sequence[str], length: int, tokens: str = "word"
) -> np.ndarray:
    """Returns texts as ids in a vocabulary, padded to L tokens: [n, L] int32."""
    number, split = {word: i for i, word in enumerate(words)}, tokenizer(tokens)
    x = np.full((len(texts), length), PADDING, np.int32)
    for row, text in zip(x, texts, strict=True):
        ids = [number.get(token, UNKNOWN) for token in split(text)[:length]]
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
      path: a JSON object {speaker: text}; or .csv, .json or .jsonl rows with the
        columns `text` and `label`, optionally `split` (train or test) and others.
      tokenizer: as `tokens` of `classified` and `spoken`.
      max_length: as there.

    Raises:
      InputError: the file cannot be read, or has other content.
    """
    name, content = f"text:{path}", read(path)
    if isinstance(content, dict):
        if not all(isinstance(text, str) for text in content.values()):
            raise InputError(f"{path} must be an object of speakers and their texts.")
        return spoken(name, content, tokens=tokenizer, max_length=max_length)
    columns, num_train = as_columns(path, content, ("text", "label"))
    y, classes = classes_of(columns.pop("label"))
    texts = [str(text) for text in columns.pop("text")]
    return classified(
        name,
        texts,
        y,
        num_train=num_train,
        num_classes=classes,
        columns=columns,
        tokens=tokenizer,
        max_length=max_length,
    )


def read(path: str) -> Any:
    """Reads a .csv (a list of rows), JSON, or JSON lines (a list), compressed or not.

    Raises:
      InputError: the file cannot be read.
    """
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
        if file.name.removesuffix(".gz").endswith(".csv"):
            return list(csv.DictReader(io.StringIO(text)))
        if file.name.removesuffix(".gz").endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error


def as_columns(
    path: str, rows: Any, required: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], int]:
    """Returns the columns of rows, those with split=train first, and their number.

    Raises:
      InputError: there are no rows, or they lack a column.
    """
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        raise InputError(f"{path} must hold rows with named columns.")
    for name in required:
        for i, row in enumerate(rows):
            if row.get(name) is None:
                raise InputError(
                    f"{path} must have the columns {', '.join(required)}: row {i + 1} "
                    f"has no {name}."
                )
    train = [row for row in rows if row.get("split", "train") != "test"]
    rows = train + [row for row in rows if row.get("split", "train") == "test"]
    if not train:
        raise InputError(f"{path} must have rows with split=train.")
    names = [name for name in rows[0] if name != "split"]
    return {name: np.array([row.get(name) for row in rows]) for name in names}, len(
        train
    )


def classes_of(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns class numbers [n] and C of labels: whole numbers as they are, others in
    sorted order."""
    words = [str(value) for value in values]
    if all(word.isdecimal() for word in words):
        y = np.array(words, int)
        return y, int(y.max()) + 1
    names, y = np.unique(words, return_inverse=True)
    return y, len(names)
