"""Predicts new rows by a run: `fedjax-pfl predict RUN --client=H03 --input=new.csv`.

The run directory suffices, without the data set. --input is a table, rows with a column
`text`, a .txt of one text per line, a folder of images, or an .npz or .npy with the
array x. --output, by default RUN/predictions.csv, gets a row per example with the
predicted class and the probabilities, or the targets of a regression. Where the input
has labels (the column `label`, the array y, folders named like classes) accuracy and a
confusion table are printed.

--client=all takes for each row the client that the column of natural:COLUMN names, or
all clients without this column. --client=global is the model that the clients share. A
client that did not train takes its own local training first, on the labelled rows of
--train.

--tokens=N makes a run of the next token continue each text, or answer a conversation.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedjax_pfl import averaging, evaluation, simulate
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.datasets import Dataset, stored_inputs
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partition import of_clients
from fedjax_pfl.data.sources import arrays, chat, images, rows, table, text as tokens
from fedjax_pfl.engine import unseen
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.experiment import cli, generation, metrics, results, text
from fedjax_pfl.experiment.generation import Generation
from fedjax_pfl.experiment.groups import MOST
from fedjax_pfl.experiment.results import Run
from fedjax_pfl.experiment.types import Trained
from fedjax_pfl.types import RunState

ALL, GLOBAL = "all", "global"
ROWS = 1000  # predicted at once
Continuation = Callable[[np.ndarray, Generation], np.ndarray]
FLAGS = {
    "client": cli.Flag(str, f"name of a client, #3 for number 3, {ALL} or {GLOBAL}"),
    "input": cli.Flag(str, "file or folder of the rows to predict"),
    "train": cli.Flag(str, "labelled rows of a client that did not train"),
    "unseen_rounds": cli.Flag(int, "rounds of its local training"),
    "output": cli.Flag(str, "file of the predictions", "RUN/predictions.csv"),
    "tokens": cli.Flag(int, "most tokens by which a text goes on"),
    "temperature": cli.Flag(float, "of their draw, 0: the most probable", 0.0),
    "seed": cli.Flag(int, "of their draw", 0),
    **cli.TRUST,
}


class Given(NamedTuple):
    """Rows to predict."""

    x: np.ndarray  # [n, *input], prepared as the data set's
    names: list[Any]  # of the rows: their numbers from 1, or files
    labels: list[Any] | None  # as they were given; None: there are none
    owners: list[str] | None  # names of their clients


def read(path: str, e: Trained) -> Given:
    """Reads rows to predict.

    Raises:
      InputError: the file cannot be read, or is not of the kind of the run's data.
    """
    kind, known = e.task.input, e.preparation
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    if suffix in (".npz", ".npy"):
        return _of_arrays(arrays.read(path), path, e)
    if known is not None and (known.columns or known.words):
        return _of_rows(path, e)
    if len(kind.shape) != 3 or kind.dtype != np.uint8:
        shape = f"{kind.dtype}{list(kind.shape)}"
        raise InputError(f"--input={path} must be an .npz with x of {shape} per row.")
    resized = e.config.image_size is not None
    files, x = images.unlabelled(path, kind.shape, resized=resized)
    labels = [file.parent.name for file in files]
    named = labels if set(labels) <= set(e.classes or ()) else None
    return Given(x, list(map(str, files)), named, None)


def _of_arrays(found: dict[str, np.ndarray], path: str, e: Trained) -> Given:
    arrays.required(path, found, ("x",))
    x, kind = stored_inputs(f"{path}: x", found["x"]), e.task.input
    x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
    if (x.shape[1:], x.dtype) != (kind.shape, kind.dtype):
        raise InputError(
            f"{path}: x must be {kind.dtype}{list(kind.shape)} per row, got "
            f"{x.dtype}{list(x.shape[1:])}."
        )
    for name in ("y", column := e.config.partition.column or ""):
        if name in found and found[name].shape[:1] != x.shape[:1]:
            raise InputError(f"{path}: {name} must have {len(x)} rows, as x.")
    labels = None
    if "y" in found:
        y, single = found["y"], e.task.label.dtype == np.int32 and found["y"].ndim == 1
        labels = _labels(path, pd.Series(y), e.classes) if single else y.tolist()
    owners = [str(x) for x in found[column]] if column in found else None
    return Given(x, list(range(1, len(x) + 1)), labels, owners)


def _of_rows(path: str, e: Trained) -> Given:
    """Reads rows of a table or of texts."""
    assert e.preparation is not None
    column, texts = e.config.partition.column, not e.preparation.columns
    if e.config.data.dataset.startswith(chat.PREFIX) and not path.endswith(".txt"):
        found = rows.objects(path)
        x = generation.prompts(path, found, e.preparation)
        owners = None
        if column is not None and all(column in row for row in found):
            owners = [str(row[column]) for row in found]
        return Given(x, list(range(1, len(x) + 1)), None, owners)
    if texts and path.lower().endswith(".txt"):
        lines = text.content(path).splitlines()
        return Given(e.inputs(lines), list(range(1, len(lines) + 1)), None, None)

    def typed(name: str) -> bool:
        return texts or name in ("label", column) or table.identifies(name)

    frame = rows.read(path, typed)
    if isinstance(frame, dict) or (texts and "text" not in frame):
        raise InputError(f"{path} must hold rows with a column text.")
    given = [str(x) for x in frame["text"]] if texts else frame
    labels = None
    if "label" in frame and e.task.label.dtype == np.int32:
        labels = _labels(path, frame["label"], e.classes)
    owners = frame[column].astype(str).tolist() if column in frame else None
    return Given(e.inputs(given), list(range(1, len(frame) + 1)), labels, owners)


def _labels(path: str, cells: Any, classes: Sequence[str] | None) -> list[Any]:
    """Returns labels of rows, whole numbers as such: a file has 1.0 for 1 where labels
    were floats."""
    texts = cells.astype(str).str.strip()
    missing = np.flatnonzero(cells.isna() | (texts == ""))
    if len(missing):
        raise InputError(f"{path}: label of row {missing[0] + 1} is missing.")
    numbers = pd.to_numeric(cells, errors="coerce")
    if set(texts) <= set(classes or ()) or not (numbers % 1 == 0).all():
        return list(cells.tolist())
    return list(numbers.astype(int).tolist())


def scores(
    e: Trained, predict: Any, x: np.ndarray, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Returns probabilities [n, C], of a regression targets [n, C]; of texts that go on
    those of the token after the last one.

    Args:
      lengths: numbers of tokens [n]; None: as `tokens.lengths`.
    """
    parts = []
    for first in range(0, len(x), ROWS):
        batch = x[first : first + ROWS]
        z = evaluation.class_logits(predict(batch), e.task.num_classes)
        if e.task.label.shape and e.task.label.dtype == np.int32:
            known = tokens.lengths(x) if lengths is None else lengths
            last = known[first : first + ROWS] - 1
            z = z.reshape(*batch.shape, -1)[np.arange(len(batch)), last]
        of = {np.int32: jax.nn.softmax, np.bool_: jax.nn.sigmoid}
        parts.append(of.get(e.task.label.dtype.type, lambda z: z)(z))
    return np.concatenate(parts)


def shared(e: Trained, state: RunState) -> tuple[Any, Continuation | None]:
    """Returns the predictor of the model that all clients share, and its continuation
    of texts x [n, L] that `fit` with a cache: (x, how) -> next tokens [n, T].

    Raises:
      InputError: the method has none.
    """
    server, model = state.method.server, e.task.models[0]
    wanted = jax.eval_shape(model.init, jax.random.key(0))
    found = {part: server.get(part) for part in wanted if isinstance(server, dict)}
    structures: list[Any] = [jax.tree.structure(x) for x in (found, wanted)]
    if structures[0] != structures[1] or len(e.task.models) > 1:
        raise InputError(f"{e.config.algo} has no global model: name a client.")

    def run(x: np.ndarray) -> Any:
        rows = e.task.prepare(jnp.asarray(x))
        with e.tracing():
            return averaging.logits(model, found, rows, jnp.ones(len(x), bool))

    def cached(x: np.ndarray, how: Generation) -> np.ndarray:
        kept = x[generation.fit(x, how)]
        return generation.decoder(e, model)(lambda _: found, {0: kept}, how)[0]

    return run, None if model.cache is None else cached


def held_out(
    e: Trained, state: RunState, t: int, rows: Given, rounds: int | None = None
) -> Any:
    """Returns the predictor of a client that did not train, after its own local
    training on labelled rows, by the trained server.

    Args:
      rounds: of its training; None: those of the run.

    Raises:
      InputError: rows have no labels, or the method cannot personalise such clients.
    """
    if rows.labels is None:
        raise InputError("--train must have labels.")
    y: Any = rows.labels
    if e.task.label.dtype == np.int32 and not e.task.label.shape:
        known = e.classes or tuple(map(str, range(e.task.num_classes)))
        y = [known.index(_name(e, label)) for label in y]
    n, x = len(rows.x), np.append(rows.x, rows.x[:1], axis=0)  # and a test row
    y = np.append(np.asarray(y, e.task.label.dtype), y[:1], axis=0)
    dataset = Dataset("--train", x, y, n, e.task.num_classes, e.task.prepare)
    federation = federate(dataset, of_clients([range(n)], [[n]]))
    task = e.task._replace(
        sizes=np.array([n]),
        class_counts=np.asarray(federation.class_counts),
        architecture=np.zeros(1, int),
        malicious=None,
        sampling=None,
    )
    on, train = unseen.personalised(
        find(e.config.algo),
        e.task,
        task,
        e.config.hparams,
        lr_decay=e.config.lr_decay,
        rounds=e.config.unseen_rounds if rounds is None else rounds,
    )
    with e.tracing():
        given = simulate.with_frozen(federation, task), state.method.server
        context, own, _ = jax.jit(train)(e.key, *given, jnp.int32(t))
    predict = jax.jit(on.predict)

    def run(x: np.ndarray) -> Any:
        with e.tracing():
            return predict(context, own, 0, jnp.asarray(x))

    return run


def predictions(
    run: Run,
    given: Given,
    client: str,
    rows: Given | None = None,
    how: Generation | None = None,
    rounds: int | None = None,
) -> pd.DataFrame:
    """Returns a row per example and client: row, client, class or target, and
    probabilities.

    Args:
      rows: labelled rows of a client that did not train.
      how: a text's continuation in place of the next token.
      rounds: of that client's training; None: those of the run.

    Raises:
      InputError: there is no such client, or the method predicts no scores of classes.
    """
    e, everything = run.trained, np.arange(len(given.x))
    if rows is not None:
        own = held_out(e, run.state(), run.checkpoint[0], rows, rounds)
        return _frame(e, own, given, everything, client, how)
    if client == GLOBAL and GLOBAL not in e.names:
        own, cached = shared(e, run.state())
        new = None if cached is None or how is None else cached(given.x, how)
        return _frame(e, own, given, everything, client, how, new)
    chosen = {client: everything}
    if client == ALL and ALL not in e.names:
        chosen = dict.fromkeys(e.names, everything)
        if given.owners is not None:
            owners, names = np.array(given.owners), sorted(set(given.owners))
            chosen = {name: np.flatnonzero(owners == name) for name in names}
    parts = []
    t, state = run.checkpoint
    found = {}
    if how is not None:
        texts = {e.index(name): given.x[at] for name, at in chosen.items()}
        found = generation.of_clients(e, state, t, texts, how)
    for name, at in chosen.items():
        number = e.index(name)
        own, name = run.predictor(number), e.names[number]
        parts.append(_frame(e, own, given, at, name, how, found.get(number)))
    order = np.concatenate(list(chosen.values()))
    once = np.array_equal(np.sort(order), everything)
    table = pd.concat(parts)
    return table.iloc[np.argsort(order)] if once else table


def _frame(
    e: Trained,
    predict: Any,
    given: Given,
    at: np.ndarray,
    client: str,
    how: Generation | None,
    known: np.ndarray | None = None,
) -> pd.DataFrame:
    if how is not None and e.preparation is not None:
        of = functools.partial(scores, e, predict)
        new = generation.continued(of, given.x[at], how, known)
        texts = generation.written(new, e.preparation, e.config.data.dataset)
        named = [given.names[i] for i in at]
        return pd.DataFrame({"row": named, "client": client, "text": texts})
    found = scores(e, predict, given.x[at])
    words = None if e.preparation is None else e.preparation.words
    names = e.classes or (words if e.task.label.shape else None)
    names = names or tuple(map(str, range(e.task.num_classes)))
    table = pd.DataFrame({"row": [given.names[i] for i in at], "client": client})
    if e.task.label.dtype == np.float32:
        targets = [f"target_{i}" for i in range(1, found.shape[1] + 1)]
        return pd.concat([table, pd.DataFrame(found, columns=targets)], axis=1)
    if e.task.label.dtype == np.int32:
        table["class"] = [names[i] for i in found.argmax(axis=1)]
    else:
        own = [np.flatnonzero(p > 0.5) for p in found]
        table["classes"] = [" ".join(names[i] for i in each) for each in own]
    if given.labels is not None:
        table.insert(2, "label", [_name(e, given.labels[i]) for i in at])
    if len(names) == len(words or ()):
        return table  # a column per token would be too many
    return pd.concat([table, pd.DataFrame(found, columns=list(names))], axis=1)


def _name(e: Trained, label: Any) -> str:
    """Returns the name of a label, which may be given as its number."""
    if e.classes is None or str(label) in e.classes:
        return str(label)
    number = int(label) if str(label).isdecimal() else -1
    if not 0 <= number < len(e.classes):
        raise InputError(f"Unknown label {label!r}, not of {', '.join(e.classes)}.")
    return e.classes[number]


def confusion(found: pd.DataFrame, further: Sequence[str] = ()) -> str:
    """Returns the accuracy, further scores of all rows, and a table of labels by
    predicted classes.

    Args:
      further: names in `evaluation.METRICS`, of rows with a probability per class.
    """
    right = (found["label"] == found["class"]).mean()
    counts = pd.crosstab(found["label"], found["class"])
    counts = counts.rename_axis(index="label", columns="predicted")
    p = found.iloc[:, found.columns.get_loc("class") + 1 :]
    lines = [f"accuracy {100 * right:.1f} % of {len(found):,}"]
    if p.shape[1]:
        y = jnp.asarray(p.columns.get_indexer(found["label"]), jnp.int32)
        for name in (x for x in further if x in evaluation.METRICS):
            score = evaluation.METRICS[name]
            value = float(score(jnp.asarray(p.to_numpy(np.float32)), y, y >= 0))
            lines.append(f"{name} {metrics.quantity(name, value)}")
    return "\n".join([*lines, counts.to_string()])


@cli.isolated
def main(argv: Sequence[str]) -> int:
    """Runs the command `predict` and returns its exit code."""
    given, words = cli.parse(argv, FLAGS, __doc__ or "")
    if len(words) != 1 or not {"client", "input"} <= {*given}:
        raise InputError("Give one run directory, --client and --input.")
    run = results.load(words[0])
    file = Path(given.get("output", run.path / "predictions.csv")).expanduser()
    client, e = given["client"], run.trained
    own = read(given["train"], e) if "train" in given else None
    if own is not None and client in (*e.names, ALL, GLOBAL):
        raise InputError(f"--train needs a client that did not train, got {client}.")
    rounds = given.get("unseen_rounds")
    if rounds is not None:
        check("unseen_rounds", rounds, 1, MOST, whole=True)
        if own is None:
            raise InputError("--unseen_rounds needs --train.")
    options = {name: given[name] for name in Generation._fields if name in given}
    how = generation.checked(e, options)
    found = predictions(run, read(given["input"], e), client, own, how, rounds)
    found.to_csv(file, index=False)
    print(file)
    if {"label", "class"} <= {*found}:
        print(confusion(found, e.config.evaluation.scores))
    return 0
