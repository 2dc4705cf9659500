"""Choice by a validation score, and tests of the differences between methods."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiment import made
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import figures, report, results, selection, significance


@pytest.fixture
def root(tmp_path):
    """Two methods with three rates and two seeds; 0.1 and 0.5 are the best of them."""
    for lr, gain in ((0.01, 0.01), (0.1, 0.05), (0.5, 0.03)):
        for seed in (0, 1):
            given = {"seed": seed, "lr": lr, "rounds": 2, "gain": gain + seed / 1000}
            made.run(tmp_path / f"ditto-{lr}-{seed}", "ditto", **given)
            given["gain"] = 0.1 * lr
            made.run(tmp_path / f"local-{lr}-{seed}", "local", **given)
    runs = results.find([tmp_path])
    content = selection.choose(runs, "val/acc")
    selection.write(tmp_path, content)
    return tmp_path


def test_the_best_mean_over_seeds_is_chosen_per_method(root):
    content = json.loads((root / "selection.json").read_text())
    ditto, local = content["chosen"]
    assert ditto["label"] == "ditto, lr=0.1" and local["label"] == "local, lr=0.5"
    assert ditto["runs"] == ["ditto-0.1-0", "ditto-0.1-1"]
    assert "unequal" not in " ".join(selection.sentences(content))
    assert ditto["edges"] == [] and local["edges"] == ["lr=0.5 of 0.01, 0.1, 0.5"]
    assert len(results.find([root])) == 4 and len(results.find([root], True)) == 12


def test_a_report_hides_the_test_scores_of_the_others(root, capsys):
    report.main([str(root)])
    text = capsys.readouterr().out
    assert "| ditto " in text and text.count("| lr=") == 2  # in a column of their own
    assert "edge of its grid: local: lr=0.5 of 0.01, 0.1, 0.5." in text
    report.main([str(root), "--all"])
    text = capsys.readouterr().out
    assert "val/acc (%)" in text and "before" not in text
    assert text.count("| yes ") == 2 and text.count("lr=0.01 ") == 2
    assert "edge of its grid: local: lr=0.5 of 0.01, 0.1, 0.5." in text
    with pytest.raises(InputError, match=r"selection\.json"):
        report.main([str(root / "ditto-0.1-0"), "--all"])
    assert report.main([str(root), "--all", f"--output={root / 'grid.md'}"]) == 0
    assert (root / "grid.md").read_text().strip() == text.strip()
    for wrong in ("--columns=before", "--test=wilcoxon", "--format=html"):
        with pytest.raises(InputError, match="--all does not go with"):
            report.main([str(root), "--all", wrong])
    with pytest.raises(InputError, match="--score needs"):
        report.main([str(root), "--score=pre/acc"])


def test_a_score_of_which_less_is_better_is_chosen_by_its_least_value(tmp_path):
    """Also one whose name alone does not say so: the headline does."""
    for lr, gain in ((0.01, 0.01), (0.1, 0.05)):
        run = made.run(tmp_path / str(lr), lr=lr, rounds=2, gain=gain)
        headline = {"score": "acc", "better": "min"}
        changed = run.summary | {"headline": headline}
        (run.path / "summary.json").write_text(json.dumps(changed))
    runs = results.find([tmp_path])
    assert selection.choose(runs, "val/acc")["chosen"][0]["runs"] == ["0.01"]
    best = results.best(results.frame(runs), "val/acc")
    assert (best[best["score"] == "acc"]["round"] == 0).all()


def test_another_sweep_of_the_directory_keeps_the_choice(root):
    for seed in (0, 1):
        made.run(root / f"apfl-{seed}", "apfl", seed=seed)
    runs = [results.load(root / f"apfl-{seed}") for seed in (0, 1)]
    content = selection.write(root, selection.choose(runs, "val/acc"))
    assert [x["algo"] for x in content["chosen"]] == ["ditto", "local", "apfl"]
    unequal = "unequal numbers of values: 3 of ditto, 3 of local, 1 of apfl."
    assert unequal in selection.sentences(content)[-1]


def test_settings_of_the_data_are_not_chosen(tmp_path):
    for alpha in (0.1, 1.0):
        for lr in (0.01, 0.1):
            path = tmp_path / f"{alpha}-{lr}"
            gain = lr * (1 if alpha < 1 else -1)
            made.run(path, lr=lr, alpha=alpha, gain=gain, rounds=2)
    chosen = selection.choose(results.find([tmp_path]), "val/acc")["chosen"]
    assert [x["runs"] for x in chosen] == [["0.1-0.1"], ["1.0-0.01"]]


def test_wilcoxon_is_scipys_after_holms_correction():
    rng = np.random.default_rng(0)
    shift = {"a": 0.0, "b": 0.4, "c": 0.9}
    table = pd.DataFrame({name: rng.normal(x, 1, 40) for name, x in shift.items()})
    found = significance.wilcoxon(table)
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    raw = sorted((stats.wilcoxon(table[x], table[y]).pvalue, x, y) for x, y in pairs)
    wanted, largest = [], 0.0
    for rank, (p, x, y) in enumerate(raw):
        largest = max(largest, min(1, p * (3 - rank)))
        wanted.append(largest)
        assert found.loc[x, y] == found.loc[y, x] == pytest.approx(largest)
    assert wanted[0] < 0.05 < wanted[-1]
    assert significance.wilcoxon(table.assign(b=table["a"])).loc["a", "b"] == 1


def test_friedman_has_demsars_critical_difference(tmp_path, capsys):
    for alpha in (0.1, 1.0, 10.0):
        for i, algo in enumerate(("local", "fedavg", "ditto")):
            made.run(tmp_path / f"{algo}-{alpha}", algo, alpha=alpha, gain=0.01 * i)
    runs = results.find([tmp_path])
    ranks = significance.friedman(significance.scores(runs, "pre/acc"))
    assert ranks.means.to_dict() == {"ditto": 1, "fedavg": 2, "local": 3}
    # Demsar, Table 5: q = 2.343 for three methods
    assert ranks.difference == pytest.approx(2.343 * np.sqrt(12 / 18), rel=1e-3)
    assert ranks.p == pytest.approx(stats.chi2.sf(6, 2))
    report.main([str(tmp_path), "--test=friedman"])
    assert "3 settings (Friedman p = 0.05" in capsys.readouterr().out
    report.main([str(tmp_path), "--test=friedman", "--format=latex"])
    text = capsys.readouterr().out
    assert "\n% Mean ranks by pre/acc over 3 settings (Friedman p = 0.05" in text
    assert text.count(r"\textbf") == 3 * 3  # one per setting and column of scores
    axes = figures.figures(runs)["ranks"].axes[0]
    shown = [x.get_text() for x in axes.get_yticklabels()]
    assert shown == ["Ditto", "FedAvg", "Local"]
    with pytest.raises(InputError, match="3 methods in 2 settings"):
        significance.friedman(significance.scores(runs[:1], "pre/acc"))


def test_latex_is_a_tabular_of_chosen_columns(root, capsys):
    report.main([str(root), "--format=latex", "--columns=before", "--test=wilcoxon"])
    text = capsys.readouterr().out
    assert text.startswith(r"\begin{tabular}") and text.count("tabular") == 2
    assert r"Ditto & \textbf{60.1 $\pm$ 0.1} & best \\" in text
    assert r"Local & 60.0 $\pm$ 0.0 & 0." in text
    with pytest.raises(InputError, match="--columns: no 'nothing' among"):
        report.main([str(root), "--columns=nothing"])
