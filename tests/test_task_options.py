"""Options of a task that every method has: loss, mixed examples, local work per client,
sampling, schedule."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.extend.core import jaxprs_in_params

from fedjax_pfl import augment, local_training, losses, simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.registry import EXCLUDES
from fedjax_pfl.engine import sampling
from fedjax_pfl.engine.method import EXCLUDED
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context, Upload, Work

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
Z, Y, MASK = RNG.normal(size=(6, 3)), np.array([0, 1, 2, 0, 0, 1]), np.arange(6) < 5
# operations of FedAvg's round on the toy task
PLAIN = {
    "dot_general": 3,
    "random_bits": 4,
    "scan": 6,
    "while": 2,
    "cond": 1,
    "sort": 3,
}
QUICK = ("fedavg", "mocha", "fml", "fedmd")
each_method = pytest.mark.parametrize(
    "method", [name if name in QUICK else toy.slow(name) for name in ALGORITHMS]
)


def trace(method, **options):
    """Traces a round of a method; nothing is computed."""
    task = toy.method_task(method)._replace(**options)
    f = simulate.with_frozen(toy.federation(), task)
    program = toy.program(toy.METHODS[method], task)
    state = jax.eval_shape(program.init, KEY, program.traced)
    given = (Context(KEY, program.traced, f, jnp.int32(0)), state, jnp.bool(True))
    jax.eval_shape(program.round, *given)


@each_method
def test_a_methods_loss_is_the_tasks_or_the_task_is_refused(method):
    calls = []

    def loss(logits, y, mask):
        calls.append(method)
        return losses.cross_entropy(logits, y, mask)

    if "loss" in EXCLUDES[method]:
        with pytest.raises(InputError, match="takes no `loss` of this kind: "):
            trace(method, loss=loss)
    else:
        trace(method, loss=loss)
        assert calls


@each_method
def test_mixed_labels_are_learned_or_refused(method):
    if "mix" in EXCLUDES[method]:
        with pytest.raises(InputError, match="takes no `mix` of this kind: "):
            trace(method, mix=augment.mixup(0.2))
    else:
        trace(method, mix=augment.mixup(0.2))


@each_method
def test_work_per_client_is_done_or_refused(method):
    work = lambda id, t: Work(lr=1 / (1.0 + id), limit=id)
    if {"work", "lr"} & EXCLUDES[method].keys():
        with pytest.raises(InputError, match=r"takes no `(work|lr)` of this kind: "):
            trace(method, work=work)
    else:
        trace(method, work=work)


def operations(task):
    """Returns a plain round's program, and the number of each operation in it."""
    program, f = toy.program("fedavg", task), toy.federation()
    state = jax.eval_shape(program.init, KEY, program.traced)
    given = (Context(KEY, program.traced, f, jnp.int32(0)), state, jnp.bool(True))
    jaxpr = jax.make_jaxpr(program.round)(*given)
    count = collections.Counter(e.primitive.name for e in equations(jaxpr.jaxpr))
    return str(jaxpr), count


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_options_that_are_not_given_add_nothing_to_a_round():
    task = TASK._replace(participation=(0.4, 0.4))
    text, count = operations(task)
    assert {name: count[name] for name in PLAIN} == PLAIN
    neutral = {"loss": losses.cross_entropy, "sampling": None, "work": None}
    assert operations(task._replace(**neutral, metrics=()))[0] == text
    given = {
        "loss": losses.focal(2.0),
        "mix": augment.mixup(0.2),
        "schedule": lambda t: 1.0 / (1 + t),
        "sampling": lambda key, t, history: jnp.ones(toy.N),
        "work": lambda id, t: Work(epochs=1 + id % 2),
    }
    for name, value in given.items():
        assert operations(task._replace(**{name: value}))[0] != text, name


def test_exclusions_name_options_and_methods():
    assert set(EXCLUDES) == set(ALGORITHMS)
    assert {option for why in EXCLUDES.values() for option in why} == set(EXCLUDED)


@pytest.mark.parametrize(
    "loss",
    [
        losses.label_smoothing(0.0),
        losses.focal(0.0),
        losses.class_balanced(0.0, np.array([[4, 1, 0], [0, 2, 7]])),
    ],
)
def test_a_neutral_loss_is_the_cross_entropy(loss):
    toy.assert_close(loss(Z, Y, MASK), losses.cross_entropy(Z, Y, MASK))


def test_losses_by_hand():
    log_p = jax.nn.log_softmax(Z)[np.arange(6), Y][:5]
    p = np.exp(log_p)
    toy.assert_close(losses.focal(2.0)(Z, Y, MASK), np.mean(-((1 - p) ** 2) * log_p))
    smooth = -0.9 * log_p - 0.1 * np.mean(jax.nn.log_softmax(Z)[:5], axis=1)
    toy.assert_close(losses.label_smoothing(0.1)(Z, Y, MASK), np.mean(smooth))
    n = np.array([9, 3, 1])
    w = (1 - 0.5) / (1 - 0.5**n)
    balanced = losses.class_balanced(0.5, n)(Z, Y, MASK)
    toy.assert_close(balanced, np.mean(-(w / w.mean())[Y[:5]] * log_p))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_the_focal_loss_has_a_gradient_where_a_probability_is_one(gamma):
    z, y, mask = jnp.array([[40.0, -40.0]]), jnp.array([0]), jnp.ones(1, bool)
    slope = jax.grad(losses.focal(gamma))(z, y, mask)
    np.testing.assert_allclose(slope, np.zeros((1, 2)), atol=1e-30)


def test_a_beta_near_one_weighs_by_the_inverse_of_the_counts():
    n = np.array([900, 90, 10])
    weights = (1 / n) / np.mean(1 / n)
    log_p = np.asarray(jax.nn.log_softmax(Z))[np.arange(6), Y]
    wanted = np.mean((-weights[Y] * log_p)[:5])
    found = losses.class_balanced(1 - 1e-9, n)(Z, Y, MASK)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "range"),
    [
        (lambda: losses.focal(-1.0), r"`gamma` must be in \[0, inf\)"),
        (lambda: losses.label_smoothing(1.5), r"`epsilon` must be in \[0, 1\]"),
        (lambda: losses.class_balanced(1.0, [[1, 2]]), r"`beta` must be in \[0, 1\)"),
        (lambda: augment.mixup(0.0), r"`alpha` must be in \(0, inf\)"),
        (lambda: augment.cutmix(0.0), r"`alpha` must be in \(0, inf\)"),
    ],
)
def test_numbers_of_losses_and_mixes_have_a_range(make, range):
    with pytest.raises(InputError, match=range):
        make()


def test_cutmix_needs_images():
    with pytest.raises(InputError, match=r"needs images .*, got inputs of shape \(5,"):
        augment.cutmix(1.0)(KEY, jnp.ones((6, 5)), jnp.eye(6), MASK)


@pytest.mark.parametrize("mix", [augment.mixup(4.0), augment.cutmix(4.0)])
def test_mixing_is_among_valid_rows_and_keeps_the_labels_share(mix):
    x = np.arange(1.0, 7)[:, None, None, None] * np.ones((6, 4, 4, 2))
    y = np.eye(6)
    new, labels = mix(KEY, x, y, MASK)
    toy.assert_close(labels.sum(axis=1), np.ones(6))
    assert not np.any(labels[:5, 5]) and np.any((labels[:5] > 0) & (labels[:5] < 1))
    # an image's mean is that of its labels
    toy.assert_close(new[:5].mean(axis=(1, 2, 3)), labels[:5] @ np.arange(1.0, 7))
    other = mix(KEY, np.where(MASK[:, None, None, None], x, np.nan), y, MASK)
    toy.assert_same((new[:5], labels[:5]), (other[0][:5], other[1][:5]))


TASK = toy.task("linear")


def test_equal_work_is_the_tasks():
    same = lambda id, t: Work(jnp.float32(1), epochs=jnp.int32(TASK.epochs))
    plain = toy.train("fedavg", TASK, 2)
    run = toy.train("fedavg", TASK._replace(work=same), 2)
    toy.assert_close(run.state, plain.state)


def test_smaller_batches_of_all_are_a_task_of_smaller_batches():
    half = lambda id, t: Work(batch_size=jnp.int32(TASK.batch_size // 2))
    small = TASK._replace(batch_size=TASK.batch_size // 2)
    run = toy.train("fedavg", TASK._replace(work=half), 1)
    toy.assert_close(run.state, toy.train("fedavg", small, 1).state)
    planned = functools.partial(local_training.planned, sizes=TASK.sizes)
    toy.assert_same(planned(TASK._replace(work=half)), planned(small))


def test_a_straggler_returns_after_its_steps():
    """With no steps its model is the one it received; with many it does them all."""
    work = lambda id, t: Work(limit=jnp.where(id == 1, 0, 1000))
    run = toy.train("local", TASK._replace(work=work), 1)
    before, after = (toy.rows(s.clients, [1]) for s in (run.begin, run.state))
    toy.assert_same(before, after)
    plain = toy.train("local", TASK, 1)
    others = [0, 2, 4]
    toy.assert_close(
        toy.rows(run.state.clients, others), toy.rows(plain.state.clients, others)
    )
    steps, _ = local_training.planned(TASK._replace(work=work), TASK.sizes)
    assert steps[1] == 0 and steps[2] == local_training.planned(TASK, TASK.sizes)[0][2]


def test_fednova_with_equal_steps_is_fedavg():
    task = toy.task("norm", epochs=None, steps=3)
    toy.assert_close(
        toy.train("fednova", task, 1).state, toy.train("fedavg", task, 1).state, 1e-5
    )


def test_fednova_moves_by_changes_per_step():
    task = TASK._replace(work=lambda id, t: Work(epochs=1 + id % 2))
    run, alone = toy.train("fednova", task, 1), toy.train("local", task, 1)
    steps, _ = local_training.planned(task, task.sizes)
    share = task.sizes / task.sizes.sum()
    start = run.begin.server["head"]["kernel"]
    change = start[None] - np.asarray(alone.state.clients["head"]["kernel"])
    each = change / np.maximum(steps, 1)[:, None, None]
    wanted = start - np.sum(share * steps) * np.tensordot(share, each, 1)
    toy.assert_close(run.state.server["head"]["kernel"], wanted, 1e-5)


def test_clients_are_drawn_by_their_weights():
    task = TASK._replace(
        participation=(0.2, 0.2), sampling=lambda key, t, history: TASK.sizes
    )
    draw = jax.vmap(lambda key: sampling.sample(key, task)[0][0])
    ids = draw(jax.random.split(KEY, 4000))
    found = np.bincount(ids, minlength=toy.N) / 4000
    np.testing.assert_allclose(found, TASK.sizes / TASK.sizes.sum(), atol=0.03)


def test_too_few_weights_are_an_error():
    task = TASK._replace(sampling=lambda key, t, history: jnp.ones(3))
    with pytest.raises(
        InputError, match=r"`sampling` must return weights \[5\], got \[3"
    ):
        sampling.sample(KEY, task)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_only_available_clients_take_part(share):
    available = np.array([[1, 0, 1, 0, 1], [0, 1, 0, 0, 0]])
    trace = lambda key, t, history: jnp.asarray(available)[t % 2]
    task = TASK._replace(participation=(share, share), sampling=trace)
    for t in range(2):
        ids, active = sampling.sample(jax.random.fold_in(KEY, t), task, t)
        assert set(np.asarray(ids[active])) == set(np.flatnonzero(available[t]))


def losses_before(run, f):
    """Returns the mean cross entropy of the first global model per client."""
    w, model = run.begin.server, TASK.model
    found = []
    for i in range(toy.N):
        at = f.train.index[i, : f.train.size[i]]
        variables = {"stats": {}, **w}
        z, _ = model.apply(variables, TASK.prepare(f.examples.x[at]))
        here = jnp.ones(len(at), bool)
        found.append(float(losses.cross_entropy(z, f.examples.y[at], here)))
    return np.array(found)


def test_power_of_choice_takes_the_highest_loss_among_all():
    choice = sampling.power_of_choice(TASK.sizes, toy.N)
    task = TASK._replace(participation=(0.4, 0.4), sampling=choice)
    run, f = toy.train("fedavg", task, 1), toy.federation()
    ids = run.metrics.ids[0][run.metrics.active[0]]
    assert set(ids) == set(np.argsort(-losses_before(run, f))[:2])


def test_power_of_choice_of_as_many_candidates_is_a_draw_by_size():
    sizes = np.array([5, 0, 3, 0, 0])
    choice = sampling.power_of_choice(sizes, 2)
    task = TASK._replace(participation=(0.4, 0.4), sampling=choice)
    ids, active = sampling.sample(KEY, task, 0, lambda ids: jnp.zeros(len(ids)))
    assert active.all() and set(np.asarray(ids)) == {0, 2}


@pytest.mark.parametrize("options", [{}, {"participation": (1.0, 1.0)}])
def test_own_sampling_reads_the_loss_of_the_received_model(options):
    seen = []

    def own(key, t, history):
        loss = history.loss(jnp.arange(toy.N))
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), loss)
        return loss

    task = TASK._replace(**({"participation": (0.4, 0.4), "sampling": own} | options))
    run = toy.train("fedavg", task, 1)
    jax.effects_barrier()
    np.testing.assert_allclose(seen[0], losses_before(run, toy.federation()), rtol=1e-5)


def test_state_in_host_memory_gives_no_losses():
    choice = sampling.power_of_choice(TASK.sizes, 3)
    task = TASK._replace(participation=(0.4, 0.4), sampling=choice)
    with pytest.raises(InputError, match=r"`history\.loss` needs the state"):
        sampling.sample(KEY, task)


def least_recent(key, t, history):
    """Draws the two clients whose last round is longest ago."""
    order = jnp.argsort(history.last_round)
    return jnp.zeros(toy.N).at[order[:2]].set(1)


@pytest.mark.parametrize("storage", ["device", "host"])
def test_own_sampling_reads_what_clients_did_before(storage):
    task = TASK._replace(participation=(0.4, 0.4), sampling=least_recent)
    program = simulate.program("fedavg", task, storage=storage, checked=False)
    f = toy.federation()
    *results, last = simulate.rounds(program, KEY, f, rounds=4)
    drawn = [set(r.metrics.ids.tolist()) for r in results]
    assert drawn == [{0, 1}, {2, 3}, {0, 4}, {1, 2}]
    record = last.state.record["history"]
    assert record.participations.tolist() == [2, 2, 2, 1, 1]
    assert record.last_round.tolist() == [2, 3, 3, 1, 2]
    losses = np.zeros(toy.N)
    for r in results:
        losses[r.metrics.ids] = r.metrics.loss
    toy.assert_same(record.last_loss, losses.astype(np.float32))


def test_a_sampling_that_reads_no_record_has_none():
    task = TASK._replace(participation=(0.4, 0.4))
    choice = sampling.power_of_choice(TASK.sizes, 3)
    by_size = lambda key, t, history: jnp.asarray(TASK.sizes)
    assert not any(
        sampling.reads_record(task._replace(sampling=x)) for x in (choice, by_size)
    )
    assert sampling.reads_record(task._replace(sampling=least_recent))


def test_a_schedule_scales_the_learning_rate_of_each_round():
    task = TASK._replace(schedule=lambda t: jnp.where(t == 0, 1.0, 0.0))
    run = toy.train("fedavg", task, 3)
    toy.assert_close(run.state, toy.train("fedavg", TASK, 1).state)


def test_an_option_of_ones_own_knows_the_client():
    """Replaces the updates of all clients."""

    def attack(c, update, server, row):
        wrong = jax.tree.map(jnp.zeros_like, update)
        return trees.choose(c.id < toy.N, wrong, update), row, ()

    option = Upload(lambda like: ((), ()), attack)
    program = simulate.program("fedavg", TASK, uploads=option, checked=False)
    state = program.init(KEY, program.traced)
    given = (Context(KEY, program.traced, toy.federation(), 0), state, jnp.bool(False))
    toy.assert_same(program.round(*given)[0].server, state.server)


def test_reverse_mode_through_two_rounds_agrees_with_finite_differences():
    task, f = TASK._replace(loop="bounded"), toy.federation()
    program = toy.program("fedprox", task, {"mu": 0.5})

    def last_loss(mu):
        _, found, _, _ = simulate.curve(
            program, KEY, {"mu": mu}, f, rounds=2, eval_every=0
        )
        return jnp.sum(jnp.where(found.active[1], found.loss[1], 0))

    slope = jax.jit(jax.grad(last_loss))(0.5)
    ahead, behind = (jax.jit(last_loss)(0.5 + h) for h in (0.05, -0.05))
    np.testing.assert_allclose(slope, (ahead - behind) / 0.1, rtol=0.02)


def test_bounded_loops_have_the_same_results():
    def run(loop):
        program = toy.program("fedavg", TASK._replace(loop=loop))
        return simulate.curve(program, KEY, {}, toy.federation(), rounds=1)[0]

    toy.assert_close(run("dynamic"), run("bounded"))


def fails(*given):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("field", "function", "message"),
    [
        ("loss", lambda z, y, mask: z[:, 0], r"return float32\[\], got float32\[2\]"),
        ("loss", lambda z, y, mask: jnp.sum(y), r"return float32\[\], got int32\[\]"),
        ("loss", lambda z, y, mask: None, r"return float32\[\], got None"),
        ("loss", lambda z, y: z.sum(), r"function \(logits, y, mask\) \(TypeError"),
        ("loss", fails, r"function \(logits, y, mask\) \(KeyError"),
        ("schedule", lambda t: "high", r"`schedule` must be a function \(round\)"),
        ("schedule", lambda: 1.0, r"function \(round\) \(TypeError"),
        ("schedule", lambda t: jnp.ones(3), r"return float32\[\], got float32\[3\]"),
        ("mix", lambda x: x, r"function \(key, x, labels, mask\) \(TypeError"),
        (
            "mix",
            lambda key, x, y, mask: x,
            r"`mix` must return float32\[2, 6\], .*, got",
        ),
        ("sampling", lambda key, t: 1, r"\(key, round, history\) .* \(TypeError"),
        ("sampling", lambda key, t, h: "x", r"\(key, round, history\) .* \(TypeError"),
    ],
)
def test_own_functions_of_another_form_are_refused_in_one_line(
    field, function, message
):
    with pytest.raises(InputError, match=message) as error:
        simulate.program("fedavg", toy.task(**{field: function}))
    assert "\n" not in str(error.value)


def test_a_method_without_the_argument_task_is_refused():
    def method():
        pass

    with pytest.raises(InputError, match=r"method must take the arguments \(task"):
        simulate.program(method, toy.task())
