"""Tests of the wheel in an empty environment."""

import importlib.util
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = pytest.mark.skipif(
    not importlib.util.find_spec("build"), reason="pip install -e '.[wheel]'"
)
RUN = """
import jax, pathlib, fedjax_pfl
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, loading, partitioners
data = loading.load("digits")
federation = federate.federate(data, partitioners.partition(data, "iid", num_clients=3, seed=0))
task = simulate.task(data, federation.class_counts, models.model("linear", (8, 8, 1), 10), lr=0.1, batch_size=50)
program = simulate.program(ALGORITHMS["fedavg"], task)
*_, last = simulate.rounds(program, jax.random.key(0), federation, rounds=2)
assert last.pre["acc"].shape == (3,), last
print(pathlib.Path(fedjax_pfl.__file__).with_name("py.typed").exists(), fedjax_pfl.__file__)
"""


def done(*command: object, **where) -> str:
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, **where
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@NEEDED
def test_the_wheel_runs_in_an_empty_environment(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in done(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source)
    assert list((tmp_path / "dist").glob("*.tar.gz"))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedjax_pfl/py.typed" in names
    # no tests, no commands of the checkout
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fedjax_pfl"}
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    done(python, "-m", "pip", "install", "--quiet", wheel)
    out = done(python, "-c", RUN, cwd=tmp_path)
    assert out.startswith("True") and str(tmp_path / "venv") in out
    command = tmp_path / "venv" / "bin" / "fedjax-pfl"
    words = ["--algo=pfedc", "--rounds=1", "--clients=5", "--data_fraction=0.2"]
    assert "round 1/1" in done(command, "run", *words, cwd=tmp_path)
    assert list((tmp_path / "runs").glob("*/summary.json"))
