"""Recording golden numbers changes nothing but the methods named."""

from pathlib import Path

import golden
import test_contract as contract

FOLDER = Path(__file__).parent


def test_what_is_not_named_stays_to_the_letter():
    assert (
        golden.losses_text(golden.recorded(contract.GOLDEN, {}))
        == (FOLDER / "golden.json").read_text()
    )
    assert (
        golden.defaults_text(golden.recorded(contract.DEFAULTS, {}))
        == (FOLDER / "defaults.json").read_text()
    )


def test_one_method_is_renewed_and_a_new_one_comes_last():
    found = golden.recorded({"a": 1, "b": 2}, {"a": 3, "c": 4})
    assert found == {"a": 3, "b": 2, "c": 4} and list(found) == ["a", "b", "c"]
