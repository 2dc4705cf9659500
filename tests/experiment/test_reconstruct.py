"""The command reconstruct."""

import json

import numpy as np
import pytest

from experiment import runs
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import reconstruct


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
