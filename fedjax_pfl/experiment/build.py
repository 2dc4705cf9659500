"""Experiments from settings: data, partition, networks, task and program."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from chex import Numeric

from fedjax_pfl import (
    augment,
    clock,
    hyperparameters,
    local_training,
    simulate,
    user_code,
)
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data import (
    datasets,
    federate,
    loading,
    marks,
    packing,
    partitioners,
    shifts,
)
from fedjax_pfl.data.partition import Partition, class_counts, digest, select
from fedjax_pfl.data.sources import chat, registry, text as tokens, tfds
from fedjax_pfl.engine import (
    asynchronous,
    batch,
    frozen,
    memory,
    placement,
    program as engine,
    unseen,
    validate,
)
from fedjax_pfl.engine.method import headline as usual_headline
from fedjax_pfl.engine.schedule import Schedule, arrivals
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.evaluation import GENERATED
from fedjax_pfl.experiment import (
    clients,
    config as settings,
    groups,
    inputs,
    task_options,
    text,
    upload_options,
)
from fedjax_pfl.experiment.checkpoints import Checkpoints
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.metrics import watched
from fedjax_pfl.experiment.types import Experiment, Unseen
from fedjax_pfl.models import MODELS, features, nnx_model, pretrained
from fedjax_pfl.models.adapted import ADAPTATIONS, adapted
from fedjax_pfl.models.registry import TEXT, Factory
from fedjax_pfl.types import Federation, Model, PyTree, RunState, Task
from fedjax_pfl.uploads.privacy import per_example

OWN_NETWORKS = ("feddva",)  # methods that ignore --model
OPTIONS_CODE = "code of options"  # in partition.json, not of earlier versions


def build(config: Config, room: Sequence[int] = federate.ROOM) -> Experiment:
    """Loads the data, partitions them and makes the program of an experiment.

    Args:
      room: least number of train, val and test rows per client, see `federate`.

    Raises:
      InputError: the settings do not fit each other or the data.
    """
    settings.check(config)  # again: in Python not all come from `resolve`
    data = prepare(config.data, config.partition, config.model, config.seed)
    dataset, everybody, public = data.dataset, data.everybody, data.public
    model = usual_model(dataset) if config.model.name == "auto" else config.model.name
    hparams = hyperparameters.defaults(find(config.algo)) | config.hparams
    number = len(everybody.train)
    config = config.replace(clients=number, model=model, hparams=hparams)
    names, of = architectures(model, number)
    warn_of_data(config.data, data.unmarked, names)
    partition = select(everybody, data.trained)
    if upload_options.flips_labels(config.uploads):
        bad = upload_options.malicious(config.uploads, len(data.trained))
        dataset = shifts.flipped(dataset, everybody, data.trained[bad])
    folders, private = pretrained.folders(model), config.dp is not None
    if private:
        inputs.check_private(config.data, dataset, folders)
    if dataset.words is not None:
        known = config.data, dataset, partition, folders, private
        dataset = inputs.vocabulary(*known, config.model.start)
        if public is not None and public.words is not None:
            public = tokens.using(public, dataset.words or ())
    prepared = inputs.preparation_of(config.data, dataset, folders)
    everyone = make_task(config, dataset, everybody)
    if public is not None:
        everyone = simulate.with_public(everyone, public)
    if config.feature_cache is not None:
        given = everyone, dataset, public
        everyone, dataset, public = features.cached(*given, dtype=config.feature_cache)
    task, schedule = for_server(config, everyone, data.trained)
    if config.drop_last and (short := int((task.sizes < config.batch_size).sum())):
        logging.warning("--drop_last: %d clients have no full batch.", short)
    config = config.replace(**lay_out(config.run, task))
    program = make_program(config, task, schedule, laid_out=True)
    task, everyone = (frozen.placed(x, program.mesh) for x in (task, everyone))
    federation = federate.federate(dataset, partition, room, public)
    federation = simulate.with_frozen(federation, task)
    if partition.val_sizes.any():
        program = simulate.with_validation(program, federation)
    away = None
    if len(data.others):
        rows = select(everybody, data.others)
        theirs = federate.others(federation, dataset, rows, room)
        away = Unseen(
            data.others,
            tuple(data.names[i] for i in data.others),
            rows,
            theirs._replace(frozen=federation.frozen),
            unseen.among(everyone, data.others),
        )
    alone = make_program(config, task, schedule)
    usual = usual_headline(task, find(config.algo)(task, **config.hparams))
    available = len(data.whole.y)
    size = max(available, tfds.SIZES.get(data.whole.name, 0))
    e = Experiment(
        config=config,
        dataset=dataset,
        unmarked=data.unmarked,
        public=public,
        everybody=everybody,
        partition=partition,
        federation=federation,
        task=task,
        program=program,
        alone=alone,
        names=tuple(data.names[i] for i in data.trained),
        headline=headline(config.evaluation, usual, task, alone, federation),
        networks=network_names(config.algo, model, len(of))[data.trained],
        planned=local_training.planned(task, task.sizes),
        examples={"used": data.used, "available": available, "of": size},
        marks=data.marks,
        classes=dataset.classes,
        preparation=prepared,
        unseen=away,
        schedule=schedule,
    )
    if away is not None:
        unseen_scorer(e, away)  # refuses methods that cannot personalise
    return e


class Prepared(NamedTuple):
    """Data of an experiment, divided among its clients."""

    whole: datasets.Dataset
    unmarked: datasets.Dataset  # without the examples of `public`
    dataset: datasets.Dataset  # with marks or a shift
    public: datasets.Dataset | None
    everybody: Partition
    names: tuple[str, ...]  # of all clients, [N]
    trained: np.ndarray  # ids of the clients that train
    others: np.ndarray  # and of those that do not
    marks: tuple[str, ...]
    used: int  # examples before they are packed


def prepare(
    data: groups.Data, partition: groups.Partition, model: groups.Model, seed: int
) -> Prepared:
    """Returns the data of the settings."""
    whole = load(data, partition, model, seed)
    unmarked, public = divided(data, whole, seed)
    everybody = assign(partition, unmarked, seed)
    names = clients.names(partition.column, unmarked, everybody)
    used = len(unmarked.y)
    if data.pack:
        unmarked, everybody = packing.packed(unmarked, everybody, row_length(data))
    _, of = architectures(model.name, len(names))
    trained, others = draw_unseen(partition.held_out, of, seed, names)
    unmarked = inputs.columns(data, unmarked, select(everybody, trained), model.start)
    dataset, kinds = unmarked, tuple[str, ...]()
    if data.marks:
        dataset, kinds = marks.mark(dataset, everybody, seed)
    if data.shift is not None:
        dataset = shifts.shift(dataset, everybody, data.shift, seed)
    return Prepared(
        whole,
        unmarked,
        dataset,
        public,
        everybody,
        names,
        trained,
        others,
        kinds,
        used,
    )


def row_length(data: groups.Data) -> int:
    """Returns the tokens of a row of --pack."""
    return data.max_length or chat.LENGTH


def for_server(
    config: Config, everyone: Task, trained: np.ndarray
) -> tuple[Task, Schedule | None]:
    """Returns the task of the clients that train, with their draw and the malicious
    ones, and the schedule of an asynchronous run.

    Args:
      everyone: the task of all clients.
      trained: ids of the clients that train.
    """
    malicious = upload_options.malicious(config.uploads, len(trained))
    task = unseen.among(everyone, trained)._replace(malicious=malicious)
    draw = task_options.SAMPLINGS.read(config.sampling)(task=task)
    task = task._replace(sampling=draw)
    validate.batches(task)
    # read in every run, as reports need them in the end
    given, count = (config.speeds, config.bandwidths), everyone.num_clients
    everybody = clock.clients(*given, count, config.seed)
    rule = rule_of(config.server)
    if rule is None:
        return task, None
    speeds, sent, times = jax.tree.map(lambda x: x[trained], everybody), 0, None
    if speeds.megabits is not None:
        sent = 4 * engine.numbers(make_program(config, task))
    if any(x is not None for x in speeds):
        _, examples = local_training.planned(task, task.sizes)
        times = clock.seconds(speeds, examples, sent)
    schedule = arrivals(
        task,
        jax.random.key(config.seed),
        rounds=max(config.rounds, 1),
        buffer=rule.buffer,
        seconds=times,
    )
    return asynchronous.task_of(task, rule), schedule


def rule_of(server: groups.Server) -> asynchronous.Rule | None:
    """Returns the rule of --asynchronous."""
    if server.asynchronous is None:
        return None
    staleness = task_options.STALENESS.read(server.staleness)()
    stale = jax.ShapeDtypeStruct((), jnp.float32)
    validate.returns("staleness", staleness, (stale,), stale)
    return task_options.RULES.read(server.asynchronous)(staleness=staleness)


_load = functools.lru_cache(2)(loading.load)  # for all runs of a sweep


def load(
    data: groups.Data, partition: groups.Partition, model: groups.Model, seed: int
) -> datasets.Dataset:
    """Returns the data set of the settings, all of its examples; texts have the tokens
    of a pretrained network, unless --tokenizer is given."""
    tokenizer, folders = data.tokenizer, pretrained.folders(model.name)
    if tokenizer is None and folders and registry.accepts(data.dataset, "tokenizer"):
        tokenizer = pretrained.tokenizer(folders[0])
    found = _load(
        data.dataset,
        data.data_dir,
        seed if user_code.named(data.dataset) else 0,
        tokenizer=tokenizer,
        max_length=data.max_length,
        image_size=data.image_size,
        missing=data.missing,
        categories=data.categories,
        owner=partition.column if registry.accepts(data.dataset, "owner") else None,
    )
    for name in ("tokenizer", "max_length"):
        if found.words is None and getattr(data, name) is not None:
            raise InputError(
                f"--{name} has no effect on {data.dataset}: it has no texts."
            )
    if data.prepare is not None and found.words is None and found.cells is None:
        raise InputError(f"--prepare has no effect on {data.dataset}.")
    return found


def usual_model(dataset: datasets.Dataset) -> str:
    """Returns the network for --model=auto."""
    shape = dataset.x.shape[1:]
    if dataset.words is not None:
        return "fasttext" if dataset.positions is None else "gru"
    return "cnn" if len(shape) == 3 and min(shape[:2]) >= 16 else "mlp"


def warn_of_data(
    data: groups.Data, dataset: datasets.Dataset, models: Sequence[str]
) -> None:
    """Logs a warning for each unusual property of the user's own data."""
    if not (data.dataset.startswith("npz:") or user_code.named(data.dataset)):
        return
    embedding = {factory.__name__ for factory in TEXT}
    as_numbers = not all(
        user_code.named(x) or x in embedding or pretrained.folder(x) for x in models
    )
    for sentence in datasets.unusual(dataset, as_numbers):
        logging.warning("%s", sentence)


def room(configs: Sequence[Config]) -> tuple[int, ...]:
    """Returns numbers of rows that give runs of all settings the same shapes."""
    widths = [federate.ROOM]
    for config in configs:
        whole = load(config.data, config.partition, config.model, config.seed)
        dataset, _ = divided(config.data, whole, config.seed)
        rows = assign(config.partition, dataset, config.seed)
        if config.pack:
            _, rows = packing.packed(dataset, rows, row_length(config.data))
        widths.append(tuple(x.shape[1] for x in (rows.train, rows.val, rows.test)))
    return tuple(map(max, zip(*widths, strict=True)))


def assign(
    partition: groups.Partition, dataset: datasets.Dataset, seed: int
) -> Partition:
    """Returns the partition of all clients."""
    own = () if partition.given else groups.BY_FILE
    options = {name: getattr(partition, name) for name in own}
    return partitioners.partition(
        dataset, partition.rule, num_clients=partition.clients, seed=seed, **options
    )


def make_task(
    config: Config, dataset: datasets.Dataset, clients: Partition | Federation
) -> Task:
    """Returns the task of all clients.

    Args:
      dataset: one example is enough with a federation.
    """
    if isinstance(clients, Partition):
        counts = class_counts(clients, dataset)
    else:
        counts = np.asarray(clients.class_counts)
    names, of = architectures(config.model.name, len(counts))
    models = {name: network(config.model, dataset, name) for name in names}
    shared = min(models.values(), key=num_parameters)
    if config.shared_model is not None:
        shared = network(config.model, dataset, config.shared_model)
    rule: Any = None  # mypy takes no named tuple as a function
    if config.dp == "example":
        rule = per_example(config.dp_clip, config.dp_noise or 0.0)
    return simulate.task(
        dataset,
        clients,
        [models[name] for name in names],
        architecture=of,
        shared=shared,
        rounds=config.rounds,
        participation=config.server.participants,
        augment=augment.augmentation(config.augment, dataset),
        bn_stats=config.bn_stats,
        loop=config.loop,
        per_example=rule,
        metrics=[x for x in config.evaluation.scores if x not in GENERATED],
        **local_work(config.local, config.rounds, counts),
    )


def local_work(local: groups.Local, rounds: int, counts: np.ndarray) -> dict[str, Any]:
    """Returns the fields of a task about local training.

    Args:
      counts: [N, C] examples of the classes.
    """
    rule: Any
    if user_code.named(local.optimizer):
        rule = user_code.load("optimizer", local.optimizer)
    else:
        given = local.momentum, local.weight_decay, local.clip
        rule = optimizer(local.optimizer, *given)
    schedule = task_options.SCHEDULES.read(local.schedule)
    names = ("lr", "batch_size", "epochs", "steps", "drop_last")
    return {name: getattr(local, name) for name in names} | {
        "optimizer": rule,
        "loss": task_options.LOSSES.read(local.loss)(class_counts=counts),
        "mix": task_options.MIXES.read(local.mix)(),
        "schedule": schedule(rounds=max(rounds, 1)),
    }


def make_program(
    config: Config,
    task: Task,
    schedule: Schedule | None = None,
    *,
    laid_out: bool = False,
) -> simulate.Program:
    """Returns the program of a task.

    Args:
      laid_out: it has the width, the devices and the memory of the settings, in place
        of one device with all state in its memory.
    """
    options: dict[str, Any] = {"lr_decay": config.lr_decay, "checked": laid_out}
    options |= upload_options.options(config.uploads, config.server, task)
    if laid_out:
        layout = ("width", "devices", "base_devices")
        options |= {name: int(getattr(config, name)) for name in layout}
        options |= {"storage": config.client_memory}
    rule = rule_of(config.server)
    if rule is not None and schedule is not None:
        options["clock"] = asynchronous.Arrivals(rule, schedule)
    return simulate.program(find(config.algo), task, config.hparams, **options)


def headline(
    evaluation: groups.Evaluation,
    usual: tuple[str, str],
    task: Task,
    program: simulate.Program,
    federation: Federation,
) -> tuple[str, str]:
    """Returns the score that decides; InputError if the method has no such score.

    Args:
      usual: the headline of the method.
      program: with all state in the memory of one device, so that it can be traced.
    """
    found = watched(evaluation, usual)
    if found[0] not in (usual[0], *task.metrics, *evaluation.generated):
        context = program.context(jax.random.key(0), federation)
        start = context.key, context.traced, program.placement
        state = jax.eval_shape(program.init, *start)
        names = jax.eval_shape(program.evaluate, context, state)
        choose("score", found[0], names)
    return found


def draw_unseen(
    held_out: float | list[str], of: np.ndarray, seed: int, names: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids of clients that train, and of those that do not, of each network.

    Args:
      held_out: fraction of the clients that do not train, or their names.
      of: [N] index of each client's network.
      names: of all clients, [N].
    """
    rng, away = np.random.default_rng([seed, 1]), np.zeros(len(of), bool)
    if isinstance(held_out, list):
        away[[clients.index(names, name) for name in held_out]] = True
    for group in np.unique(of) if held_out else ():
        ids = np.flatnonzero(of == group)
        if isinstance(held_out, float):
            count = max(1, round(held_out * len(ids)))
            away[rng.permutation(ids)[:count]] = True
        if away[ids].all():
            raise InputError(f"--unseen={held_out} leaves no client to train.")
    return np.flatnonzero(~away), np.flatnonzero(away)


def unseen_scorer(e: Experiment, others: Unseen) -> Any:
    """Returns `engine.unseen.scorer` of an experiment."""
    return unseen.scorer(
        find(e.config.algo),
        e.task,
        others.task,
        e.config.hparams,
        lr_decay=e.config.lr_decay,
        width=min(int(e.config.width), len(others.ids)),
        rounds=e.config.unseen_rounds,
    )


def lay_out(run: groups.Run, task: Task) -> dict[str, str]:
    """Returns devices, those that share a base, and width, chosen for "auto"."""
    cohort, processes = max(task.cohort_sizes), jax.process_count()
    free = run.devices in ("auto", "all")
    devices = jax.device_count() if free else len(placement.take(int(run.devices)))
    width = None if run.width == "auto" else int(run.width)
    if run.base_devices == "auto":
        least = width or automatic_width(task, cohort, devices)
        base = frozen.least_devices(task, least, devices, memory.per_device())
    else:
        base = int(run.base_devices)
    groups = max(1, devices // base)
    if free:
        groups = -(-min(groups, cohort) // processes) * processes
        devices = groups * base
    each = -(-cohort // groups)
    width = min(width or automatic_width(task, cohort, groups), each)
    return {"devices": str(devices), "base_devices": str(base), "width": str(width)}


def divided(
    data: groups.Data, whole: datasets.Dataset, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Returns the clients' data set and the public examples: those of another data set,
    or training examples of the clients' own that no client gets."""
    dataset = datasets.subset(whole, data.data_fraction, seed)
    if data.public is None:
        return dataset, None
    name, count = groups.public(data.public)
    rng = np.random.default_rng(seed)
    if name != data.dataset:
        pool = loading.load(name, data.data_dir, seed)
        if count is None:
            return dataset, pool
        check("public", count, 1, len(pool.y), whole=True)
        rows = np.sort(rng.permutation(len(pool.y))[:count])
        return dataset, pool.take(rows, len(rows))
    n = dataset.num_train
    if count is None or count >= n:
        raise InputError(
            f"--public={data.public} is the data set of the clients: give a number "
            f"of its {n} training examples, as {name}:1000."
        )
    order = rng.permutation(n)
    rows, rest = np.sort(order[:count]), np.sort(order[count:])
    kept = np.append(rest, np.arange(n, len(dataset.y)))
    return dataset.take(kept, len(rest)), dataset.take(rows, len(rows))


def architectures(spec: str, num_clients: int) -> tuple[list[str], np.ndarray]:
    """Returns the names of the networks [G], and the index of each client's [N].

    Raises:
      InputError: there are more networks than clients, or not one name per client.
    """
    kind, _, rest = spec.partition(":")
    ids = np.arange(num_clients)
    if kind == "file":
        words = text.content(rest).split()
    else:
        listed = (rest if kind == "blocks" else spec).split(",")
        slots = (
            ids * len(listed) // num_clients if kind == "blocks" else ids % len(listed)
        )
        words = [listed[i] for i in slots] if len(listed) <= num_clients else listed
    if len(words) != num_clients:
        raise InputError(
            f"--model={spec} has {len(words)} names, {num_clients} clients."
        )
    names = list(dict.fromkeys(words))
    return names, np.array([names.index(word) for word in words])


def network_names(algo: str, model: str, num_clients: int) -> np.ndarray:
    """Returns the short name of each client's network [N]."""
    if algo in OWN_NETWORKS:
        return np.full(num_clients, "own")
    names, of = architectures(model, num_clients)
    brief = [user_code.short(name) for name in names]
    return np.array(brief if len(set(brief)) == len(names) else names)[of]


def network(model: groups.Model, dataset: datasets.Dataset, name: str) -> Model:
    """Returns a network for the prepared inputs of a data set."""
    if pretrained.folder(name) is None:
        text.choose("model", name, MODELS)
    if dataset.packed and (model.adapt or "").startswith("prompt"):
        raise InputError("--pack excludes --adapt=prompt.")
    example = datasets.prepared(dataset)
    given = name, example.shape[1:], dataset.num_classes, model.adapt, model.base
    options: dict[str, Any] = {
        "bn_stats": model.bn_stats,
        "conv": model.conv,
        "features": model.features,
        "compute_dtype": model.compute_dtype,
        "input_dtype": example.dtype,
        "vocabulary": dataset.vocabulary,
        "positions": dataset.positions,
        "packed": dataset.packed,
    }
    if model.adapt is not None:
        options |= {"base_dtype": model.base_dtype, "blocks": model.blocks}
    if not user_code.named(name):
        return _known(*given, **options)
    with user_code.blamed("model", name):
        made = _made(*given, **options)
        validate.model(made, dataset)
    return made


def _made(
    name: str,
    shape: tuple[int, ...],
    num_classes: int,
    adapt: str | None,
    base: str | None,
    **options: Any,
) -> Model:
    """Makes a network, adapted if `adapt` is given.

    The base of an adapted network is `base`, a run, else the weights of its folder."""
    folder = pretrained.folder(name)
    if adapt is None and folder is not None:
        return pretrained.model(folder, shape, num_classes, **options)
    if adapt is None:
        return nnx_model.model(name, shape, num_classes, **options)
    factory: Factory | str = name
    variables = None if base is None else base_of(base)
    if folder is not None:
        found = pretrained.load(folder)
        factory = found.factory
        variables = variables or found.variables
    how = ADAPTATIONS.read(adapt)()
    return adapted(factory, how, shape, num_classes, base=variables, **options)


_known = functools.cache(_made)  # one trace for all runs of a sweep


@functools.cache  # one copy for all networks
def base_of(path: str) -> PyTree:
    """Returns the variables of the model that the clients of a finished run shared,
    from the files of the run alone.

    Raises:
      InputError: the run has no checkpoint, or its clients shared no body.
    """
    server = Checkpoints(path).server()
    if not isinstance(server, dict) or not jax.tree.leaves(server.get("body")):
        raise InputError(f"--base={path} has no model that its clients shared.")
    parts = {name: server.get(name) or {} for name in ("body", "head", "stats")}
    return jax.tree.map(jnp.asarray, parts)


def rebuilt(path: str | Path) -> Experiment:
    """Returns the experiment of a run directory, on one device."""
    config = settings.read(Path(path).expanduser() / "config.json")
    return build(config.replace(**groups.ONE_DEVICE, client_memory="device"))


def restored(path: str | Path) -> tuple[Experiment, int, RunState]:
    """Returns a run's experiment, rounds and state, as `Checkpoints.latest`."""
    e = rebuilt(path)
    return e, *Checkpoints(path).latest(e)


def num_parameters(model: Model) -> int:
    """Returns the number of parameters of a network."""
    return nnx_model.num_parameters(jax.eval_shape(model.init, jax.random.key(0)))


def optimizer(
    name: str, momentum: float = 0.0, decay: float = 0.0, clip: float | None = None
) -> Callable[[Numeric], optax.GradientTransformation]:
    """Returns lr -> an optimizer of optax, with PyTorch's order of its parts.

    Gradients are clipped, then decayed, unless the optimizer has its own decay (AdamW).
    """
    rule = getattr(optax, name)

    def make(lr: Numeric) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(clip)] if clip is not None else []
        if "weight_decay" in inspect.signature(rule).parameters:
            return optax.chain(*parts, rule(lr, weight_decay=decay))
        parts += [optax.add_decayed_weights(decay)] if decay else []
        return optax.chain(
            *parts, rule(lr, momentum or None) if name == "sgd" else rule(lr)
        )

    return make


def check_growth(e: Experiment, before: int) -> None:
    """Raises InputError if a method has a schedule over the rounds, which grew, or an
    asynchronous run needs more versions of the server than before."""
    if e.config.rounds == before:
        return
    if e.config.dp_epsilon is not None:
        raise InputError(f"--dp_epsilon is that of --rounds={before}.")
    texts = set()
    for rounds in (before, e.config.rounds):
        task = e.task._replace(rounds=rounds)
        program = make_program(e.config, task)
        federation = simulate.with_frozen(e.federation, task)
        federation = federation._replace(placement=program.placement)
        texts.add(batch.lowered(program, federation))
    if len(texts) > 1 or e.config.schedule != "constant":
        raise InputError(f"{e.config.algo} has a schedule over --rounds={before}.")
    if e.schedule is not None:
        kept = 1 + e.schedule.slot[: max(before, 1)].max()
        if kept != e.schedule.slots:
            raise InputError(
                f"--asynchronous kept {kept} versions of the server until --rounds="
                f"{before}, and {e.schedule.slots} are needed for {e.config.rounds}."
            )


def digests(e: Experiment) -> dict[str, str]:
    """Returns hashes of the data, the partition, the networks and the user's files."""
    c, public = e.config, (e.public.x, e.public.y) if e.public else ()
    # features differ in their last bits between devices
    data = e.unmarked if c.feature_cache else e.dataset
    base = jax.tree.leaves(base_of(c.base)) if c.base else []
    weights = " ".join(map(pretrained.digest, pretrained.folders(c.model.name)))
    options, noise = user_code.digest(code_of_options(e)), None
    if c.dp_epsilon is not None:
        noise = upload_options.noise_of(c.uploads, c.rounds, e.task)
    return {
        "data": _digest(data.x, data.y),
        "public": _digest(*public),
        "networks": _digest("\n".join(e.networks).encode()),
        "partition": digest(e.everybody),
        "code": user_code.digest(own_code(e)) or "",
        **({OPTIONS_CODE: options} if options else {}),
        **({"base": _digest(*base)} if base else {}),
        **({"weights": weights} if weights else {}),
        **({"noise (--dp_epsilon, --rounds)": str(noise)} if noise is not None else {}),
    }


def own_code(e: Experiment) -> list[str]:
    """Returns the settings of a run that may name functions of the user."""
    c, (names, _) = e.config, architectures(e.config.model.name, len(e.everybody.train))
    found = [c.algo, *names, c.shared_model or "", c.dataset, c.partition.rule]
    return [*found, c.optimizer, c.loss, c.mix, c.schedule, c.sampling]


def code_of_options(e: Experiment) -> list[str]:
    """Returns further such settings, which earlier versions did not record."""
    c, attack = e.config, (e.config.malicious or "").partition(":")[2]
    found = [c.shift or "", c.adapt or "", c.compress or "", attack]
    if c.asynchronous:  # else results do not depend on them
        found += [c.asynchronous, c.staleness, c.speeds or "", c.bandwidths or ""]
    return found


def _digest(*arrays: Any) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
