"""The import of the package."""

import subprocess
import sys

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
