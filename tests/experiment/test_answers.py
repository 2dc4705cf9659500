"""Scores of generated answers."""

import json

import numpy as np
import pandas as pd
import pytest

from experiment.runs import run
from fedjax_pfl.experiment import answers, report, results, sweep


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("the cat sat", "the cat sat", 1),
        ("The cat, sat!", "the CAT sat", 1),
        ("the cat sat", "on the mat the dog sat", 2 * 2 / (3 + 6)),  # the, sat
        ("police kill the gunman", "police killed the gunman", 2 * 3 / (4 + 4)),
        ("a b c d", "d c b a", 2 * 1 / (4 + 4)),
        ("don't", "don t", 1),
        ("x", "y", 0),
        ("", "a", 0),
        ("...", "...", 0),
    ],
)
def test_rouge_l(found, wanted, score):
    assert answers.rouge_l(found, wanted) == pytest.approx(score)
    assert answers.rouge_l(wanted, found) == pytest.approx(score)


def test_exact_match_ignores_spaces_around_a_text():
    assert answers.exact_match(" Red\n", "Red") == 1
    assert answers.exact_match("red", "Red") == 0


def test_answers_of_conversations_and_of_packed_ones():
    x = np.array([2, 3, 4, 5, 6, 7, 0, 0])
    y = np.array([-1, 4, 5, -1, 7, 8, -1, -1])
    found = [(p.tolist(), a.tolist()) for p, a in answers.asked(x, y)]
    assert found == [([2, 3], [4, 5]), ([2, 3, 4, 5, 6], [7, 8])]
    x[3:5] = ~x[3:5]  # the second text has one token, the third one is an answer
    y[3] = 9
    found = [(p.tolist(), a.tolist()) for p, a in answers.asked(x, y)]
    assert found == [([2, 3], [4, 5]), ([5], [9]), ([6], [7, 8])]
    full = np.array([2, 3]), np.array([3, 4])  # cut within its answer
    assert [a.tolist() for _, a in answers.asked(*full)] == [[3, 4]]


def conversations(folder):
    """Two clients, whose answers to one question differ."""
    path = folder / "chat.jsonl"
    rows = [
        {"instruction": "Say it", "output": word, "site": site}
        for site, word in (("x", "RED"), ("y", "DARK BLUE"))
        for _ in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--dataset=chat:{path} --partition=natural:site --clients=2 --model=transformer"


@pytest.mark.slow  # trains a network of tokens
@pytest.mark.parametrize("packed", ["", " --pack --max_length=64"])
def test_a_run_scores_the_answers_of_its_clients(packed, tmp_path, capsys):
    given = conversations(tmp_path) + packed
    flags = f"--algo=local {given} --optimizer=adam --lr=0.01 --rounds=24"
    flags += f" --metrics=exact_match,rouge_l --eval_every=12 --workdir={tmp_path}/run"
    assert run(*flags.split()) == 0
    shown = capsys.readouterr().out
    assert "exact_match (%)" in shown and "rouge_l (%)" in shown
    clients = pd.read_csv(tmp_path / "run/clients.csv", index_col=0)
    assert clients["pre/exact_match"].to_dict() == {"x": 1, "y": 1}
    table = pd.read_csv(tmp_path / "run/metrics.csv")
    assert table["pre/rouge_l"].dropna().tolist() == [1]
    assert table["round"][table["pre/exact_match"].notna()].tolist() == [24]
    assert results.load(tmp_path / "run").headline == ("exact_match", "max")
    assert run(f"{tmp_path}/run", command=report.main) == 0
    assert "exact_match (%)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_network_without_attention_answers(tmp_path):
    """And the clients' shared model has the answer of one of them."""
    given = conversations(tmp_path).replace("transformer", "gru")
    flags = f"--algo=fedavg {given} --optimizer=adam --lr=0.02 --rounds=8 --epochs=3"
    flags += f" --metrics=acc,exact_match --workdir={tmp_path}/run"
    assert run(*flags.split()) == 0
    run_of = results.load(tmp_path / "run")
    last = run_of.scores.query("point == 'pre' and score == 'exact_match'")
    assert sorted(last["value"]) == [0, 1] and run_of.headline[0] == "acc"


def test_settings_that_do_not_go_together_are_refused(tmp_path, capsys):
    chat = conversations(tmp_path)
    for flags, message in (
        ("--dataset=digits --metrics=rouge_l", "rouge_l needs --dataset=chat:PATH"),
        (
            f"{chat} --metrics=acc,exact_match --patience=2 --val_fraction=0.2",
            "excludes --patience",
        ),
        (f"{chat} --watch=val/rouge_l", "must be of a score of every round"),
        (f"{chat} --metrics=rouge_2", "Unknown metric 'rouge_2'"),
    ):
        assert run("--algo=local", *flags.split(), f"--workdir={tmp_path}/run") == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    argv = f"--algo=local {chat} --metrics=rouge_l --select=val/rouge_l --root={tmp_path}/all"
    assert run(*argv.split(), command=sweep.sweep) == 2
    assert "must be of a score of every round" in capsys.readouterr().err
