"""Grids of a sweep: which runs they are, and which combination validation examples
choose."""

import json
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from experiments.config import Config
from experiments.gather import Found
from experiments.grid import Member
from experiments.outcome import Line, Rule

from experiments import (
    flags,
    gather,
    grid,
    outcome,
    runs,
    session,
    settings,
    show,
    sweep,
    tables,
)
from fedjax_pfl.errors import InputError

TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--rounds=1",
]
ROOT = Path("root")


def members(*words, seeds=None):
    return grid.members(flags.parse(words, grid.FLAGS).settings(), ROOT, seeds)


def test_every_combination_is_a_run_whose_name_says_what_varies():
    found = members(
        "--algo=ditto",
        "--hparam=lam=0.1,1.0",
        "--lr=0.005,.01",
        "--epochs=2",
        "--seed=3,4",
    )
    assert [m.path.name for m in found] == [
        f"ditto-lr={lr}-lam={lam}-seed{seed}"
        for lr in ("0.005", "0.01")
        for lam in ("0.1", "1")
        for seed in (3, 4)
    ]
    for m, (lr, lam) in zip(
        found[::2], [(0.005, 0.1), (0.005, 1), (0.01, 0.1), (0.01, 1)], strict=True
    ):
        assert (m.config.lr, m.config.hparams["lam"], m.config.epochs) == (lr, lam, 2)
    assert found[0].label == "ditto, lr=0.005, lam=0.1"


def test_a_hyperparameter_may_be_of_one_method():
    found = members("--algo=fedavg,ditto", "--hparam=ditto:lam=0.5,1", "--lr=0.01")
    assert [m.path.name for m in found] == [
        "fedavg-seed0",
        "ditto-lam=0.5-seed0",
        "ditto-lam=1-seed0",
    ]


def test_a_hyperparameter_may_be_called_as_a_setting():
    found = members(
        "--algo=apfl",
        "--partition=dirichlet",
        "--alpha=0.1,1",
        "--hparam=alpha=0.25,0.5",
    )
    assert [m.path.name for m in found] == [
        f"apfl-alpha={data}-hparam.alpha={own}-seed0"
        for data in ("0.1", "1")
        for own in ("0.25", "0.5")
    ]
    tuned = members("--algo=apfl", "--val_fraction=0.2", "--hparam=alpha=0.25,0.5")
    assert outcome.rule("val/acc", tuned) == Rule("acc", "max")


def test_a_comma_in_text_is_no_end_of_a_value():
    """Of the clients' networks, say; there semicolons are."""
    assert [m.config.model for m in members("--algo=local", "--model=mlp,linear")] == [
        "mlp,linear"
    ]
    found = members("--algo=local", "--model=mlp;linear,mlp", "--participation=0.5:1,1")
    assert [(m.config.model, m.config.participation) for m in found] == [
        (model, part) for part in ("0.5:1", "1") for model in ("mlp", "linear,mlp")
    ]


def test_names_are_apart_by_commas():
    found = members(
        "--algo=fedavg",
        "--server_optimizer=adam,yogi",
        "--server_lr=0.1",
        "--bn_stats=local,batch",
    )
    assert [(m.config.server_optimizer, m.config.bn_stats) for m in found] == [
        (name, stats) for name in ("adam", "yogi") for stats in ("local", "batch")
    ]


def test_what_no_flag_says_is_taken_from_the_settings_of_a_run(tmp_path):
    config = settings.resolve(
        {"algo": "ditto", "seed": 3, "lr": 0.2, "hparams": {"lam": "2"}}
    )
    (tmp_path / "config.json").write_text(
        json.dumps(vars(config) | {"digests": {}}, default=str)
    )
    found = members(
        f"--config={tmp_path / 'config.json'}",
        "--epochs=1,2",
        "--hparam=personal_epochs=3",
    )
    assert [
        (m.config.algo, m.config.seed, m.config.lr, m.config.epochs) for m in found
    ] == [
        ("ditto", 3, 0.2, 1),
        ("ditto", 3, 0.2, 2),
    ]
    assert all(
        (m.config.hparams["lam"], m.config.hparams["personal_epochs"]) == (2, 3)
        for m in found
    )


def test_of_a_flag_that_is_repeated_the_last_counts():
    """As in every command line here."""
    [only] = members(
        "--algo=ditto", "--lr=0.1,0.2", "--lr=0.3", "--hparam=lam=1", "--hparam=lam=2"
    )
    assert (only.config.lr, only.config.hparams["lam"], only.varied) == (0.3, 2, {})


def test_seeds_are_counted_from_the_one_that_is_given():
    assert [m.config.seed for m in members("--algo=local", "--seed=7", seeds=3)] == [
        7,
        8,
        9,
    ]
    assert [m.config.seed for m in members("--algo=local", seeds=2)] == [0, 1]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--lr=0.1,0.10"], "--lr=0.1,0.10 lists 0.1 twice"),
        (["--hparam=lam=1,1.0"], "--hparam=lam=1,1.0 lists 1 twice"),
        (["--lr=0.1,"], "has a value that is empty"),
        (["--lr=0.1,x"], "--lr=0.1,x must be a number"),
        (["--hparam=lam=1,x"], "`lam` must be a number, got x"),
        (["--hparam=lam=1,-1"], "must be in"),
        (["--hparam=mu=1,2"], "Unknown hyperparameter of ditto 'mu'"),
        (["--hparam=fedavg:mu=1"], "Unknown method of --hparam 'fedavg'"),
        (["--width=1,2"], "--width=1,2 must be a whole number"),
        (["--checkpoint_every=1,2"], "lists 2 values, but it changes no result"),
        (
            ["--patience=2,5"],
            "lists 2 values, but a run may go on with another: make a sweep of each",
        ),
        (["--drop_last=true,false"], "--drop_last=true,false must be true or false."),
        (["--preset=digits,digits_pathological"], "make a sweep of each"),
        (
            ["--partition=iid,pathologic"],
            "Unknown partition 'pathologic': did you mean 'pathological'?",
        ),
        (["--partition=file:a,b.npz"], "the comma may be of a file's name"),
        (
            ["--model=a b;a_b"],
            "Two runs would have the directory root/ditto-model=a_b-seed0",
        ),
    ],
)
def test_what_is_no_grid_is_refused(words, said):
    with pytest.raises(InputError) as error:
        members("--algo=ditto", *words)
    assert said in str(error.value) and "experiments.sweep" not in str(error.value)


def test_seeds_and_a_list_of_them_are_one_too_many():
    with pytest.raises(
        InputError, match="--seeds=2 counts from one --seed, and 2 are listed"
    ):
        members("--algo=local", "--seed=0,1", seeds=2)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two rates and two seeds that chooses by validation examples, and what
    it said."""
    import contextlib
    import io

    root, out = tmp_path_factory.mktemp("sweep"), io.StringIO()
    command = [
        "--algo=fedavg",
        "--lr=0.0001,0.1",
        "--seeds=2",
        "--val_fraction=0.3",
        "--select=val/acc",
        *TINY,
    ]
    with contextlib.redirect_stdout(out):
        assert sweep.run([*command, f"--root={root}"]) == 0
    return root, out.getvalue(), [*command, f"--root={root}"]


def test_the_choice_is_by_the_mean_over_seeds_on_validation_examples(swept):
    root, out, _ = swept
    content = json.loads((root / "comparison.json").read_text())
    held_out = {}
    for line in content["lines"]:
        rows = [
            runs.read_rows(root / name / "metrics.jsonl")[-1]["val/acc"]
            for name in line["runs"]
        ]
        said = line["scores"]["val/acc"]
        assert said["values"] == rows and said["mean"] == pytest.approx(np.mean(rows))
        assert said["std"] == pytest.approx(np.std(rows, ddof=1))
        held_out[line["varied"]["lr"]] = said["mean"], line["scores"].keys()
    assert held_out["0.1"][0] > held_out["0.0001"][0]
    assert content["select"]["chosen"] == ["fedavg, lr=0.1"]
    assert held_out["0.0001"][1] == {"val/acc"}  # no test score of what was not chosen
    assert held_out["0.1"][1] == {"val/acc", "pre/acc", "post/acc"}
    assert (
        "Chosen by val/acc: fedavg, lr=0.1." in out
        and "Chosen by" in (root / "comparison.md").read_text()
    )
    before = out[: out.index("Chosen by")]
    assert "after local training" not in before  # test scores come only then
    # each run's line names the score
    assert before.count("  acc: validation, before local training ") == 4


def test_other_commands_take_of_a_sweep_that_chooses_what_was_chosen(swept):
    root, chosen = swept[0], ["fedavg-lr=0.1-seed0", "fedavg-lr=0.1-seed1"]
    assert [path.name for path in gather.directories([str(root)])] == chosen
    for command in (show, tables):  # as the runs stand now
        table = command.main([str(root)])
        assert "fedavg" in table and "lr=0.0001" not in table
    one = root / "fedavg-lr=0.0001-seed0"
    assert gather.directories([str(one)]) == [one]  # a run that is named is shown


def test_nothing_shows_test_scores_of_a_sweep_that_has_not_chosen_yet(swept, tmp_path):
    root = tmp_path / "sweep"
    shutil.copytree(swept[0], root)
    words = ["--algo=fedavg", "--lr=0.0001,0.1", "--val_fraction=0.3", *TINY]
    some = grid.members(flags.parse(words, grid.FLAGS).settings(), root, 2)
    # as after a sweep without --select, which has comparison.md, too
    (root / "comparison.json").unlink()
    outcome.begin(some, root, Rule("acc", "max"))
    assert not (root / "comparison.md").exists()
    for command in (show, tables):
        with pytest.raises(
            InputError,
            match=r"--select=val/acc that has chosen nothing yet. .*the same command",
        ):
            command.main([str(root)])
    before = (swept[0] / "comparison.json").read_text()
    outcome.begin(some, swept[0], Rule("acc", "max"))
    # what was chosen stays until something else is
    assert (swept[0] / "comparison.json").read_text() == before


def test_values_stand_beside_the_seeds_that_have_them():
    said = {"headline": {"score": "acc", "better": "max"}}
    said |= {"scores": {point: {"acc": {"macro": 0.5}} for point in ("pre", "post")}}
    two = [
        types.SimpleNamespace(
            config=Config(algo="local", seed=k), path=Path(f"s{k}"), varied={}
        )
        for k in (0, 1)
    ]
    line = Line("local", two, [Found(Path("s1"), two[1].config, said)])
    [found] = outcome.Outcome([line], None, [line]).content()["lines"]
    assert (found["seeds"], found["runs"], found["incomplete"], found["complete"]) == (
        [1],
        ["s1"],
        ["s0"],
        1,
    )
    assert found["scores"]["post/acc"]["values"] == [0.5]


def test_validation_scores_are_those_of_the_validation_examples(swept):
    """Each client's, computed again from its predictor."""
    run = runs.load(swept[0] / "fedavg-lr=0.1-seed0")
    e, (*_, last) = run.experiment, run.scores
    for k in range(e.task.num_clients):
        index = e.partition.val[k, : e.partition.val_sizes[k]]
        hits = (
            np.argmax(run.predictor(k)(e.dataset.x[index]), axis=-1)
            == e.dataset.y[index]
        )
        assert last["val"]["acc"][k] == pytest.approx(hits.mean(), abs=1e-6)
    assert last["val"]["acc"] != last["pre"]["acc"]


def test_a_killed_sweep_goes_on(swept, monkeypatch, capsys):
    root, _, command = swept
    started = []
    monkeypatch.setattr(
        session, "train_into", lambda given, *_: started.extend(given) or 0
    )
    assert sweep.run(command) == 0 and not started
    file = root / "fedavg-lr=0.1-seed1" / "summary.json"
    whole = file.read_text()
    runs.write_json(file, json.loads(whole) | {"status": "interrupted"})
    capsys.readouterr()
    assert sweep.run(command) == 0
    [(user, workdir, resume)] = started
    assert (user["lr"], user["seed"], workdir, resume) == (
        0.1,
        1,
        str(file.parent),
        True,
    )
    out = capsys.readouterr().out
    # only what is complete is chosen
    assert "Chosen by val/acc: fedavg, lr=0.0001." in out and "1 of 2" in out
    file.write_text(whole)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--select=pre/acc", "--val_fraction=0.2"], "would choose by test examples"),
        (
            ["--select=acc", "--val_fraction=0.2"],
            "write a validation score, as --select=val/acc",
        ),
        (
            ["--select=val/accc", "--val_fraction=0.2"],
            "Unknown score of fedavg 'accc': did you mean 'acc'",
        ),
        (
            ["--select=val/acc"],
            "needs validation examples, and fedavg, lr=0.1 has none",
        ),
        (
            ["--select=val/acc", "--val_fraction=0.1,0.2"],
            "but --val_fraction has several values",
        ),
    ],
)
def test_what_cannot_choose_is_refused_before_any_run(words, said, tmp_path):
    with pytest.raises(InputError) as error:
        sweep.run(
            ["--algo=fedavg", "--lr=0.1,0.2", *words, *TINY, f"--root={tmp_path}"]
        )
    assert said in str(error.value) and not list(tmp_path.iterdir())


def test_the_best_is_the_least_of_a_score_of_which_less_is_better():
    def line(lr, *values):
        one = Member(
            {}, settings.resolve({"algo": "fedavg", "hparams": {}}), {"lr": lr}, ROOT
        )
        said = [{"scores": {"val": {"error": {"macro": value}}}} for value in values]
        return Line(lr, [one] * 2, [Found(ROOT, one.config, x) for x in said])

    # of c a run is missing
    lines = [line("a", 3.0, 4.0), line("b", 1.0, 2.0), line("c", 0.5)]
    assert [x.label for x in outcome.chosen(lines, Rule("error", "min"))] == ["b"]
    assert [x.label for x in outcome.chosen(lines, Rule("error", "max"))] == ["a"]


def test_what_has_no_effect_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(
        settings.logging, "warning", lambda text, *of: said.append(text % of)
    )
    settings._warn.cache_clear()
    members(
        "--algo=local,fedavg",
        "--alpha=0.5",
        "--classes_per_client=3",
        "--partition=pathological",
        "--seed=0,1",
    )
    members(
        "--algo=local", "--alpha=0.5", "--classes_per_client=3", "--partition=dirichlet"
    )
    members("--algo=local", "--unseen_rounds=2", "--unseen=0.2")
    assert said == [
        "--alpha=0.5 has no effect with --partition=pathological.",
        "--classes_per_client=3 has no effect with --partition=dirichlet.",
    ]
