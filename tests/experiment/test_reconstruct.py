"""The command reconstruct."""

import json

import numpy as np
import pytest

from experiment import runs
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import reconstruct


def test_a_picture_names_images_and_their_psnr():
    images = np.random.default_rng(0).random((1, 2, 4, 4, 1))
    found = {"original": images, "found": images, "label": [[1, 0]]}
    found["psnr_of_image"] = [[20.04, 7.5]]
    figure = reconstruct.picture(found, "fedavg, client H03", ["cat", "dog"])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["dog", "cat", "20.0 dB", "7.5 dB"]
    rows = [axes.get_ylabel() for axes in figure.axes]
    assert rows == ["original", "", "reconstructed", ""]
    assert figure.get_suptitle() == "fedavg, client H03"
    titles = [axes.get_title() for axes in reconstruct.picture(found).axes]
    assert titles[:2] == ["class 1", "class 0"]


def test_images_of_a_first_round_are_attacked(tmp_path, capsys):
    """A table row and two files per run of a folder; a linear model's single image is
    recovered."""
    path = tmp_path / "run"
    given = [*runs.SMALL, "--dataset=digits", "--algo=fedavg", "--rounds=1"]
    assert runs.run(*given, f"--workdir={path}") == 0
    given = ["--images=1", "--steps=300", "--attack=dlg", "--clients=2"]
    assert reconstruct.main([str(tmp_path), *given]) == 0
    assert "PSNR (dB)" in capsys.readouterr().out
    row = json.loads((path / "reconstruction.json").read_text())
    assert row["method"] == "fedavg" and np.isfinite(row["distance"])
    assert row["psnr"] > 20 and row["images"] == 1
    assert (path / "reconstruction.png").stat().st_size
    with pytest.raises(InputError, match="images"):
        reconstruct.write(path, images=10**6)
