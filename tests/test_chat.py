"""Conversations: their formats, the chat template, and the labels of answers."""

import json

import numpy as np
import pytest

from fedjax_pfl.data import loading
from fedjax_pfl.data.sources import chat
from fedjax_pfl.errors import InputError

ASKED = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Oh"}


def written(folder, *given):
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return f"chat:{path}"


def learned(data, row):
    """The texts of the tokens that a conversation teaches."""
    return "".join(data.words[i] for i in data.y[row] if i >= 0)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Oh"},
            ]
        },
        {"instruction": "Hi", "output": "Oh"},
        {"instruction": "Hi", "input": "", "output": "Oh"},
        {"instruction": "Hi", "context": "", "response": "Oh"},
    ],
)
def test_formats(row):
    assert chat.messages("row", row) == [ASKED, SAID]


def test_an_input_follows_its_instruction():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert chat.messages("row", row)[0]["content"] == "Add.\n\n1 2"


def test_the_labels_are_the_next_tokens_of_answers(tmp_path):
    more = [
        {"role": "system", "content": "s"},
        ASKED,
        SAID,
        ASKED,
        {"role": "assistant", "content": "Ah"},
    ]
    given = {"messages": [ASKED, SAID], "site": "a"}, {"messages": more, "site": "b"}
    data = loading.load(written(tmp_path, *given))
    whole = "user: Hi\nassistant: Oh\n"
    assert data.x.shape[1] == len("system: s\n") + 2 * len(whole) - 1
    assert "".join(data.words[i] for i in data.x[0, : len(whole) - 1]) == whole[:-1]
    assert learned(data, 0) == "Oh\n" and learned(data, 1) == "Oh\nAh\n"
    before = whole.index("O") - 1  # its next token is the answer's first
    assert np.flatnonzero(data.y[0] >= 0).tolist() == [before, before + 1, before + 2]
    assert (
        data.columns["site"].tolist() == ["a", "b"]
        and data.positions == data.x.shape[1]
    )


def test_a_cut_conversation_is_said(tmp_path):
    row = {"instruction": "Hi", "output": 80 * "o"}
    data = loading.load(written(tmp_path, row), max_length=40)
    assert data.note == "conversations cut to 40 tokens: 1"


def test_splits_and_what_is_left_out(tmp_path):
    rows = [
        {"instruction": 80 * str(i), "output": "Oh", "split": "test"} for i in range(2)
    ]
    rows += [
        {"instruction": "Hi", "output": "Oh", "split": x} for x in ("test", "train")
    ]
    data = loading.load(written(tmp_path, *rows), max_length=40)
    assert (len(data.x), data.num_train) == (2, 1)
    assert data.note == "conversations without an answer in 40 tokens left out: 2"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Hi"}, "row 1 must have messages, conversations, or the texts"),
        ({"instruction": "Hi", "output": 3}, "row 1 must have messages"),
        ({"messages": "Hi"}, "row 1: messages must be a list"),
        ({"messages": []}, "row 1: messages must be a list"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "a message must have"),
        ({"messages": ["Hi"]}, "row 1: a message must have role, one of user"),
        ({"messages": [{"role": "cat", "content": "Hi"}]}, "a message must have role"),
        ({"messages": [ASKED]}, "row 1 must have an answer"),
    ],
)
def test_wrong_rows_are_refused_with_their_place(row, message, tmp_path):
    with pytest.raises(InputError, match=message):
        loading.load(written(tmp_path, row))


TEMPLATE = """{{ bos_token }}{% for m in messages %}
<|{{ m['role'] }}|> {{ m['content'] | trim }} </s>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|> {% endif %}"""


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer.json and its chat template."""
    library = pytest.importorskip("tokenizers", reason="needs the extra data")
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    made = library.Tokenizer(
        library.models.WordLevel(
            {word: i for i, word in enumerate([*special, "Hi", "Oh", "yes"])}, "<unk>"
        )
    )
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special)
    made.save(str(tmp_path / "tokenizer.json"))
    config = {
        "chat_template": TEMPLATE,
        "bos_token": {"content": "<s>"},
        "eos_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "tokenizer.json"


def test_the_template_of_a_tokenizer_is_that_of_transformers(tokenizer, tmp_path):
    given = [ASKED, {"role": "assistant", "content": " Oh yes "}]
    data = loading.load(
        written(tmp_path, {"messages": given}), tokenizer=str(tokenizer)
    )
    tokens = ["<s>", "<|user|>", "Hi", "</s>", "<|assistant|>", "Oh", "yes", "</s>"]
    assert [data.words[i] for i in data.x[0]] == tokens[:-1]
    assert learned(data, 0) == "Ohyes</s>"
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    known = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), bos_token="<s>", chat_template=TEMPLATE
    )
    text = known.apply_chat_template(given, tokenize=False)
    assert chat.template(str(tokenizer))(given, False) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "The chat template of .* fails"),
        (
            "{{ raise_exception('no system') }}",
            "row 1: The chat template fails .*no system",
        ),
        ("{{ messages | length }}", "row 1: The chat template must write each message"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|fails"),
    ],
)
def test_templates_that_cannot_serve(template, message, tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match=message):
        loading.load(
            written(tmp_path, {"messages": [ASKED, SAID]}), tokenizer=str(tokenizer)
        )
