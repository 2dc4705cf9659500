"""Rounds to a target: what is counted, and until when."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from experiments.config import Config
from experiments.files import write_json, write_text
from rich.console import Console

from experiments import (
    comparison,
    entry,
    gather,
    main,
    recorded,
    report,
    settings,
    tables,
    targets,
)
from fedjax_pfl import local_training
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Data

FLOPS = targets.Flops(first=9, later=7)
CONFIG = Config(algo="fedavg")


TASK = {"task_acc": 0.95, "task_acc_majority": 0.95}  # its majority baseline
TASK = {
    name + suffix: value
    for name, value in TASK.items()
    for suffix in ("", "_micro", "_std", "_worst10", "_best10")
}


def rows(pre, post, **more):
    """A run's rows: 10 scalars each way, 3 integers and 2 messages a round, 4 steps on
    30 examples."""
    spent = {
        "traffic/down": 10,
        "traffic/up": 10,
        "traffic/ints": 3,
        "traffic/messages": 2,
    }
    spent |= {"work/steps": 4, "work/examples": 30, "loss": 1.0}
    made = [{"round": t, **(spent if t < len(post) else {})} for t in range(len(pre))]
    for name, series in (("pre/acc", pre), ("post/acc", post)):
        for row, value in zip(made, series, strict=False):
            if value is not None:
                row |= {
                    name + suffix: value
                    for suffix in ("", "_micro", "_std", "_worst10", "_best10")
                }
    return [row | more for row in made]


def test_the_first_round_that_reaches_it_and_what_was_spent_until_then():
    # evaluated every second round, and the last
    run = rows([0.1, None, 0.5, None, 0.8], [0.3, None, 0.5, 0.9])
    # the rows are read once
    first = targets.reached(iter(run), "acc", (0.1, 0.5, 0.8, 0.91), flops=FLOPS).first
    assert first["pre", 0.5] == {
        "round": 2,
        "rounds": 2,  # before the third begins
        "value": 0.5,
        "down": 20,
        "up": 20,
        "ints": 6,
        "messages": 4,
        "encrypted": 0,
        "public_data": 0,
        "bytes": 4 * 46,
        "client_steps": 8,
        "client_flops": 30 * 9 + 30 * 7,  # of the first round and of the second
    }
    after = first["post", 0.5]
    assert (after["round"], after["rounds"], after["down"], after["client_steps"]) == (
        2,
        3,
        30,
        12,
    )
    closing = first["pre", 0.8]
    assert (closing["round"], closing["rounds"], closing["up"]) == (4, 4, 40)
    assert first["pre", 0.1]["down"] == 0  # before anything was sent
    assert ("post", 0.91) not in first and not targets.reached(
        run, "task_acc", (0.1,), flops=FLOPS
    ).first


def test_a_mean_of_float32_scores_reaches_what_it_is():
    mean = float(np.mean(np.full(4, 0.9, np.float32), dtype=np.float64))
    assert mean < 0.9
    assert targets.reached(rows([mean], []), "acc", (0.9,), FLOPS).first


def test_the_levels_asked_for_are_shown():
    for text, expected in (
        ("0.5,0.6,0.8", ["0.5", "0.6", "0.8"]),
        ("0.6,0.95", ["0.6", "0.95"]),
    ):
        console = Console(record=True, width=100)
        targets.show(
            console,
            rows([0.1, 0.55], [0.65]),
            CONFIG.replace(targets=text),
            targets.Flops(1e12, 1e12),
        )
        shown = console.export_text().splitlines()[5:]
        assert [line.split()[0] for line in shown if "before" in line] == expected
        assert ["after", "1", "10", "10", "9.2e-05", "4", "30"] in [
            line.split() for line in shown
        ]
        assert ("never" in " ".join(shown)) and "0.7" not in " ".join(shown)
    found = targets.summary(rows([0.1], []), CONFIG, FLOPS)
    assert [level["target"] for level in found["levels"]] == list(targets.LEVELS)
    targets.show(console, [], CONFIG, FLOPS)  # nothing evaluated: nothing to say


@pytest.mark.parametrize(
    "text",
    ["", "0.8,", "80%", "0.8;0.9", "0", "-0.5", "1.2", "nan", "acc", "acc:", ":0.8"],
)
def test_targets_that_cannot_be(text):
    with pytest.raises(InputError, match=r"targets=.*\(0, 1\]"):
        targets.parse(text)


def test_none_asks_for_no_targets():
    """As of a run whose --targets another one is not to have."""
    assert (
        targets.parse("none") == targets.parse(None)
        and not targets.given("none")
        and targets.given("0.5")
    )


def test_targets_are_sorted_and_single():
    assert targets.parse("0.9,0.8, 0.9") == (None, (0.8, 0.9))
    assert targets.parse("acc_present:0.9,0.8") == ("acc_present", (0.8, 0.9))


def shown(run, **config):
    console = Console(record=True, width=200)
    targets.show(console, run, CONFIG.replace(**config), FLOPS)
    return console.export_text()


def test_the_score_that_is_named_is_the_one_that_is_meant():
    run = [row | {"post/acc_present": 0.9} for row in rows([0.1, 0.6], [0.7])]
    found = targets.summary(
        run,
        CONFIG.replace(preset="pfedc_mnist", algo="pfedc", targets="acc_present:0.8"),
        FLOPS,
    )
    assert (
        found["score"] == "acc_present" and found["levels"][0]["post"]["value"] == 0.9
    )
    assert "the macro mean of acc_present" in shown(run, targets="acc_present:0.8")
    assert "the micro mean of acc first" in shown(run, targets="acc_micro:0.5")
    assert (
        targets.wanted(CONFIG.replace(preset="pfedc_mnist", targets="0.8"))[0] == "acc"
    )


def test_a_score_that_the_run_has_not_is_said_with_those_it_has(tmp_path, capsys):
    assert (
        main.run(
            ["--algo=fedavg", "--targets=task_acc:0.9", f"--workdir={tmp_path / 'run'}"]
        )
        == entry.BAD_INPUT
    )
    assert capsys.readouterr().err == (
        "Unknown score of fedavg 'task_acc': did you mean 'acc'? Choose one of "
        "acc, acc_present.\n"
    )
    assert not list(tmp_path.iterdir())
    for name in ("task_acc_majority", "acc_std"):
        with pytest.raises(InputError, match="Unknown score of pfedc"):
            targets.check_score(
                f"{name}:0.9", ("acc", "task_acc", "task_acc_majority"), "pfedc"
            )
    targets.check_score("acc_micro:0.9", ("acc",), "fedavg")


def test_a_target_that_saying_no_would_reach_is_marked():
    run = [
        row | {"post/acc_majority": 0.5, "pre/acc_majority": 0.5}
        for row in rows([0.1, 0.6], [0.7])
    ]
    found = targets.summary(run, CONFIG.replace(targets="0.4,0.5,0.6"), FLOPS)
    assert [level["baseline"] for level in found["levels"]] == [True, True, False]
    assert found["baseline"] == {"pre": 0.5, "post": 0.5}
    text = shown(run, targets="0.5,0.6")
    assert "0.5*" in text and "0.6*" not in text and f"{targets.BASELINE}." in text
    assert targets.MARK not in shown(run, targets="0.6") and targets.MARK not in shown(
        rows([0.1], []), targets="0.1"
    )


def test_the_mark_is_of_the_participants_who_reached_the_target():
    run = [
        row | {"post/acc_majority": floor}
        for row, floor in zip(rows([None, None], [0.9, 0.6]), (0.9, 0.3), strict=True)
    ]
    found = targets.summary(run, CONFIG.replace(targets="0.2,0.5,0.9,0.95"), FLOPS)
    assert [level["baseline"] for level in found["levels"]] == [True, True, True, False]


@pytest.mark.parametrize(
    ("every", "said"),
    [(1, None), (5, "every 5 rounds only"), (0, "after the last round only")],
)
def test_rounds_are_upper_bounds_where_not_every_round_was_evaluated(every, said):
    found = targets.summary(
        rows([0.1, 0.6], [0.7]), CONFIG.replace(eval_every=every), FLOPS
    )["bound"]
    assert (
        (found is None) if said is None else (said in found and "upper bounds" in found)
    )
    assert every != 5 or "up to 4 too many" in found
    assert ("upper bounds" in shown(rows([0.1, 0.6], [0.7]), eval_every=every)) == (
        said is not None
    )


def finished(path, algo, more, **user):
    """A run directory as `experiments.tables` reads it."""
    path.mkdir()
    made = [row | more for row in rows([0.1, None, 0.6], [0.3, 0.7])]
    write_json(
        path / "config.json", recorded.signed(settings.resolve({"algo": algo, **user}))
    )
    write_json(
        path / "summary.json",
        report.summary(made)
        | {"status": "complete", "rounds": 2, "seconds": {"train": 1}},
    )
    write_text(path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def test_where_nothing_was_evaluated_the_table_says_nothing(tmp_path):
    """With --eval_every=0 there is no score after local training, so it was not never
    reached."""
    path = finished(tmp_path / "a", "fedavg", {}, eval_every=0)
    made = [
        {k: v for k, v in row.items() if not k.startswith("post/")}
        for row in rows([0.1, None, 0.6], [0.3, 0.7])
    ]
    write_text(
        tmp_path / "a" / "metrics.jsonl",
        "".join(json.dumps(row) + "\n" for row in made),
    )
    assert "| - / ≤2 | - / 0.0 | - / never | - / - |" in tables.main(
        ["--targets=0.5,0.9", path]
    )


def test_the_majority_baseline_of_a_table_is_that_of_each_point(tmp_path):
    """After local training it is that of the round's participants."""
    ends = ("", "_micro", "_std", "_worst10", "_best10")
    floors = {
        f"{p}/acc_majority{end}": x
        for p, x in (("pre", 0.5), ("post", 0.4))
        for end in ends
    }
    path = finished(tmp_path / "a", "fedavg", floors)
    _, (head, _, floor), _ = comparison.content([gather.read(Path(path))])
    found = dict(zip(head, floor, strict=True))
    assert [found[x] for x in ("before local training", "worst tenth", "after it")] == [
        "50.0",
        "-",
        "40.0",
    ]


def test_a_table_names_the_score_of_its_targets_and_marks_what_they_are_worth(tmp_path):
    task = {
        f"{point}/{name}": value
        for point in ("pre", "post")
        for name, value in TASK.items()
    }
    fedavg = finished(tmp_path / "a", "fedavg", {}, preset="pfedc_mnist", eval_every=2)
    pfedc = finished(tmp_path / "b", "pfedc", task, preset="pfedc_mnist")
    head, _, first, second, *notes = tables.main(
        ["--targets=0.5,0.9", fedavg, pfedc]
    ).splitlines()
    assert "| targets of | rounds to 0.5 | MB to 0.5 | rounds to 0.9 |" in head
    # after round 1, and before round 2
    assert "| acc | ≤2 / ≤2 | 0.0 / 0.0 | never / never |" in first
    assert "| task_acc | 1* / 0* | 0.0 / 0.0 | 1* / 0* |" in second
    assert [note for note in notes if note] == [
        "± is the standard deviation over clients.",
        f"`*` A target {targets.BASELINE}.",
        f"`≤` {fedavg}: evaluated every 2 rounds only, so rounds are upper bounds, up "
        "to 1 too many.",
    ]
    table = tables.main(["--targets=acc:0.5", fedavg, pfedc])
    assert (
        "| rounds to 0.5 of acc | MB to 0.5 |" in table
        and "targets of" not in table
        and "*" not in table
    )
    with pytest.raises(
        InputError,
        match=r"Unknown score of .*a 'task_acc': did you mean 'acc'\? Choose one of acc\.",
    ):
        tables.main(["--targets=task_acc:0.5", pfedc, fedavg])


@pytest.mark.parametrize(
    "options",
    [{"epochs": 3}, {"epochs": 2, "drop_last": True}, {"epochs": None, "steps": 7}],
    ids=str,
)
def test_the_work_that_is_counted_is_the_work_that_is_done(options):
    f, task = toy.federation(), toy.task(**options)

    @jax.jit
    def work(index, size):
        def step(key, seen, batch):
            return seen + jnp.sum(batch.mask), ()

        data = Data(f.examples, index, size, task.prepare)
        return local_training.work(jax.random.key(0), data, step, jnp.int32(0), task)

    steps, examples = local_training.planned(task, toy.SIZES)
    done = [work(*client) for client in zip(*f.train, strict=True)]
    assert steps.tolist() == [int(count) for _, _, count in done] and steps.any()
    assert examples.tolist() == [int(seen) for seen, _, _ in done]
