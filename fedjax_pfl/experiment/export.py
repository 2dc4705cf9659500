"""Writes one client's personal model: `fedjax-pfl export RUN --client=3`.

PATH.npz (NumPy) and PATH.msgpack (Flax) hold the variables of the network that the
client predicts with before local training: body, head and running statistics. Where a
method combines several networks they hold what the server and the client store. PATH is
RUN/client-NAME, or --output. The lines that load them are printed.

With --peft the folder RUN/client-NAME-peft, or --output, has a LoRA adapter of a
network of Hugging Face and the client's head, as the library peft loads them.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization, traverse_util

from fedjax_pfl import architectures, averaging, simulate
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import cli, results
from fedjax_pfl.experiment.types import Trained
from fedjax_pfl.models import peft, pretrained
from fedjax_pfl.models.adapted import ADAPTATIONS
from fedjax_pfl.types import Algorithm, Client, Predictor, PyTree, RunState, Task

FLAGS = {
    "client": cli.Flag(str, "name of the client, or #3 for number 3"),
    "output": cli.Flag(str, "path of the files without their suffix"),
    "peft": cli.Flag(bool, "write the LoRA adapter as the library peft loads it"),
    **cli.TRUST,
}
LINES = """# client {client} after {rounds} rounds: {count:,} numbers
from pathlib import Path
from flax import serialization
content = Path('{file}').read_bytes()
variables = serialization.msgpack_restore(content)"""
NETWORK = """
import fedjax_pfl
network = fedjax_pfl.model({arguments})"""
OF_RUN = """
from fedjax_pfl.experiment import results
network = results.load('{path}').trained.task.models[{index}]"""
CALL = """
logits, _ = network.apply(variables, x)  # prepared inputs [B, ...]"""


def exported(e: Trained, state: RunState, t: int, client: int) -> Any:
    """Returns variables of a network, or {"server", "client"} of several networks.

    Args:
      state: after `t` rounds, as `RunDirectory.restore` returns it.
    """
    return serialization.to_state_dict(exporter(e, state, t)(client))


def exporter(e: Trained, state: RunState, t: int) -> Callable[[int], PyTree]:
    """Returns (client) -> what `exported` returns, compiled once for all clients."""

    def kept(predictor: Any, server: PyTree, row: PyTree, c: Client) -> Predictor:
        if getattr(predictor, "func", None) is averaging.logits:
            _, found = predictor.args
        else:
            own = architectures.select(server, c.architecture)
            found = {"server": own, "client": row}
        return lambda x, mask: found

    x = np.zeros((1, *e.task.input.shape), e.task.input.dtype)
    run = changed(e, state, t, kept)
    return lambda client: run(client, x)


def of_client(
    e: Trained,
    state: RunState,
    t: int,
    client: int,
    x: Any,
    change: Callable[[Any, PyTree, PyTree, Client], Predictor],
) -> PyTree:
    """Returns what a changed predictor of one client returns for x [B, *input], raw;
    the arguments are those of `changed`."""
    return changed(e, state, t, change)(client, x)


def changed(
    e: Trained,
    state: RunState,
    t: int,
    change: Callable[[Any, PyTree, PyTree, Client], Predictor],
) -> Callable[[int, Any], PyTree]:
    """Returns (client, x [B, *input], raw) -> what a changed predictor of the client
    returns.

    Args:
      state: after `t` rounds, as `RunDirectory.restore` returns it.
      change: (predictor, server, the client's row, c) -> the predictor to call.
    """
    inner: Callable[..., Any] = find(e.config.algo)

    def factory(task: Task, **hparams: Any) -> Algorithm:
        made = inner(task, **hparams)

        def predict(server: PyTree, row: PyTree, c: Client) -> Predictor:
            return change(made.predict(server, row, c), server, row, c)

        return made._replace(predict=predict)

    factory = functools.wraps(inner)(factory)
    options: dict[str, Any] = {"lr_decay": e.config.lr_decay, "checked": False}
    program = simulate.program(factory, e.task, e.config.hparams, **options)
    placed = program.place(RunState(state.method))  # the rest predicts nothing
    context = program.context(e.key, e.federation, t)
    # of several architectures the client's is static
    several = len(e.task.models) > 1
    compiled = jax.jit(program.predict, static_argnums=2 if several else ())

    def run(client: int, x: Any) -> PyTree:
        with e.tracing():
            return jax.device_get(compiled(context, placed, client, x))

    return run


def _named(e: Trained, client: int) -> str:
    """Returns the name of a client's files."""
    return f"client-{e.names[client].replace('/', '-')}"


def write(path: str | Path, client: int | str, output: str | None = None) -> str:
    """Writes both files and returns the lines that load them."""
    run = results.load(path)
    e, (t, state) = run.trained, run.checkpoint
    client = e.index(client)
    tree = exported(e, state, t, client)
    base = Path(output or run.path / _named(e, client)).expanduser()
    flat = traverse_util.flatten_dict(tree, sep="/")
    np.savez(f"{base}.npz", **flat)
    file = Path(f"{base}.msgpack")
    file.write_bytes(serialization.msgpack_serialize(tree))
    count = sum(np.size(x) for x in flat.values())
    lines = LINES.format(client=e.names[client], rounds=t, count=count, file=file)
    if "server" in tree:
        return lines
    c, x, name = e.config, e.task.prepared, str(e.networks[client])
    if c.adapt or pretrained.folder(name) or x.dtype == np.int32:
        index = int(e.task.architecture[client])
        return lines + OF_RUN.format(path=run.path, index=index) + CALL
    given = f"'{name}', {x.shape[1:]}, {e.task.num_classes}"
    given += f", '{c.bn_stats}', features={c.features}, input_dtype='{x.dtype}'"
    return lines + NETWORK.format(arguments=given) + CALL


PEFT = """# client {client} after {rounds} rounds
from peft import PeftModel
network = PeftModel.from_pretrained(network, '{folder}')  # of {base}"""


def write_adapter(
    path: str | Path, client: int | str, output: str | None = None
) -> str:
    """Writes a client's adapter in peft's layout and returns the lines that load it.

    Raises:
      InputError: the run is not one of LoRA on a folder of Hugging Face, or the method
        combines several networks.
    """
    run = results.load(path)
    e, (t, state) = run.trained, run.checkpoint
    client = e.index(client)
    c, base = e.config, pretrained.folder(str(e.networks[client]))
    if base is None or c.base is not None or "lora" not in (c.adapt or ""):
        raise InputError("--peft needs a run of --adapt=lora on a Hugging Face folder.")
    tree = exported(e, state, t, client)
    if "server" in tree:
        raise InputError(f"--peft needs one network, and {c.algo} combines several.")
    folder = Path(output or run.path / f"{_named(e, client)}-peft")
    model = e.task.models[int(e.task.architecture[client])]
    peft.save(folder, base, model, tree, ADAPTATIONS.read(str(c.adapt))().scale)
    return PEFT.format(client=e.names[client], rounds=t, folder=folder, base=base)


@cli.isolated
def main(argv: Sequence[str]) -> int:
    """Runs the command `export` and returns its exit code."""
    parsed = cli.parse(argv, FLAGS, __doc__ or "")
    if len(parsed.words) != 1 or "client" not in parsed.given:
        raise InputError("Give one run directory, and --client.")
    make = write_adapter if parsed.given.get("peft") else write
    print(make(parsed.words[0], parsed.given["client"], parsed.given.get("output")))
    return 0
