"""Runs shown beside each other after the fact: in the terminal, as figures, as one HTML
page."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import time
import types
from html.parser import HTMLParser

import numpy as np
import pytest
from experiments.targets import Flops

from experiments import (
    comparison,
    comparison_figures,
    courses,
    figures,
    files,
    gather,
    html as report_page,
    recorded,
    recorder,
    report,
    runs,
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
    "--rounds=2",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A sweep of two methods; the runs of a second seed are theirs with other
    scores."""
    path = tmp_path_factory.mktemp("several") / "sweep"
    with contextlib.redirect_stdout(io.StringIO()):
        assert sweep.run(["--algo=local,fedavg", *TINY, f"--root={path}"]) == 0
    for method in ("local", "fedavg"):
        another_seed(path / f"{method}-seed0", path / f"{method}-seed1")
    return path


def another_seed(run, copy):
    shutil.copytree(run, copy)
    runs.write_json(
        copy / "config.json", recorded.signed(runs.read_config(run).replace(seed=1))
    )
    metrics, scores = (
        runs.read_rows(run / name) for name in ("metrics.jsonl", "scores.jsonl")
    )
    for row in metrics:
        row |= {
            key: 0.75 * row[key]
            for key in row
            if key.startswith(("pre/", "post/")) and "clients" not in key
        }
    for row in scores:
        for known in (row[point] for point in ("pre", "post") if point in row):
            known["acc"] = [
                (0.5 + 0.1 * i) * value for i, value in enumerate(known["acc"])
            ]
    for name, rows in (("metrics.jsonl", metrics), ("scores.jsonl", scores)):
        (copy / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = runs.read_json(run / "summary.json") | report.summary(metrics)
    runs.write_json(
        copy / "summary.json", said | {"seconds": {"train": 2.5, "compile": 1.0}}
    )


def test_what_is_not_the_same_method_has_another_name(root, tmp_path):
    """The user's own of a name here, and runs that were to end by other scores."""
    run = gather.read(root / "fedavg-seed0")
    changed = lambda **values: run._replace(config=run.config.replace(**values))
    names = gather.names(
        [run, changed(algo="a.py:fedavg"), changed(seed=2), changed(stop_at="none")]
    )
    assert names == ["fedavg", "a.py:fedavg", "fedavg", "fedavg"]
    assert gather.names([run, changed(stop_at="acc:0.5")]) == [
        "fedavg",
        "fedavg, stop_at=acc:0.5",
    ]
    shown = show.settings(
        run.config.replace(algo="apfl", alpha=0.1, hparams={"alpha": 0.5})
    )
    assert (shown["alpha"], shown["alpha of apfl"]) == ("0.1", "0.5")


def test_values_that_look_the_same_when_cut_or_rounded_are_told_apart(root):
    run = gather.read(root / "fedavg-seed0")
    changed = lambda **values: run._replace(config=run.config.replace(**values))
    assert gather.names([changed(lr=0.05), changed(lr=0.0500000001)]) == [
        "fedavg, lr=0.05",
        "fedavg, lr=0.0500000001",
    ]
    files = [f"file:{'x' * 50}/{name}.npz" for name in "ab"]
    assert gather.settings([changed(partition=file) for file in files]) == [
        [f"partition={file}"] for file in files
    ]
    assert gather.names([run, changed(eval_every=7)])[1] == "fedavg, eval_every=7"
    text = report_page.page([changed(partition=file) for file in files])
    assert all(file in text for file in files)


def test_a_seed_that_is_there_twice_is_said(root, tmp_path):
    copies = [shutil.copytree(root / "fedavg-seed0", tmp_path / name) for name in "ab"]
    assert "fedavg: several runs have one seed, and each counts." in comparison.table(
        copies
    )
    assert "several runs have one seed" not in comparison.table(
        gather.directories([str(root)])
    )


def test_a_run_that_goes_on_is_not_complete_by_its_old_end(root, tmp_path):
    path = shutil.copytree(root / "fedavg-seed0", tmp_path / "run")
    said = runs.read_json(path / "summary.json")
    ended = {"why": "x", "stop_at": "acc:0.5", "patience": 0}
    runs.write_json(path / "summary.json", said | {"rounds": 1, "ended": ended})
    for stop_at, complete in (("acc:0.5", True), ("none", False)):
        config = runs.read_config(root / "fedavg-seed0").replace(stop_at=stop_at)
        runs.write_json(path / "config.json", recorded.signed(config))
        assert gather.read(path).complete == complete and gather.read(path).said[
            "rounds"
        ] == (1 if complete else 2)


def last(path, key):
    return runs.read_rows(path / "metrics.jsonl")[-1][key]


def cut_short(root, folder, summary=True):
    """A copy of a run that was interrupted after its first round, torn while it wrote
    the next."""
    path = shutil.copytree(root / "fedavg-seed0", folder)
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text(rows[0] + rows[1][:50])
    if summary:
        runs.write_json(
            path / "summary.json",
            runs.read_json(path / "summary.json") | {"status": "interrupted"},
        )
    else:
        (path / "summary.json").unlink()
    return path


def test_a_table_of_an_interrupted_run_has_the_rows_that_are_there(root, tmp_path):
    """As a killed run leaves them, in front of its last summary or without one."""
    for summary in (True, False):
        path = cut_short(root, tmp_path / str(summary), summary)
        head, _, line, *_ = tables.main([str(path)]).splitlines()
        row = dict(zip(head.split(" | "), line.split(" | "), strict=True))
        status = "interrupted" if summary else "running or killed"
        assert row["rounds"] == f"{status} after 1 round"
        assert row["acc post"].startswith(f"{100 * last(path, 'post/acc'):.2f} ± ")


def test_one_run_is_shown_with_settings_ending_and_tables(root):
    path = root / "fedavg-seed0"
    shown = show.main([str(path)])
    assert "clients 5" in shown and "model linear" in shown and "seed 0" in shown
    assert (
        "Complete after 2 rounds; " in shown
        and "Test accuracy of fedavg after 2 rounds" in shown
    )
    assert f"before local training {last(path, 'pre/acc'):.1%}" in shown
    assert (
        f"{100 * last(path, 'pre/acc_present'):.1f}"
        in shown[shown.index("Clients' test scores in %") :]
    )


def test_a_sweep_is_shown_as_a_table_over_seeds(root):
    title, head, *lines, majority = show.main([str(root)]).splitlines()
    floors = [100 * last(root / f"local-seed{k}", "pre/acc_majority") for k in (0, 1)]
    floor = f"{np.mean(floors):.1f} ± {abs(floors[0] - floors[1]) / np.sqrt(2):.1f}"
    assert majority.split("  ")[0] == "majority baseline" and majority.count(floor) == 2
    assert "sample standard deviation over seeds" in title
    assert head.split("  ")[0] == "method" and head.split()[-4:] == [
        "rounds",
        "MB",
        "sent",
        "seconds",
    ]
    for line in lines:
        method = line.split()[0]
        cells, found = (
            [cell.strip() for cell in line.split("  ") if cell.strip()],
            rows_of(root, method),
        )
        for cell, place, name in (
            (2, -1, "pre/acc"),
            (3, -1, "pre/acc_worst10"),
            (4, -2, "post/acc"),
        ):
            values = [100 * rows[place][name] for rows in found]
            assert cells[cell] == (
                f"{np.mean(values):.1f} ± {abs(values[0] - values[1]) / np.sqrt(2):.1f}"
            )
        # down and up, rounds, clients, parameters, bytes
        sent = 2 * 2 * 5 * 650 * 4 / 1e6 if method == "fedavg" else 0
        assert cells[1] == "2" and cells[5:7] == ["2", f"{sent:.3g}"]
    assert sorted(line.split()[0] for line in lines) == ["fedavg", "local"]


@pytest.mark.parametrize("summary", [True, False])
def test_a_run_that_was_interrupted_is_shown_with_what_it_has(root, tmp_path, summary):
    path = cut_short(root, tmp_path / "run", summary)
    how = "interrupted" if summary else "running or killed"
    shown = show.main([str(path)])
    assert (
        f"{how.capitalize()} after 1 round of 2" in shown
        and "Test accuracy of fedavg after 1 round" in shown
    )
    assert (
        "before local training "
        f"{runs.read_rows(path / 'metrics.jsonl')[0]['pre/acc']:.1%}" in shown
    )
    beside = show.main([str(path), str(root / "local-seed0")])
    assert beside.splitlines()[-1] == f"{path}: {how} after 1 round of 2."
    # with the closing row, which is no round
    shutil.copy(root / "fedavg-seed0" / "metrics.jsonl", path)
    assert gather.read(path).said["rounds"] == 2
    (path / "metrics.jsonl").write_text("")
    assert "No evaluation is recorded yet." in show.main([str(path)])


def test_what_is_no_run_directory_is_one_sentence(root, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "nowhere"):
        with pytest.raises(
            InputError, match=f"{name} is not a run directory, nor one of a sweep"
        ):
            show.main([str(root), str(tmp_path / name)])
    with pytest.raises(InputError, match="Name the run directories"):
        show.main([])


def test_what_is_written_beside_the_runs_of_a_sweep_is_left_out(root):
    page = gather.output(None, gather.directories([str(root)]), "report.html")
    assert page.parent.samefile(root)
    page.touch()
    inside = [str(path) for path in root.iterdir()]
    assert {"comparison.json", "comparison.md", "comparison.png"} <= {
        path.name for path in root.iterdir()
    }
    assert set(gather.directories(inside)) == set(gather.directories([str(root)]))
    page.unlink()
    table = tables.main([str(root)])
    assert table == tables.main([str(path) for path in gather.directories([str(root)])])
    assert "| fedavg, seed=0 |" in table and "| local, seed=1 |" in table


def test_runs_are_found_once_and_in_order(root):
    assert [path.name for path in gather.directories([str(root)])] == [
        "fedavg-seed0",
        "fedavg-seed1",
        "local-seed0",
        "local-seed1",
    ]
    assert (
        len(
            gather.directories(
                [str(root), str(root / "local-seed1"), str(root / ".." / root.name)]
            )
        )
        == 4
    )


def test_runs_are_called_by_what_they_differ_in(root):
    fedavg, other, local = (
        gather.read(root / name)
        for name in ("fedavg-seed0", "fedavg-seed1", "local-seed0")
    )
    with_lr = other._replace(config=other.config.replace(lr=0.5))
    assert gather.labels([fedavg, other, local]) == ["fedavg", "fedavg", "local"]
    assert gather.labels([fedavg, with_lr, local]) == [
        "fedavg, lr=0.1",
        "fedavg, lr=0.5",
        "local",
    ]
    skewed = [
        run._replace(config=run.config.replace(partition="dirichlet", alpha=0.1))
        for run in (fedavg, local)
    ]
    even = [run._replace(config=run.config.replace(alpha=1.0)) for run in skewed]
    assert gather.labels([*skewed, *even]) == [
        f"{m}, alpha={a}" for a in (0.1, 1) for m in ("fedavg", "local")
    ]
    assert gather.names([*skewed, *even]) == ["fedavg", "local"] * 2
    classes = [
        run._replace(config=run.config.replace(alpha=a))
        for a, run in ((0.1, fedavg), (1.0, other))
    ]
    pathological = [
        run._replace(config=run.config.replace(partition="pathological"))
        for run in classes
    ]
    # of a partition without alpha
    assert gather.labels(pathological) == ["fedavg", "fedavg"]
    own = [
        run._replace(config=run.config.replace(hparams={"alpha": a, "lam": a}))
        for a, run in ((1, fedavg), (2, other))
    ]
    assert gather.labels(own) == [f"fedavg, hparam.alpha={a}, lam={a}" for a in (1, 2)]


def test_settings_that_differ_between_methods_are_said_below_the_table(root):
    fedavg, local = (
        gather.read(root / f"{name}-seed0") for name in ("fedavg", "local")
    )
    other = fedavg._replace(
        config=fedavg.config.replace(lr=0.5, model="mlp", features=7)
    )
    # of one method the names say it
    assert gather.unlike([fedavg, local]) == gather.unlike([fedavg, other]) == []
    assert gather.unlike([other, local]) == [
        "Not all have the same lr: 0.5 (fedavg); 0.1 (local).",
        "Not all have the same model: mlp (fedavg); linear (local).",
        "Not all have the same features: 7 (fedavg); not set (local).",
    ]
    assert (
        gather.unlike([fedavg, other, local])[0]
        == "Not all have the same lr: 0.1 (fedavg, local); 0.5 (fedavg)."
    )


def test_the_note_on_settings_stands_below_the_table(root, tmp_path):
    path = shutil.copytree(root / "local-seed0", tmp_path / "local")
    runs.write_json(
        path / "config.json", recorded.signed(runs.read_config(path).replace(lr=0.5))
    )
    assert (
        comparison.table([root / "fedavg-seed0", path])
        .splitlines()[-1]
        .startswith("Not all have the same lr: 0.1 (")
    )


def rows_of(root, method):
    return [
        runs.read_rows(root / f"{method}-seed{k}" / "metrics.jsonl") for k in (0, 1)
    ]


def drawn(root, flops=lambda run: None):
    return comparison_figures.figures(
        [gather.read(path) for path in gather.directories([str(root)])], flops
    )


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_the_curves_are_means_over_seeds_with_their_deviation(root):
    before, after = drawn(root)[0]["curves"].axes
    for panel, point, shift in ((before, "pre", 0), (after, "post", 1)):
        for method in ("fedavg", "local"):
            found = [
                [
                    (r["round"] + shift, r[f"{point}/acc"])
                    for r in rows
                    if f"{point}/acc" in r
                ]
                for rows in rows_of(root, method)
            ]
            x, y = np.array(found).transpose(2, 0, 1)
            line = lines(panel)[method]
            assert np.array_equal(line.get_xdata(), x[0])
            assert line.get_ydata() == pytest.approx(y.mean(axis=0))
    title = drawn(root)[0]["curves"].get_suptitle()
    assert (
        "digits (0.2 of it): 5 clients" in title
        and "linear" in title
        and "over 2 seeds" in title
    )
    a, b = (rows[-1]["pre/acc"] for rows in rows_of(root, "fedavg"))
    course = [
        courses.course(gather.read(root / f"fedavg-seed{k}"), "acc", None)["pre"]
        for k in (0, 1)
    ]
    assert courses.band(course).std[-1] == pytest.approx(abs(a - b) / np.sqrt(2))


def test_costs_are_bytes_operations_and_seconds(root):
    found, notes = drawn(root, lambda run: Flops(1e12, 1e12))
    sent, work, seconds = (lines(panel) for panel in found["costs"].axes)
    each = 2 * 5 * 650 * 4 / 1e3  # down and up, clients, parameters, bytes
    assert sent["fedavg"].get_xdata() == pytest.approx([0, each, 2 * each])
    end = rows_of(root, "local")
    # sends nothing
    assert set(sent["local"].get_ydata()) == {
        np.mean([rows[-1]["pre/acc"] for rows in end])
    }
    examples = [
        np.cumsum([0, *(row["work/examples"] for row in rows if "loss" in row)])
        for rows in end
    ]
    assert work["local"].get_xdata() == pytest.approx(np.mean(examples, axis=0))
    said = [
        runs.read_json(root / f"local-seed{k}" / "summary.json")["seconds"]["train"]
        for k in (0, 1)
    ]
    assert seconds["local"].get_xdata()[-1] == pytest.approx(np.mean(said))
    assert notes == []
    found, notes = drawn(root)
    assert len(found["costs"].axes) == 2 and "operations" in notes[0]


def test_costs_of_other_sizes_are_on_a_logarithmic_axis_without_what_costs_nothing(
    root,
):
    found = [gather.read(path) for path in gather.directories([str(root)])]
    flops = {"fedavg": Flops(1e12, 1e12), "local": Flops(1e9, 1e9)}
    _, work, _ = comparison_figures.figures(found, lambda run: flops[run.config.algo])[
        0
    ]["costs"].axes
    assert work.get_xscale() == "log" and work.get_xlabel().startswith("GFLOP")
    a, b = (lines(work)[method].get_xdata() for method in ("fedavg", "local"))
    assert len(a) == 2 and a == pytest.approx(1e3 * b)


def test_clients_are_sorted_by_their_last_score(root):
    before = drawn(root)[0]["clients"].axes[0]
    last = [
        runs.read_rows(root / f"local-seed{k}" / "scores.jsonl")[-1]["pre"]["acc"]
        for k in (0, 1)
    ]
    assert lines(before)["local"].get_ydata() == pytest.approx(
        np.sort(last, axis=1).mean(axis=0)
    )


def test_clients_out_of_a_round_keep_their_last_score(tmp_path):
    rows = [
        {
            "round": 0,
            "ids": [2, 0],
            "post": {"acc": [0.2, 0.1]},
            "pre": {"acc": [0.0, 0.0, 0.0]},
        },
        {"round": 1, "ids": [0], "post": {"acc": [0.5]}},
    ]
    (tmp_path / "scores.jsonl").write_text(
        "".join(f"{row}\n".replace("'", '"') for row in rows)
    )
    found = courses.of_clients(gather.Found(tmp_path, None, {}), "acc")
    assert (
        found["post"] == pytest.approx([0.5, np.nan, 0.2], nan_ok=True)
        and list(found["pre"]) == [0.0] * 3
    )
    assert list(courses.ranked([found["post"]]).mean) == [0.2, 0.5]
    # the worst first
    assert list(courses.ranked([found["post"]], "min").mean) == [0.5, 0.2]
    # of the sample
    assert courses.ranked(np.array([[0.0], [1.0]])).std == [np.sqrt(0.5)]
    # of a run without scores after local training
    assert len(courses.ranked([np.zeros(0)]).x) == 0


def test_heterogeneity_is_drawn_where_runs_differ_in_it(root):
    found = [gather.read(path) for path in gather.directories([str(root)])]
    partitions = ({"partition": "dirichlet", "alpha": alpha} for alpha in (0.1, 1.0))
    both = [
        run._replace(config=run.config.replace(**given))
        for given in partitions
        for run in found
    ]
    names = {"curves", "clients", "costs"}
    made, _ = comparison_figures.figures(both, lambda run: None)
    assert made.keys() == {
        f"{name}-alpha={alpha}" for name in names for alpha in ("0.1", "1")
    } | {"alpha"}
    container = made["alpha"].axes[0].containers[0]
    assert container.get_label() == "fedavg"
    assert container.lines[0].get_ydata() == pytest.approx(
        [np.mean([r[-1]["pre/acc"] for r in rows_of(root, "fedavg")])] * 2
    )
    assert comparison_figures.figures(found, lambda run: None)[0].keys() == names
    more = [
        run._replace(config=run.config.replace(clients=n))
        for n in (5, 9)
        for run in both
    ]
    made, _ = comparison_figures.figures(more, lambda run: None)
    assert {name for name in made if name.startswith("alpha")} == {
        "alpha-clients=5",
        "alpha-clients=9",
    }


@pytest.mark.slow  # the figures are tested above, their files in test_matrices.py
def test_several_runs_are_drawn_as_png_and_pdf(root, tmp_path):
    said = figures.main([str(root), f"--output={tmp_path / 'out'}"])
    made = {
        f"{name}.{suffix}"
        for name in ("curves", "clients", "costs")
        for suffix in ("png", "pdf")
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == made
    # of the embedded data they are counted
    assert "curves.png, curves.pdf" in said and "operations" not in said


def test_methods_look_different_without_colours():
    styles = comparison.styles([*map(str, range(8)), "local"]).values()
    assert len({(str(style["linestyle"]), style["marker"]) for style in styles}) == 9


class Page(HTMLParser):
    """The tables of a page as rows of texts, by the id of their section; all addresses;
    open elements, of which none may be left."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.addresses, self.open, self.words = {}, [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.addresses += [
            value
            for name, value in attrs.items()
            if name in ("src", "href", "action", "data", "srcset")
        ]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        if tag == "section":
            self.section = attrs["id"]
        if tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.tables[self.section][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[self.section][-1][-1] += data


@pytest.fixture(scope="module")
def written(root):
    path = root.parent / "report.html"
    said = report_page.main([str(root), f"--output={path}"])
    assert said.startswith(f"{path}: 4 runs")
    return path


def test_the_page_has_the_numbers(root, written):
    found = Page(written.read_text())
    assert found.open == []
    shown = {
        method: [row[-1]["pre/acc"] for row in rows_of(root, method)]
        for method in ("local", "fedavg")
    }
    results = {row[0]: row for row in found.tables["results"]}
    for method, values in shown.items():
        mean_std = f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"
        assert results[method][2] == mean_std
        assert [method, "acc", "before", mean_std] in [
            row[:4] for row in found.tables["scores"]
        ]
    head, *clients = found.tables["clients"]
    assert (
        head[:6] == ["method", "seed", "client", "train", "test", "acc in % before"]
        and len(clients) == 4 * 5
    )
    scores = runs.read_rows(root / "fedavg-seed1" / "scores.jsonl")[-1]["pre"]["acc"]
    own = [row for row in clients if row[:2] == ["fedavg", "1"]]
    assert [row[5] for row in own] == [f"{100 * value:.1f}" for value in scores]
    with np.load(root / "fedavg-seed1" / "partition.npz") as arrays:
        assert [int(row[3]) for row in own] == arrays["train_sizes"].tolist()
    assert ["rounds", "2"] in found.tables["settings"] and [
        "model",
        "linear",
    ] in found.tables["settings"]
    assert [row[:3] for row in found.tables["runs"]][1] == [
        str(root / "fedavg-seed0"),
        "fedavg",
        "0",
    ]


def test_the_page_needs_nothing_from_outside(written):
    text = written.read_text()
    addresses = Page(text).addresses
    assert (
        sum(address.startswith("data:image/svg+xml;base64,") for address in addresses)
        == 3
    )
    assert all(address.startswith(("data:image/", "#")) for address in addresses)
    assert not re.search(r"@import|url\(|https?://|fetch\(|XMLHttpRequest", text)


def test_texts_of_the_page_are_escaped(root, tmp_path):
    path = shutil.copytree(
        root / "local-seed0", tmp_path / "<script>alert(1)</script>" / "a&b"
    )
    config = runs.read_config(path).replace(
        data_dir='"><img src=x onerror=alert(1)>', targets='"><img src=x>'
    )
    found = gather.read(path)._replace(config=config)
    text = report_page.page([found])
    assert (
        "alert(1)" in text and "<script>alert" not in text and "<img src=x" not in text
    )
    assert str(path) in "".join(Page(text).words)


def test_the_page_of_one_run_has_its_ending_and_pictures(root):
    text = report_page.page([gather.read(root / "fedavg-seed0")])
    found = Page(text)
    assert "Test accuracy of fedavg after 2 rounds" in "".join(found.words)
    # the partition
    assert (
        sum(address.startswith("data:image/png;base64,") for address in found.addresses)
        == 1
    )


def test_the_page_of_a_run_without_an_evaluation(root, tmp_path):
    path = cut_short(root, tmp_path / "run", summary=False)
    for name in ("metrics.jsonl", "scores.jsonl"):
        (path / name).write_text("")
    (path / "partition.npz").unlink()
    assert "No evaluation is recorded yet." in "".join(
        Page(report_page.page([gather.read(path)])).words
    )


BROWSERS = (
    "chromium",
    "chromium-headless-shell",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is on PATH")
def test_the_page_in_a_browser(root, written, tmp_path):
    """Its numbers are there, and a click on a heading sorts the clients."""
    click = (
        "[...document.querySelectorAll('#clients th button')].find((x) => "
        "x.textContent === 'acc in % before').click();"
    )
    orders = []
    for clicks in (0, 1, 2):
        file = tmp_path / f"{clicks}.html"
        file.write_text(
            written.read_text().replace(
                "</body>", f"<script>{click * clicks}</script></body>"
            )
        )
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--dump-dom",
        ]
        done = subprocess.run(
            [BROWSER, *flags, file.as_uri()], capture_output=True, text=True, timeout=60
        )
        found = Page(done.stdout)
        orders.append([float(row[5]) for row in found.tables["clients"][1:]])
        assert (
            f"{100 * np.mean([rows[-1]['pre/acc'] for rows in rows_of(root, 'local')]):.1f}"
            in done.stdout
        )
    assert (
        orders[0] != sorted(orders[0]) == orders[1] == orders[2][::-1]
        and len(set(orders[0])) > 5
    )


@pytest.mark.parametrize(
    "said, untimed, train",
    [
        ({}, 5, 0.0),
        ({"rounds": 3}, 2, 2.0),
        ({"rounds": 4, "timed": 1}, 4, 2.0),
        ({"rounds": 8}, 0, 1.25),
    ],
)
def test_seconds_are_of_the_rounds_that_are_there_and_were_timed(
    said, untimed, train, tmp_path
):
    """After a crash the last summary may be of fewer rounds than the checkpoint, or of
    more."""
    if said:
        files.write_json(tmp_path / "summary.json", said | {"seconds": {"train": 2.0}})
    run = types.SimpleNamespace(
        path=tmp_path,
        rows=[{"round": t, "loss": 1.0} for t in range(5)] + [{"round": 5}],
    )
    compiling = [0.0]
    clock = recorder.Clock(run, lambda: compiling[0])
    assert clock.untimed == untimed and clock.before == {"compile": 0.0, "train": train}
    clock.stop()
    seconds = clock.seconds()
    time.sleep(0.01)
    compiling[0] = 5.0  # what is traced for the summary is no time of its rounds either
    assert clock.seconds() == seconds
