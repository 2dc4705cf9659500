"""Clients that do not train: who they are, what they score, and that training does not
know of them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from experiments import (
    build,
    comparison,
    courses,
    gather,
    main,
    runs,
    settings,
    sweep,
    tables,
    unseen,
)
from experiments.config import Config
from experiments.recorded import is_complete
from fedjax_pfl import models, testing, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import datasets, marks
from fedjax_pfl.data.partition import load_file, save, select
from fedjax_pfl.engine import validate
from fedjax_pfl.engine.unseen import among, obstacle, scorer
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import State

FLAGS = [
    "--algo=fedper",
    "--data_fraction=0.2",
    "--width=1",
    "--devices=1",
    "--epochs=1",
    "--model=linear",
]
FLAGS += ["--participation=0.7"]


def rows(path):
    return [
        json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run in which two of six clients do not train."""
    path = tmp_path_factory.mktemp("unseen") / "run"
    assert (
        main.run(
            [*FLAGS, "--clients=6", "--unseen=0.3", "--rounds=2", f"--workdir={path}"]
        )
        == 0
    )
    return path


def test_training_does_not_know_of_them(run, tmp_path):
    config, apart = (
        json.loads((run / "config.json").read_text()),
        json.loads((run / "partition.json").read_text()),
    )
    data = datasets.subset(datasets.load("digits"), 0.2, config["seed"])
    everybody = load_file(run / "partition.npz", data)
    assert config["clients"] == len(everybody.train) == 6 and len(apart["unseen"]) == 2
    alone = select(everybody, np.setdiff1d(np.arange(6), apart["unseen"]))
    assert "digits (0.2 of it): 6 clients (0.3 of them unseen)" in comparison.title(
        [gather.read(run)]
    )
    toy.assert_same(
        courses.sizes(gather.read(run)), (alone.train_sizes, alone.test_sizes)
    )
    save(tmp_path / "alone.npz", alone, data)
    given = [
        f"--partition=file:{tmp_path / 'alone.npz'}",
        "--rounds=2",
        f"--workdir={tmp_path / 'alone'}",
    ]
    assert main.run([*FLAGS, *given]) == 0
    found, wanted = rows(run), rows(tmp_path / "alone")
    assert [
        {k: v for k, v in row.items() if not k.startswith("unseen")} for row in found
    ] == wanted
    assert wanted[0]["participants"] == 2  # 0.7 of the four that train


@pytest.mark.slow  # test_clients_table.py has a run with some
def test_their_scores_are_in_the_last_row_the_summary_and_the_table(run, capsys):
    *before, last = rows(run)
    assert not any(name.startswith("unseen") for row in before for name in row)
    summary, scores = (
        json.loads(text)
        for text in ((run / "summary.json").read_text(), scored(run)[-1])
    )
    for point in ("unseen", "unseen_post"):
        assert last[f"{point}/acc_clients"] == len(scores[point]["acc"]) == 2
        assert last[f"{point}/acc"] == pytest.approx(np.mean(scores[point]["acc"]))
        assert summary["scores"][point]["acc"]["macro"] == last[f"{point}/acc"]
    assert "acc unseen post | acc unseen pre" in tables.main([str(run)])
    assert (
        main.run(["--resume", f"--workdir={run}", "--rounds=3", "--unseen_rounds=2"])
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "4 clients and 2 unseen" in out
        and "unseen before" in out
        and "unseen after" in out
    )
    assert ["unseen/acc" in row for row in rows(run)] == [False] * 3 + [True]


def test_marks_are_of_everybody():
    words = {
        "algo": "local",
        "model": "linear",
        "clients": 6,
        "data_fraction": 0.2,
        "unseen": 0.3,
        "marks": True,
    }
    found = build.prepare(settings.resolve(words | {"hparams": {}}))
    assert found.marks == tuple(marks.MARKS[k % 4] for k in range(6))
    assert found.of_trained(found.marks).tolist() == [
        found.marks[k] for k in range(6) if k not in found.unseen.ids
    ]


@pytest.mark.slow  # three sweeps
def test_a_sweep_with_other_rounds_of_theirs_scores_them_again(tmp_path, capsys):
    words = [
        "--algo=local",
        "--model=linear",
        "--clients=6",
        "--data_fraction=0.2",
        "--unseen=0.3",
        "--rounds=1",
    ]
    path = tmp_path / "local-seed0"
    for count in (1, 3, 3):
        assert (
            sweep.run(
                [
                    *words,
                    "--width=1",
                    "--devices=1",
                    f"--unseen_rounds={count}",
                    f"--root={tmp_path}",
                ]
            )
            == 0
        )
        assert json.loads((path / "summary.json").read_text())["unseen_rounds"] == count
    # the third time all is there
    assert capsys.readouterr().out.count("Resuming after round 1 of 1") == 1
    config = runs.read_config(path)
    assert [
        is_complete(path, config.replace(unseen_rounds=count)) for count in (3, 7)
    ] == [True, False]


@pytest.mark.slow  # three commands
def test_they_are_scored_again_after_a_run_that_ended_early(tmp_path, capsys):
    path = tmp_path / "run"
    assert (
        main.run(
            [
                *FLAGS,
                "--clients=6",
                "--unseen=0.3",
                "--stop_at=acc:0.01",
                f"--workdir={path}",
            ]
        )
        == 0
    )
    before, resume = rows(path), ["--resume", f"--workdir={path}"]
    assert not is_complete(path, runs.read_config(path).replace(unseen_rounds=3))
    assert main.run([*resume, "--unseen_rounds=3"]) == 0
    summary, after = runs.read_json(path / "summary.json"), rows(path)
    assert (summary["unseen_rounds"], summary["rounds"]) == (
        3,
        1,
    ) and "has reached" in summary["ended"]["why"]
    assert after[:-1] == before[:-1] and after[-1]["pre/acc"] == before[-1]["pre/acc"]
    assert after[-1]["unseen_post/acc"] != before[-1]["unseen_post/acc"]
    capsys.readouterr()
    assert main.run(resume) == 0 and "has ended after 1 of" in capsys.readouterr().out


def scored(path):
    return (path / "scores.jsonl").read_text().splitlines()


def test_of_each_architecture_some_do_not_train_and_some_do():
    of = np.arange(11) % 3
    ids, apart = unseen.draw(Config(unseen=0.25), of)
    assert np.array_equal(np.sort(np.append(ids, apart)), np.arange(11))
    assert np.array_equal(np.bincount(of[apart]), [1, 1, 1])
    with pytest.raises(InputError, match="leaves none to train"):
        unseen.draw(Config(unseen=0.25), np.array([0, 0, 1]))


def test_each_seed_draws_others_and_they_are_as_recorded():
    found = [
        unseen.draw(Config(unseen=0.2, seed=seed), np.zeros(20, int))[1].tolist()
        for seed in (0, 1)
    ]
    assert found == RECORDED


RECORDED = [[0, 10, 13, 15], [6, 7, 16, 19]]


def test_they_are_personalised_as_the_settings_and_the_seed_say(monkeypatch):
    def scorer(*given, **options):
        return lambda key, federation, server, t: {
            "given": options,
            "key": jax.random.key_data(key),
            "t": t,
        }

    monkeypatch.setattr(unseen.unseen, "scorer", scorer)
    config = Config(algo="fedavg", seed=3, rounds=7, lr_decay=0.5, unseen_rounds=2)
    others = unseen.Unseen(np.arange(3), None, None, (), None)
    found = unseen.scores(config, None, others, (), width=8)
    toy.assert_same(found["given"], {"lr_decay": 0.5, "width": 3, "rounds": 2})
    toy.assert_same(
        (found["key"], found["t"]), (jax.random.key_data(jax.random.key(3)), 7)
    )


def test_the_draw_is_not_that_of_the_partition():
    """By shards of one class each; with the partition's stream they would be the first
    classes."""
    found = []
    for seed in range(5):
        config = settings.resolve(
            {
                "algo": "fedavg",
                "dataset": "synthetic",
                "clients": 20,
                "partition": "shards",
                "hparams": {},
            }
            | {"classes_per_client": 1, "unseen": 0.2, "seed": seed}
        )
        found.append(build.prepare(config).unseen.federation.class_counts.sum(axis=0))
    assert np.asarray(found)[:, 2:].any(axis=1).all()


def personalised(factory, given, server, t, rounds=1, **options):
    """The scores of the toy's clients as if they had not trained."""
    run = jax.jit(scorer(factory, given, given, rounds=rounds, width=2, **options))
    return run(jax.random.key(5), toy.federation(), server, jnp.int32(t))


def keeping(task):
    """FedAvg whose clients keep the mean of the round and predict with it."""
    base = ALGORITHMS["fedavg"](task)

    def init(key):
        server, own = base.init(key)
        return State(
            server, {"own": own, "kept": trees.replicate(server, task.num_clients)}
        )

    def round(key, state, cohort):
        (server, own), metrics = base.round(
            key, State(state.server, state.clients["own"]), cohort
        )
        return State(
            server, {"own": own, "kept": trees.replicate(server, len(cohort.ids))}
        ), metrics

    return base._replace(
        init=init,
        round=round,
        predict=lambda _, row, c: base.predict(row["kept"], row["own"], c),
    )


@pytest.mark.slow
def test_the_server_stays_and_a_round_is_what_it_is_for_a_client_that_trains():
    given = toy.method_task("fedavg")
    two, once = (toy.train("fedavg", given, rounds=rounds) for rounds in (2, 1))
    found = personalised(keeping, given, once.state.server, 1)
    toy.assert_close(found["unseen"], once.last)
    toy.assert_close(
        found["unseen_post"], {name: x[1] for name, x in two.metrics.post.items()}
    )


@pytest.mark.parametrize("matching", ["distance", toy.slow("bbp")])
def test_fedma_matches_no_neurons_of_clients_that_keep_their_statistics(matching):
    """The server of unseen clients does not change, so their statistics must not change
    places."""
    method = functools.partial(ALGORITHMS["fedma"], matching=matching)
    for bn_stats, refused in (("aggregate", False), ("local", True)):
        given = testing.task(
            models=(models.model("lenet_bn", (28, 28, 1), toy.C, bn_stats=bn_stats),),
            bn_stats=bn_stats,
        )
        assert bool(obstacle(method, given)) == refused
        assert not obstacle(functools.partial(method, matching="identity"), given)


@pytest.mark.slow
def test_rounds_of_personalisation_go_on_from_their_rows():
    given = toy.method_task("local")
    wanted = toy.train("local", given, rounds=3)
    toy.assert_close(
        personalised(ALGORITHMS["local"], given, wanted.state.server, 0, rounds=3)[
            "unseen"
        ],
        wanted.last,
    )


def of_the_round(task):
    """FedAvg whose `post` score is the number of the round, and whose predictions are
    random."""
    base = ALGORITHMS["fedavg"](task)

    def round(key, state, cohort):
        state, metrics = base.round(key, state, cohort)
        return state, metrics._replace(
            post={**metrics.post, "acc": jnp.full(len(cohort.ids), cohort.round, float)}
        )

    return base._replace(
        round=round,
        predict=lambda server, own, c: (
            lambda x, mask: jax.random.normal(c.key, (len(x), toy.C))
        ),
    )


@pytest.mark.slow  # their learning rate goes by these numbers, below
def test_rounds_of_personalisation_have_the_numbers_that_follow():
    given, key = toy.method_task("fedavg"), jax.random.key(5)
    program, begin = (
        toy.program(of_the_round, given),
        toy.train(of_the_round, given, 0).state,
    )
    found = personalised(of_the_round, given, begin.server, 4, rounds=3)
    np.testing.assert_array_equal(found["unseen_post"]["acc"], 6)
    then = program.evaluate(key, program.traced, toy.federation(), begin, jnp.int32(6))
    np.testing.assert_array_equal(found["unseen"]["acc"], then["acc"])


def of_the_rate(task):
    """FedAvg whose `post` score is the learning rate."""
    base = ALGORITHMS["fedavg"](task)

    def round(key, state, cohort):
        state, metrics = base.round(key, state, cohort)
        return state, metrics._replace(
            post={**metrics.post, "acc": jnp.full(len(cohort.ids), task.lr)}
        )

    return base._replace(round=round)


@pytest.mark.slow
def test_their_learning_rate_is_that_of_the_round():
    """Half as large in each, so an eighth in round 3."""
    given = toy.method_task("fedavg")._replace(lr=0.8)
    server = toy.train("fedavg", given, 0).state.server
    found = personalised(of_the_rate, given, server, 2, rounds=2, lr_decay=0.5)
    np.testing.assert_allclose(found["unseen_post"]["acc"], 0.1, rtol=1e-6)


@pytest.mark.slow  # four programs
def test_they_are_scored_by_id_whatever_their_architectures():
    model = toy.method_task("local").models[0]
    one = toy.task(models=(model,))
    two = toy.task(
        models=(model, model), architecture=np.array([1, 0, 1, 0, 0], np.int32)
    )
    found = [
        personalised(ALGORITHMS["local"], x, toy.train("local", x, 0).state.server, 0)
        for x in (one, two)
    ]
    toy.assert_close(*found)
    assert len(set(np.asarray(found[0]["unseen_post"]["acc"]).tolist())) > 1


@pytest.mark.parametrize("clients, some, most", [(50, 40, 10), (10, 8, 2)])
def test_those_who_train_are_drawn_by_the_share_that_was_asked_for(clients, some, most):
    """Not by the share that it comes to of all clients, unseen ones among them."""
    task = toy.task()
    whole = task._replace(
        sizes=np.full(clients, 3),
        class_counts=np.tile([3, 0, 0, 0], (clients, 1)),
        architecture=np.zeros(clients, int),
        participation=0.25,
    )
    assert max(among(validate.task(whole), np.arange(some)).cohort_sizes) == most
