"""The clients' state in the host's memory, of which only the rows of a round's clients go to the devices and back.

For many clients with large personal models: the devices then hold S rows, not N. The results are those of state on the
devices. A round's rows travel both ways, and an evaluation sends everybody's, S at a time.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.engine.cohort import AXIS
from fedjax_pfl.engine.program import Program
from fedjax_pfl.engine.sampling import cohort_size
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, PyTree, State, Task


def offloaded(program: Program, task: Task) -> Program:
    """The same experiment with State.clients as NumPy arrays [N, ...] by client id, which rounds overwrite in place.

    Its functions are jitted where they can be, and cannot be traced themselves.

    Raises:
      InputError: everybody takes part in a round, so that no row could stay on the host; or several processes.
    """
    n, most = task.num_clients, cohort_size(task)
    if jax.process_count() > 1:
        raise InputError("client_memory=host is for a single process: leave it out.")
    if most == n:
        raise InputError(
            f"client_memory=host keeps the clients that are not in the round on the host, but with participation=1 "
            f"all {n} are: leave it out."
        )
    everywhere, apart = (program.mesh and NamedSharding(program.mesh, spec) for spec in (P(), P(AXIS)))
    draw, score = jax.jit(program.parts.draw), jax.jit(program.parts.score)
    train = jax.jit(program.parts.train, donate_argnums=3)

    def here(state: State, ids: np.ndarray) -> State:
        rows = jax.tree.map(lambda x: x[np.minimum(ids, n - 1)], state.clients)
        return State(state.server, jax.device_put(rows, apart))

    def place(state: State) -> State:
        return State(jax.device_put(state.server, everywhere), jax.tree.map(np.array, state.clients))

    def init(key: Array, numbers: dict[str, Array]) -> State:
        return place(jax.device_get(jax.jit(program.parts.init)(*_on_cpu((key, numbers)))))

    def round(key, numbers, federation, state: State, t, evaluated) -> tuple[State, PyTree]:
        ids, active = jax.device_get(draw(key, t))
        new, metrics = train(key, numbers, federation, here(state, ids), ids, active, t, evaluated)
        for old, rows in zip(jax.tree.leaves(state.clients), jax.tree.leaves(new.clients), strict=True):
            old[ids[active]] = np.asarray(rows)[active]
        return State(new.server, state.clients), metrics

    def scores(key, numbers, federation, state: State, t) -> dict[str, Any]:
        size = len(jax.eval_shape(program.parts.draw, key, t)[0])
        blocks = np.arange(n + -n % size, dtype=np.int32).reshape(-1, size)
        found = [jax.device_get(score(key, numbers, federation, here(state, ids), ids, t)) for ids in blocks]
        return {name: np.concatenate([block[name] for block in found])[:n] for name in found[0]}

    def predict(key, numbers, federation, state: State, t, id, x) -> Array:
        return program.predict(key, numbers, federation, program.place(state), t, id, x)

    functions = (init, round, scores, predict, place, lambda state: state)
    return Program(program.numbers, *functions, program.parts, None, mesh=program.mesh, task=program.task)


def _on_cpu(tree: PyTree) -> PyTree:
    """Moved to where the N rows begin: beside an accelerator on the CPU, if JAX may use it.

    Arguments that lie on a mesh would be computed with on all of it, whatever the default device.
    """
    try:
        return jax.device_put(tree, jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return tree
