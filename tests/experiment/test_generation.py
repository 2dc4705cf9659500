"""Texts that a client's model continues."""

import json

import numpy as np
import pandas as pd
import pytest

from experiment.runs import run
from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.data.sources import chat, text
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import generation, predict
from fedjax_pfl.experiment.generation import Generation

WORDS = ("<pad>", "<unk>", "a", "b", "c", "\n")


def after(x, length):
    """The token after the last one follows it in the order of numbers, 2 after 5."""
    last = x[np.arange(len(x)), length - 1]
    return np.eye(6, dtype=np.float32)[np.where(last == 5, 2, last + 1)]


def test_the_most_probable_tokens_follow_one_another():
    """Also where a text is full."""
    x = np.array([[2, 0, 0, 0], [3, 4, 0, 0], [2, 3, 4, 5]], np.int32)
    found = generation.continued(after, x, Generation(5))
    assert found.tolist() == [[3, 4, 5, 2, 3], [5, 2, 3, 4, 5], [2, 3, 4, 5, 2]]
    assert x[0].tolist() == [2, 0, 0, 0]


def test_token_0_may_be_a_token_like_others():
    x = np.array([[2, 0, 3, 0], [2, 0, 0, 0]], np.int32)
    assert text.lengths(x).tolist() == [3, 1]
    seen = []

    def zero(x, length):
        seen.append(length.tolist())
        return np.eye(6, dtype=np.float32)[[0, 0]]

    generation.continued(zero, x, Generation(3))
    assert seen == [[3, 1], [4, 2], [4, 3]]


def test_draws_have_the_probabilities_of_the_temperature():
    p = np.tile(np.float32([0, 0, 0.2, 0.8, 0, 0]), (20_000, 1))
    x = np.full((20_000, 1), 2, np.int32)
    for temperature, wanted in ((1.0, 0.8), (0.5, 0.64 / 0.68)):
        found = generation.continued(lambda *_: p, x, Generation(1, temperature, 3))
        assert {*found[:, 0].tolist()} == {2, 3}
        np.testing.assert_allclose((found == 3).mean(), wanted, atol=0.01)
    again = generation.continued(lambda *_: p, x, Generation(1, 0.5, 3))
    np.testing.assert_array_equal(again, found)


def test_an_answer_ends_where_the_template_ends_it():
    tokens, known = np.array([[2, 3, 5, 4]]), Preparation(words=WORDS, tokenizer="char")
    assert generation.written(tokens, known, "chat:a.jsonl") == ["ab"]
    assert generation.written(tokens, known, "text:a.json") == ["ab\nc"]


def test_prompts_end_where_an_answer_begins():
    given = [{"instruction": "Hi"}, {"instruction": "Hi", "output": "Oh"}]
    words = ("<pad>", "<unk>", *dict.fromkeys("user: Hi\nassistant: "))
    x = chat.prompts("f", given, "char", words, 24)
    whole = "user: Hi\nassistant: "
    assert (
        "".join(words[i] for i in x[0] if i)
        == "".join(words[i] for i in x[1] if i)
        == whole
    )
    short = chat.prompts("f", given, "char", words, 3)
    assert "".join(words[i] for i in short[0]) == "t: "


@pytest.mark.slow  # trains a network of tokens
def test_a_client_answers_from_its_run(tmp_path, capsys):
    path, folder = tmp_path / "chat.jsonl", tmp_path / "run"
    rows = [
        {"instruction": f"Say {word}", "output": word.upper(), "site": site}
        for site, word in (("x", "red"), ("y", "blue"))
        for _ in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--algo=local --dataset=chat:{path} --partition=natural:site --clients=2 --model=transformer --optimizer=adam --lr=0.01 --rounds=8 --workdir={folder}"
    assert run(*flags.split()) == 0
    path.write_text(json.dumps({"instruction": "Say blue"}) + "\n")
    ask = [str(folder), "--client=y", f"--input={path}"]
    assert run(*ask, "--tokens=9", command=predict.main) == 0
    found = pd.read_csv(folder / "predictions.csv")
    assert found.to_dict("records") == [{"row": 1, "client": "y", "text": "BLUE"}]
    assert (
        run(*ask, "--seed=1", command=predict.main) == 2
        and "needs --tokens" in capsys.readouterr().err
    )


def test_wrong_options_are_refused():
    for given, message in (
        ({"temperature": 1.0}, "--temperature needs --tokens"),
        ({"tokens": 0}, "`tokens` must be"),
        ({"tokens": 1, "temperature": -1.0}, "`temperature` must be"),
    ):
        with pytest.raises(InputError, match=message):
            generation.checked(None, given)
