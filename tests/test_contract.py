"""The contract of every method in ALGORITHMS: the rules of fedjax_pfl.testing, and
recorded numbers.

One compiled round a method serves most rows, because cohort, state, learning rate and
round are its arguments.
"""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import C, N

from fedjax_pfl import keys, simulate, testing
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import unseen
from fedjax_pfl.testing.rounds import ACTIVE, IDS, same_round
from fedjax_pfl.types import Context

pytestmark = pytest.mark.contract
each = pytest.mark.parametrize("method", ALGORITHMS)

# Mean losses of rounds 0, 5 and 11 under each method's defaults, measured when the
# method was built.
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
# it grows from round to round, and differs between processors and compilers
ROUNDING = {"feddva": (1e-3, 1e-2, 0.1)}
# losses see few of them
DEFAULTS = json.loads((Path(__file__).parent / "defaults.json").read_text())
SEND_NOTHING = (  # through Cohort.mean, on these networks
    *(
        "local",
        "fedamp",
        "fedfomo",
        "pfedhn",
        "mocha",
        "mnfl",
        "mnfl_het",
        "fedmd",
        "sim_pfd",
        "topk_pfd",
        "fedgh",
        "fedtgp",
        "pfedsim",
        "fedap",
        "pfedla",
        "fedmtl",
        "apple",
        "fedcross",
        "cfl",
        "fedpcl",
    ),
)
# What scores the model that `post` does, of methods whose clients fine-tune a copy of
# it before they predict.
BEFORE_TUNING = {"fedavg_ft": "fedavg", "fedbabu": "fedavg", "pfeddf": "feddf"}
# hyperparameters under which the score of a client that trains alone stays, and shows
# what was scored
ALONE = {
    # else Sigma changes after the scores, and with it the models
    "mocha": {"relate_every": 100},
    # else the layers are trained once more after the scores
    "fedma": {"retrain_epochs": 0},
    # else the server distils after the scores, though from one teacher
    "feddf": {"student_lr": 0.0},
    "pfeddf": {"student_lr": 0.0},
    "fedapen": {"lam_lr": 1.0},  # else the weight moves too little to change a score
    "pfedme": {"lam": 1.0},  # else the two models are too near to each other
}
# scores by what the server makes of the client's training, and `post` by what the
# client had received
SEEN_LATER = {
    "fedproto": ("proto_acc", "proto_acc_present"),  # the prototypes
    "fedtgp": ("proto_acc", "proto_acc_present"),
    # the small model is trained once more after the scores
    "pfedafm": ("small_acc", "small_acc_present"),
}
NOT_ITS_OWN = {  # methods whose `post` no state predicts with
    "fedcp": (
        "the model runs beside the body and the head that were received: test_fedcp.py "
        "checks them"
    ),
    "pfedhn": "the hypernetwork moves to the client's model: it has a test of its own below",
    "pfedma": "its round is FedMA's, and FedMA is here",
    # their servers do not take the mean of the models
    **dict.fromkeys(
        (
            *("feddyn", "fedadmm", "fedgh", "ccvr", "fedcross", "pfedfda", "fedap"),
            *("pfedla", "pefll"),
        ),
        "its rounds by hand are in tests/algorithms",
    ),
}
# their server moves though no upload differs from the default
MOVES = ("feddyn", "fedgen", "ccvr", "pefll")
# Rules that trace or compile another round are slow, but for one method of each way to
# train and average. All other rules share the compiled round of `subject`.
COMMON = ("fedavg", "scaffold", "mnfl_het", "fedcp", "pfedc")
QUICK = {
    "layout": COMMON,
    "bn_stats": ("fedavg", "scaffold"),
    "grouping": ("fedproto", "mnfl_het"),
    "dtype": (*COMMON, "fedfomo", "fedkd"),
    "several_architectures": ("lg_fedavg", "fedproto", "mnfl_het"),
    "float32": (*COMMON, "fedfomo", "fedkd"),
}
# what these methods need for clients of several architectures
ACROSS = {"fedgen": {"shared": "head"}}
# have networks of their own, or refuse that of the rule bn_stats
PARTICULAR = ("mocha", "fedma", "pfedma", "feddva")


@functools.cache
def subject(method):
    return testing.subject(toy.METHODS[method], toy.method_task(method))


@functools.cache
def held(method):
    """Its means are their defaults."""
    start = subject(method).start
    return testing.subject(
        toy.METHODS[method], toy.method_task(method), start=start, held=True
    )


def applies(method, rule):
    if rule in ("grouping", "several_architectures"):
        return not toy.METHODS[method](toy.method_task(method)).one_architecture
    return rule != "bn_stats" or method not in PARTICULAR


def cases():
    for method, rule in itertools.product(ALGORITHMS, testing.RULES):
        if applies(method, rule):
            yield (
                (method, rule)
                if method in QUICK.get(rule, ALGORITHMS)
                else toy.slow(method, rule)
            )


@pytest.mark.parametrize("method, rule", cases())
def test_rule(method, rule):
    s = subject(method)
    if rule == "several_architectures" and method in ACROSS:
        s = s._replace(factory=functools.partial(s.factory, **ACROSS[method]))
    testing.check(rule, s)


def learn(method):
    """The state after twelve rounds with everybody, and the mean losses of rounds 0, 5
    and 11."""
    s, everybody, losses = (
        subject(method),
        {"ids": np.arange(N, dtype=np.int32), "active": np.ones(N, bool)},
        [],
    )
    state = jax.device_get(s.init(jax.random.key(7), s.traced))
    for t in range(12):
        state, metrics = testing.run(s, state=state, t=t, **everybody)
        losses.append(metrics.loss.mean())
    return state, np.array(losses)[[0, 5, 11]]


@each
def test_learns(method):
    s, (state, losses) = subject(method), learn(method)
    # 0.55: argmax over the client's own classes
    chance = np.mean([1 / len(own) for own in toy.OWN])
    assert np.mean(testing.evaluate(s, state=state, t=12)["acc_present"]) > chance + 0.2
    first = 1 if method == "fedpcl" else 0  # which trains nothing in round 0
    assert losses[-1] < losses[first]
    drifted = "a default has drifted, or a stream of keys"
    tolerances = ROUNDING.get(method, (1e-3, 1e-3, 1e-3))
    for loss, golden, rtol in zip(losses, GOLDEN[method], tolerances, strict=True):
        np.testing.assert_allclose(loss, golden, rtol=rtol, atol=1e-5, err_msg=drifted)


@each
def test_unseen_clients_influence_nobody(method):
    """Under a server that stays, a round of a client with the row of `init` depends on
    that client alone."""
    s, one = held(method), 3
    start = s.start.with_rows(jax.device_get(s.init(jax.random.key(7), s.traced)).rows)
    given = {"state": start, "ids": np.arange(N, dtype=np.int32)}
    (together, metrics), (alone, by_itself) = (
        testing.run(s, active=np.isin(np.arange(N), active), **given)
        for active in (np.arange(N), [one])
    )
    both = [(together.clients, metrics.post), (alone.clients, by_itself.post)]
    leaves = [jax.tree.leaves(toy.rows(tree, one)) for tree in both]
    # a mean of equal numbers rounds
    close = lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    influence = not all(close(*pair) for pair in zip(*leaves, strict=True))
    why = unseen.obstacle(toy.METHODS[method], toy.method_task(method))
    assert influence <= bool(why)
    # it says so itself, and with reason
    if toy.METHODS[method](toy.method_task(method)).no_unseen:
        assert influence


def hard(f, one, seed):
    """The federation with as many test examples as fit, each halfway between two of
    other clients; the training examples of client `one` stay."""
    rng, x, width = (
        np.random.default_rng(seed),
        np.array(f.examples.x),
        f.test.index.shape[1],
    )
    others = np.setdiff1d(np.arange(len(x) - 1), np.asarray(f.train.index[one]))
    x[others] = (x[others] + x[rng.permutation(others)]) / 2
    index = np.stack([rng.permutation(others)[:width] for _ in range(N)]).astype(
        np.int32
    )
    test = f.test._replace(index=jnp.asarray(index), size=jnp.full(N, width, jnp.int32))
    return f._replace(examples=f.examples._replace(x=jnp.asarray(x)), test=test)


@pytest.mark.parametrize(
    "method",
    [m if m in COMMON else toy.slow(m) for m in ALGORITHMS if m not in NOT_ITS_OWN],
)
def test_a_client_that_trains_alone_is_scored_as_what_it_then_predicts_with(method):
    """The mean of one upload is that upload, so the next `pre` of the client is its
    `post`."""
    s, task, given = subject(method), toy.method_task(method), ALONE.get(method, {})
    traced = {name: value for name, value in given.items() if name in s.traced}
    if given != traced:
        s = testing.subject(
            functools.partial(ALGORITHMS[method], **given), task, start=s.start
        )
    of = BEFORE_TUNING.get(method)
    predicts = testing.subject(ALGORITHMS[of], task, start=s.start) if of else s
    for one, seed in itertools.product(IDS[ACTIVE], range(2)):
        f = hard(s.federation, one, seed)
        state, metrics = testing.run(s, federation=f, active=one == IDS, **traced)
        after = testing.evaluate(predicts, f, state)
        names = (metrics.post.keys() & after.keys()).difference(
            SEEN_LATER.get(method, ())
        )
        assert "acc" in names
        for name in names:
            np.testing.assert_allclose(
                metrics.post[name][one == IDS], after[name][one], 1e-4, err_msg=name
            )


@pytest.mark.parametrize("method", ["pfedhn"])
def test_pfedhns_client_is_scored_as_trained_from_what_it_received(method):
    """With a learning rate of zero that is what the hypernetwork makes for it before
    the round."""
    s, moved = subject(method), []
    # alone, because the hypernetwork takes a step after each client
    for one in IDS[ACTIVE]:
        f = hard(s.federation, one, 0)
        post = lambda f=f, one=one, **rate: testing.run(
            s, federation=f, active=one == IDS, **rate
        )[1].post["acc"]
        received, untrained, trained = (
            testing.evaluate(s, f)["acc"][one],
            post(inner_lr=0.0),
            post(),
        )
        np.testing.assert_array_equal(untrained[one == IDS], received)
        moved.append(trained[one == IDS] != received)
    assert np.any(moved)


@each
def test_a_client_without_training_examples_is_as_one_that_takes_no_part(method):
    """The upload of such a client would be the model that it received."""
    check_without_examples(subject(method))


def check_without_examples(s):
    f = s.federation
    for one in IDS[ACTIVE]:
        train = f.train._replace(size=f.train.size.at[one].set(0))
        empty = f._replace(train=train, class_counts=f.class_counts.at[one].set(0))
        here, away = (
            testing.run(s, federation=empty, active=a)
            for a in (ACTIVE, ACTIVE & (one != IDS))
        )
        same_round(here, away, np.setdiff1d(IDS[ACTIVE], one), 1e-5)


@pytest.mark.parametrize(
    "method", [m if m in QUICK["float32"] else toy.slow(m) for m in ALGORITHMS]
)
def test_state_is_float32_in_programs_of_64_bits(method):
    """Also where jax_enable_x64 makes float64 the type of arrays that name none; and
    what is drawn is what is drawn without it."""
    key, task = jax.random.key(0), toy.method_task(method)
    f = simulate.with_frozen(toy.federation(), task)
    with jax.enable_x64(True):
        program = simulate.program(toy.METHODS[method], task, checked=False)
        init, state = jax.make_jaxpr(program.init, return_shape=True)(
            key, program.traced
        )
        round, (new, _) = jax.make_jaxpr(program.round, return_shape=True)(
            Context(key, program.traced, f, 0), state, True
        )
        jax.eval_shape(program.evaluate, Context(key, program.traced, f, 1), new)
        drawn = f"{init}{round}"
        assert "bit_width=32" in drawn and "bit_width=64" not in drawn
    assert new == state
    assert {
        x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    } <= {jnp.dtype("float32")}


@each
def test_defaults_are_the_recorded_ones(method):
    assert simulate.hyperparameters(ALGORITHMS[method]) == DEFAULTS[method]


@pytest.mark.parametrize(
    "method", [m if m in COMMON else toy.slow(m) for m in ALGORITHMS]
)
def test_streams_below_one_key_are_distinct(method, monkeypatch):
    """Two streams with one number, below one key or one kind of key, would draw the
    same random numbers."""
    folded, fold = [], keys.fold

    def record(key, stream, offset=0):
        folded.append((key, stream))
        return fold(key, stream, offset)

    monkeypatch.setattr(keys, "fold", record)
    # traces init, a round and predictions
    simulate.program(toy.METHODS[method], toy.method_task(method))
    assert {type(stream) for _, stream in folded} >= {keys.Run, keys.Round, keys.Client}
    kinds = {
        type(stream): {s for _, s in folded if type(s) is type(stream)}
        for _, stream in folded
    }
    # `folded` keeps the keys alive
    parents = {id(key): {s for k, s in folded if k is key} for key, _ in folded}
    for streams in (*kinds.values(), *parents.values()):
        numbers = [stream.number for stream in streams]
        assert len(set(numbers)) == len(numbers), streams


def formula(method: str) -> tuple[np.ndarray, np.ndarray]:
    """Scalars down and up of the clients 3, 0, 4, 1, from the sheets' table 28.1."""
    body, head = 6 * 8 + 8, 8 * C + C
    policy = 8 * 16 + 16 + 2 * 16
    classes = np.array([2, 2, 4, 2])
    ones = np.ones(4, int)
    table = {
        "local": 0 * ones,
        "fedper": body * ones,
        "fedrep": body * ones,
        "fedbabu": body * ones,
        "lg_fedavg": head * ones,
        "pfedafm": body * ones,
        "fedem": 3 * (body + head) * ones,
        "fedcp": (body + head + policy) * ones,
        "pfl_da": head * ones,
        "fedl2g": C * C * ones,
        "fedsr": (body + head + 8 * 16 + 16) * ones,
        "gpfl": (body + 8 * C + 2 * (8 * 8 + 3 * 8)) * ones,
        "feddbe": (body + head + 8) * ones,
        "pfedfda": (body + 8 * C + 8 * 8) * ones,
        "scaffold": 2 * (body + head) * ones,
        "feddva": (76 + 536 + 112) * ones,  # two convolutions and a posterior of z
        "pfedc": body + classes * (8 + 1),
        "fedssa": classes * (8 + 1),
        # all branches and the client's part in them, here unencrypted
        "privacy_pfedc": (body + head + C) * ones,
    }
    small = 6 * 5 + 5 + 5 * C + C
    table |= dict.fromkeys(("fml", "fedkd", "fedapen", "fedmrl"), small * ones)
    table |= dict.fromkeys(
        ("fedmd", "sim_pfd", "topk_pfd", "mnfl_het"), toy.PUBLIC * C * ones
    )
    table["pfedlora"] = (8 * 4 + 4 * C) * ones
    table["fedsa_lora"] = 6 * 3 * ones  # A
    ranks = np.array([2, 1, 1, 2])
    of_ranks = head + (6 + 8) * ranks
    columns = (6 + 1) * C * ones  # one-vs-rest, a constant among the features
    apart = {
        "hetlora": (of_ranks, of_ranks + 1),  # up the norm of its product
        # 2 rounds missed: the sum of their products is smaller
        "flora": (head + 6 * 8 * ones, head + (6 + 8) * 3 * ones),
        # M = 5 models down
        "fedfomo": (5 * (body + head) * ones, (body + head + N) * ones),
        "mocha": (columns + 2, columns),  # Sigma_tt and rho
        # the embedding network, the model, and an embedding of 3
        "pefll": ((body + 12 * 3 + 3 + body + head + 3) * ones,) * 2,
        "floco": ((body + head + 16 * C + 3) * ones, (body + head + 16 * C) * ones),
        "apple": (5 * (body + head) * ones, (body + head) * ones),
        "ccvr": (2 * (body + head) * ones, (body + head + C * (8 + 64)) * ones),
        "fedgen": ((body + head + 184) * ones, (body + head) * ones),
        "fedpcl": (8 * 11 * ones, 8 * classes),
        "fedas": (body * ones, (body + 1) * ones),  # up its Fisher information
        "fednova": ((body + head) * ones, (body + head + 1) * ones),  # up its steps
        "fedcac": (2 * (body + head) * ones, (body + head) * ones),
        "fedtgp": (8 * C * ones, 8 * classes),
        "fedgh": (head * ones, 8 * classes),
        "fedpac": (body + head + 8 * C * ones, body + head + 16 * classes + 1),
        "fedproto": (8 * C * ones, 8 * classes),  # all classes are known
        "fd": (C * C * ones, C * classes),  # every class has been sent by somebody else
    }
    both = table.get(method, (body + head) * ones)
    return apart.get(method, (both, both))


@each
def test_traffic_is_the_sheets_formula(method):
    _, metrics = testing.run(subject(method))
    down, up = formula(method)
    np.testing.assert_array_equal(metrics.traffic.down[ACTIVE], down)
    np.testing.assert_array_equal(metrics.traffic.up[ACTIVE], up)
