"""Limiting cases in which one method must equal another, on three rounds of the toy
federation."""

from operator import attrgetter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import SIZES, assert_close, assert_same

from fedjax_pfl import averaging, simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.types import Context, RunState, State

KEY = jax.random.key(5)
MLP, NORM = toy.task("mlp"), toy.task("norm")


def train(method, task=MLP, federation=None, **hparams):
    return toy.train(method, task, federation_=federation, **hparams)


def equal_sizes():
    """Every client holds the same number of training examples."""
    f = toy.federation()
    return f._replace(train=f.train._replace(size=jnp.full_like(f.train.size, 4)))


def identical():
    """Every client has the examples of client 1."""
    f = toy.federation()
    same = lambda rows: type(rows)(*(trees.replicate(x[1], toy.N) for x in rows))
    counts = trees.replicate(f.class_counts[1], toy.N)
    return f._replace(train=same(f.train), class_counts=counts)


# Parts of a run that are compared.
SERVER, STATE = attrgetter("state.server"), attrgetter("state")
OWN, SCORED = attrgetter("state.clients", "last"), attrgetter("state", "last")
SERVED = attrgetter("state.server", "last")


def personal(run):
    return run.state.clients["v"], run.last


def attentive(run):
    """The models of FedAMP's clients, which are at the server."""
    return {**run.state.server["w"], "stats": run.state.clients}, run.last


def split_model(run):
    return run.state.server["body"], run.state.clients["head"]


def replicated_head(run):
    server = run.state.server
    return server["body"], trees.replicate(server["head"], toy.N)


def component(run):
    """The only component of FedEM."""
    return trees.gather(run.state.server, 0), run.metrics.loss, run.last


def body_and_head(run):
    return run.state.server["body"], run.state.server["head"]


def mean_model(run):
    return jax.tree.map(lambda w: jnp.mean(w, axis=0), run.state.server["w"])


def limit(method, hparams, other, ours=SERVER, theirs=None, **more):
    """A row of LIMITS: with `hparams`, `ours` of a method is `theirs` of another."""
    given = {"task": MLP, "federation": None, "tolerance": 1e-6} | more
    marks = [pytest.mark.slow] if given.pop("slow", False) else []
    case = method, hparams, other, ours, theirs or ours, given
    return pytest.param(*case, marks=marks, id="-".join([method, *hparams, other]))


SLOW, NORMED = {"slow": True}, {"task": NORM, "tolerance": 2e-6}
EQUAL, EXACT = {"federation": equal_sizes()}, {"tolerance": 0.0}
FULL_BATCH = {"task": toy.task("mlp", batch_size=19), "federation": identical()}
ONE_STEP = {"task": toy.task("mlp", epochs=None, steps=1)}
IDENTITY = {"retrain_epochs": 0, "matching": "identity", "weights": "uniform"}
PERSONAL_PATH = {"cpn": False, "gh": False, "lam": 0.0}
NO_POLICY = {"cpn": False, "gfm": False, "gh": False}
SINGLE = {"tasks": "single", "head_weighting": "data"}
UNIFORM = {"tasks": "single", "head_weighting": "uniform"}
EPOCHS = {"fine_tune_epochs": MLP.epochs}
BEGIN, HEAD = attrgetter("begin.server"), lambda run: run.state.server["head"]
LIMITS = [
    limit(
        "fedavg",
        {},
        "local",
        SERVER,
        lambda run: toy.rows(run.state.clients, 2),
        **FULL_BATCH,
    ),
    limit("fedprox", {"mu": 0.0}, "fedavg", STATE),
    limit("ditto", {"lam": 0.0}, "fedavg"),
    limit("ditto", {"lam": 2.0}, "fedavg"),
    limit("ditto", {"lam": 0.0}, "local", personal, OWN),
    limit("ditto", {"personal_epochs": 0}, "fedavg"),
    limit(
        "ditto",
        {"personal_epochs": 0},
        "local",
        lambda run: run.state.clients["v"],
        attrgetter("begin.clients"),
        **EXACT,
    ),
    limit(
        "scaffold",
        {},
        "fedavg",
        lambda run: run.state.server["w"],
        SERVER,
        **FULL_BATCH,
        **SLOW,
        tolerance=1e-5,
    ),
    limit("per_fedavg", {"alpha": 0.0}, "fedavg", **NORMED),
    limit("per_fedavg", {"alpha": 0.0}, "fedavg", **SLOW, tolerance=2e-6),
    limit("fedrod", {"gamma": 0.0}, "fedavg", **NORMED),
    limit("fedrod", {"gamma": 0.0}, "fedavg", **SLOW),
    limit("pfedme", {"beta": 0.0}, "fedavg", SERVER, BEGIN),
    limit("pfedme", {"lam": 0.0}, "fedavg", SERVER, BEGIN, **SLOW),
    limit("apfl", {"alpha": 0.9}, "fedavg"),
    limit("apfl", {}, "fedavg", **SLOW),
    limit("apfl", {"alpha": 1.0, "adaptive": False}, "local", personal, OWN, **SLOW),
    limit("mnfl", {"coef_lr": 0.0}, "fedavg", mean_model, SERVER, **EQUAL, **SLOW),
    limit(
        "fedem",
        {"components": 1},
        "fedavg",
        component,
        attrgetter("state.server", "metrics.loss", "last"),
        tolerance=2e-6,
    ),
    limit(
        "fedem",
        {"components": 1},
        "fedavg",
        component,
        attrgetter("state.server", "metrics.loss", "last"),
        **NORMED,
        **SLOW,
    ),
    limit("fedamp", {"lam": 0.0}, "local", attentive, OWN),
    limit("fedamp", {"lam": 0.0}, "local", attentive, OWN, **NORMED, **SLOW),
    # the pull acts from the second step on
    limit("fedamp", {"sigma": 1e-9}, "local", attentive, OWN, **ONE_STEP, **SLOW),
    limit("fedphp", {"lam": 0.0}, "fedavg", **NORMED),
    limit("fedphp", {"lam": 0.0}, "fedavg", **SLOW, tolerance=2e-6),
    limit("fedala", {"lr_weights": 0.0}, "fedavg", SERVED),
    limit("fedala", {"blended": "none"}, "fedavg", SERVED, **SLOW, task=NORM),
    limit(
        "fedrep", {"head_epochs": 0}, "fedbabu", split_model, replicated_head, **SLOW
    ),
    limit("fedbabu", {}, "fedavg", HEAD, lambda run: run.begin.server["head"], **EXACT),
    limit("fedbn", {}, "fedavg", **EXACT),
    limit("fedavg_ft", {"fine_tune_epochs": 0}, "fedavg", SCORED, **EXACT),
    limit("fedavg_ft", {"fine_tune_epochs": 3}, "fedavg", STATE, **EXACT, **SLOW),
    limit("fedma", IDENTITY, "fedavg", STATE, **EQUAL),
    limit("fedma", IDENTITY, "fedavg", STATE, **EQUAL, **SLOW, task=toy.task("linear")),
    limit("pfedma", {"fine_tune_epochs": 0}, "fedma", SCORED, **EXACT, **SLOW),
    limit("pfedma", EPOCHS, "fedma", STATE, **EXACT, **SLOW),
    limit("fedcp", PERSONAL_PATH, "fedper", split_model, task=NORM),
    limit("fedcp", PERSONAL_PATH, "fedper", split_model, **SLOW),
    limit("fedcp", NO_POLICY, "fedper", split_model, **SLOW, task=NORM),
    limit("fedcp", NO_POLICY, "fedper", split_model, **SLOW),
    limit("pfedc", SINGLE, "fedavg", body_and_head),
    limit("pfedc", UNIFORM, "fedavg", body_and_head, **EQUAL, **SLOW),
]


@pytest.mark.parametrize("method, hparams, other, ours, theirs, given", LIMITS)
def test_in_a_limiting_case_a_method_is_another(
    method, hparams, other, ours, theirs, given
):
    where = given["task"], given["federation"]
    run, expected = train(method, *where, **hparams), train(other, *where)
    assert_close(ours(run), theirs(expected), given["tolerance"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg_ft", "pfedma"])
def test_fine_tuning_for_the_local_epochs_predicts_as_after_training(method):
    before, after = (toy.train(method, MLP, rounds, **EPOCHS) for rounds in (2, 3))
    assert_same(before.last, toy.rows(after.metrics.post, -1))


def test_mnfl_of_own_models_only_is_local():
    program, f = (
        toy.program(ALGORITHMS["mnfl"], MLP, {"coef_lr": 0.0}),
        toy.federation(),
    )
    step = jax.jit(
        lambda state, t: program.round(
            Context(KEY, program.traced, f, t), state, jnp.bool(True)
        )[0]
    )
    state = program.init(KEY, program.traced)
    state = RunState(
        State({**state.server, "coefficients": jnp.eye(toy.N)}, state.clients)
    )
    for t in range(3):
        state = step(state, jnp.int32(t))
    assert_close(state.server["w"], train("local").state.clients)
    assert_same(state.server["coefficients"], jnp.eye(toy.N))


@pytest.mark.slow  # test_fedamp.py has the attention by hand
def test_fedamp_that_sees_everybody_equally_pulls_towards_the_mean():
    """A wide attention has u_i = mean of all: with one step a round, w_i - lr (g +
    lam/alpha (w_i - mean))."""
    task, sigma, lr = toy.task("mlp", epochs=None, steps=1), 1e7, 0.1
    strength = 0.5 * sigma / toy.N  # lam, so that lam / alpha = 0.5
    wide = {"alpha": sigma / toy.N, "sigma": sigma, "lam": strength}
    program, f = toy.program(ALGORITHMS["fedamp"], task, wide), toy.federation()
    free = toy.program(ALGORITHMS["fedamp"], task, {"lam": 0.0})
    step = jax.jit(
        lambda numbers, state, t: program.round(
            Context(KEY, numbers, f, t), state, jnp.bool(False)
        )[0]
    )
    state = step(program.traced, program.init(KEY, program.traced), 0)
    pulled, alone = (step(p.traced, state, 1).server["w"] for p in (program, free))
    w = state.server["w"]
    expected = jax.tree.map(
        lambda a, w: a - lr * 0.5 * (w - jnp.mean(w, axis=0)[None]), alone, w
    )
    assert_close(pulled, expected, 2e-6)
    assert trees.sq_dist(pulled, alone) > 1e-4


@pytest.mark.slow  # test_fedala.py has the blending by hand
@pytest.mark.parametrize("blended, method", [("head", "fedper"), ("all", "local")])
def test_fedala_that_keeps_its_own_model_is_partial_averaging(blended, method):
    def own(task):
        algorithm = ALGORITHMS["fedala"](task, blended=blended, lr_weights=0.0)

        def init(key):
            state = algorithm.init(key)
            return state._replace(
                clients={
                    **state.clients,
                    "weights": optax.tree.scale(0, state.clients["weights"]),
                }
            )

        return algorithm._replace(init=init)

    (state, _, last), expected = train(own), train(method)
    for part in expected.state.clients["head"]:
        assert_close(
            state.clients["w"]["head"][part], expected.state.clients["head"][part]
        )
    if method == "fedper":
        assert_close(state.server["body"], expected.state.server["body"])
    assert_close(last, expected.last)


@pytest.mark.parametrize("bn_stats", ["aggregate", "local"])
def test_masks_of_the_family(bn_stats):
    task = NORM._replace(bn_stats=bn_stats)
    mask = {
        parts: averaging.split(task, parts).personal[0]
        for parts in ((), ("head",), ("body",), ("body", "head"))
    }
    leaves = lambda tree: jax.tree.leaves(tree)
    trained = lambda tree: {part: tree[part] for part in ("body", "head")}
    # FedAvg and Local
    assert not any(leaves(trained(mask[()]))) and all(leaves(mask["body", "head"]))
    fedper, lg_fedavg = trained(mask["head",]), trained(mask["body",])
    assert fedper == jax.tree.map(lambda mine: not mine, lg_fedavg)
    assert set(leaves(mask["head",]["stats"])) == {bn_stats == "local"}


# body 72 of which norms 16, head 36, batch-norm moments 16
TRAFFIC = {
    "local": (0, 0),
    "fedavg": (124, 108),
    "fedavg_ft": (124, 108),
    "fedprox": (124, 108),
    "fedper": (88, 72),
    "fedrep": (88, 72),
    "lg_fedavg": (36, 36),
    "fedbabu": (88, 72),
    "fedbn": (92, 92),
    "ditto": (124, 108),
    "fedem": (3 * 124, 3 * 108),
    "fedamp": (108, 108),
    "fedphp": (124, 108),
    "scaffold": (232, 216),
    "per_fedavg": (124, 108),
    "pfedme": (124, 108),
    "apfl": (124, 108),
    "fedrod": (124, 108),
    "mnfl": (124, 108),
    "pfedhn": (124, 108),
    "fedcp": (300, 284),
    "fedala": (124, 108),
    "pfedc": (88 + 9 * 2, 72 + 9 * 2),
}


# that no statistics travel if they stay local is a rule of the contract
@pytest.mark.slow
@pytest.mark.parametrize("bn_stats", [0, toy.slow(1)], ids=["aggregate", "local"])
@pytest.mark.parametrize("method", TRAFFIC)
def test_traffic_with_batch_norm(method, bn_stats):
    task = toy.task("norm", bn_stats=("aggregate", "local")[bn_stats])
    algorithm = ALGORITHMS[method](task)
    cohort = toy.cohort(task, [0, 1], [True, False])  # two classes each
    sent = toy.sent(algorithm, cohort)
    np.testing.assert_array_equal(sent.down, [TRAFFIC[method][bn_stats], 0])
    np.testing.assert_array_equal(sent.up, sent.down)
    np.testing.assert_array_equal(
        sent.messages, [2 * (TRAFFIC[method][bn_stats] > 0), 0]
    )
    assert not np.any(sent.ints)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, hparams",
    [
        ("scaffold", {}),
        toy.slow("apfl", {}),
        toy.slow("pfedme", {"inner_steps": 1, "lam": 0.0, "inner_lr": 0.1}),
    ],
)
def test_the_server_receives_the_running_statistics_that_local_training_has_seen(
    method, hparams
):
    """With one client that trains, the server has this client's statistics."""
    f = toy.federation()
    one = f._replace(
        train=f.train._replace(size=jnp.where(jnp.arange(toy.N) == 1, f.train.size, 0))
    )
    got = toy.train(method, NORM, 1, federation_=one, **hparams).state.server
    alone = toy.train("local", NORM, 1, federation_=one).state.clients
    assert_close(got.get("w", got)["stats"], toy.rows(alone["stats"], 1))


@pytest.mark.slow
@pytest.mark.parametrize("bn_stats", [toy.slow("local"), "batch"])
@pytest.mark.parametrize("method", ["ditto", *map(toy.slow, ["fedavg", "pfedc"])])
def test_every_use_of_running_statistics_learns(method, bn_stats):
    got = train(method, toy.task("norm", bn_stats=bn_stats))
    assert got.metrics.loss[-1].mean() < got.metrics.loss[0].mean()
    toy.assert_finite((got.state, got.outputs()))


@pytest.mark.slow
def test_fedrep_without_body_phase_keeps_the_body():
    program = toy.program(ALGORITHMS["fedrep"], MLP, {"body_epochs": 0})
    begin = program.init(KEY, program.traced)
    got = train("fedrep", body_epochs=0)
    state = got.state
    assert_close(state.server["body"], begin.server["body"])
    assert np.all(got.metrics.loss > 0)  # of the head's phase
    assert trees.sq_dist(state.clients["head"], begin.clients["head"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbabu", *map(toy.slow, ["fedavg_ft", "pfedma"])])
def test_what_is_fine_tuned(method):
    """Logits of a tuned head are linear in the received features."""
    state, f = train(method).state, toy.federation()
    h, _ = MLP.model.features(state.server, f.examples.x)
    h = np.column_stack([h, np.ones(len(h))])
    logits = {}
    for part in ("head", "body", "all"):
        program = toy.program(ALGORITHMS[method], MLP, {"fine_tune": part})
        tuned = jax.jit(program.predict)(
            Context(KEY, program.traced, f, jnp.int32(3)), state, 1, f.examples.x
        )
        logits[part] = np.asarray(tuned[..., 0] if method == "fedbabu" else tuned)
    off = {
        part: np.abs(h @ np.linalg.lstsq(h, z, rcond=None)[0] - z).max()
        for part, z in logits.items()
    }
    assert off["head"] < 1e-4 < 1e-2 < min(off["body"], off["all"])
    assert np.abs(logits["body"] - logits["all"]).max() > 1e-2


@pytest.mark.slow
def test_fedbabu_scores_the_untuned_model_beside_the_tuned_one():
    program, f = toy.program(ALGORITHMS["fedbabu"], MLP), toy.federation()
    # as `pre` scores a model that nobody tunes
    frozen_head = toy.program(ALGORITHMS["fedavg"], MLP)
    state, _, last = train("fedbabu")
    received = jax.jit(frozen_head.evaluate)(
        Context(KEY, frozen_head.traced, f, jnp.int32(3)), state
    )
    for name in ("acc", "acc_present"):
        assert_same(last[f"untuned_{name}"], received[name])
    assert last["acc_present"].mean() > last["untuned_acc_present"].mean()
    still = train("fedbabu", fine_tune_epochs=0).last
    assert_same(still["untuned_acc"], still["acc"])
    outputs = jax.jit(program.predict)(
        Context(KEY, program.traced, f, jnp.int32(3)), state, 1, f.examples.x[:4]
    )
    assert_close(outputs[..., 1], MLP.model.apply(state.server, f.examples.x[:4])[0])


def test_fine_tuning_by_a_rate_of_zero_changes_nothing():
    state = train("fedbabu").state
    program, f = toy.program(ALGORITHMS["fedbabu"], MLP), toy.federation()
    still = jax.jit(program.evaluate)(
        Context(KEY, program.traced | {"lr": 0.0}, f, jnp.int32(3)), state
    )
    assert_same(still["untuned_acc"], still["acc"])


def test_local_ignores_the_others():
    f = toy.federation()
    others = np.concatenate(
        [np.asarray(f.train.index[i][: SIZES[i]]) for i in range(1, toy.N)]
    )
    changed = f._replace(
        examples=f.examples._replace(x=f.examples.x.at[others].multiply(-3))
    )
    mine = lambda result: toy.rows(result.state.clients, 0)
    assert_same(mine(train("local", federation=changed)), mine(train("local")))


def test_evaluation_does_not_depend_on_the_width():
    f, programs = (
        toy.federation(),
        [toy.program(ALGORITHMS["ditto"], MLP, width=width) for width in (1, 3)],
    )
    state = train("ditto").state
    one, three = (
        jax.jit(p.evaluate)(Context(KEY, p.traced, f, jnp.int32(0)), state)
        for p in programs
    )
    assert_close(one, three)


@pytest.mark.slow
@pytest.mark.parametrize("eval_every", [1, 2, 0])
def test_curve_is_the_loop(eval_every):
    task = toy.task("mlp", participation=(0.4, 0.8))
    program, f = toy.program(ALGORITHMS["ditto"], task), toy.federation()
    options = {"rounds": 4, "eval_every": eval_every}
    state, metrics, scores, last = jax.jit(
        lambda: simulate.curve(program, KEY, program.traced, f, **options)
    )()
    for result in simulate.rounds(program, KEY, f, **options):
        if result.metrics is None:
            assert_close(result.pre, last)
            assert_close(result.state, state)
            continue
        here, pre = jax.tree.map(lambda x, t=result.round: x[t], (metrics, scores))
        order = np.argsort(here.ids)  # the loop gives its rows by id
        by_id = jax.tree.map(lambda x, order=order: x[order], here._replace(server={}))
        assert_close(result.metrics, by_id._replace(server=here.server))
        assert_close(result.pre or jax.tree.map(lambda x: x * np.nan, pre), pre)


@pytest.mark.slow
def test_fewer_places_than_clients_keep_the_absent_bit_for_bit():
    """The contract has a place for everybody; here the rows of a round are gathered and
    scattered."""
    program, f = (
        toy.program(ALGORITHMS["ditto"], toy.task("mlp", participation=(0.2, 0.8))),
        toy.federation(),
    )
    step = jax.jit(chex.assert_max_traces(program.round, n=1))
    state, numbers = program.init(KEY, program.traced), set()
    for t in range(6):
        before = state
        state, metrics = step(
            Context(KEY, program.traced, f, jnp.int32(t)), before, jnp.bool(False)
        )
        absent = np.ones(toy.N, bool)
        absent[metrics.ids[metrics.active]] = False
        assert_same(
            trees.gather(state.clients, absent), trees.gather(before.clients, absent)
        )
        kernel, old = (x.clients["v"]["head"]["kernel"] for x in (state, before))
        assert np.any(kernel != old, axis=(1, 2))[~absent].all()
        numbers.add(int((~absent).sum()))
    assert len(numbers) > 1 and max(numbers) <= 4
