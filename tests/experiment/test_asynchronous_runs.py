"""Asynchronous runs and simulated time on the command line."""

import json

import numpy as np
import pytest

from experiment import made
from experiment.runs import SMALL, rows, run
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import config, report, results
from fedjax_pfl.experiment.build import rule_of

BUFFERED = [
    *SMALL,
    *("--algo=fedavg", "--participation=0.6", "--asynchronous=fedbuff:2"),
    *("--speeds=lognormal:100:0.8", "--bandwidths=1", "--checkpoint_every=2"),
]


def test_a_run_reports_the_times_of_its_schedule(tmp_path, capsys):
    assert run(*BUFFERED, "--rounds=4", f"--workdir={tmp_path}") == 0
    assert "simulated seconds: " in capsys.readouterr().out
    found = results.load(tmp_path)
    ends = found.experiment.schedule.seconds
    times = found.metrics["clock/seconds"].to_numpy()[:-1]
    np.testing.assert_allclose(np.cumsum(times), ends)
    table = results.frame([found])
    last = table[(table["point"] == "post") & (table["score"] == "acc")]
    np.testing.assert_allclose(last["simulated"], ends)


@pytest.mark.slow
def test_a_run_with_more_rounds_goes_on_where_its_schedule_allows(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*BUFFERED, "--rounds=6", f"--workdir={whole}") == 0
    assert run(*BUFFERED, "--rounds=4", f"--workdir={parts}") == 0
    code = run("--resume", "--rounds=6", f"--workdir={parts}")
    slot = results.load(whole).experiment.schedule.slot
    assert code == (0 if slot[:4].max() == slot.max() else 2)
    if code == 0:
        assert rows(whole) == rows(parts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling": "size"}, "excludes --sampling"),
        ({"aggregate": "median"}, "excludes --aggregate"),
        ({"participation": "0.1:1"}, "excludes a range of --participation"),
    ],
)
def test_settings_that_need_a_whole_cohort_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        config.resolve({"algo": "fedavg", "asynchronous": "fedasync"} | given)


def test_rules_by_name():
    def rule(spec, staleness="polynomial:0.5"):
        given = {"algo": "fedavg", "asynchronous": spec, "staleness": staleness}
        return rule_of(config.resolve(given).server)

    assert rule("fedasync:0.9")[:2] == (1, 0.9) and rule("fedasync").rate == 0.6
    assert rule("fedbuff:3:0.5")[:2] == (3, 0.5) and rule("fedbuff:3").rate == 1
    weight = float(rule("fedasync", "hinge:10:4").staleness(np.float32(5)))
    assert weight == pytest.approx(1 / 11)
    for wrong in ("fedbuff", "fedbuff:1.5", "fedasync:1:2"):
        with pytest.raises(InputError, match="asynchronous"):
            rule(wrong)


@pytest.fixture
def timed(tmp_path):
    """A run of four clients with 10 to 40 examples."""
    found = made.run(tmp_path / "a")
    sizes = {"train_sizes": np.array([10, 20, 30, 40])}
    np.savez(found.path / "partition.npz", **sizes)
    (found.path / "partition.json").write_text(json.dumps({"unseen": []}))
    return found


def test_simulated_seconds_by_hand(timed):
    """40 examples at 10 a second, and 1,500 numbers by four clients at 1 MB/s."""
    assert results.simulated(timed) is None
    given = results.timed(timed, {"speeds": "10", "bandwidths": "8"})
    found = results.simulated(given)
    np.testing.assert_allclose(found, [4.0015, 4.0015, 4.0015, 0])
    first = results.to_target(results.frame([given]), 0.7, "pre/acc").iloc[0]
    assert first["completed"] == 2
    np.testing.assert_allclose(first["simulated"], 8.003)


def test_a_report_takes_speeds(timed, capsys):
    path = str(timed.path)
    report.main([path, "--target=0.7", "--speeds=10"])
    shown = capsys.readouterr().out
    assert "simulated seconds to 70.0 %" in shown and "| 8 " in shown
    report.main([path, "--target=0.7"])
    assert "simulated" not in capsys.readouterr().out


def test_an_asynchronous_run_has_its_own_speeds(timed):
    timed.config["asynchronous"] = "fedasync"
    with pytest.raises(InputError, match="has its own speeds"):
        results.timed(timed, {"speeds": "10"})


def test_the_end_of_a_run_has_all_scores_that_were_asked_for(tmp_path, capsys):
    given = ["--algo=fedavg", "--rounds=1", "--metrics=acc,auc,ece"]
    assert run(*SMALL, *given, f"--workdir={tmp_path / 'a'}") == 0
    shown = capsys.readouterr().out
    assert "acc (%)" in shown and "auc (%)" in shown and "ece (%)" in shown
