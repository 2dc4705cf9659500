"""Writes one client's personal model: `fedjax-pfl export RUN --client=3`.

PATH.npz (NumPy) and PATH.msgpack (Flax) hold the variables of the network that the
client predicts with before local training: body, head and running statistics. Where a
method combines several networks they hold what the server and the client store. PATH is
RUN/client-3, or --output. The lines that load them are printed.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization, traverse_util

from fedjax_pfl import architectures, simulate
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.experiment import cli, results
from fedjax_pfl.experiment.build import Experiment, method
from fedjax_pfl.types import Algorithm, Client, PyTree, State, Task

FLAGS = {
    "client": cli.Flag(int, "index of the client, from 0"),
    "output": cli.Flag(str, "path of the files without their suffix"),
}


class Exported(NamedTuple):
    """What one client predicts with."""

    tree: PyTree  # variables of a network, else {"server": ..., "client": ...}
    network: bool


def exported(e: Experiment, state: State, t: int, client: int) -> Exported:
    """Returns what a client predicts with.

    Args:
      state: after `t` rounds, as `RunDirectory.restore` returns it.
    """
    check("client", client, 0, e.task.num_clients - 1, whole=True)
    try:
        return _exported(e, state, t, client, alone=True)
    except jax.errors.UnexpectedTracerError:  # several networks in a loop
        return _exported(e, state, t, client, alone=False)


def _exported(
    e: Experiment, state: State, t: int, client: int, *, alone: bool
) -> Exported:
    """Returns what a client predicts with, a network that is used `alone` as such."""
    x = e.dataset.x[e.partition.test[client][:1]]
    seen: list[PyTree] = []

    def noted(apply: Any) -> Any:
        def noting(variables: PyTree, *args: Any, **options: Any) -> Any:
            seen.append(variables)
            return apply(variables, *args, **options)

        return noting

    def factory(task: Task, **hparams: Any) -> Algorithm:
        made = inner(task, **hparams)

        def predict(server: PyTree, row: PyTree, c: Client) -> Any:
            predictor = made.predict(server, row, c)

            def run(x: Any, mask: Any) -> Any:
                seen.clear()  # networks that a method adapted with
                predictor(x, mask)
                own = architectures.select(server, c.architecture)
                return {
                    "networks": list(seen) if alone else [],
                    "server": own,
                    "client": row,
                }

            return run

        return made._replace(predict=predict)

    inner, hparams = method(e.config)
    factory = functools.wraps(inner)(factory)
    models = tuple(
        model._replace(apply=noted(model.apply), features=noted(model.features))
        for model in e.task.models
    )
    task = e.task._replace(models=models)
    program = simulate.program(
        factory, task, hparams, lr_decay=e.config.lr_decay, checked=False
    )
    given = (e.key, program.traced, e.federation, program.place(state), t, client, x)
    found = jax.device_get(jax.jit(program.predict, static_argnums=5)(*given))
    if len(found["networks"]) == 1:
        return Exported(found["networks"][0], True)
    parts = {name: found[name] for name in ("server", "client")}
    return Exported(serialization.to_state_dict(parts), False)


def write(path: str | Path, client: int, output: str | None = None) -> str:
    """Writes both files and returns the lines that load them."""
    run = results.load(path)
    e, (t, state) = run.experiment, run.checkpoint
    found = exported(e, state, t, client)
    base = Path(output or run.path / f"client-{client}").expanduser()
    flat = traverse_util.flatten_dict(found.tree, sep="/")
    np.savez(f"{base}.npz", **flat)
    Path(f"{base}.msgpack").write_bytes(serialization.msgpack_serialize(found.tree))
    count = sum(np.size(x) for x in flat.values())
    lines = [f"# client {client} after {t} rounds: {count:,} numbers"]
    lines += ["from pathlib import Path", "from flax import serialization"]
    lines += [f"content = Path('{base}.msgpack').read_bytes()"]
    lines += ["variables = serialization.msgpack_restore(content)"]
    if found.network:
        c, x = e.config, e.task.prepared
        given = f"'{e.networks[client]}', {x.shape[1:]}, {e.task.num_classes}"
        given += f", '{c.bn_stats}', features={c.features}, input_dtype='{x.dtype}'"
        lines += ["import fedjax_pfl", f"network = fedjax_pfl.model({given})"]
        lines += ["logits, _ = network.apply(variables, x)  # prepared inputs [B, ...]"]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs the command `export` and returns its exit code."""
    parsed = cli.parse(argv, FLAGS, __doc__ or "")
    if len(parsed.words) != 1 or "client" not in parsed.given:
        raise InputError("Give one run directory, and --client.")
    print(write(parsed.words[0], parsed.given["client"], parsed.given.get("output")))
    return 0
