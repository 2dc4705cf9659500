"""Degenerate cases in which one method must equal another (specs 28.2), on three rounds
of the toy federation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from absl import logging
from toy import SIZES, assert_close, assert_same

from fedjax_pfl import averaging, keys, local_training, losses, simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.types import Batch, Data, State

KEY = jax.random.key(5)
MLP, NORM = toy.task("mlp"), toy.task("norm")


def train(method, task=MLP, federation=None, **hparams):
    return toy.train(method, task, federation_=federation, **hparams)


def equal_sizes():
    """Every client holds the same number of training examples."""
    f = toy.federation()
    return f._replace(train=f.train._replace(size=jnp.full_like(f.train.size, 4)))


def test_fedprox_without_pull_is_fedavg():
    assert_close(train("fedprox", mu=0.0).state, train("fedavg").state)


@pytest.mark.slow  # test_reference.py has the pull by hand
def test_fedprox_pull_acts_from_the_second_step_on():
    one_step = toy.task("mlp", epochs=None, steps=1)
    weak, strong = (train("fedprox", one_step, mu=mu).state for mu in (0.0, 100.0))
    assert_same(weak, strong)
    two_steps = toy.task("mlp", epochs=None, steps=2)
    weak, strong = (train("fedprox", two_steps, mu=mu).state for mu in (0.0, 5.0))
    assert trees.sq_dist(weak.server, strong.server) > 1e-4


def test_ditto_global_model_is_fedavgs():
    expected = train("fedavg").state.server
    for lam in (0.0, 2.0):
        assert_close(train("ditto", lam=lam).state.server, expected)


def test_ditto_without_pull_is_local():
    state, _, last = train("ditto", lam=0.0)
    alone = train("local")
    assert_close(state.clients["v"], alone.state.clients)
    assert_same(last, alone.last)


def test_dittos_personal_epochs_are_of_the_personal_model_alone():
    got = train("ditto", personal_epochs=0)
    assert_close(got.state.server, train("fedavg").state.server)
    assert_same(got.state.clients["v"], got.begin.clients["v"])


@pytest.mark.slow
def test_scaffold_of_identical_clients_is_fedavg():
    f = toy.federation()
    same = lambda rows: type(rows)(*(trees.replicate(x[1], toy.N) for x in rows))
    equal = f._replace(
        train=same(f.train), class_counts=trees.replicate(f.class_counts[1], toy.N)
    )
    full_batch = toy.task("mlp", batch_size=19)
    corrected, plain = (
        train(method, full_batch, equal).state.server
        for method in ("scaffold", "fedavg")
    )
    assert_close(corrected["w"], plain, 1e-5)


@pytest.mark.parametrize("task", [toy.slow(MLP), NORM])
def test_per_fedavg_without_inner_step_is_fedavg(task):
    state = train("per_fedavg", task, alpha=0.0).state
    expected = train("fedavg", task).state
    assert_close(state.server, expected.server, 2e-6)


@pytest.mark.slow  # test_perfedavg.py has rates by hand
def test_per_fedavgs_outer_step_has_a_rate_of_its_own():
    slower = toy.task("mlp", lr=0.05)
    assert_close(
        train("per_fedavg", alpha=0.0, beta=0.05).state.server,
        train("fedavg", slower).state.server,
    )


@pytest.mark.parametrize("task", [toy.slow(MLP), NORM])
def test_fedrod_without_balancing_is_fedavg(task):
    assert_close(
        train("fedrod", task, gamma=0.0).state.server,
        train("fedavg", task).state.server,
        2e-6,
    )


@pytest.mark.parametrize("still", [toy.slow({"lam": 0.0}), {"beta": 0.0}])
def test_pfedme_without_pull_or_mixing_keeps_the_global_model(still):
    program = toy.program(ALGORITHMS["pfedme"], MLP)
    assert_close(
        train("pfedme", **still).state.server, program.init(KEY, program.traced).server
    )


@pytest.mark.parametrize("hparams", [toy.slow({}), {"alpha": 0.9}])
def test_apfl_global_model_is_fedavgs(hparams):
    assert_close(train("apfl", **hparams).state.server, train("fedavg").state.server)


@pytest.mark.slow
def test_apfl_of_personal_models_only_is_local():
    state, _, last = train("apfl", alpha=1.0, adaptive=False)
    alone = train("local")
    assert_close(state.clients["v"], alone.state.clients)
    assert_same(last, alone.last)


@pytest.mark.slow  # test_mnfl.py has the mixing by hand
def test_mnfl_of_uniform_coefficients_is_fedavg():
    got = train("mnfl", federation=equal_sizes(), coef_lr=0.0)
    state, metrics = got.state, got.metrics
    expected = train("fedavg", federation=equal_sizes())
    assert_close(
        jax.tree.map(lambda w: jnp.mean(w, axis=0), state.server["w"]),
        expected.state.server,
    )
    assert_close(metrics.loss, expected.metrics.loss, 1e-5)
    assert_same(metrics.post, expected.metrics.post)


def test_mnfl_of_own_models_only_is_local():
    program, f = (
        toy.program(ALGORITHMS["mnfl"], MLP, {"coef_lr": 0.0}),
        toy.federation(),
    )
    step = jax.jit(
        lambda state, t: program.round(
            KEY, program.traced, f, state, t, jnp.bool(True)
        )[0]
    )
    state = program.init(KEY, program.traced)
    state = State({**state.server, "coefficients": jnp.eye(toy.N)}, state.clients)
    for t in range(3):
        state = step(state, jnp.int32(t))
    assert_close(state.server["w"], train("local").state.clients)
    assert_same(state.server["coefficients"], jnp.eye(toy.N))


@pytest.mark.parametrize("task", [MLP, toy.slow(NORM)])
def test_fedem_of_one_component_is_fedavg(task):
    state, metrics, last = train("fedem", task, components=1)
    expected, plain, scores = train("fedavg", task)
    assert_close(trees.gather(state.server, 0), expected.server, 2e-6)
    assert_close(metrics.loss, plain.loss, 2e-6)
    assert_same(last, scores)
    assert_same(state.clients["pi"], jnp.ones((toy.N, 1)))


@pytest.mark.parametrize("task", [toy.slow(NORM), MLP])
def test_fedamp_without_attention_is_local(task):
    state, _, last = train("fedamp", task, lam=0.0)
    alone = train("local", task)
    assert_close({**state.server["w"], "stats": state.clients}, alone.state.clients)
    assert_close(last, alone.last)


@pytest.mark.slow  # test_fedamp.py has the attention by hand
def test_fedamp_that_sees_nobody_is_local():
    """In a round of one step, for the pull lam/alpha (w - u) with u = w_i acts from the
    second step on."""
    task = toy.task("mlp", epochs=None, steps=1)
    got = train("fedamp", task, sigma=1e-9)
    state, metrics = got.state, got.metrics
    np.testing.assert_array_equal(metrics.clients["self_weight"][1:], 1)
    assert_close({**state.server["w"], "stats": {}}, train("local", task).state.clients)


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
            KEY, numbers, f, state, t, jnp.bool(False)
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


@pytest.mark.parametrize("task", [toy.slow(MLP), NORM])
def test_fedphp_without_a_teacher_trains_as_fedavg(task):
    assert_close(
        train("fedphp", task, lam=0.0).state.server,
        train("fedavg", task).state.server,
        2e-6,
    )


@pytest.mark.parametrize(
    "task, hparams", [(MLP, {"lr_weights": 0.0}), toy.slow(NORM, {"blended": "none"})]
)
def test_fedala_that_takes_the_global_model_is_fedavg(task, hparams):
    state, _, last = train("fedala", task, **hparams)
    expected = train("fedavg", task)
    assert_close(state.server, expected.state.server)
    assert_close(last, expected.last)


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
@pytest.mark.parametrize("bn_stats", [0, toy.slow(1)], ids=["aggregate", "local"])
@pytest.mark.parametrize("method", TRAFFIC)
def test_traffic_with_batch_norm(method, bn_stats):
    task = toy.task("norm", bn_stats=("aggregate", "local")[bn_stats])
    algorithm = ALGORITHMS[method](task)
    ids = jnp.array([0, 1])  # two classes each
    nothing = {"round": jnp.int32(0), "evaluated": jnp.bool(False)}
    cohort = Cohort(
        toy.federation(),
        task,
        ids,
        jnp.array([True, False]),
        key=KEY,
        width=1,
        **nothing,
    )
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
    """Of a round in which one client has examples: they are those of training alone."""
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
def test_fedrep_without_head_phase_is_fedbabu():
    fedrep, fedbabu = train("fedrep", head_epochs=0).state, train("fedbabu").state
    assert_close(fedrep.server["body"], fedbabu.server["body"])
    assert_same(fedrep.clients["head"], trees.replicate(fedbabu.server["head"], toy.N))


@pytest.mark.slow
def test_fedrep_without_body_phase_keeps_the_body():
    program = toy.program(ALGORITHMS["fedrep"], MLP, {"body_epochs": 0})
    begin = program.init(KEY, program.traced)
    got = train("fedrep", body_epochs=0)
    state = got.state
    assert_close(state.server["body"], begin.server["body"])
    assert np.all(got.metrics.loss > 0)  # of the head's phase
    assert trees.sq_dist(state.clients["head"], begin.clients["head"]) > 0


def test_fedbn_without_batch_norm_is_fedavg():
    assert_same(train("fedbn").state.server, train("fedavg").state.server)


@pytest.mark.slow  # its traffic shows it
def test_fedbn_keeps_norms_and_shares_the_rest():
    state = train("fedbn", NORM).state
    shared, own = (
        jax.tree.leaves(
            jax.tree_util.tree_map_with_path(lambda path, _: str(path), part)
        )
        for part in state
    )
    assert (
        own
        and all("norm" in path for path in own)
        and not any("norm" in path for path in shared)
    )


def test_fine_tuning_by_no_epochs_is_fedavg():
    state, _, last = train("fedavg_ft", fine_tune_epochs=0)
    expected, _, scores = train("fedavg")
    assert_same(state, expected)
    assert_same(last, scores)


@pytest.mark.slow  # by no epochs it is FedAvg's, too
def test_fine_tuning_does_not_touch_training():
    assert_same(train("fedavg_ft", fine_tune_epochs=3).state, train("fedavg").state)


@pytest.mark.slow  # pFedMA's is seen below
def test_fine_tuning_for_the_local_epochs_is_fedavgs_post():
    before, after = (
        toy.train("fedavg_ft", MLP, rounds, fine_tune_epochs=MLP.epochs)
        for rounds in (2, 3)
    )
    assert_same(before.last, toy.rows(after.metrics.post, -1))


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
            KEY, program.traced, f, state, jnp.int32(3), 1, f.examples.x
        )
        logits[part] = np.asarray(tuned[..., 0] if method == "fedbabu" else tuned)
    off = {
        part: np.abs(h @ np.linalg.lstsq(h, z, rcond=None)[0] - z).max()
        for part, z in logits.items()
    }
    assert off["head"] < 1e-4 < 1e-2 < min(off["body"], off["all"])
    assert np.abs(logits["body"] - logits["all"]).max() > 1e-2


@pytest.mark.parametrize("task", [MLP, toy.slow(toy.task("linear"))])
def test_fedma_of_neurons_that_stay_is_uniform_fedavg(task):
    still = {"retrain_epochs": 0, "matching": "identity", "weights": "uniform"}
    uniform = equal_sizes()
    assert_close(
        train("fedma", task, uniform, **still).state,
        train("fedavg", task, uniform).state,
    )


@pytest.mark.slow  # so is its state with fine-tuning, below
def test_pfedma_without_fine_tuning_is_fedma():
    state, _, last = train("pfedma", fine_tune_epochs=0)
    expected, _, scores = train("fedma")
    assert_same(state, expected)
    assert_same(last, scores)


@pytest.mark.slow
def test_pfedma_trains_as_fedma_and_predicts_what_it_has_trained():
    before, after = (
        toy.train("pfedma", MLP, rounds, fine_tune_epochs=MLP.epochs)
        for rounds in (2, 3)
    )
    assert_same(after.state, train("fedma").state)
    assert_same(before.last, toy.rows(after.metrics.post, -1))


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu"])
def test_a_network_without_a_body_to_share_is_said(method, monkeypatch):
    said = []
    monkeypatch.setattr(
        logging, "log_first_n", lambda level, text, n: said.append(text)
    )
    ALGORITHMS[method](MLP)
    assert not said
    ALGORITHMS[method](toy.task("linear"))
    assert len(said) == 1 and "nothing is averaged" in said[0]


def test_fedbabu_head_never_moves():
    program = toy.program(ALGORITHMS["fedbabu"], MLP)
    assert_same(
        train("fedbabu").state.server["head"],
        program.init(KEY, program.traced).server["head"],
    )


@pytest.mark.slow
def test_fedbabu_scores_the_untuned_model_beside_the_tuned_one():
    program, f = toy.program(ALGORITHMS["fedbabu"], MLP), toy.federation()
    # as `pre` scores a model that nobody tunes
    frozen_head = toy.program(ALGORITHMS["fedavg"], MLP)
    state, _, last = train("fedbabu")
    received = jax.jit(frozen_head.evaluate)(
        KEY, frozen_head.traced, f, state, jnp.int32(3)
    )
    for name in ("acc", "acc_present"):
        assert_same(last[f"untuned_{name}"], received[name])
    assert last["acc_present"].mean() > last["untuned_acc_present"].mean()
    still = train("fedbabu", fine_tune_epochs=0).last
    assert_same(still["untuned_acc"], still["acc"])
    outputs = jax.jit(program.predict)(
        KEY, program.traced, f, state, jnp.int32(3), 1, f.examples.x[:4]
    )
    assert_close(outputs[..., 1], MLP.model.apply(state.server, f.examples.x[:4])[0])


def test_fine_tuning_by_a_rate_of_zero_changes_nothing():
    state = train("fedbabu").state
    program, f = toy.program(ALGORITHMS["fedbabu"], MLP), toy.federation()
    still = jax.jit(program.evaluate)(
        KEY, program.traced | {"lr": 0.0}, f, state, jnp.int32(3)
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


@pytest.mark.slow  # FedPer's mask is in test_masks_of_the_family
def test_fedper_of_equal_clients_has_equal_heads():
    f = toy.federation()
    same = lambda rows: type(rows)(*(x.at[1].set(x[0]) for x in rows))
    f = f._replace(
        train=same(f.train), class_counts=f.class_counts.at[1].set(f.class_counts[0])
    )
    full_batch = toy.task("mlp", batch_size=19)
    heads = train("fedper", full_batch, federation=f).state.clients["head"]
    assert_close(trees.gather(heads, 0), trees.gather(heads, 1))


@pytest.mark.parametrize(
    "hparams",
    [
        toy.slow({"cpn": False, "gfm": False, "gh": False}),
        {"cpn": False, "gh": False, "lam": 0.0},
    ],
)
@pytest.mark.parametrize("task", [toy.slow(MLP), NORM])
def test_fedcp_with_the_personal_path_only_is_fedper(task, hparams):
    state, expected = train("fedcp", task, **hparams).state, train("fedper", task).state
    assert_close(state.server["body"], expected.server["body"])
    assert_close(state.clients["head"], expected.clients["head"])


@pytest.mark.parametrize(
    "head_weighting, federation",
    [("data", toy.federation()), toy.slow("uniform", equal_sizes())],
)
def test_pfedc_with_one_task_is_fedavg(head_weighting, federation):
    state = train(
        "pfedc", federation=federation, tasks="single", head_weighting=head_weighting
    ).state.server
    expected = train("fedavg", federation=federation).state.server
    assert_close(
        {part: state[part] for part in ("body", "head")},
        {part: expected[part] for part in ("body", "head")},
    )


@pytest.mark.slow  # oracle.py has minibatches in this order for the rounds by hand
def test_one_client_is_a_plain_loop():
    """Minibatches, their order and the short last batch against a Python loop over the
    same permutations."""
    f, loss = toy.federation(), losses.classification(MLP.model)
    size, batch = int(SIZES[1]), MLP.batch_size
    data = Data(f.examples, f.train.index[1], f.train.size[1], MLP.prepare)
    w = start = MLP.model.init(KEY)
    for epoch in range(MLP.epochs):
        key = jax.random.fold_in(keys.fold(KEY, keys.Client.SHUFFLE), epoch)
        order = np.asarray(data.index)[
            np.asarray(local_training.shuffle(key, data.index.shape[0], size))[:size]
        ]
        for s in range(0, size, batch):
            x, y = (
                f.examples.x[order[s : s + batch]],
                f.examples.y[order[s : s + batch]],
            )
            one = Batch(x, y, jnp.ones(len(y), bool), None)
            w = jax.tree.map(
                lambda a, g: a - 0.1 * g,
                w,
                jax.grad(lambda w, one=one: loss(w, one, KEY)[0])(w),
            )
    got, _ = jax.jit(lambda: local_training.sgd(KEY, data, loss, start, MLP))()
    assert_close(got, w)


def test_evaluation_does_not_depend_on_the_width():
    f, programs = (
        toy.federation(),
        [toy.program(ALGORITHMS["ditto"], MLP, width=width) for width in (1, 3)],
    )
    state = train("ditto").state
    one, three = (
        jax.jit(p.evaluate)(KEY, p.traced, f, state, jnp.int32(0)) for p in programs
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
            KEY, program.traced, f, before, jnp.int32(t), jnp.bool(False)
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


@pytest.mark.slow  # so do several equal ones, below
def test_one_client_averages_to_itself():
    task = toy.task("mlp", sizes=SIZES[:1], class_counts=MLP.class_counts[:1])
    f = toy.federation()
    first = lambda rows: type(rows)(*(x[:1] for x in rows))
    one = f._replace(
        train=first(f.train),
        val=first(f.val),
        test=first(f.test),
        class_counts=f.class_counts[:1],
    )
    averaged, alone = (train(method, task, one).state for method in ("fedavg", "local"))
    assert_same(trees.replicate(averaged.server, 1), alone.clients)


def test_identical_clients_average_to_any_of_them():
    f = toy.federation()
    same = lambda rows: type(rows)(*(trees.replicate(x[1], toy.N) for x in rows))
    equal = f._replace(
        train=same(f.train), class_counts=trees.replicate(f.class_counts[1], toy.N)
    )
    full_batch = toy.task("mlp", batch_size=19)
    average, alone = (
        train("fedavg", full_batch, equal).state.server,
        train("local", full_batch, equal).state.clients,
    )
    assert_close(average, trees.gather(alone, 2))


@pytest.mark.slow  # seconds; test_vectorized.py has seeds and rates
def test_two_seeds_times_two_rates_in_one_vmap_are_four_runs():
    program = toy.program(ALGORITHMS["ditto"], MLP)
    f = toy.federation()

    def run(key, lam):
        return simulate.curve(
            program, key, program.traced | {"lam": lam}, f, rounds=3, eval_every=2
        )[1:]

    seeds, lams = jax.random.split(jax.random.key(1), 2), jnp.array([0.1, 1.0])
    grid = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))(seeds, lams)
    single = jax.jit(run)
    for i in range(2):
        for j in range(2):
            got = jax.tree.map(lambda x, i=i, j=j: x[i, j], grid)
            assert_close(got, single(seeds[i], lams[j]), 1e-5)
