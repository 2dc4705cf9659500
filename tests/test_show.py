"""Runs shown beside each other after the fact: in the terminal, as figures, as one HTML page."""

import contextlib
import io
import shutil

import numpy as np
import pytest

from experiments import gather, runs, show, sweep
from fedjax_pfl.errors import InputError

TINY = ["--data_fraction=0.2", "--clients=5", "--width=1", "--epochs=1", "--model=linear", "--rounds=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A sweep of two methods and two seeds."""
    path = tmp_path_factory.mktemp("several") / "sweep"
    with contextlib.redirect_stdout(io.StringIO()):
        assert sweep.run(["--algo=local,fedavg", "--seed=0,1", *TINY, f"--root={path}"]) == 0
    return path


def last(path, key):
    return runs.read_rows(path / "metrics.jsonl")[-1][key]


def cut_short(root, folder, summary=True):
    """A copy of a run that was interrupted after its first round, torn while it wrote the next."""
    path = shutil.copytree(root / "fedavg-seed0", folder)
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text(rows[0] + rows[1][:50])
    if summary:
        runs.write_json(path / "summary.json", runs.read_json(path / "summary.json") | {"status": "interrupted"})
    else:
        (path / "summary.json").unlink()
    return path


def test_one_run_is_shown_with_settings_ending_and_tables(root):
    path = root / "fedavg-seed0"
    shown = show.main([str(path)])
    assert "clients 5" in shown and "model linear" in shown and "seed 0" in shown
    assert "Complete after 2 rounds; " in shown and "Test accuracy of fedavg after 2 rounds" in shown
    assert f"before local training {last(path, 'pre/acc'):.1%}" in shown
    assert f"{100 * last(path, 'pre/acc_present'):.1f}" in shown[shown.index("Clients' test scores in %") :]


def test_a_sweep_is_shown_as_a_table_over_seeds(root):
    title, head, *lines = show.main([str(root)]).splitlines()
    assert "sample standard deviation over seeds" in title
    assert head.split("  ")[0] == "method" and head.split()[-4:] == ["rounds", "MB", "sent", "seconds"]
    for line in lines:
        method = line.split()[0]
        values = [100 * last(root / f"{method}-seed{k}", "pre/acc") for k in (0, 1)]
        assert f"{np.mean(values):.1f} ± {abs(values[0] - values[1]) / np.sqrt(2):.1f}" in line
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        sent = 2 * 2 * 5 * 650 * 4 / 1e6 if method == "fedavg" else 0  # down and up, rounds, clients, parameters, bytes
        assert cells[1] == "2" and cells[5:7] == ["2", f"{sent:.3g}"]
    assert sorted(line.split()[0] for line in lines) == ["fedavg", "local"]


@pytest.mark.parametrize("summary", [True, False])
def test_a_run_that_was_interrupted_is_shown_with_what_it_has(root, tmp_path, summary):
    path = cut_short(root, tmp_path / "run", summary)
    how = "interrupted" if summary else "running or killed"
    shown = show.main([str(path)])
    assert f"{how.capitalize()} after 1 round of 2" in shown and "Test accuracy of fedavg after 1 round" in shown
    assert f"before local training {runs.read_rows(path / 'metrics.jsonl')[0]['pre/acc']:.1%}" in shown
    beside = show.main([str(path), str(root / "local-seed0")])
    assert beside.splitlines()[-1] == f"{path}: {how} after 1 round of 2."
    (path / "metrics.jsonl").write_text("")
    assert "No evaluation is recorded yet." in show.main([str(path)])


def test_what_is_no_run_directory_is_one_sentence(root, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "nowhere"):
        with pytest.raises(InputError, match=f"{name} is not a run directory, nor one of a sweep"):
            show.main([str(root), str(tmp_path / name)])
    with pytest.raises(InputError, match="Name the run directories"):
        show.main([])


def test_runs_are_found_once_and_in_order(root):
    assert [path.name for path in gather.directories([str(root)])] == [
        "fedavg-seed0",
        "fedavg-seed1",
        "local-seed0",
        "local-seed1",
    ]
    assert len(gather.directories([str(root), str(root / "local-seed1"), str(root / ".." / root.name)])) == 4


def test_runs_are_called_by_what_they_differ_in(root):
    fedavg, other, local = (gather.read(root / name) for name in ("fedavg-seed0", "fedavg-seed1", "local-seed0"))
    with_lr = other._replace(config=other.config.replace(lr=0.5))
    assert gather.labels([fedavg, other, local]) == ["fedavg", "fedavg", "local"]
    assert gather.labels([fedavg, with_lr, local]) == ["fedavg, lr=0.1", "fedavg, lr=0.5", "local"]
    skewed = [run._replace(config=run.config.replace(partition="dirichlet", alpha=0.1)) for run in (fedavg, local)]
    even = [run._replace(config=run.config.replace(alpha=1.0)) for run in skewed]
    assert gather.labels([*skewed, *even]) == [f"{m}, alpha={a}" for a in (0.1, 1) for m in ("fedavg", "local")]
    assert gather.names([*skewed, *even]) == ["fedavg", "local"] * 2
    classes = [run._replace(config=run.config.replace(alpha=a)) for a, run in ((0.1, fedavg), (1.0, other))]
    pathological = [run._replace(config=run.config.replace(partition="pathological")) for run in classes]
    assert gather.labels(pathological) == ["fedavg", "fedavg"]  # of a partition without alpha
