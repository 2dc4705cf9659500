"""Names of clients: the values of natural:COLUMN, else their numbers."""

from collections import Counter
from collections.abc import Sequence

from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.errors import InputError, check, nearest

LISTED = 20  # names in a message


def names(
    column: str | None, dataset: Dataset, everybody: Partition
) -> tuple[str, ...]:
    """Returns the names of all clients.

    Args:
      column: of a natural partition, whose values are the names. Several clients of a
        value are VALUE/0, VALUE/1 and so on; None: names are "0" to "N-1".
    """
    if column is None:
        return tuple(map(str, range(len(everybody.train))))
    values = [str(x) for x in dataset.columns[column][everybody.train[:, 0]]]
    count, seen, found = Counter(values), Counter[str](), []
    for value in values:
        found.append(value if count[value] == 1 else f"{value}/{seen[value]}")
        seen[value] += 1
    return tuple(found)


def index(names: Sequence[str], client: int | str, unseen: str | None = None) -> int:
    """Returns the number of a client that trains.

    Args:
      client: its number, its name, or "#3" for number 3; a name wins.
      unseen: the setting of this name.

    Raises:
      InputError: there is none.
    """
    if isinstance(client, str) and client in names:
        return names.index(client)
    if client in (unseen or "").removeprefix("names:").split(","):
        raise InputError(
            f"{client} did not train: fedjax-pfl predict RUN --client={client} "
            "--train=FILE trains its model on labelled rows."
        )
    number = client[1:] if isinstance(client, str) and client[:1] == "#" else client
    if isinstance(number, str) and not (number != client and number.isdecimal()):
        near = nearest(number, names)
        hint = f"did you mean {near!r}? " if near else ""
        listed = ", ".join([*names[:LISTED], "..."][: len(names)])
        raise InputError(f"Unknown client {client!r}: {hint}Known: {listed}.")
    check("client", int(number), 0, len(names) - 1, whole=True)
    return int(number)
