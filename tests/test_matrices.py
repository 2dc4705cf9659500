"""Matrices of a run, such as MNFL's coefficients: kept for every evaluated round,
rewound by a resume, and drawn."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import figures, main, matrices, matrix_figures

TINY = [
    "--algo=mnfl",
    "--data_fraction=0.2",
    "--clients=5",
    "--epochs=1",
    "--model=linear",
    "--width=1",
    "--devices=1",
]


def run(path, *flags):
    assert (
        main.run(
            [
                *TINY,
                "--eval_every=2",
                "--checkpoint_every=2",
                f"--workdir={path}",
                *flags,
            ]
        )
        == 0
    )


@pytest.mark.slow  # three runs
def test_a_file_for_each_evaluated_round_and_a_resume_ends_alike(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(whole, "--rounds=6")
    found = matrices.load(whole, "coefficients")
    assert matrices.names(whole) == ["coefficients"] and list(found) == [0, 2, 4, 5]
    np.testing.assert_allclose([a.sum(axis=1) for a in found.values()], 1, rtol=1e-5)
    row = json.loads((whole / "metrics.jsonl").read_text().splitlines()[2])
    assert row["coefficients/max"] == found[2].max() and "coefficients" not in row

    run(resumed, "--rounds=4")
    # the last round then, and not evaluated in a longer run
    assert 3 in matrices.load(resumed, "coefficients")
    # of a round that was killed before its checkpoint
    matrices.save(resumed, 4, {"coefficients": np.zeros((5, 5))})
    assert main.run(["--resume", f"--workdir={resumed}", "--rounds=6"]) == 0
    again = matrices.load(resumed, "coefficients")
    assert list(again) == list(found)
    for round in (4, 5):
        np.testing.assert_array_equal(again[round], found[round])


def test_clients_are_drawn_by_architecture_then_by_their_most_frequent_class():
    counts = np.array([[0, 9], [9, 0], [1, 2], [5, 5], [7, 8]])
    np.testing.assert_array_equal(
        matrix_figures.order(np.array([1, 0, 0, 1, 0]), counts), [1, 2, 4, 3, 0]
    )


@pytest.mark.parametrize(
    "matrix, expected",
    [
        # large diagonals leave the scale to the others
        ([[0.9, 0.1], [0.3, 0.7]], (0.1, 0.3, "max")),
        ([[0.0, 1.0], [2.0, 3.0]], (1.0, 2.0, "both")),
        # rounding is no pattern
        ([[0.5, 0.5 + 1e-6], [0.5, 0.5]], (0.4975, 0.5025, "neither")),
        ([[2.0]], (1.99, 2.01, "neither")),
        ([[0.0, 0.0], [0.0, 0.0]], (0, 0, "neither")),
        # of those in the round
        ([[0.9, 0.1, np.nan], [0.3, 0.7, np.nan], [np.nan] * 3], (0.1, 0.3, "max")),
        ([[np.nan, np.nan], [np.nan, np.nan]], (0, 0, "neither")),
    ],
)
def test_the_scale_of_colours(matrix, expected):
    low, high, extend = matrix_figures.scale([np.array(matrix)])
    np.testing.assert_allclose((low, high), expected[:2], atol=1e-6)
    assert low < high and extend == expected[2]


@pytest.mark.slow
def test_a_heat_map_of_some_rounds_in_png_and_pdf(tmp_path, monkeypatch):
    """Every panel has the matrix of its round, rows and columns reordered alike, and
    lines between architectures."""
    path, drawn = tmp_path / "run", []
    run(path, "--rounds=6", "--eval_every=1", "--checkpoint_every=3")
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, to, **how: (drawn.append(figure), save(figure, to, **how)),
    )
    assert "coefficients.png, coefficients.pdf" in figures.main([str(path)])
    assert all(
        (path / "figures" / f"coefficients.{kind}").stat().st_size > 5000
        for kind in ("png", "pdf")
    )

    found, names = (
        matrices.load(path, "coefficients"),
        np.array(["mlp", "linear", "mlp", "mlp", "linear"]),
    )
    counts, ids = np.eye(5, dtype=int)[[2, 1, 0, 4, 3]], [2, 0, 3, 1, 4]
    matrix_figures.draw(tmp_path / "a", "a", found, names, counts)
    panels = drawn[-1].axes[: matrix_figures.PANELS]
    assert [axes.get_title() for axes in panels] == [
        "round 0",
        "round 2",
        "round 3",
        "round 5",
    ]
    np.testing.assert_array_equal(
        panels[1].images[0].get_array(), found[2][ids][:, ids]
    )
    assert [text.get_text() for text in panels[0].get_yticklabels()] == [
        "2 (0)",
        "0 (2)",
        "3 (4)",
        "1 (1)",
        "4 (3)",
    ]
    # three mlp, then linear
    assert {tuple(np.ravel(line.get_ydata())) for line in panels[3].lines} >= {
        (2.5, 2.5)
    }
    assert [text.get_text() for text in panels[3].child_axes[0].get_yticklabels()] == [
        "mlp",
        "linear",
    ]


@pytest.mark.slow  # a run of its own
def test_what_is_no_matrix_of_pairs_is_not_drawn(tmp_path):
    path = tmp_path / "run"
    run(path, "--rounds=1")
    matrices.save(path, 0, {"weights": np.zeros((5, 3))})
    assert matrices.names(path) == ["coefficients", "weights"]
    assert "weights" not in figures.main([str(path)])


def test_rounds_are_in_their_order_whatever_their_number_of_digits(tmp_path):
    for t in (99_999, 100_000):
        matrices.save(tmp_path, t, {"a": np.eye(2)})
    assert list(matrices.load(tmp_path, "a")) == [99_999, 100_000]
