"""The row of a metrics table for one round."""

import numpy as np
import pytest

from experiments import records, schema
from fedjax_pfl.engine.program import Round
from fedjax_pfl.engine.results import Result, record
from fedjax_pfl.types import Traffic


def test_a_row_is_of_the_participants_and_their_own_test_examples():
    """Clients 1, 3 and 4 have a place, and 3 takes no part."""
    active, numbers = np.array([True, False, True]), np.array([1.0, 100.0, 3.0])
    sent = np.array([2, 0, 5])
    m = Round(
        loss=numbers,
        post={"acc": numbers / 4},
        clients={"alpha": 2 * numbers},
        server={"gap": np.float32(7), "row": np.array([1.0, 2.0, 6.0])},
        traffic=Traffic(sent, sent + 1, 0 * sent, sent, public_data=None),
        ids=np.array([1, 3, 4]),
        active=active,
        finite=active,
    )
    pre = {"acc": np.array([0.0, 1.0, np.nan, 0.5, 0.5])}
    row = record(Result(3, None, m, pre), np.array([9, 1, 9, 9, 3]))
    expected = {"round": 3, "loss": 2, "participants": 2, "alpha": 4, "gap": 7}
    expected |= {
        "row/mean": 3,
        "row/min": 1,
        "row/max": 6,
        "traffic/down": 7,
        "traffic/up": 10,
        "traffic/messages": 7,
    }
    expected |= {
        "post/acc": 0.5,
        "post/acc_micro": (0.25 + 3 * 0.75) / 4,
        "post/acc_worst10": 0.25,
    }
    expected |= {
        "pre/acc": 0.5,
        "pre/acc_micro": (1 + 4.5 + 1.5) / 22,
        "pre/acc_best10": 1,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert "traffic/public_data" not in row
    assert records.client_scores(Result(3, None, m, pre)) == {
        "round": 3,
        "ids": [1, 4],
        "loss": [1, 3],
        "post": {"acc": [0.25, 0.75]},
        "pre": {"acc": [0, 1, None, 0.5, 0.5]},
    }


def test_a_score_that_is_not_finite_is_null_in_the_files():
    row = records.client_scores(
        Result(
            1, None, None, {"nll": np.array([np.inf, 0.1, np.nan, -np.inf], np.float32)}
        )
    )
    assert (
        row == {"round": 1, "pre": {"nll": [None, 0.1, None, None]}}
        and schema.problem(row, schema.SCORES) is None
    )
