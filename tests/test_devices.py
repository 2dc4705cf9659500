"""Several devices: who gets which client, what they say to each other, and that results
do not change."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_fuzz import MEAN
from toy import N, assert_close

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.datasets import Dataset, prepare_images
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.engine import placement
from fedjax_pfl.types import Context

KEY = jax.random.key(3)


def test_every_client_is_assigned_once_and_every_place_is_used():
    work = np.random.default_rng(0).integers(0, 50, 21)
    assigned = np.asarray(placement.assign(jnp.asarray(work), 8))
    assert assigned.shape == (24,) and sorted(assigned) == list(range(24))


def test_one_device_and_equal_work():
    assert sorted(np.asarray(placement.assign(jnp.ones(5), 1))) == list(range(5))
    assert (np.asarray(placement.assign(jnp.ones(6), 3)).reshape(3, 2) < 6).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_busiest_device_has_little_more_than_the_best_assignment_gives_it(seed):
    """100 clients, Dirichlet 0.1, 8 devices, in steps: at most 10 % over
    longest-processing-time without places."""
    y = np.arange(14_000, dtype=np.int32) % 10
    data = Dataset(
        "random", np.zeros((len(y), 1, 1, 1), np.uint8), y, len(y), 10, prepare_images
    )
    sizes = partition(
        data, "dirichlet", num_clients=100, alpha=0.1, seed=seed
    ).train_sizes
    steps, best = -(-sizes // 10), np.zeros(8)
    for n in sorted(steps)[::-1]:
        best[best.argmin()] += n
    assigned = np.asarray(placement.assign(jnp.asarray(sizes), 8)).reshape(8, -1)
    loads = np.append(steps, np.zeros(assigned.size - 100))[assigned].sum(axis=1)
    assert loads.sum() == steps.sum()
    assert loads.max() <= 1.1 * best.max()


def test_program_says_what_its_layout_means():
    # Python 3.13 keeps docstrings without their indentation
    said = inspect.getdoc(simulate.program)
    for name in inspect.signature(simulate.program).parameters:
        assert name == "task" or f"\n  {name}: " in said, name


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.slow  # compiles a round and its derivative for one device and for several
def test_the_derivative_along_a_learning_rate_is_that_of_one_device():
    f, key, found = toy.federation(), jax.random.key(0), []
    for devices in (1, 2):
        program = simulate.program("ditto", toy.task("linear"), devices=devices)
        loss = lambda lr, program=program: simulate.curve(
            program, key, {"lr": lr}, f, rounds=2, eval_every=0
        )[1].loss.sum(1)
        found.append(
            jax.jit(lambda lr, loss=loss: jax.jvp(loss, (lr,), (jnp.float32(1),)))(
                jnp.float32(0.05)
            )
        )
    assert_close(found[1], found[0], 1e-4)
    assert np.all(found[0][1])


def mixed(*nets):
    """Two clients of each network; the first of them has the most examples where the
    last has the least."""
    sizes, given = (
        np.array([32, 28, 20, 8, 4, 16]),
        [models.model(net, toy.SHAPE, toy.C) for net in nets],
    )
    return toy.task(
        models=tuple(given),
        architecture=np.arange(6) % len(nets),
        sizes=sizes,
        epochs=1,
    )


def test_devices_are_balanced_over_all_architectures():
    task = mixed(*[toy.tiny_mlp] * 3)
    # each device has a row of each
    rows = placement.placement(task, 2).client.reshape(3, 2)
    assert sorted(rows.reshape(-1)) == list(range(6))
    # in steps 8 and 2, 7 and 1, 5 and 4: the longest of each on one device would be 20
    assert sorted((task.sizes // 4)[rows].sum(axis=0)) == [13, 14]


@functools.cache
def program_of(method, devices, participation):
    """One for all tests: its functions are then compiled once."""
    task = toy.method_task(method)._replace(participation=participation)
    # the networks of FedDVA are large, FedL2G's warm-up is longer than a test
    small = method in ("feddva", "fedl2g")
    factory = toy.METHODS[method] if small else ALGORITHMS[method]
    return toy.program(factory, task, devices=devices)


def run(method, devices, participation, rounds=3):
    program = program_of(method, devices, participation)
    return program, list(simulate.rounds(program, KEY, toy.federation(), rounds=rounds))


def on_host(program, state):
    """The state by id."""
    return jax.device_get(jax.jit(program.unplace)(state))


@pytest.mark.slow  # one method on eight devices is below
@pytest.mark.parametrize(
    "devices, participation",
    [(3, (1, 1)), (3, (0.6, 0.6)), (3, (0.3, 1)), (8, (0.6, 0.6))],
)
def test_a_run_over_devices_is_the_run_on_one(devices, participation):
    """Everybody, a sample and drop-outs, with state that stays on the clients; N is not
    a multiple of the devices. On 8 of them a sample takes as many places as everybody
    does."""
    _, alone = run("ditto", 1, participation)
    many, together = run("ditto", devices, participation)
    assert_close(on_host(many, together[-1].state), alone[-1].state, 1e-5)
    assert len(together) == len(alone) == 4
    for a, b in zip(together, alone, strict=True):
        assert_close(a.pre, b.pre, 1e-5)
        if b.metrics is not None:
            assert_close(a.metrics, b.metrics, 1e-5)


@pytest.mark.parametrize(
    "method",
    ["ditto", *(toy.slow(x) for x in sorted({*ALGORITHMS} - MEAN - {"ditto"}))],
)
def test_every_method_on_eight_devices(method):
    """A sample, padded to as many rows as there are clients; the contract and test_fuzz
    have rounds of everybody on several devices. Methods whose round is one mean differ
    in what one client does alone."""
    (_, alone), (many, together) = (
        run(method, devices, (0.6, 0.6), rounds=2) for devices in (1, 8)
    )
    # FedPCL's prototypes are divided by norms, which may be small
    off = 1e-4 if method == "fedpcl" else 1e-5
    assert_close(on_host(many, together[-1].state), alone[-1].state, off)
    for a, b in zip(together, alone, strict=True):
        assert_close(a.pre, b.pre, 1e-5)


@pytest.mark.slow  # compiles a whole run for one device and for three
def test_one_client_can_be_asked_wherever_it_lies():
    answers = []
    for devices in (1, 3):
        program, results = run("ditto", devices, (1.0, 1.0), rounds=1)
        x, ask = np.asarray(toy.federation().examples.x)[:4], jax.jit(program.predict)
        args = (
            Context(KEY, program.traced, toy.federation(), jnp.int32(1)),
            results[-1].state,
        )
        answers.append([ask(*args, i, x) for i in range(N)])
    assert_close(answers[1], answers[0], 1e-5)


# compiles a round of one seed and of two; a sampled cohort over devices is above
@pytest.mark.slow
def test_seeds_are_vmapped_over_devices_too():
    program, seeds = program_of("ditto", 2, (1.0, 1.0)), jax.random.split(KEY, 2)

    @jax.jit
    def one(key, lam):
        numbers = program.traced | {"lam": lam}
        state = program.init(key, numbers)
        return program.round(
            Context(key, numbers, toy.federation(), jnp.int32(0)), state, jnp.bool(True)
        )[1].loss

    lam = jnp.array([0.1, 1.0])
    together = jax.jit(jax.vmap(one))(seeds, lam)
    assert_close(
        together, jnp.stack([one(*pair) for pair in zip(seeds, lam, strict=True)]), 1e-5
    )


@functools.cache
def compiled(method, participation):
    """The compiled round on 8 devices, of 16 clients with the toy's data."""
    f = toy.federation()
    rows = lambda x: toy.rows(x, np.arange(16) % N)
    f = f._replace(
        train=rows(f.train),
        val=rows(f.val),
        test=rows(f.test),
        class_counts=rows(f.class_counts),
    )
    task = toy.task(
        participation=participation,
        sizes=np.asarray(f.train.size),
        class_counts=np.asarray(f.class_counts),
    )
    program = toy.program(ALGORITHMS[method], task, devices=8)
    state = program.init(KEY, program.traced)
    f = jax.device_put(f, jax.NamedSharding(program.mesh, jax.P()))
    args = (Context(KEY, program.traced, f, jnp.int32(0)), state, jnp.bool(False))
    return state, jax.jit(program.round).lower(*args).compile()


def collectives(program) -> dict[str, list[str]]:
    """{kind: shapes} of what the devices say to each other."""
    found: dict[str, list[str]] = {}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for shape, kind in re.findall(
        rf"= (.*?) ({kinds})(?:-start)?\(", program.as_text()
    ):
        found.setdefault(kind, []).append(shape)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", *map(toy.slow, ["fedavg", "pfedc"])])
def test_everybody_takes_part_and_only_the_aggregate_travels(method):
    state, program = compiled(method, (1.0, 1.0))
    (kind, shapes), *others = collectives(program).items()
    model = sum(len(jax.tree.leaves(state.server[part])) for part in ("body", "head"))
    assert kind == "all-reduce" and not others
    assert len(shapes) == 1 and len(re.findall(r"\w+\[", shapes[0])) == model, shapes


def test_a_sampled_cohort_adds_one_gather_and_one_scatter_of_its_rows():
    """The rows come with the aggregate's sum and go back one array a leaf; nothing else
    travels, indices neither."""
    state, program = compiled("ditto", (0.5, 0.5))
    rows, model = (
        len(jax.tree.leaves(x))
        for x in (state.clients, [state.server[part] for part in ("body", "head")])
    )
    arrays = {
        kind: re.findall(r"(\w+)\[", "".join(shapes))
        for kind, shapes in collectives(program).items()
    }
    assert arrays == {
        "all-reduce": ["f32"] * (model + rows),
        "all-gather": ["f32"] * rows,
    }


@pytest.mark.slow
def test_clients_at_rest_lie_on_their_devices():
    state, program = compiled("ditto", (1.0, 1.0))
    for tree in (state.clients, program.output_shardings[0].clients):
        for x in jax.tree.leaves(tree):
            spec = x.sharding.spec if hasattr(x, "sharding") else x.spec
            assert spec[0] == placement.AXIS
