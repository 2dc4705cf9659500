import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toy

from experiment.runs import SMALL, rows, run
from fedjax_pfl import experiment, simulate
from fedjax_pfl.data import partition
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import callbacks, inputs, results, warm_start
from fedjax_pfl.experiment.build import build, check_growth
from fedjax_pfl.experiment.config import BY_FILE, Config
from fedjax_pfl.experiment.run_directory import BEST, RunDirectory
from fedjax_pfl.experiment.train import complete, execute, standard_callbacks, train

CONFIG = Config(
    algo="fedavg",
    clients=5,
    partition="iid",
    data_fraction=0.3,
    val_fraction=0.2,
    model="linear",
    lr=0.05,
    width="4",
    devices="1",
    rounds=6,
    checkpoint_every=2,
)
SEVERAL = CONFIG.replace(participation="0.5", eval_every=3, rounds=5)


def ends(path):
    """Returns the files and the state that a run ends with."""
    directory = RunDirectory(path)
    return rows(directory.path), directory.restore(build(directory.config))


def same(a, b):
    assert a[0] == b[0] and a[1][0] == b[1][0]
    jax.tree.map(np.testing.assert_array_equal, a[1][1], b[1][1])


def test_a_run_starts_from_the_variables_of_another(tmp_path):
    config = CONFIG.replace(val_fraction=0.0, rounds=2)
    first, same_method, other = (tmp_path / name for name in "abc")
    execute([RunDirectory(first)], [config])
    warm = config.replace(rounds=0, init_from=str(first))
    execute([RunDirectory(same_method)], [warm])
    execute([RunDirectory(other)], [warm.replace(algo="ditto", hparams={})])
    last = list(RunDirectory(first).rows("metrics.jsonl"))[-1]["pre/acc"]
    for path in (same_method, other):  # Ditto's personal models begin with FedAvg's
        first_row = next(RunDirectory(path).rows("metrics.jsonl"))
        assert first_row["pre/acc"] == last


def test_a_run_of_texts_or_a_table_starts_with_the_inputs_of_the_other(tmp_path):
    said, more = tmp_path / "a.json", tmp_path / "b.json"
    said.write_text(json.dumps({"x": "abcdef" * 9, "y": "fedcba" * 9}))
    more.write_text(json.dumps({"x": "fcz" * 9, "y": "zcf" * 9}))
    table, other = tmp_path / "a.csv", tmp_path / "b.csv"
    rows = [f"{i},{'uv'[i % 2]},{i % 2}" for i in range(20)]
    table.write_text("\n".join(["age,kind,label", *rows]))
    rows = [f"{'vw'[i % 2]},{i % 2},{7 * i}" for i in range(20)]
    other.write_text("\n".join(["kind,label,age", *rows]))
    given = {"clients": 2, "rounds": 1, "partition": "iid", "val_fraction": 0.0}
    for kind, first, second, model in (
        ("text", said, more, "gru"),
        ("table", table, other, "mlp"),
    ):
        run = tmp_path / kind
        config = CONFIG.replace(
            **given, dataset=f"{kind}:{first}", model=model, data_fraction=1.0
        )
        if kind == "text":
            config = config.replace(max_length=9)
        else:
            config = config.replace(categories="onehot")
        execute([RunDirectory(run)], [config])
        known = inputs.recorded(run)
        later = config.replace(dataset=f"{kind}:{second}", init_from=str(run))
        e = build(later)
        assert e.preparation.words == known.words
        assert e.preparation.columns == known.columns
        warm_start.first_state(e)
    short = tmp_path / "c.csv"
    short.write_text("\n".join(["kind,label", *(f"u,{i % 2}" for i in range(20))]))
    with pytest.raises(InputError, match=r"must have the input age of --init_from="):
        build(later.replace(dataset=f"table:{short}"))
    # without it a resume would compute other means
    (run / inputs.FILE).unlink()
    with pytest.raises(InputError, match=r"needs a run of a table, got --init_from="):
        build(later)


def test_a_run_from_one_of_other_classes_says_so(tmp_path, caplog):
    given = {"clients": 2, "rounds": 1, "partition": "iid", "val_fraction": 0.0}
    given |= {"model": "mlp", "data_fraction": 1.0}
    first, other = tmp_path / "a.csv", tmp_path / "b.csv"
    for file, names in ((first, ("yes", "no")), (other, ("yes", "maybe"))):
        rows = [f"{i},{names[i % 2]}" for i in range(20)]
        file.write_text("\n".join(["age,label", *rows]))
    run = str(tmp_path / "run")
    config = CONFIG.replace(**given, dataset=f"table:{first}")
    execute([RunDirectory(run)], [config])
    later = config.replace(init_from=run)
    warm_start.first_state(build(later))
    assert "Other classes" not in caplog.text
    warm_start.first_state(build(later.replace(dataset=f"table:{other}")))
    assert "by number: no, yes and maybe, yes" in caplog.text


def test_leaves_of_other_names_or_shapes_are_new():
    taken, unfit = set(), set()
    tree = {"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(1)}
    other = {"a": np.ones(2), "b": np.ones(4), "d": np.ones(1)}
    found = warm_start.overlaid(tree, other, taken, unfit)
    assert taken == {"a"} and not found["b"].any() and not found["c"].any()
    assert unfit == {"b"}
    assert found["a"].tolist() == [1, 1]


def killed(path, config, round):
    """Runs until the row of a round is written, as if killed there."""
    directory, e = RunDirectory(path), build(config)
    start, state = directory.open(e)

    def kill(result):
        if result.round == round:
            raise SystemError("killed")

    found = standard_callbacks(directory, config.evaluation, config.run)
    with pytest.raises(SystemError):
        train(e, [*found[:-1], kill, found[-1]], start=start, state=state)
    directory.unlock()


@pytest.mark.parametrize("algo", ["ditto", toy.slow("scaffold")])
def test_a_killed_run_goes_on_bit_for_bit(algo, tmp_path):
    config = SEVERAL.replace(algo=algo)
    assert execute([RunDirectory(tmp_path / "whole")], [config]) == 0
    killed(tmp_path / "killed", config, 1)
    killed(tmp_path / "killed", config, 3)
    assert execute([RunDirectory(tmp_path / "killed")], [config]) == 0
    same(ends(tmp_path / "whole"), ends(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["fedavg", "pfedc", "fedcp", "fedem"])
def test_random_kills_leave_no_trace(algo, tmp_path):
    rng, config = np.random.default_rng(0), SEVERAL.replace(algo=algo, rounds=12)
    assert execute([RunDirectory(tmp_path / "whole")], [config]) == 0
    for i in range(3):
        path, last = tmp_path / str(i), 0
        for t in np.sort(rng.integers(0, 12, 3)):
            last = max(last, int(t))
            killed(path, config, last)
        assert execute([RunDirectory(path)], [config]) == 0
        same(ends(tmp_path / "whole"), ends(path))


@pytest.mark.slow
def test_a_longer_run_is_the_shorter_one_resumed(tmp_path):
    short, whole = f"--workdir={tmp_path / 'short'}", f"--workdir={tmp_path / 'whole'}"
    argv = ["--algo=fedavg", *SMALL, "--eval_every=2"]
    assert run(*argv, "--rounds=4", short) == run(*argv, "--rounds=7", whole) == 0
    assert run("--resume", "--rounds=7", short) == 0
    same(ends(tmp_path / "short"), ends(tmp_path / "whole"))


@pytest.mark.slow
def test_a_schedule_over_the_rounds_cannot_grow(tmp_path, capsys):
    path = f"--workdir={tmp_path / 'run'}"
    assert run("--algo=fedphp", *SMALL, "--rounds=1", path) == 0
    assert run("--resume", "--rounds=2", path) == 2
    assert "schedule over --rounds=1" in capsys.readouterr().err


def test_a_run_with_a_schedule_resumes_with_the_same_rounds():
    e = build(CONFIG.replace(schedule="cosine"))
    check_growth(e, e.config.rounds)
    with pytest.raises(InputError, match="schedule over"):
        check_growth(e, e.config.rounds + 1)


def test_ctrl_c_saves_and_goes_on(tmp_path, capsys):
    directory = RunDirectory(tmp_path / "run")
    e = build(CONFIG)
    before = signal.getsignal(signal.SIGINT)
    interrupt = callbacks.Interrupt()

    def press(result):
        if result.round == 2 and result.metrics is not None:
            os.kill(os.getpid(), signal.SIGINT)
            while not interrupt.number:
                pass

    directory.open(e)
    found = standard_callbacks(directory, CONFIG.evaluation, CONFIG.run, interrupt)
    with pytest.raises(callbacks.Stopped):
        train(e, [interrupt, press, *found])
    assert directory.summary["status"] == "interrupted"
    assert directory.restore(e)[0] == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_callback_ends_a_run_after_its_last_scores():
    seen = []

    def stop(result):
        seen.append((result.round, result.metrics is None))
        return result.round == 2

    experiment.train(build(CONFIG), [stop])
    assert seen == [(0, False), (1, False), (2, False), (3, True)]


@pytest.mark.slow
def test_patience_ends_a_run_and_a_resume_ends_at_the_same_round(tmp_path, capsys):
    config = CONFIG.replace(rounds=40, patience=2, lr=0.2)
    directory = RunDirectory(tmp_path / "run")
    assert execute([directory], [config]) == 0
    rounds = directory.summary["rounds"]
    values = [row["val/acc"] for row in directory.rows("metrics.jsonl")][:rounds]
    assert rounds < 40 and max(values) == max(values[:-2]) == values[-3]
    best = {"watch": "val/acc", "round": rounds - 3, "value": max(values)}
    assert directory.summary["best"] == best
    assert directory.summary["stopped"] == "No better val/acc in 2 evaluations"
    kept = directory.restore(build(config), BEST)
    killed(tmp_path / "after", config, best["round"])
    again = RunDirectory(tmp_path / "after")
    same((None, kept), (None, again.restore(build(config), BEST)))
    killed(tmp_path / "killed", config, rounds - 2)
    assert execute([RunDirectory(tmp_path / "killed")], [config]) == 0
    same(ends(tmp_path / "run"), ends(tmp_path / "killed"))
    capsys.readouterr()
    assert run("--resume", f"--workdir={directory.path}") == 0
    assert "round 1/" not in capsys.readouterr().out  # nothing is trained


def test_a_last_evaluation_that_is_the_best_is_no_reason_to_end(monkeypatch):
    said, e = [], build(CONFIG.replace(rounds=9))
    directory = SimpleNamespace(
        rows=lambda _: (), save=lambda *_: None, summarize=lambda **x: said.append(x)
    )
    early = callbacks.EarlyStopping(1, directory)
    early.start(e, 0)
    state = e.program.place(warm_start.first_state(e))
    for i, value in enumerate((0.5, 0.4, 0.6)):
        scores = {"val": {"acc": np.full(e.task.num_clients, value)}}
        monkeypatch.setattr(callbacks.metrics, "points", lambda _, x=scores: x)
        metrics = None if i == 2 else ()
        early(simulate.Result(i, state, metrics, None))
    assert said[-2]["best"]["round"] == 2
    assert said[-1] == {"stopped": "No better val/acc in 1 evaluation before the last"}


def test_the_first_of_metrics_or_watch_decides():
    e = build(CONFIG.replace(metrics="auc,acc"))
    assert e.headline == ("auc", "max")
    assert build(CONFIG.replace(watch="val/acc_present")).headline[0] == "acc_present"
    with pytest.raises(InputError, match="acc_present"):
        build(CONFIG.replace(watch="val/acc_presnt"))
    host = {"client_memory": "host", "participation": "0.5"}
    with pytest.raises(InputError, match="acc_present"):
        build(CONFIG.replace(watch="val/acc_presnt", **host))


def test_a_report_reads_the_best_round_of_early_stopping(tmp_path):
    directory, config = RunDirectory(tmp_path), CONFIG.replace(patience=3, rounds=4)
    assert execute([directory], [config]) == 0
    run = results.load(tmp_path)
    directory.summarize(best={"watch": "val/acc", "round": 1, "value": 0.5})
    directory.save(1, run.state(), BEST)
    run = results.load(tmp_path)
    table = results.final([run])
    assert set(table["round"]) == {1}
    assert run.checkpoint[0] == 1
    [line] = [x for x in results.notes([run]) if "after 1 round" in x]
    assert line.endswith("Scores are after 1 round: val/acc 50.0 %.")


def test_other_numbers_in_a_checkpoint_are_refused(tmp_path):
    e, found = build(CONFIG), []
    for name, seed in (("a", 0), ("b", 1)):
        directory = RunDirectory(tmp_path / name)
        directory.path.mkdir()
        state = e.program.init(jax.random.key(seed), e.program.traced)
        directory.save(2, e.fetch(state))
        found.append(directory.path)
    assert RunDirectory(found[0]).restore(e)[0] == 2
    shutil.rmtree(found[0] / "checkpoints")
    shutil.copytree(found[1] / "checkpoints", found[0] / "checkpoints")
    with pytest.raises(InputError, match="not those that were written"):
        RunDirectory(found[0]).restore(e)
    (found[0] / "digests.json").unlink()  # of an earlier version
    assert RunDirectory(found[0]).restore(e)[0] == 2


@pytest.mark.parametrize("compress", [None, "top_k:0.5"])
def test_a_checkpoint_of_the_method_alone_is_read_without_options(tmp_path, compress):
    """Reads what versions before RunState wrote."""
    e = build(CONFIG.replace(compress=compress))
    directory = RunDirectory(tmp_path)
    state = e.fetch(e.program.init(jax.random.key(0), e.program.traced))
    directory.save(2, state.method)
    directory.write("versions.json", {"git": "f40cf8b3"})
    if compress is None:
        step, found = directory.restore(e)
        assert step == 2
        toy.assert_same(found, state)
    else:
        with pytest.raises(InputError, match="written by git f40cf8b3"):
            directory.restore(e)


def test_a_run_with_patience_may_grow(tmp_path):
    directory, config = RunDirectory(tmp_path), CONFIG.replace(patience=2)
    directory.write("config.json", config.flat())
    ended = {"status": "complete", "unseen_rounds": 1, "patience": 2}
    directory.write("summary.json", ended | {"rounds": config.rounds})
    assert complete(directory, config)
    assert not complete(directory, config.replace(rounds=7))
    directory.write("summary.json", ended | {"rounds": 4})  # stopped early
    assert complete(directory, config.replace(rounds=7))
    assert not complete(directory, config.replace(patience=3))


@pytest.mark.slow
def test_the_others_train_as_without_the_unseen_clients(tmp_path):
    some = build(CONFIG.replace(unseen=0.4, rounds=2))
    partition.save(tmp_path / "others.npz", some.partition, some.dataset)
    file = dict.fromkeys((*BY_FILE, "clients"))
    file |= {"partition": f"file:{tmp_path / 'others.npz'}", "unseen": 0.0}
    found = []
    for e in (some, build(CONFIG.replace(rounds=2, **file))):
        rounds = []
        train(e, [lambda x, rounds=rounds: rounds.append(x._replace(state=None))])
        found.append(rounds)
    assert some.task.num_clients == 3 and len(found[0]) == 3
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_results_are_printed_and_tabulated(tmp_path, capsys):
    path = tmp_path / "run"
    argv = ["--algo=fedavg", *SMALL, "--rounds=2", "--unseen=0.2", "--tensorboard"]
    assert run(*argv, f"--workdir={path}") == 0
    text = capsys.readouterr().out
    for word in ("before", "after", "held-out clients", "majority baseline", "MB"):
        assert word in text
    assert re.search(r"^round 2/2  loss \d", text, re.M)
    header, *lines = (path / "clients.csv").read_text().splitlines()
    assert header.startswith("client,") and "unseen/acc" in header and len(lines) == 5
    assert len((path / "metrics.csv").read_text().splitlines()) == 4
    assert len(list(path.glob("events.out.tfevents.*"))) == 1


@pytest.mark.slow
def test_clients_on_the_host_train_the_same(tmp_path):
    config = CONFIG.replace(participation="0.4", rounds=2, server_optimizer="adam")
    config = config.replace(server_lr=0.01)
    for memory in ("device", "host"):
        directory = RunDirectory(tmp_path / memory)
        assert execute([directory], [config.replace(client_memory=memory)]) == 0
    same(ends(tmp_path / "device"), ends(tmp_path / "host"))


@pytest.mark.slow
def test_rows_of_the_networks(tmp_path):
    path = tmp_path / "run"
    argv = ["--algo=fd", *SMALL, "--model=linear,mlp", "--rounds=1"]
    assert run(*argv, f"--workdir={path}") == 0
    *_, last = RunDirectory(path).rows("metrics.jsonl")
    assert last["pre/acc@linear/clients"] + last["pre/acc@mlp/clients"] == 5
    shutil.rmtree(path)
