import numpy as np
import pytest
import toy
from flax import serialization

import fedjax_pfl
from experiment.runs import SMALL, run
from experiment.test_predict import untrained
from fedjax_pfl.experiment import export, results
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.run_directory import RunDirectory


@pytest.mark.parametrize("algo", [toy.slow("ditto"), "fedavg"])
def test_the_exported_network_predicts_as_the_client_does(algo, tmp_path, capsys):
    path = tmp_path / "run"
    assert run(f"--algo={algo}", *SMALL, "--rounds=1", f"--workdir={path}") == 0
    capsys.readouterr()
    assert run(str(path), "--client=2", command=export.main) == 0
    names: dict = {}
    x = fedjax_pfl.load("digits").prepare(fedjax_pfl.load("digits").x[:4])
    exec(capsys.readouterr().out, names | {"x": x}, names)
    directory = RunDirectory(path)
    e = build(directory.config)
    t, state = directory.restore(e)
    wanted = e.predictor(state, t, 2)(e.dataset.x[:4])
    x = e.dataset.prepare(e.dataset.x[:4])
    found = names["network"].apply(names["variables"], x)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    packed = serialization.msgpack_restore((path / "client-2.msgpack").read_bytes())
    np.testing.assert_array_equal(
        packed["head"]["kernel"], names["variables"]["head"]["kernel"]
    )


@pytest.mark.slow
def test_a_method_of_several_networks_exports_its_parts(tmp_path, capsys):
    path = tmp_path / "run"
    assert run("--algo=fedem", *SMALL, "--rounds=1", f"--workdir={path}") == 0
    assert (
        run(str(path), "--client=0", f"--output={tmp_path / 'it'}", command=export.main)
        == 0
    )
    names = np.load(tmp_path / "it.npz").files
    assert {name.split("/")[0] for name in names} <= {"server", "client"}
    assert run(str(path), "--client=9", command=export.main) == 2
    assert run(str(path), command=export.main) == 2


def test_an_asynchronous_run_is_exported(tmp_path):
    given = {"asynchronous": "fedbuff:2", "participation": "0.5"}
    e = untrained(tmp_path, algo="fedavg", **given)
    assert run(str(tmp_path), "--client=#2", command=export.main) == 0
    packed = serialization.msgpack_restore((tmp_path / "client-2.msgpack").read_bytes())
    found = e.task.model.apply(packed, e.task.prepare(e.dataset.x[:4]))[0]
    wanted = results.load(tmp_path).predictor(2)(e.dataset.x[:4])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
