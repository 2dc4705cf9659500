"""Texts: rows of text and label, speakers, and tokenizer.json."""

import json

from . import Case
from .tables import classes, lines, split

GOOD = ("good film,pos", "bad film,neg")


def text(*rows, head="text,label\n"):
    return head + "\n".join(rows or GOOD) + "\n"


def read(*texts):
    """Asserts the texts, their tokens being words between spaces."""

    def same(data, path):
        found = [" ".join(data.words[i] for i in row if i) for row in data.x]
        assert found == list(texts)

    return same


def long(data, path):
    assert data.x.shape == (2, 200000)
    assert (data.x[0] == data.x[0, 0]).all()


def speakers(*names):
    def same(data, path):
        assert sorted(set(data.columns["speaker"])) == sorted(names)

    return same


def silent(data, path):
    speakers("ada")(data, path)
    assert data.note == "without two tokens and left out: bob"


def case(name, what, content, expected, **options):
    return Case(name, what, content, "text", expected, options)


CASES = [
    case("texts.csv", "nothing", text(), read("good film", "bad film")),
    case("texts.tsv", "tabs", text().replace(",", "\t"), read("good film", "bad film")),
    case(
        "texts.Csv", "a suffix in another case", text(), classes([1, 0], ("neg", "pos"))
    ),
    case(
        "texts-mark.csv",
        "Excel's byte order mark",
        "\ufeff" + text(),
        read("good film", "bad film"),
    ),
    case(
        "texts-mark.jsonl",
        "a byte order mark",
        "\ufeff" + lines({"text": "a b", "label": 0}),
        read("a b"),
    ),
    case(
        "separators.jsonl",
        "U+2028 and U+0085 in a text",
        '{"text": "a\u2028b", "label": 0}\n{"text": "c\u0085d", "label": 1}',
        read("a b", "c d"),
    ),
    case(
        "texts-long.csv",
        "a text of 400,000 letters",
        text("x " * 200000 + ",a", "y,b"),
        long,
        max_length=200000,
    ),
    case(
        "texts-long.jsonl",
        "a text of 400,000 letters",
        lines({"text": "x " * 200000, "label": 0}, {"text": "y", "label": 1}),
        long,
        max_length=200000,
    ),
    case(
        "texts-comma.csv",
        "a comma without quotes",
        text("good, film,pos"),
        r"row 1 has more fields than the header",
    ),
    case(
        "quote.csv",
        "a quote that is not closed",
        text('"good film,pos', "bad film,neg"),
        r"quote\.csv cannot be read \(ParserError",
    ),
    case("na.csv", "the text None", text("None,pos", "NA,neg"), read("none", "na")),
    case(
        "empty-text.csv",
        "an empty text",
        text("good,pos", ",neg"),
        r"text of row 2 is missing, 1 in all\.$",
    ),
    case(
        "empty-label.csv",
        "an empty label",
        text("good,pos", "bad,"),
        r"label of row 2 must not be missing",
    ),
    case(
        "no-text.csv",
        "no column text",
        text(head="words,label\n"),
        r"must have a column text, got 'words', 'label'",
    ),
    case(
        "upper.csv",
        "a column Text",
        text(head="Text,label\n"),
        r"must have a column text, got 'Text', 'label'",
    ),
    case(
        "list-text.jsonl",
        "a text that is a list",
        lines({"text": ["a", "b"], "label": 0}),
        r"text of row 1 must be a number or a text, got a list",
    ),
    case(
        "numbers.jsonl",
        "texts that are numbers",
        lines({"text": 5, "label": 0}, {"text": "a", "label": 1}),
        read("5", "a"),
    ),
    case(
        "row.jsonl",
        "a row that is a text",
        '"a"\n',
        r"row 1 must be an object, got 'a'",
    ),
    case(
        "texts-split.csv",
        "splits in any case",
        text("a,0,TEST", "b,1,Train", "c,0,valid", head="text,label,split\n"),
        split((1, 1, 1), [1, 0, 0]),
    ),
    case(
        "texts-dev.csv",
        "a split dev",
        text("a,0,dev", "b,1,train", head="text,label,split\n"),
        r"split of row 1 must be train, val or test, got 'dev'",
    ),
    case(
        "speakers.json",
        "texts of speakers",
        json.dumps({"ada": "hello", "bob": "hi"}),
        speakers("ada", "bob"),
    ),
    case(
        "silent.json",
        "a speaker of one letter",
        json.dumps({"ada": "hello", "bob": "h"}),
        silent,
    ),
    case(
        "speaker-list.json",
        "a speaker with a list",
        json.dumps({"ada": ["hello"]}),
        r"must be an object of speakers and their texts",
    ),
    case(
        "no-speaker.json",
        "no speakers",
        "{}",
        r"must have a speaker with two tokens or more",
    ),
    case(
        "emoji.csv",
        "letters of four bytes",
        text("\U0001f600 \u4f60,a", "b,b"),
        read("\U0001f600 \u4f60", "b"),
    ),
]
