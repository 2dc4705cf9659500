"""Options of a run on what clients send, for every method: a cohort with another
`mean`.

Differential privacy, robust aggregation, attacks and compression wrap a method's
factory, and its round then gets such a cohort. Nothing of this is in a plain round.
"""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pfl import architectures
from fedjax_pfl.engine import contract
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Algorithm, Array, Client, Cohort, Own, PyTree, State

# (client, its row, upload, default) -> upload
Change = Callable[[Client, PyTree, PyTree, PyTree], PyTree]
Sends = Callable[..., tuple[PyTree, ...]]  # a client's function, as `mean` takes it


class Through:
    """A cohort whose `mean`, or whose clients, are changed; all else is as before.

    Attributes:
      means: calls of `mean` so far.
    """

    def __init__(
        self,
        cohort: Cohort,
        mean: Callable[..., tuple[PyTree, tuple[PyTree, ...]]] | None = None,
        client: Callable[[Client], Client] | None = None,
    ):
        self._cohort, self._mean, self._client = cohort, mean or cohort.mean, client
        self.means = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cohort, name)

    def map(self, client: Callable[..., PyTree], *rows: PyTree, **options: Any) -> Any:
        """See `types.Cohort`."""
        return self._cohort.map(self._changed(client), *rows, **options)

    def mean(self, client: Sends, *rows: PyTree, **options: Any) -> Any:
        """See `types.Cohort`."""
        self.means += 1
        return self._mean(self._changed(client), *rows, **options)

    def scan(self, client: Callable[..., Any], *rows: PyTree, **options: Any) -> Any:
        """See `types.Cohort`."""
        return self._cohort.scan(self._changed(client), *rows, **options)

    def _changed(self, client: Callable[..., Any]) -> Callable[..., Any]:
        if self._client is None:
            return client
        change = self._client
        return lambda c, *rows: client(change(c), *rows)


def sending(client: Sends, change: Change, default: PyTree) -> Sends:
    """Returns a client's function whose upload is change(c, row, upload, default).

    The function returned takes `row`, an entry of any tree, before the others.
    """

    def one(c: Client, row: PyTree, *rows: PyTree) -> tuple[PyTree, ...]:
        results = client(c, *rows)
        if not isinstance(results, tuple) or not results:
            return results  # refused by the cohort
        first, *rest = results
        like = architectures.select(default, c.architecture)
        if isinstance(first, Own):
            contract.check_like("the upload must be like `default`", like, first.tree)
            return Own(change(c, row, first.tree, like)), *rest
        contract.check_like("the upload must be like `default`", like, first)
        return change(c, row, first, like), *rest

    return one


def must_send(name: str, means: int) -> None:
    """Raises InputError unless a round has called `Cohort.mean`."""
    if not means:
        raise InputError(f"{name}: clients send nothing through cohort.mean.")


def over(method: Algorithm, **fields: Any) -> Algorithm:
    """Returns a method whose State.server holds the method's own as `method`.

    Args:
      fields: in place of the method's, among them `init` and `round`.
    """

    def inner(state: State) -> State:
        return State(state.server.method, state.clients)

    def traffic(state: State, cohort: Cohort, metrics: Any) -> Any:
        return method.traffic and method.traffic(inner(state), cohort, metrics)

    def predict(server: PyTree, row: PyTree, c: Client) -> Any:
        return method.predict(server.method, row, c)

    given = {"predict": predict, "traffic": method.traffic and traffic, "averages": ()}
    return method._replace(**(given | fields))


def key_of(c: Client) -> Array:
    """Returns the client's key, or one of its id where a phase draws nothing."""
    found: Array | None = c.key
    return jax.random.fold_in(jax.random.key(0), c.id) if found is None else found


def random_like(key: Array, tree: PyTree) -> PyTree:
    """Draws standard normal numbers, independent in every leaf, in the leaves'
    types."""
    leaves, structure = jax.tree.flatten(tree)
    draws = [
        jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, draws)
