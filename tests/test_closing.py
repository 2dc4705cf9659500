"""What a run and a sweep say at the end: a few lines and one picture, unless more is
asked for."""

import re

import pytest
from experiments.presets import PRESETS
from matplotlib.figure import Figure

from experiments import (
    closing,
    comparison,
    drawing,
    main,
    published,
    report,
    runs,
    settings,
    sweep,
)
from fedjax_pfl.algorithms import ALGORITHMS

TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--rounds=2",
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Where a sweep of two methods is, and what it printed. Its tests are slow: what is
    drawn and printed of another is in test_show.py and test_grid.py."""
    import contextlib
    import io

    root, out = tmp_path_factory.mktemp("sweep"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert sweep.run(["--algo=local,fedavg", *TINY, f"--root={root}"]) == 0
    return root, out.getvalue()


def test_of_a_run_that_was_stopped_each_score_says_its_rounds():
    """The last evaluation is of row 33 of 36."""
    spread = ("", "_micro", "_std", "_worst10", "_best10")
    row = {"round": 33, "loss": 1.0, "participants": 2} | {
        f"{p}/acc{s}": 0.5 for p in ("pre", "post") for s in spread
    }
    found = report.summary([row, {"round": 34, "loss": 1.0, "participants": 2}])
    first, before, after, *_ = closing.lines(
        found, [row], settings.resolve({"algo": "ditto", "rounds": 36}), None
    )
    assert "of ditto after 34 rounds" in first
    assert (
        "before local training 50.0% after 33 rounds  (" in before
        and "after local training 50.0%  (" in after
    )


def test_a_run_ends_with_at_most_eight_lines(tmp_path, capsys):
    assert main.run(["--algo=fedavg", *TINY, f"--workdir={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    end = out[out.index("Test accuracy of fedavg after 2 rounds") :].splitlines()
    assert (
        len(end) <= 8
        and end[-1].startswith("Everything is in")
        and "curves.png" in end[-1]
    )
    row = runs.read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (
        f"before local training {row['pre/acc']:.1%}  (worst tenth of the clients "
        in out
    )
    assert (
        f"{row['pre/acc_worst10']:.1%}, best tenth {row['pre/acc_best10']:.1%}" in out
    )
    traffic = 2 * 2 * 5 * 650 * 4  # down and up, rounds, clients, parameters, bytes
    assert (
        f"{traffic / 1e6:,.1f} MB in all, {traffic / 10 / 1e3:,.1f} kB per client and "
        "round" in out
    )


@pytest.mark.slow
def test_a_sweep_ends_with_its_methods_in_order_and_a_picture(said):
    root, out = said
    end = out.splitlines()[-6:]
    assert [line.split()[0] for line in end] == [
        "acc",
        "method",
        *_ordered(root),
        "majority",
        "Picture:",
    ]
    assert (
        (root / "comparison.png").is_file()
        and "| method |" not in out
        and "round 1/2" not in out
    )


def _ordered(root):
    last = {
        m: runs.read_rows(root / f"{m}-seed0" / "metrics.jsonl")[-1]["pre/acc"]
        for m in ("local", "fedavg")
    }
    assert last["local"] != last["fedavg"]
    return sorted(last, key=last.get, reverse=True)


@pytest.mark.slow
def test_the_picture_shows_the_numbers(said, monkeypatch):
    root, drawn = said[0], []
    monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure))
    paths = [root / "local-seed0", root / "fedavg-seed0"]
    comparison.draw(paths, root)
    (figure,) = drawn
    assert isinstance(figure, Figure)
    left, right = figure.axes
    *lines, majority = left.lines
    for line, path in zip(lines, paths, strict=True):
        rows = runs.read_rows(path / "metrics.jsonl")
        assert list(line.get_ydata()) == pytest.approx([row["pre/acc"] for row in rows])
        assert line.get_label().endswith(f"{100 * rows[-1]['pre/acc']:.1f}")
        assert set(majority.get_ydata()) == {rows[-1]["pre/acc_majority"]}
    methods = _ordered(root)[::-1]
    assert [text.get_text() for text in right.get_yticklabels()] == methods
    for i, method in enumerate(methods):
        *_, row, closing = runs.read_rows(root / f"{method}-seed0" / "metrics.jsonl")
        worst, mean = closing["pre/acc_worst10"], closing["pre/acc"]
        shown = [list(line.get_xdata()) for line in right.lines[4 * i : 4 * i + 4]]
        assert shown == [[worst, mean], [worst], [mean], [row["post/acc"]]]


def test_what_was_measured_is_said_only_of_its_setting():
    config = settings.resolve({"algo": "pfedc", "hparams": {}})
    assert (
        config.preset == "digits"
        and PRESETS["digits"].measured.keys() <= ALGORITHMS.keys()
    )
    line = published.beside(config)
    assert all(
        re.search(rf"\b{method} [\d.]+", line)
        for method in ("local", "fedavg", "pfedc", "ditto")
    )
    assert published.beside(config.replace(seed=3)) == line
    assert published.beside(config.replace(clients=50)) is None


def test_a_score_after_local_training_has_that_round_behind_it():
    assert [
        report.rounds_behind(point, 2)
        for point in ("pre", "val", "post", "post_latest")
    ] == [2, 2, 3, 3]
