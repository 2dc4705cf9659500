"""Scores that are no accuracies, and those of which less is better: in tables, summary,
curves and targets."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from experiments.config import Config, optimizers
from experiments.files import write_json, write_text
from rich.console import Console

from experiments import (
    build,
    comparison,
    comparison_figures,
    drawing,
    entry,
    figures,
    gather,
    html as report_page,
    networks,
    recorded,
    report,
    runs,
    scores,
    settings,
    tables,
    targets,
)
from fedjax_pfl.data import datasets, marks
from fedjax_pfl.errors import InputError

DVA, ERROR = ("elbo", "max"), ("reconstruction", "min")
CONFIG = Config(algo="feddva")
FLOPS = targets.Flops(1, 1)


def rows():
    """Three evaluations: the middle one is best by reconstruction, the last by the
    bound."""
    made = []
    for t, (error, elbo) in enumerate(((80.0, -99.0), (40.0, -60.5), (50.0, -60.25))):
        row = {"round": t, "loss": 1.0, "traffic/down": 10, "traffic/up": 10}
        row |= {"work/steps": 4, "work/examples": 30}
        for name, value in (("reconstruction", error), ("elbo", elbo)):
            spread = {"": 0, "_micro": 0, "_std": 1, "_worst10": -5, "_best10": 5}
            row |= {
                f"{point}/{name}{s}": (1 if s == "_std" else value + d)
                for point in ("pre", "post")
                for s, d in spread.items()
            }
        made.append(row)
    return made


@pytest.mark.parametrize(
    "name, headline, way",
    [
        ("acc", scores.ACCURACY, "max"),
        ("recall_macro", scores.ACCURACY, "max"),
        ("elbo", DVA, "max"),
        ("kl_z", DVA, "min"),
        ("reconstruction_micro", DVA, "min"),
        ("my_own", ("my_own", "min"), "min"),
        ("my_own_micro", ("my_own", "min"), "min"),
    ],
)
def test_which_way_a_score_is_better(name, headline, way):
    assert scores.better(name, headline) == way


@pytest.mark.parametrize(
    "name",
    ["acc", "acc@lenet", "task_acc_micro", "recall_0", "task_bal", "top5_accuracy"],
)
def test_a_share_is_known_by_a_word_of_its_name(name):
    assert scores.is_share(name)


@pytest.mark.parametrize(
    "name", ["global_loss", "loss@balanced", "elbo", "accumulated_error"]
)
def test_what_has_only_the_letters_of_one_is_no_share(name):
    """As every global_ score has those of bal."""
    assert not scores.is_share(name)


def test_the_best_round_and_the_worst_clients_are_those_of_the_scores_direction():
    found = report.summary(rows(), DVA)
    assert found["headline"] == {"score": "elbo", "better": "max"}
    error, elbo = (found["scores"]["post"][name] for name in ("reconstruction", "elbo"))
    assert (error["course"]["best"]["round"], error["course"]["best"]["value"]) == (
        1,
        40,
    )
    assert elbo["course"]["best"]["round"] == 2
    assert (error["worst10"], error["best10"]) == (55, 45) and (
        elbo["worst10"],
        elbo["best10"],
    ) == (-65.25, -55.25)
    assert scores.ordered(["acc", "elbo"], DVA) == ["elbo", "acc"]


def test_a_score_that_is_not_finite_at_the_last_evaluation_has_no_result():
    """Else that of an earlier round would be said to be after the last."""
    first, second, _ = rows()
    lost = {
        name: None if name.startswith("pre/reconstruction") else x
        for name, x in second.items()
    }
    given = [first, lost, {"round": 2, "loss": 1.0}]  # which is not evaluated
    found = report.summary(given, DVA)["scores"]
    assert {point: list(of) for point, of in found.items() if of} == {
        "pre": ["elbo"],
        "post": ["elbo", "reconstruction"],
    }
    assert found["post"]["reconstruction"]["round"] == 1
    alone = [
        {name: x for name, x in row.items() if "elbo" not in name} for row in given
    ]
    console = Console(file=io.StringIO(), width=200)
    report.tables(console, report.summary(alone, ERROR))
    assert "reconstruction" in console.file.getvalue()


def test_the_tables_say_what_is_better_and_show_no_percent():
    console = Console(file=io.StringIO(), width=200)
    report.tables(console, report.summary(rows(), DVA))
    text = " ".join(console.file.getvalue().split())
    assert "elbo: higher is better; reconstruction: lower is better" in text
    assert (
        "-60.25" in text
        and "4000" not in text
        and "majority" not in text
        and "in %" not in text
    )


def test_progress_shows_the_headline_in_its_unit():
    console = Console(file=io.StringIO(), width=100)
    with report.Reporter(console, 0, 3, ERROR) as reporter:
        for row in rows():
            reporter.update(row)
    assert "reconstruction 40 → 40" in console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_show_no_scores_of_other_rounds(terminal):
    """A bar does, until there are newer ones."""
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    with report.Reporter(console, 0, 2) as reporter:
        reporter.update({"round": 0, "loss": 2.0, "pre/acc": 0.25})
        reporter.update({"round": 1, "loss": 1.0})
    last = console.file.getvalue().split("round 2/2")[-1]
    assert "loss 1" in last and ("25.0%" in last) == terminal


def test_a_target_of_which_less_is_better_is_reached_from_above():
    first = targets.reached(rows(), "reconstruction", (39, 45), FLOPS).first
    assert first["post", 45]["round"] == 1 and ("post", 39) not in first
    assert (
        targets.reached(rows(), "elbo", (-60.5,), FLOPS, DVA).first["post", -60.5][
            "round"
        ]
        == 1
    )
    found = targets.summary(
        rows(), CONFIG.replace(targets="reconstruction:45,100"), FLOPS, DVA
    )
    assert [level["post"]["rounds"] for level in found["levels"]] == [2, 1]
    console = Console(file=io.StringIO(), width=200)
    targets.show(
        console, rows(), CONFIG.replace(targets="reconstruction:45"), FLOPS, DVA
    )
    assert "(lower is better)" in console.file.getvalue()


def test_levels_may_leave_0_and_1_only_with_such_a_name():
    assert targets.parse("elbo:-60,-80") == ("elbo", (-80.0, -60.0))
    for text in ("45", "acc:45", "-60"):
        with pytest.raises(InputError, match="must be in"):
            targets.parse(text)
    assert targets.wanted(CONFIG.replace(preset="feddva_small"), DVA)[0] == "elbo"
    assert (
        targets.wanted(
            CONFIG.replace(preset="feddva_small", algo="fedavg"), scores.ACCURACY
        )[0]
        == "acc"
    )


def test_the_curves_are_of_the_headline(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure))
    figures.draw_curves(rows(), tmp_path / "c.png", ERROR)
    axes = drawn[0].axes[0]
    assert (
        axes.get_title() == "reconstruction (lower is better)"
        and axes.get_ylim()[1] > 50
    )
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), [80, 40, 50])
    found = [list(line.get_xdata()) for line in axes.lines[:2]]
    # the rounds behind the scores before and after local training
    assert found == [[0, 1, 2], [1, 2, 3]]


def finished(path, algo, config, summary, status="complete"):
    path.mkdir()
    config = settings.resolve(
        {"algo": algo, "hparams": {}, "dataset": "synthetic", **config}
    )
    write_json(path / "config.json", recorded.signed(config))
    write_text(
        path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows())
    )
    write_json(
        path / "summary.json",
        summary | {"status": status, "rounds": 3, "seconds": {"train": 1}},
    )
    return path


def test_the_table_of_runs_has_columns_of_their_own_for_them(tmp_path):
    path = finished(
        tmp_path / "a", "feddva", {"rounds": 3}, report.summary(rows(), DVA)
    )
    head, _, body = tables.table([path]).splitlines()[:3]
    cells = dict(zip(head.split(" | "), body.split(" | "), strict=True))
    assert (
        cells["elbo post"] == "-60.25 ± 1"
        and cells["reconstruction post (lower is better)"] == "50"
    )
    assert "acc post" not in head and cells["model"] == "own"
    text = tables.table([path], "reconstruction:45")
    assert "rounds to 45 of reconstruction" in text


def test_what_a_run_scored_before_it_diverged_is_in_no_mean(tmp_path):
    ends = report.summary(rows(), DVA)
    better = report.summary([row | {"pre/elbo": 0.0} for row in rows()], DVA)
    runs = [
        finished(tmp_path / str(seed), "feddva", {"seed": seed}, ends)
        for seed in (0, 1)
    ]
    runs += [finished(tmp_path / "2", "feddva", {"seed": 2}, better, "diverged")]
    _, (head, first), notes = comparison.content(list(map(gather.read, runs)))
    row = dict(zip(head, first, strict=True))
    assert (row["runs"], row["before local training"]) == (
        "2 of 3",
        "-60.25 ± 0",
    ) and any("diverged" in note for note in notes)
    found = list(map(gather.read, runs))
    assert "-60.25 ± 0" in report_page._scores(
        found
    ) and "-40" not in report_page._scores(found)
    _, more = comparison_figures.figures(found, lambda run: FLOPS)
    assert any(note.endswith("2 is left out: it has diverged.") for note in more)
    alone = comparison.content(list(map(gather.read, runs[2:])))[1][1]
    assert alone[1] == "-"
    assert (
        comparison.draw(runs, tmp_path).exists()
        and comparison.draw(runs[2:], tmp_path).exists()
    )


def test_tables_in_a_file_are_not_cut_at_80_columns(capsys):
    console, name = entry.terminal(), "a method with a long name"
    assert console.width == 200
    wide = report.plain_table("Title", ["method"], [f"score {i:02}" for i in range(14)])
    wide.add_row(name, *("0.12345",) * 14)
    console.print(wide)
    row = next(line for line in capsys.readouterr().out.splitlines() if name in line)
    assert row.count("0.12345") == 14 and len(row) > 80


# --- what FedDVA brought to the command line


def config(**user):
    return settings.resolve({"algo": "fedavg", "hparams": {}, **user})


def test_tables_and_titles_name_the_network_that_is_trained():
    assert networks.label(config()) == config().model == "mlp"
    made = networks.label(config(algo="feddva"))
    assert made == "own" and set(networks.names(config(algo="feddva"), 3)) == {made}


def test_the_optimizer_is_one_of_optaxs_by_its_name():
    assert {"adam", "adamw", "rmsprop", "sgd"} <= set(optimizers())
    adam = networks.optimizer(0.0, 0.0, None, "adam")(0.1)
    updates, _ = adam.update(
        {"w": np.float32(5)}, adam.init({"w": np.float32(0)}), {"w": np.float32(0)}
    )
    # the first step of Adam is of length lr
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)
    for decay in (0.0, 0.5):  # AdamW's own, and no further one
        adamw = networks.optimizer(0.0, decay, None, "adamw")(0.1)
        w = {"w": np.float32(2)}
        updates, _ = adamw.update({"w": np.float32(0)}, adamw.init(w), w)
        np.testing.assert_allclose(updates["w"], -0.1 * decay * 2)
    with pytest.raises(InputError, match="Unknown optimizer 'noisy_sgd'"):
        config(optimizer="noisy_sgd")
    with pytest.raises(
        InputError, match="Unknown optimizer 'adamm': did you mean 'adam'"
    ):
        config(optimizer="adamm")
    with pytest.raises(InputError, match=r"momentum=0\.9 is of --optimizer=sgd"):
        config(optimizer="adam", momentum=0.9)


def test_marks_are_drawn_and_written(tmp_path):
    made = build.prepare(config(dataset="digits", marks=True, clients=5, model="mlp"))
    assert made.marks == (*marks.MARKS, "plain")
    plain = datasets.load("digits")
    for k, kind in enumerate(made.marks):
        rows = made.partition.train[k, : made.partition.train_sizes[k]]
        changed = (made.dataset.x[rows] != plain.x[rows]).any(axis=(1, 2, 3))
        assert changed.any() == (kind != "plain")
    runs.RunDirectory(tmp_path / "run", made).start(made, {}, {})
    assert json.loads((tmp_path / "run" / "partition.json").read_text())[
        "marks"
    ] == list(made.marks)
    # serves other runs, with marks or without
    file = f"file:{tmp_path / 'run' / 'partition.npz'}"
    again = [
        build.prepare(config(dataset="digits", marks=on, partition=file, model="mlp"))
        for on in (True, False)
    ]
    for other, dataset in zip(again, (made.dataset, plain), strict=True):
        assert np.array_equal(other.partition.train, made.partition.train)
        assert np.array_equal(other.dataset.x, dataset.x)


def test_the_run_says_how_long_the_rest_takes(monkeypatch):
    """By its own rounds, the first of which compiles and does not count."""
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=100)
    reporter = report.Reporter(console, 0, 40)
    for t in (0, 1):
        reporter.update({"round": t, "loss": 1.0})
    lines = console.file.getvalue().splitlines()
    assert lines[0].endswith("39 rounds left") and lines[1].endswith(
        "38 rounds left, about 3 min"
    )


def test_of_equal_evaluations_the_first_is_the_best_and_the_mean_is_of_the_last_ten():
    values = [0.1, 0.5, 0.5, *[0.2] * 9, 0.3]
    made = [
        {"round": t, "loss": 2.0 - t / 8}
        | {f"post/acc{s}": x for s in report.STATISTICS.values()}
        for t, x in enumerate(values)
    ]
    found = report.summary([*made, {"round": 13}])
    course = found["scores"]["post"]["acc"]["course"]
    assert course["best"]["round"] == 1 and found["loss"] == 0.5
    assert (course["mean_of_last"]["evaluations"], course["mean_of_last"]["value"]) == (
        10,
        np.mean(values[-10:]),
    )


def test_traffic_in_bytes():
    sent = {
        "down": 1,
        "up": 2,
        "ints": 3,
        "messages": 4,
        "encrypted": 5,
        "public_data": 6,
    }
    rows = [{f"traffic/{name}": value for name, value in sent.items()}] * 2
    assert report.traffic(rows) == {name: 2 * value for name, value in sent.items()} | {
        "bytes": 2 * (4 * 12 + 5)
    }


def test_of_an_architectures_score_the_same_way_is_better():
    assert scores.better("my_own@lenet_micro", ("my_own", "min")) == "min"
    names = ("acc", "acc_present", "acc_groups", "recall_macro", "task_bal")
    floors = [
        "acc_majority",
        "acc_majority",
        "acc_majority",
        "recall_majority",
        "task_bal_majority",
    ]
    assert [scores.baseline(name) for name in names] == floors
    assert scores.baseline("acc_present_micro") == "acc_majority_micro"


def test_runs_of_a_seed_with_other_data_have_no_majority_baseline():
    found = lambda floor, seed: gather.Found(
        Path(),
        CONFIG.replace(seed=seed),
        {"scores": {"pre": {"acc_majority": {"macro": floor}}}},
    )
    one, other, same = found(0.3, 0), found(0.4, 1), found(0.3, 0)
    assert comparison.majority([one, other, same], "acc") == [0.3, 0.4]
    assert comparison.majority([one, found(0.4, 0)], "acc") == []


def test_seconds_are_divided_by_the_rounds_that_were_timed():
    said = {"status": "complete", "rounds": 4, "timed": 2, "seconds": {"train": 2.0}}
    run = gather.Found(
        Path(),
        config(),
        said | {"scores": {}, "headline": {"score": "acc", "better": "max"}},
    )
    assert tables.row(run, {})[-2:] == ["2", "1.00"]


@pytest.mark.parametrize(
    "values, said",
    [
        ([0.5, 0.5], "0.500"),
        ([12.34], "12.3"),
        ([1234.6], "1,235"),
        ([12.0, 14.0], "13.0 ± 1.4"),
        ([0.0], "0"),
        ([], "-"),
    ],
)
def test_costs_have_three_digits_and_a_deviation_where_they_differ(values, said):
    assert comparison._costs(values) == said


def test_methods_without_the_score_come_last():
    run = lambda value: gather.Found(
        Path(), CONFIG, {"scores": {"pre": {"acc": {"macro": value}}}}
    )
    found = {
        name: [run(value)] for name, value in (("a", 0.5), ("b", None), ("c", 0.7))
    }
    assert comparison._ordered(found, ("acc", "max")) == ["c", "a", "b"]
    assert comparison._ordered(found, ("acc", "min")) == ["a", "c", "b"]


def test_runs_are_in_the_order_of_their_numbers_and_say_what_matters_to_their_partition():
    assert sorted(map(Path, ("seed10", "seed9", "a")), key=gather._natural) == [
        Path("a"),
        Path("seed9"),
        Path("seed10"),
    ]
    config = CONFIG.replace(partition="dirichlet", alpha=0.1, classes_per_client=2)
    assert (
        gather.setting(config, "alpha") == 0.1
        and gather.setting(config, "classes_per_client") is None
    )
    assert gather.setting(config.replace(partition="pathological"), "alpha") is None


def test_a_title_says_of_how_many_seeds():
    run = lambda algo, seed: gather.Found(
        Path(), CONFIG.replace(algo=algo, seed=seed), {}
    )
    three = [run("local", 0), run("local", 1), run("fedavg", 0)]
    assert comparison.title(three).endswith("over up to 2 seeds")
    assert comparison.title([*three, run("fedavg", 1)]).endswith("over 2 seeds")
