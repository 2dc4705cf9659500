"""One client's model in files of its own, for methods of each kind."""

import numpy as np
import pytest
import toy

from experiments import export, main, runs
from fedjax_pfl.errors import InputError

TINY = [
    "--data_fraction=0.2",
    "--clients=4",
    "--epochs=1",
    "--width=1",
    "--devices=1",
    "--rounds=1",
    "--batch_size=20",
]
# which predicts by two models; adapts before it predicts; in a loop; by a network
# beside prototypes
SLOW = ("fedrod", "per_fedavg", "fedem", "fedproto")
CLIENT = 1


@pytest.fixture(scope="module", params=["fd", *map(toy.slow, SLOW)])
def run(request, tmp_path_factory):
    """Of FD clients of two networks; FedRoD's predict with more than one."""
    path = tmp_path_factory.mktemp("runs") / request.param
    model = "mlp,linear" if request.param == "fd" else "linear"
    assert (
        main.run(
            [f"--algo={request.param}", f"--model={model}", *TINY, f"--workdir={path}"]
        )
        == 0
    )
    return runs.load(path)


def restored(text, base):
    """The lines that load the .msgpack, with the arrays of the .npz in its place."""
    arrays = f"traverse_util.unflatten_dict(dict(np.load({f'{base}.npz'!r})), sep='/')"
    empty = "dict(body={}, head={}, stats={}) | " if "variables" in text else ""
    return "import numpy as np\nfrom flax import traverse_util\n" + text.replace(
        "serialization.msgpack_restore(file.read())", empty + arrays
    )


def test_both_files_predict_as_the_run_does(run, tmp_path):
    base = tmp_path / "client"
    said = export.main(
        [str(run.path), f"--client={CLIENT}", f"--output={base}.msgpack"]
    )
    one = run.config.algo not in ("fedrod", "fedem")
    assert ("one network" in said) == one and {p.name for p in tmp_path.iterdir()} == {
        "client.msgpack",
        "client.npz",
    }
    x = run.experiment.dataset.x[:7]
    wanted = np.asarray(run.predictor(CLIENT)(x))
    for text in (said, restored(said, base)):
        names: dict = {}
        exec(text, names)
        np.testing.assert_allclose(names["predict"](x), wanted, rtol=1e-5, atol=1e-5)


def test_the_files_hold_the_weights_and_not_the_run(run, tmp_path):
    """Other weights in the file are other predictions."""
    export.write(run, CLIENT, str(tmp_path / "client"))
    arrays = dict(np.load(tmp_path / "client.npz"))
    assert arrays and all(x.dtype.kind in "fiub" for x in arrays.values())
    np.savez(tmp_path / "client.npz", **{name: 0 * x for name, x in arrays.items()})
    names: dict = {}
    one = run.config.algo not in ("fedrod", "fedem")
    exec(
        restored(
            "\n".join(export.lines(run, CLIENT, str(tmp_path / "client"), one)),
            tmp_path / "client",
        ),
        names,
    )
    outputs = np.asarray(names["predict"](run.experiment.dataset.x[:3]))
    # says nothing
    np.testing.assert_allclose(
        outputs, outputs[:1, :1].repeat(3, 0).repeat(10, 1), atol=1e-5
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "Name one run directory, not 0"),
        (["{run}"], "Say which client"),
        (["{run}", "{run}", "--client=0"], "Name one run directory, not 2"),
        (["{run}", "--client=4"], r"`client` must be in \[0, 3\], got 4"),
        (["{run}", "--client=-1"], "`client` must be in"),
        (
            ["{run}", "--client=0", "--output=/nowhere/x"],
            "there is no directory /nowhere",
        ),
        (["/nowhere", "--client=0"], "is not a run directory"),
    ],
)
def test_a_wrong_command_is_one_sentence(run, flags, sentence):
    """Nothing is compiled, so for each method."""
    with pytest.raises(InputError, match=sentence):
        export.main([flag.format(run=run.path) for flag in flags])
