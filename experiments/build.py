"""From settings to an experiment: data, partition, task, program. Everything wrong is found here, before compiling."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from experiments import scores, settings
from fedjax_pfl import simulate, trees
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data import datasets, federate, marks, partitioners, tfds
from fedjax_pfl.engine import host_state
from fedjax_pfl.engine.flops import flops_of_step
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import functional, layers
from fedjax_pfl.types import Algorithm, Federation, Model, State, Task

OWN_NETWORKS = ("feddva",)  # methods that make their networks of the inputs' shape: of --model they take nothing


class Experiment(NamedTuple):
    """What a run is made of; `config` says all of it."""

    config: dict[str, Any]
    dataset: datasets.Dataset
    public: datasets.Dataset | None
    partition: partitioners.Partition
    federation: Federation
    task: Task
    conv: str  # the form of the convolutions
    made: dict[Any, Any]  # what is made once: programs by layout, so that what was traced is there again; `flops`
    examples: dict[str, int]  # those used (data_fraction), available here, and of the whole data set
    marks: tuple[str, ...] = ()  # [N] the type of mark on each client's images; empty without --marks

    @property
    def key(self) -> jax.Array:
        return jax.random.key(self.config["seed"])

    def program(self, width: int = 1, devices: int = 1, rounds: int | None = None) -> simulate.Program:
        """The pure functions of this experiment; made once for each layout."""
        if (width, devices, rounds) not in self.made:
            task = self.task if rounds is None else self.task._replace(rounds=rounds)
            # with `rounds` it is to be traced
            make = simulate.program if rounds or self.config["client_memory"] == "device" else host_state.program
            options = {"lr_decay": self.config["lr_decay"], "width": width, "devices": devices}
            options["checked"] = not self.made  # the first time
            factory = find(self.config["algo"])
            self.made[width, devices, rounds] = make(factory, task, self.config["hparams"], **options)
        return self.made[width, devices, rounds]

    def algorithm(self) -> Algorithm:
        """The method as a value, at the first round's learning rate."""
        return find(self.config["algo"])(self.task, **self.config["hparams"])

    @property
    def headline(self) -> scores.Headline:
        """The score that decides, and whether more or less of it is better."""
        return self.algorithm().headline

    def state_shapes(self) -> State:
        """The state's structure with shapes and types in place of arrays; nothing is compiled."""
        program, key = self.program(rounds=self.config["rounds"]), jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(lambda key, values: program.unplace(program.init(key, values)), key, numbers(program))


def prepare(config: dict[str, Any], conv: str = "auto", room: Sequence[int] = federate.ROOM) -> Experiment:
    """Loads, partitions and checks.

    Args:
      conv: "auto", or the recorded form on a resume.
      room: as `federate` takes it.

    Raises:
      InputError: the settings do not fit each other or the data.
    """
    dataset = datasets.load(config["dataset"], config["data_dir"])
    available = len(dataset.y)
    dataset = datasets.subset(dataset, config["data_fraction"], config["seed"])
    assigned, kinds = _partition(config, dataset), tuple[str, ...]()
    if config["marks"]:
        dataset, kinds = marks.mark(dataset, assigned, config["seed"])
    if config["drop_last"]:
        _check_batches(assigned.train_sizes, config["batch_size"])
    config = config | {"clients": len(assigned.train)}
    if config["model"] == "auto":
        config["model"] = "cnn" if _is_image(dataset.x.shape[1:]) else "mlp"
    conv, public = layers.form(conv), _public(config)
    task = _task(config, dataset, assigned, conv)
    if public is not None:
        task = simulate.with_public(task, public)
    whole = max(available, tfds.SIZES.get(dataset.name, 0))
    examples = {"used": len(dataset.y), "available": available, "of": whole}
    experiment = Experiment(config, dataset, public, assigned, None, task, conv, {}, examples, kinds)  # type: ignore[arg-type]
    experiment.program()  # checks the method: its hyperparameters, the model's parts, the shapes of a round
    return experiment._replace(federation=federate.federate(dataset, assigned, room, public))


def room(configs: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Room for the clients of each of these settings, which differ in the seed (see `federate`).

    Raises:
      InputError: as `prepare`.
    """
    whole, found = datasets.load(configs[0]["dataset"], configs[0]["data_dir"]), [federate.ROOM]
    for config in configs:
        assigned = _partition(config, datasets.subset(whole, config["data_fraction"], config["seed"]))
        found.append(tuple(rows.shape[1] for rows in (assigned.train, assigned.val, assigned.test)))
    return tuple(map(max, zip(*found, strict=True)))


def _partition(config: dict[str, Any], dataset: datasets.Dataset) -> partitioners.Partition:
    spec, draw = config["partition"], {"num_clients": config["clients"], "seed": config["seed"]}
    if config["clients"] is None:  # the file says it
        return partitioners.load_file(spec.removeprefix("file:"), dataset)
    if spec.startswith("file:"):
        return partitioners.partition(dataset, spec, **draw)
    return partitioners.partition(
        dataset,
        spec,
        **draw,
        alpha=config["alpha"],
        classes_per_client=config["classes_per_client"],
        test_split=config["test_split"],
        val_fraction=config["val_fraction"],
    )


def _check_batches(sizes: np.ndarray, batch_size: int) -> None:
    """With drop_last a client that cannot fill one batch takes no step."""
    short = int((sizes < batch_size).sum())
    if short == len(sizes):
        raise InputError(
            f"--drop_last with batches of {batch_size} leaves nothing to train on: the largest client has "
            f"{sizes.max()} examples. Take a smaller --batch_size, or leave --drop_last out."
        )
    if short:
        logging.warning(
            "--drop_last: %d of %d clients have fewer than %d examples and will not train.",
            short,
            len(sizes),
            batch_size,
        )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[:2]) >= 16


def _task(config: dict[str, Any], dataset: datasets.Dataset, assigned: partitioners.Partition, conv: str) -> Task:
    names, of = architectures(config["model"], len(assigned.train))
    made = {name: model(config, dataset, conv, name) for name in dict.fromkeys(names)}
    return simulate.task(
        dataset,
        partitioners.class_counts(assigned, dataset),
        [made[name] for name in names],
        architecture=of,
        shared=_shared(config, dataset, conv, made),
        lr=config["lr"],
        optimizer=optimizer(config["momentum"], config["weight_decay"], config["clip"], config["optimizer"]),
        batch_size=config["batch_size"],
        epochs=config["epochs"],
        steps=config["steps"],
        rounds=config["rounds"],
        participation=settings.participation(config["participation"]),
        drop_last=config["drop_last"],
        bn_stats=config["bn_stats"],
    )


def architectures(spec: str, num_clients: int) -> tuple[list[str], np.ndarray]:
    """Reads --model.

    Returns:
      the names of the networks [G], and which of them each client has [N].

    Raises:
      InputError: a file cannot be read or has not one name per client, or there are more networks than clients.
    """
    if not spec.startswith("file:"):
        names = spec.split(",")
        if len(names) > num_clients:
            raise InputError(f"--model={spec} has {len(names)} networks for {num_clients} clients: name fewer.")
        return names, np.arange(num_clients) % len(names)
    path = Path(spec.removeprefix("file:")).expanduser()
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--model={spec} cannot be read ({error}): write the name of a network per client.") from None
    if len(words) != num_clients:
        raise InputError(f"--model={spec} names {len(words)} networks for {num_clients} clients: write one per client.")
    names = list(dict.fromkeys(words))
    return names, np.array([names.index(word) for word in words])


def model(config: dict[str, Any], dataset: datasets.Dataset, conv: str, name: str) -> Model:
    """A network for inputs of the data set's shape, with convolutions in the form `conv`."""
    example = jax.ShapeDtypeStruct((1, *dataset.x.shape[1:]), dataset.x.dtype)
    prepared = jax.eval_shape(dataset.prepare, example)
    options = (config["bn_stats"], conv, config["compute_dtype"], config["features"])
    shape, dtype = prepared.shape[1:], prepared.dtype
    return functional.model(name, shape, dataset.num_classes, *options, input_dtype=dtype)


def _shared(config: dict[str, Any], dataset: datasets.Dataset, conv: str, made: dict[str, Model]) -> Model:
    """The network that all clients exchange: as --shared_model says, else the smallest of the clients' own."""
    if config["shared_model"] is not None:
        return model(config, dataset, conv, config["shared_model"])
    return min(made.values(), key=num_parameters)


def num_parameters(model: Model) -> int:
    """Parameters of a network."""
    return functional.num_parameters(jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0))))


def _public(config: dict[str, Any]) -> datasets.Dataset | None:
    """The examples of --public."""
    if config["public"] is None:
        return None
    name, colon, count = config["public"].rpartition(":")
    if not colon or not count.isdigit():
        name, count = config["public"], ""
    dataset = datasets.load(name, config["data_dir"])
    if not count:
        return dataset
    if not 1 <= int(count) <= len(dataset.y):
        raise InputError(f"--public={config['public']}: {name} has 1 to {len(dataset.y)} examples to take.")
    rows = np.sort(np.random.default_rng(config["seed"]).permutation(len(dataset.y))[: int(count)])
    return dataset._replace(x=dataset.x[rows], y=dataset.y[rows], num_train=len(rows))


def optimizer(momentum: float, weight_decay: float, clip: float | None, name: str = "sgd"):
    """An optimizer with PyTorch's meaning of its numbers, lr -> transformation: gradients clipped, then decayed.

    Args:
      momentum: of SGD.
      name: one of `settings.optimizers`, with optax's defaults but for the learning rate.
    """

    def make(lr: float | jax.Array) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(clip)] if clip is not None else []
        parts += [optax.add_decayed_weights(weight_decay)] if weight_decay else []
        last = optax.sgd(lr, momentum or None) if name == "sgd" else getattr(optax, name)(lr)
        return optax.chain(*parts, last)

    return make


def numbers(program: simulate.Program) -> dict[str, jax.ShapeDtypeStruct]:
    """The traced floats of a program, as shapes."""
    return {name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.numbers}


def in_form(experiment: Experiment, conv: str) -> Experiment:
    """The experiment with convolutions in this form."""
    if conv == experiment.conv:
        return experiment
    config, dataset, task = experiment.config, experiment.dataset, experiment.task
    names, _ = architectures(config["model"], task.num_clients)
    made = {name: model(config, dataset, conv, name) for name in dict.fromkeys(names)}
    task = task._replace(models=tuple(made[name] for name in names), shared=_shared(config, dataset, conv, made))
    return experiment._replace(task=task, conv=conv, made={})


def check_growth(experiment: Experiment, before: int) -> None:
    """Raises InputError if the program depends on the number of rounds, which grew from `before`."""
    if experiment.config["rounds"] == before:
        return
    if _trace(experiment, before) != _trace(experiment, experiment.config["rounds"]):
        raise InputError(
            f"{experiment.config['algo']} has a schedule over the rounds, so rounds cannot grow from {before} to "
            f"{experiment.config['rounds']}: start a new run with --workdir."
        )


def _trace(experiment: Experiment, rounds: int) -> str:
    """The round as text; addresses in it say nothing."""
    program = experiment.program(rounds=rounds)
    key, t = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
    wanted = jax.ShapeDtypeStruct((), jnp.bool)
    arguments = (key, numbers(program), experiment.federation, experiment.state_shapes(), t, wanted)
    traced = jax.make_jaxpr(program.round)(*arguments)
    constants = [(x.shape, np.asarray(x).tobytes()) for x in traced.consts if isinstance(x, np.ndarray)]
    return re.sub(r"0x[0-9a-f]+", "", str(traced)) + str(constants)


def flops(experiment: Experiment) -> float | None:
    """Floating-point operations of the method's local work for each example that the settings ask for, see
    `engine.flops`; None if they cannot be counted."""
    if "flops" not in experiment.made:
        plain = in_form(experiment, "matmul")
        factory = find(plain.config["algo"])
        try:
            counted = flops_of_step(factory, plain.task, plain.federation, plain.config["hparams"])
            experiment.made["flops"] = counted / plain.task.batch_size
        except Exception as error:  # another version of JAX may write another trace; a run does not depend on it
            logging.warning("Floating-point operations are not counted (%s: %s).", type(error).__name__, error)
            experiment.made["flops"] = None
    return experiment.made["flops"]


def data_digest(dataset: datasets.Dataset) -> str:
    """SHA-256 of the examples and labels."""
    content = hashlib.sha256(np.ascontiguousarray(dataset.x).data)
    content.update(np.ascontiguousarray(dataset.y).data)
    return content.hexdigest()


def initial_broadcast(experiment: Experiment) -> dict[str, int]:
    """Scalars that it takes to give every client its model before the first round: in no round's traffic.

    One model each: what a method has beside it, as FedEM its further models, is not counted.
    """
    task, key = experiment.task, jax.eval_shape(lambda: jax.random.key(0))
    if experiment.config["algo"] in OWN_NETWORKS:
        return {"scalars": task.num_clients * own_parameters(experiment)}
    sizes = np.array([trees.size(jax.eval_shape(model.init, key)) for model in task.models])
    return {"scalars": int(sizes[task.architecture].sum())}


def own_parameters(experiment: Experiment) -> int:
    """Parameters of one client's networks, of a method in OWN_NETWORKS."""
    state = experiment.state_shapes()
    own = trees.size({name: part for name, part in state.clients.items() if name != "stats"})
    return trees.size(state.server) + own // experiment.task.num_clients


def describe(experiment: Experiment) -> str:
    """One line: what is going to run."""
    c, n = experiment.config, experiment.examples
    names, _ = architectures(c["model"], c["clients"])
    sizes = [f"{num_parameters(model):,}" for model in experiment.task.models]
    networks = ", ".join(f"{name} with {size} parameters" for name, size in zip(names, sizes, strict=True))
    if c["algo"] in OWN_NETWORKS:
        networks = f"own networks with {own_parameters(experiment):,} parameters"
    marked = " with marks" if experiment.marks else ""
    how = "" if c["optimizer"] == "sgd" else f"{c['optimizer']}, "
    work = f"{c['steps']} steps" if c["steps"] is not None else f"{c['epochs']} epochs"
    moved = experiment.partition.moved
    assigned = f"{c['partition']}; {moved} examples moved to clients below the minimum" if moved else c["partition"]
    part = f" ({n['available']:,} of its {n['of']:,} examples)" if n["available"] < n["of"] else ""
    return (
        f"{c['algo']} on {c['dataset']}{marked}{part}: {c['clients']} clients ({assigned}), {networks}, "
        f"{c['rounds']} rounds of {work}, batch {c['batch_size']}, {how}lr {c['lr']:g}"
    )
