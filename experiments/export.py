"""Writes one client's personal model: `python -m experiments.export RUN --client=3
--output=PATH`.

It is what the client predicts with at `pre`: the state of the run's last checkpoint, a
method's adaptation before predicting included. PATH.msgpack (Flax) and PATH.npz (NumPy,
names joined by /) hold the same arrays; PATH is RUN/client-3 where it is not given.
Where the client predicts with one network, they are its variables: body, head, and
running statistics. Where the method puts several parts together (as FedCP, FedEM,
FedRoD), they are what the client and what the server hold. The lines that load them are
printed.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization, traverse_util

from experiments import build, entry, flags, gather, runs
from experiments.files import write_bytes
from fedjax_pfl import architectures, simulate, user_code
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import Algorithm, Client, Model, Predictor, PyTree, Task

_FLAGS = {
    "client": flags.Flag(int, "which client, from 0"),
    "output": flags.Flag(
        str, "where to: PATH.msgpack and PATH.npz (default: RUN/client-K)"
    ),
}
# examples by which a network is recognised as the one that the client predicts with
_COMPARED = 64


class Exported(NamedTuple):
    """What one client predicts with."""

    tree: PyTree  # nested dicts of arrays with string keys
    # is it the variables of one network? Else {"server": ..., "client": ...}
    network: bool


def exported(run: runs.Run, client: int) -> Exported:
    """What a client of a run predicts with; InputError if there is no such client."""
    check("client", client, 0, run.experiment.task.num_clients - 1, whole=True)
    e = run.experiment
    x = e.dataset.x[
        e.partition.test[client][: e.partition.test_sizes[client]][:_COMPARED]
    ]
    try:
        found = _predicted(run, client, x, networks=True)
    except jax.errors.UnexpectedTracerError:
        # networks inside a loop, so several of them
        found = _predicted(run, client, x, networks=False)
    model, outputs = e.task.models[e.task.architecture[client]], found["outputs"]
    if isinstance(outputs, np.ndarray):
        wanted = runs.first(outputs)
        for network in found["networks"]:
            if _is_of(model, network) and _close(
                model.apply(network, e.dataset.prepare(jnp.asarray(x)))[0], wanted
            ):
                return Exported(network, True)
    return Exported(
        serialization.to_state_dict(
            {name: found[name] for name in ("server", "client")}
        ),
        False,
    )


def predictor(run: runs.Run, client: int, parts: PyTree) -> Callable[[Any], PyTree]:
    """The prediction, raw inputs [B, *input] -> outputs, that a run's method makes of
    exported parts.

    Args:
      parts: {"server": ..., "client": ...}, as a file of `export` holds them.
    """
    check("client", client, 0, run.experiment.task.num_clients - 1, whole=True)

    def predict(method: Algorithm, server: PyTree, row: PyTree, c: Client) -> Predictor:
        here = {"server": architectures.select(server, c.architecture), "client": row}
        merged = _flat(serialization.to_state_dict(here)) | _flat(parts)
        given = serialization.from_state_dict(
            here, traverse_util.unflatten_dict(merged, sep="/")
        )
        given = jax.tree.map(jnp.asarray, given)
        whole = jax.tree.map(
            lambda old, new: (
                new
                if not architectures.is_grouped(old)
                else _grouped(old, new, c.architecture)
            ),
            server,
            given["server"],
            is_leaf=architectures.is_grouped,
        )
        return method.predict(whole, given["client"], c)

    return lambda x: runs.first(
        _run(run, client, jnp.asarray(x), predict, run.experiment.task)
    )


def _grouped(old: PyTree, new: PyTree, group: int) -> PyTree:
    """Grouped trees with one architecture's replaced."""
    return old._replace(trees=(*old.trees[:group], new, *old.trees[group + 1 :]))


def _predicted(
    run: runs.Run, client: int, x: np.ndarray, networks: bool
) -> dict[str, Any]:
    """On the host {"outputs": of the client's predictor, "server", "client": what it is
    made of, "networks": variables of the client's models, in the order in which they
    were applied}."""
    seen: list[PyTree] = []

    def noted(apply: Callable[..., Any]) -> Callable[..., Any]:
        def noting(variables: PyTree, *args: Any, **options: Any) -> Any:
            seen.append(variables)
            return apply(variables, *args, **options)

        return noting

    def predict(method: Algorithm, server: PyTree, row: PyTree, c: Client) -> Predictor:
        inner = method.predict(server, row, c)

        def run(x: jax.Array, mask: jax.Array) -> dict[str, PyTree]:
            seen.clear()  # what it adapted with
            outputs = inner(x, mask)
            parts = {
                "server": architectures.select(server, c.architecture),
                "client": row,
            }
            return {
                "outputs": outputs,
                "networks": list(seen) if networks else [],
            } | parts

        return run

    task = run.experiment.task
    models = tuple(
        m._replace(apply=noted(m.apply), features=noted(m.features))
        for m in task.models
    )
    return jax.device_get(
        _run(run, client, jnp.asarray(x), predict, task._replace(models=models))
    )


def _run(
    run: runs.Run,
    client: int,
    x: jax.Array,
    predictor: Callable[..., Predictor],
    task: Task,
) -> PyTree:
    """What `predictor` returns for one client, which takes the run's method and what
    `Algorithm.predict` does."""
    c, e = run.config, run.experiment
    factory, hparams = build.method(c)

    @functools.wraps(factory)
    def changed(task: Task, **hparams: Any) -> Algorithm:
        method = factory(task, **hparams)
        return method._replace(predict=functools.partial(predictor, method))

    program = simulate.program(
        changed, task, hparams, lr_decay=c.lr_decay, checked=False
    )
    values = {name: jnp.float32(value) for name, value in program.traced.items()}
    predict = jax.jit(
        lambda state, x: program.predict(
            e.key, values, e.federation, state, run.round, client, x
        )
    )
    return predict(program.place(run.state), x)


def _is_of(model: Model, variables: PyTree) -> bool:
    """Are these variables of the model?"""
    wanted = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, wanted)


def _close(a: Any, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-5)


def _flat(tree: PyTree) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, keep_empty_nodes=True, sep="/")


def write(run: runs.Run, client: int, output: str | None = None) -> str:
    """Writes both files and returns the lines that load them."""
    base = entry.directory(output) if output else run.path / f"client-{client}"
    base = base.with_suffix("") if base.suffix in (".msgpack", ".npz") else base
    if not base.parent.is_dir():
        raise InputError(f"--output={output}: there is no directory {base.parent}.")
    found = exported(run, client)
    arrays = {name: x for name, x in _flat(found.tree).items() if hasattr(x, "shape")}
    packed = serialization.msgpack_serialize(found.tree)
    with gather.writing(base):
        write_bytes(Path(f"{base}.msgpack"), lambda file: file.write(packed))
        write_bytes(Path(f"{base}.npz"), lambda file: np.savez(file, **arrays))
    count = sum(x.size for x in arrays.values())
    what = (
        "one network"
        if found.network
        else f"the parts that {run.config.algo} puts together, the server's whole"
    )
    head = (
        f"# client {client} after round {run.round}, at `pre`: {what}, {count:,} "
        f"numbers; {base}.npz holds the same"
    )
    return "\n".join([head, *lines(run, client, str(base), found.network)])


def lines(run: runs.Run, client: int, base: str, network: bool) -> list[str]:
    """The Python that loads the file of a client and makes `predict`, raw inputs ->
    outputs."""
    name, needed = (
        ("variables", "import fedjax_pfl as pfl")
        if network
        else ("parts", "from experiments import export, runs")
    )
    loaded = [
        "from flax import serialization",
        needed,
        "",
        f'with open({base + ".msgpack"!r}, "rb") as file:',
    ]
    loaded += [f"    {name} = serialization.msgpack_restore(file.read())"]
    if network:
        return loaded + _network(run, client)
    return [
        *loaded,
        f"predict = export.predictor(runs.load({str(run.path)!r}), {client}, parts)",
    ]


def _network(run: runs.Run, client: int) -> list[str]:
    """The Python that makes the network and `predict`."""
    c, e = run.config, run.experiment
    name = build.networks.architectures(c.model, len(e.everybody.train))[0][
        e.task.architecture[client]
    ]
    example = jax.eval_shape(
        e.dataset.prepare,
        jax.ShapeDtypeStruct((1, *e.dataset.x.shape[1:]), e.dataset.x.dtype),
    )
    options: dict[str, tuple[Any, Any]] = {
        "bn_stats": (c.bn_stats, "aggregate"),
        "compute_dtype": (c.compute_dtype, "float32"),
        "features": (c.features, None),
        "input_dtype": (str(example.dtype), "float32"),
    }
    given = "".join(
        f", {key}={value!r}"
        for key, (value, usual) in options.items()
        if value != usual
    )
    data = f", {c.data_dir!r}" if c.data_dir else ""
    data += f", seed={c.seed}" if user_code.named(c.dataset) else ""
    return [
        f"network = pfl.model({name!r}, {example.shape[1:]}, "
        f"{e.task.num_classes}{given})",
        f"prepare = pfl.load({c.dataset!r}{data}).prepare  # of raw inputs, as the "
        "data set has them",
        "predict = lambda x: network.apply(variables, prepare(x))[0]  # logits [B, C]",
    ]


def main(argv: list[str]) -> str:
    """Exports as a command line says."""
    parsed = flags.parse(argv, _FLAGS, words=True)
    if len(parsed.words) != 1:
        raise InputError(f"Name one run directory, not {len(parsed.words)}.")
    if parsed.get("client") is None:
        raise InputError("Say which client to export with --client=K.")
    return write(
        runs.load(entry.directory(parsed.words[0])),
        parsed.given["client"],
        parsed.get("output"),
    )


if __name__ == "__main__":
    sys.exit(entry.enter(main, __doc__))
