"""The import of the package."""

import subprocess
import sys

import pytest

CODE = """
import sys
import fedjax_pfl, fedjax_pfl.experiment, experiments.main
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not {"tensorflow", "tensorflow_datasets", "torch"} & set(sys.modules)
"""


def test_import_does_not_start_jax():
    """Started, JAX would take one device of a CPU and ignore a cluster."""
    subprocess.run([sys.executable, "-c", CODE], check=True)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("from fedjax_pfl import compression", "uploads=uploads.top_k"),
        ("from fedjax_pfl import server_optimizer", "server=uploads.fedadam"),
        ("from fedjax_pfl.privacy import differential_privacy", "uploads.private"),
        ("from fedjax_pfl.privacy import encryption", "algorithms.pfedc.encryption"),
        ("from fedjax_pfl.privacy import robust", "uploads.robust"),
        ("from fedjax_pfl.uploads import Through", "an Upload"),
        ("from fedjax_pfl.traffic import uploads", "both_ways"),
        ("from fedjax_pfl.engine import host_state", 'storage="host"'),
        ("from fedjax_pfl.engine.asynchronous import program", "clock=asynchronous"),
        ("from fedjax_pfl.local_training import bounded", 'loop="bounded"'),
    ],
)
def test_a_name_that_has_gone_names_the_new_call(line, call):
    with pytest.raises(ImportError, match=call):
        exec(line, {})
