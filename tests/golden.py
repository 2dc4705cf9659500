"""Records the golden losses and the defaults of the methods named: `python
tests/golden.py ditto fedprox`.

For a new method, or after a change that is meant to move them; other methods' stay as
they are."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import conftest  # noqa: E402, F401  (the compiler's flags, before JAX starts)
import test_contract as contract  # noqa: E402

from fedjax_pfl import simulate  # noqa: E402
from fedjax_pfl.algorithms import ALGORITHMS  # noqa: E402
from fedjax_pfl.errors import choose  # noqa: E402


def recorded(known: dict, found: dict) -> dict:
    """Returns the recorded numbers, updated; new methods come last."""
    return known | found


def losses_text(losses: dict) -> str:
    return json.dumps(losses, indent=1) + "\n"


def defaults_text(defaults: dict) -> str:
    """One line for each method."""
    lines = [f' "{name}": {json.dumps(values)}' for name, values in defaults.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(methods: list[str]) -> None:
    for method in methods:
        choose("method", method, ALGORITHMS)
    losses = {m: [round(float(x), 6) for x in contract.learn(m)[1]] for m in methods}
    defaults = {m: simulate.hyperparameters(ALGORITHMS[m]) for m in methods}
    folder = Path(__file__).parent
    (folder / "golden.json").write_text(losses_text(recorded(contract.GOLDEN, losses)))
    (folder / "defaults.json").write_text(
        defaults_text(recorded(contract.DEFAULTS, defaults))
    )
    print(f"Recorded {', '.join(methods)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
