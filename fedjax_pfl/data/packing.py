"""Packed texts: rows of tokens with several texts of one client."""

from collections.abc import Iterable

import numpy as np

from fedjax_pfl.data import partition
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.sources import text


def packed(dataset: Dataset, p: Partition, length: int) -> tuple[Dataset, Partition]:
    """Packs the texts of each client into rows of L tokens, those of train, val and
    test separately, and returns the rows and the partition of them.

    In the partition's order, each text is put into the client's first row with room.
    The first token t of a text after another one is -1 - t, which marks it. Labels are
    those of the texts, -1 in padding.

    Args:
      dataset: texts [n, l] of at least one token and at most L, with a label per
        position.
      p: texts of the clients. Texts of nobody are left out.
      length: L.
    """
    sizes, rows, found = text.lengths(dataset.x), list[list[int]](), {}
    for part in ("train", "val", "test"):
        own = zip(getattr(p, part), getattr(p, f"{part}_sizes"), strict=True)
        each = [first_fit(ids[:count], sizes, length) for ids, count in own]
        packs = [pack for client in each for pack in client]
        found[f"{part}_sizes"] = np.array([len(client) for client in each])
        found[part] = np.arange(len(rows), len(rows) + len(packs))
        rows += packs
    shape = len(rows), length
    x, y = np.full(shape, text.PADDING, np.int32), np.full(shape, -1, np.int32)
    for i, texts in enumerate(rows):
        start = 0
        for each_text in texts:
            end = start + sizes[each_text]
            x[i, start:end] = dataset.x[each_text, : end - start]
            y[i, start:end] = dataset.y[each_text, : end - start]
            if start:
                x[i, start] = ~x[i, start]
            start = end
    flat = [j for texts in rows for j in texts]
    before = 1 - sizes[flat].mean() / dataset.x.shape[1]
    after = 1 - sizes[flat].sum() / x.size
    note = (
        f"{len(flat):,} texts packed into {len(rows):,} rows, padding "
        f"{100 * before:.1f} % before and {100 * after:.1f} % after"
    )
    made = dataset._replace(
        x=x,
        y=y,
        num_train=len(rows) - len(found["test"]),
        columns={},
        validation=None,
        packed=True,
        note="; ".join(filter(None, (dataset.note, note))),
    )
    return made, partition.build(**found, moved=p.moved)


def first_fit(ids: Iterable[int], sizes: np.ndarray, length: int) -> list[list[int]]:
    """Returns numbers of texts row by row, each in the first row with room for it.

    Args:
      ids: numbers of texts, in order.
      sizes: tokens [n] of all texts, each at most `length`.
      length: tokens of a row.
    """
    rows, room = list[list[int]](), np.zeros(0, int)
    for i in map(int, ids):
        fits = np.flatnonzero(room >= sizes[i])
        if not len(fits):
            rows.append([])
            room = np.append(room, length)
        row = int(fits[0]) if len(fits) else len(rows) - 1
        rows[row].append(i)
        room[row] -= sizes[i]
    return rows
