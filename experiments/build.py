"""From settings to an experiment: data, partition, task, program. Everything wrong is
found here, before compiling."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from experiments import networks, scores, unseen
from experiments.config import BY_FILE, Config, participation
from experiments.unseen import Unseen
from fedjax_pfl import server_optimizer, simulate, user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data import datasets, federate, marks, partitioners, tfds
from fedjax_pfl.data.partition import Partition, class_counts, load_file, select
from fedjax_pfl.engine import batch, host_state, validate
from fedjax_pfl.engine.unseen import among
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.types import Algorithm, Federation, Model, State, Task


class Experiment(NamedTuple):
    """What a run is made of; `config` says all of it."""

    config: Config
    dataset: datasets.Dataset
    # the same without --marks, to which partition files refer
    unmarked: datasets.Dataset
    public: datasets.Dataset | None
    partition: Partition  # of the clients that train, as all that follows
    federation: Federation
    task: Task
    # what is made once: programs by layout, so that what was traced is there again;
    # `flops`
    made: dict[Any, Any]
    # those used (data_fraction), available here, and of the whole data set
    examples: dict[str, int]
    # as `everybody`, the type of mark on each client's images; empty without --marks
    marks: tuple[str, ...] = ()
    unseen: Unseen | None = None  # the clients that do not train

    @property
    def key(self) -> jax.Array:
        return jax.random.key(self.config.seed)

    @property
    def everybody(self) -> Partition:
        """The partition with the clients that do not train."""
        return self.partition if self.unseen is None else self.unseen.everybody

    @property
    def network_names(self) -> np.ndarray:
        """Of each client that trains the name of its network [N], see
        `networks.names`."""
        return self.of_trained(networks.names(self.config, len(self.everybody.train)))

    def of_trained(self, values: Sequence[Any] | np.ndarray) -> np.ndarray:
        """What is known of everybody, of the clients that train [N]."""
        return (
            np.asarray(values)
            if self.unseen is None
            else np.delete(values, self.unseen.ids)
        )

    def program(
        self,
        width: int = 1,
        devices: int = 1,
        conv: str = "auto",
        rounds: int | None = None,
    ) -> simulate.Program:
        """The pure functions of this experiment; made once for each layout."""
        if (width, devices, conv, rounds) not in self.made:
            task = self.in_form(
                self.task if rounds is None else self.task._replace(rounds=rounds), conv
            )
            # with `rounds` it is to be traced
            on_host = rounds is None and self.config.client_memory == "host"
            make = host_state.program if on_host else simulate.program
            options: dict[str, Any] = {
                "lr_decay": self.config.lr_decay,
                "width": width,
                "devices": devices,
            }
            options["checked"] = not self.made  # the first time
            factory, hparams = method(self.config)
            self.made[width, devices, conv, rounds] = make(
                factory, task, hparams, **options
            )
        return self.made[width, devices, conv, rounds]

    def algorithm(self) -> Algorithm:
        """The method as a value, at the first round's learning rate."""
        factory, hparams = method(self.config)
        return factory(self.task, **hparams)

    @property
    def headline(self) -> scores.Headline:
        """The score that decides, and whether more or less of it is better."""
        return self.algorithm().headline

    def state_shapes(self) -> State:
        """The state's structure with shapes and types in place of arrays; nothing is
        compiled."""
        program = self.program(rounds=self.config.rounds)
        traced = {
            name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.traced
        }
        return jax.eval_shape(
            lambda values: program.unplace(program.init(self.key, values)), traced
        )

    def in_form(self, task: Task, conv: str) -> Task:
        """A task of this experiment with convolutions in a form; "auto": as the
        settings have them."""
        if conv == "auto" or layers.form(conv) == layers.form(self.config.conv):
            return task
        models, _, shared = _models(
            self.config, self.dataset, len(self.everybody.train), conv
        )
        return task._replace(models=tuple(models), shared=shared)


def method(config: Config) -> tuple[Callable[..., Algorithm], dict[str, Any]]:
    """The factory of the method, under --server_optimizer if one is given, and its
    hyperparameters."""
    factory = find(config.algo)
    if config.server_optimizer is None:
        return factory, config.hparams
    return _optimized(factory, config.server_optimizer), config.hparams | {
        server_optimizer.RATE: config.server_lr
    }


@functools.cache  # the same for runs that are to be one program
def _optimized(
    factory: Callable[..., Algorithm], name: str
) -> Callable[..., Algorithm]:
    return server_optimizer.optimized(factory, networks.optimizer(0.0, 0.0, None, name))


def prepare(config: Config, room: Sequence[int] = federate.ROOM) -> Experiment:
    """Loads, partitions and checks.

    Args:
      room: as `federate` takes it.

    Raises:
      InputError: the settings do not fit each other or the data.
    """
    dataset = datasets.load(config.dataset, config.data_dir, config.seed)
    available = len(dataset.y)
    dataset = datasets.subset(dataset, config.data_fraction, config.seed)
    _warn_of_channels_first(dataset)
    everybody, kinds, unmarked = _partition(config, dataset), tuple[str, ...](), dataset
    if config.marks:
        dataset, kinds = marks.mark(dataset, everybody, config.seed)
    model = (
        ("cnn" if _is_image(dataset.x.shape[1:]) else "mlp")
        if config.model == "auto"
        else config.model
    )
    config = config.replace(clients=len(everybody.train), model=model)
    whole = _task(config, dataset, everybody)
    if (public := _public(config)) is not None:
        whole = simulate.with_public(whole, public)
    ids, apart = unseen.draw(config, whole.architecture)
    assigned, task = select(everybody, ids), among(whole, ids)
    validate.batches(task)
    if config.drop_last:
        _warn_of_short(task.sizes, config.batch_size)
    size = max(available, tfds.SIZES.get(dataset.name, 0))
    examples = {"used": len(dataset.y), "available": available, "of": size}
    found = (config, dataset, unmarked, public, assigned)
    experiment = Experiment(*found, None, task, {}, examples, kinds)  # type: ignore[arg-type]
    # checks the method: its hyperparameters, the model's parts, the shapes of a round
    experiment.program()
    if not len(apart):
        return experiment._replace(
            federation=federate.federate(dataset, assigned, room, public)
        )
    others = among(whole, apart)
    unseen.scorer(config, task, others)  # checks the method
    federation, theirs = (
        federate.federate(dataset, assigned, room, public),
        select(everybody, apart),
    )
    of_others = Unseen(
        apart,
        everybody,
        theirs,
        federate.others(federation, dataset, theirs, room),
        others,
    )
    return experiment._replace(federation=federation, unseen=of_others)


def room(configs: Sequence[Config]) -> tuple[int, ...]:
    """Room for the clients of each of these settings, which differ in the seed (see
    `federate`).

    Raises:
      InputError: as `prepare`.
    """
    load = functools.cache(
        lambda seed: datasets.load(configs[0].dataset, configs[0].data_dir, seed)
    )
    found = [federate.ROOM]
    for config in configs:
        whole = load(config.seed if user_code.named(config.dataset) else 0)
        assigned = _partition(
            config, datasets.subset(whole, config.data_fraction, config.seed)
        )
        found.append(
            tuple(
                rows.shape[1] for rows in (assigned.train, assigned.val, assigned.test)
            )
        )
    return tuple(map(max, zip(*found, strict=True)))


def _partition(config: Config, dataset: datasets.Dataset) -> Partition:
    spec = config.partition
    if config.clients is None:  # the file says it
        return load_file(spec.removeprefix("file:"), dataset)
    theirs = spec.startswith("file:") or user_code.named(spec)
    how = {} if theirs else {name: getattr(config, name) for name in BY_FILE}
    return partitioners.partition(
        dataset, spec, num_clients=config.clients, seed=config.seed, **how
    )


def _warn_of_short(sizes: np.ndarray, batch_size: int) -> None:
    """Says how many clients cannot fill one batch, and so take no step with
    drop_last."""
    if short := int((sizes < batch_size).sum()):
        told = (
            "--drop_last: %d of %d clients have fewer than %d examples and will not "
            "train."
        )
        logging.warning(told, short, len(sizes), batch_size)


def _warn_of_channels_first(dataset: datasets.Dataset) -> None:
    """Warns of images [n, C, H, W], as PyTorch has them, which would be taken for
    narrow ones of many channels, or for no images."""
    shape = dataset.x.shape[1:]
    if len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= 16:
        logging.warning(
            "%s has inputs of shape %s, taken as [height, width, channels]: if the "
            "channels are first, store "
            "x.transpose(0, 2, 3, 1).",
            dataset.name,
            shape,
        )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[:2]) >= 16


def _task(config: Config, dataset: datasets.Dataset, assigned: Partition) -> Task:
    models, of, shared = _models(config, dataset, len(assigned.train), config.conv)
    return simulate.task(
        dataset,
        class_counts(assigned, dataset),
        models,
        architecture=of,
        shared=shared,
        lr=config.lr,
        optimizer=networks.optimizer(
            config.momentum, config.weight_decay, config.clip, config.optimizer
        ),
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps=config.steps,
        rounds=config.rounds,
        participation=participation(config.participation),
        drop_last=config.drop_last,
        bn_stats=config.bn_stats,
    )


def _models(
    config: Config, dataset: datasets.Dataset, num_clients: int, conv: str
) -> tuple[list[Model], np.ndarray, Model]:
    """The networks [G], which of them each client has [N], and the one that all
    exchange."""
    names, of = networks.architectures(config.model, num_clients)
    made = {
        name: networks.model(config, dataset, conv, name)
        for name in dict.fromkeys(names)
    }
    return (
        [made[name] for name in names],
        of,
        networks.shared(config, dataset, conv, made),
    )


def _public(config: Config) -> datasets.Dataset | None:
    """The examples of --public."""
    if config.public is None:
        return None
    name, colon, count = config.public.rpartition(":")
    if colon and name in datasets.DATASETS and not count.isdecimal():
        raise InputError(
            f"--public={config.public}: write how many examples of {name} as a whole "
            "number."
        )
    if not colon or not count.isdecimal():
        name, count = config.public, ""
    if _source(name) == _source(config.dataset):
        raise InputError(
            f"--public={config.public}: {name} is the clients' own data set, whose "
            "test examples would be among the "
            "public ones: take another."
        )
    dataset = datasets.load(name, config.data_dir, config.seed)
    if not count:
        return dataset
    if not 1 <= int(count) <= len(dataset.y):
        raise InputError(
            f"--public={config.public}: {name} has 1 to {len(dataset.y)} examples to "
            "take."
        )
    rows = np.sort(
        np.random.default_rng(config.seed).permutation(len(dataset.y))[: int(count)]
    )
    return dataset._replace(x=dataset.x[rows], y=dataset.y[rows], num_train=len(rows))


def _source(name: str) -> str:
    """The same text for names of the same examples."""
    name = name.removeprefix("tfds:")
    if name.startswith("npz:"):
        return os.path.realpath(os.path.expanduser(name.removeprefix("npz:")))
    if user_code.named(name):
        return os.path.abspath(name)
    if name.startswith("emnist/"):  # all drawn from the same images
        return "emnist"
    return "cifar100" if name == "cifar100_coarse" else name


def check_growth(experiment: Experiment, before: int) -> None:
    """Raises InputError if the program depends on the number of rounds, which grew from
    `before`."""
    if experiment.config.rounds != before and lowered(experiment, before) != lowered(
        experiment
    ):
        raise InputError(
            f"{experiment.config.algo} has a schedule over the rounds, so rounds "
            f"cannot grow from {before} to "
            f"{experiment.config.rounds}: start a new run with --workdir."
        )


def lowered(experiment: Experiment, rounds: int | None = None) -> str:
    """A digest of all that a run of so many rounds, or of its own, compiles; runs that
    have the same differ in arguments only."""
    program = experiment.program(
        rounds=experiment.config.rounds if rounds is None else rounds
    )
    return batch.lowered(
        program, experiment.federation._replace(placement=program.placement)
    )


def data_digest(dataset: datasets.Dataset) -> str:
    """SHA-256 of the examples and labels."""
    content = hashlib.sha256(np.ascontiguousarray(dataset.x).data)
    content.update(np.ascontiguousarray(dataset.y).data)
    return content.hexdigest()
