"""Tables: .csv, .tsv, .json and .jsonl."""

import codecs
import gzip
import json

import numpy as np
import pandas as pd

from . import Case

HEAD = "a,b,label\n"
ROWS = ("1,5,0", "2,7,1", "3,6,0", "4,8,1")


def text(*rows, head=HEAD, end="\n"):
    return head + end.join(rows or ROWS) + end


def standard(x):
    """Returns numbers of mean 0 and deviation 1."""
    x = np.asarray(x, np.float64)
    return (x - x.mean(axis=0)) / np.where(x.std(axis=0) > 0, x.std(axis=0), 1)


def inputs(*columns, y=(0, 1, 0, 1)):
    """Asserts the inputs, standardised, and the labels."""

    def same(data, path):
        wanted = standard(np.stack(columns, axis=1))
        np.testing.assert_allclose(data.x, wanted, rtol=1e-5, atol=1e-6)
        assert data.y.tolist() == list(y)

    return same


def by_pandas(*columns, **options):
    """Asserts the inputs to be those columns of pandas' own reader."""

    def same(data, path):
        frame = pd.read_csv(path, **options)
        wanted = standard(frame[list(columns)].to_numpy())
        np.testing.assert_allclose(data.x, wanted, rtol=1e-5, atol=1e-6)
        assert data.y.tolist() == frame["label"].tolist()

    return same


def filled(rule):
    def same(data, path):
        a = pd.read_csv(path)["a"]
        wanted = standard(a.fillna(getattr(a, rule)()))
        np.testing.assert_allclose(data.x[:, 0], wanted, rtol=1e-5, atol=1e-6)
        assert data.x.shape == (4, 2)

    return same


def marked(data, path):
    filled("mean")(data._replace(x=data.x[:, [0, 2]]), path)
    assert data.x[:, 1].tolist() == [0, 1, 0, 0]


def onehot(data, path):
    kinds = pd.get_dummies(pd.read_csv(path)["kind"])
    np.testing.assert_allclose(data.x[:, 1:], kinds)
    assert data.inputs[1].categories == tuple(kinds.columns)


def noted(note):
    def same(data, path):
        assert data.note == note
        assert data.x.shape[1] == 1

    return same


def split(sizes, labels):
    """Asserts the sizes of training, validation and test, and the labels in order."""

    def same(data, path):
        held = 0 if data.validation is None else int(data.validation.sum())
        found = data.num_train - held, held, len(data.y) - data.num_train
        assert found == sizes
        assert data.y.tolist() == labels

    return same


def classes(y, names=None):
    def same(data, path):
        assert data.y.tolist() == y
        assert data.classes == names

    return same


def column(name, values):
    def same(data, path):
        assert list(data.columns[name]) == values
        assert name not in [x.name for x in data.inputs]

    return same


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def case(name, what, content, expected, kind="table", **options):
    return Case(name, what, content, kind, expected, options)


MANY = "\n".join(["a,label", *(f"{i},{i % 2}" for i in range(5000))])
NUMBERS = (
    ("exponent", "numbers such as 1e3", ("1e3", "2E-2", "-3e+1", "4")),
    ("signed", "numbers with a sign", ("+1", "-2", "+3.5", "0")),
    ("spaces", "spaces around numbers", (" 1", "2 ", " 3 ", "4")),
    ("points", "numbers such as .5 and 5.", (".5", "5.", "-.25", "1")),
    ("large", "numbers up to 1e30", ("1e30", "2e30", "3e30", "4e30")),
    ("long", "numbers of 20 digits", ("1" * 20, "2" * 20, "3" * 20, "4" * 20)),
)
MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "NULL", "None", "<NA>", "#N/A")
CASES = [
    case("plain.csv", "nothing", text(), by_pandas("a", "b")),
    case("plain.CSV", "a suffix in upper case", text(), by_pandas("a", "b")),
    case("plain.tsv", "tabs", text().replace(",", "\t"), by_pandas("a", "b", sep="\t")),
    case("mark.csv", "Excel's byte order mark", "\ufeff" + text(), by_pandas("a", "b")),
    case("crlf.csv", "line ends of Windows", text(end="\r\n"), by_pandas("a", "b")),
    case(
        "quoted.csv",
        "quoted numbers",
        text('"1",5,0', *ROWS[1:]),
        inputs([1, 2, 3, 4], [5, 7, 6, 8]),
    ),
    case(
        "blank.csv",
        "an empty line",
        text(*ROWS[:2], "", *ROWS[2:]),
        by_pandas("a", "b"),
    ),
    case("no-end.csv", "no line end at the end", text()[:-1], by_pandas("a", "b")),
    case(
        "zipped.csv.gz",
        "gzip",
        gzip.compress(text().encode(), mtime=0),
        by_pandas("a", "b"),
    ),
    case("many.csv", "5,000 rows", MANY, by_pandas("a")),
    case(
        "torn.csv.gz",
        "half of a gzip file",
        gzip.compress(text().encode(), mtime=0)[:20],
        r"torn\.csv\.gz cannot be read \(",
    ),
    case(
        "no-zip.csv.gz",
        "a text named .gz",
        text(),
        r"no-zip\.csv\.gz cannot be read \(",
    ),
    case(
        "latin.csv",
        "Latin-1",
        text("1,5,é", *ROWS[1:]).encode("latin-1"),
        r"latin\.csv cannot be read \(UnicodeDecodeError",
    ),
    case(
        "utf16.csv",
        "UTF-16",
        codecs.BOM_UTF16_LE + text().encode("utf-16-le"),
        r"utf16\.csv cannot be read \(UnicodeDecodeError",
    ),
    case("zero.csv", "no content", b"", r"zero\.csv (cannot be read|must have)"),
    case(
        "nul.csv",
        "a zero byte",
        text("1,5,0", "2,\0,1"),
        r"nul\.csv: b of row 2 must be a number",
    ),
    case("head.csv", "a header alone", HEAD, r"head\.csv must have rows"),
    case(
        "no-head.csv",
        "no header",
        text(head=""),
        r"must have a column `label`, or `target`, got '1', '5', '0'",
    ),
    case(
        "semicolons.csv",
        "semicolons",
        text().replace(",", ";"),
        r"must have a column `label`, or `target`, got 'a;b;label'",
    ),
    case(
        "twice.csv",
        "two columns of one name",
        text(head="a,a,label\n"),
        r"must have one column a, got two",
    ),
    case(
        "unnamed.csv",
        "a column without a name",
        text(head="a,,label\n"),
        r"column 2 must have a name",
    ),
    case(
        "few.csv",
        "a row with few fields",
        text("1,5,0", "2,7"),
        r"row 2 must have 3 fields, as the header, got 2",
    ),
    case(
        "surplus.csv",
        "a row with surplus fields",
        text("1,5,0", "2,7,1,9"),
        r"surplus\.csv cannot be read \(ParserError.*line 3",
    ),
    case(
        "surplus-first.csv",
        "surplus fields in row 1",
        text("1,5,0,9", "2,7,1"),
        r"row 1 has more fields than the header",
    ),
    case(
        "index.csv",
        "surplus fields in all rows",
        text("9,1,5,0", "9,2,7,1"),
        r"row 1 has more fields than the header",
    ),
    case(
        "both.csv",
        "label and target",
        text(head="a,target,label\n"),
        r"must have a column `label`, or `target`, got 'a', 'target', 'label'",
    ),
    case(
        "no-inputs.csv",
        "no numbers",
        text("x,0", "y,1", head="a,label\n"),
        r"must have a column of numbers as input, got a \(text\), label \(label\)",
    ),
    case(
        "unknown.xlsx",
        "another format",
        b"PK",
        r"must end in one of \.csv, \.tsv, \.json, \.jsonl, \.ndjson",
    ),
    case(
        "thousands.csv",
        'a cell "1,006"',
        text('"1,006",5,0', *ROWS[1:]),
        r"a of row 1 must be a number, got '1,006'",
    ),
    case(
        "comma.csv",
        "decimal commas",
        text('"1,5",5,0', *ROWS[1:]),
        r"a of row 1 must be a number, got '1,5'",
    ),
    case(
        "unit.csv",
        "a number with a unit",
        text(*ROWS[:3], "4 kg,8,1"),
        r"a of row 4 must be a number, got '4 kg'",
    ),
    case(
        "question.csv",
        "a question mark",
        text("1,5,0", "?,7,1", *ROWS[2:]),
        r"a of row 2 must be a number, got '\?'",
    ),
    case(
        "underscore.csv",
        "1_000",
        text("1_000,5,0", *ROWS[1:]),
        r"a of row 1 must be a number, got '1_000'",
    ),
    case(
        "infinite.csv",
        "an infinity",
        text("1,5,0", "inf,7,1", *ROWS[2:]),
        r"a of row 2 must be finite",
    ),
    case(
        "overflow.csv",
        "1e400",
        text("1,5,0", "1e400,7,1", *ROWS[2:]),
        r"a of row 2 must be finite",
    ),
    case(
        "hex.csv",
        "0x10",
        text("0x10,5,0", *ROWS[1:]),
        r"a of row 1 must be a number, got '0x10'",
    ),
    *(
        case(
            f"{name}.csv",
            what,
            text(*(f"{x},5,{i % 2}" for i, x in enumerate(cells))),
            inputs([float(x) for x in cells], [5] * 4),
        )
        for name, what, cells in NUMBERS
    ),
    *(
        case(
            f"missing-{i}.csv",
            f"a missing cell `{word}`",
            text("1,5,0", f"{word},7,1", *ROWS[2:]),
            r"a of row 2 is missing, 1 in all\. --missing=mean\|median\|indicator fills",
        )
        for i, word in enumerate(MISSING)
    ),
    case(
        "gaps.csv",
        "a gap in every column",
        text(",5,0", "2,,1", *ROWS[2:]),
        r"a of row 1 is missing, 1 in all",
    ),
    case(
        "all-missing.csv",
        "a column without a cell",
        text(",5,0", ",7,1"),
        r"a must have a number in the training rows",
        missing="mean",
    ),
    case(
        "mean.csv",
        "missing, filled by the mean",
        text("1,5,0", ",7,1", *ROWS[2:]),
        filled("mean"),
        missing="mean",
    ),
    case(
        "median.csv",
        "missing, filled by the median",
        text("1,5,0", "NA,7,1", *ROWS[2:]),
        filled("median"),
        missing="median",
    ),
    case(
        "marked.csv",
        "missing, with an indicator",
        text("1,5,0", "nan,7,1", *ROWS[2:]),
        marked,
        missing="indicator",
    ),
    case(
        "constant.csv",
        "a constant column",
        text(*(f"{i},7,{i % 2}" for i in range(4))),
        inputs(range(4), [7] * 4),
    ),
    case(
        "constant-half.csv",
        "a constant that is no binary fraction",
        text(*(f"{i},0.1,{i % 2}" for i in range(4))),
        inputs(range(4), [0] * 4),
    ),
    case(
        "truth.csv",
        "booleans",
        text("1,True,0", "2,false,1", "3,TRUE,0", "4,False,1"),
        inputs(range(4), [1, 0, 1, 0]),
    ),
    case(
        "truth-gap.csv",
        "booleans with a gap",
        text("1,True,0", "2,,1", "3,True,0", "4,False,1"),
        r"b of row 2 is missing",
    ),
    case(
        "category.csv",
        "a category",
        text("1,x,0", "2,y,1", "3,x,0", "4,y,1", head="a,kind,label\n"),
        noted("no inputs: kind (category)"),
    ),
    case(
        "onehot.csv",
        "a category as inputs",
        text("1,x,0", "2,y,1", "3,x,0", "4,y,1", head="a,kind,label\n"),
        onehot,
        categories="onehot",
    ),
    case(
        "category-gap.csv",
        "a category with a gap",
        text("1,x,0", "2,,1", "3,x,0", "4,y,1", head="a,kind,label\n"),
        column("kind", ["x", None, "x", "y"]),
    ),
    case(
        "category-gap.jsonl",
        "a category with null",
        lines(
            *({"a": i, "kind": k, "label": i % 2} for i, k in enumerate("xx_y"))
        ).replace('"_"', "null"),
        column("kind", ["x", "x", None, "y"]),
    ),
    case(
        "onehot-gap.csv",
        "a category with a gap as inputs",
        text("1,x,0", "2,,1", "3,x,0", "4,y,1", head="a,kind,label\n"),
        lambda data, path: np.testing.assert_array_equal(
            data.x[:, 1:], [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
        ),
        categories="onehot",
        missing="indicator",
    ),
    case(
        "date-gap.csv",
        "a date with a gap",
        text("1,2020-01-02,0", "2,,1", head="a,day,label\n"),
        noted("no inputs: day (date)"),
    ),
    case(
        "site-gap.csv",
        "an identifier with a gap",
        text("1,x,0", "2,,1", head="a,site,label\n"),
        column("site", ["x", None]),
    ),
    case(
        "words.csv",
        "the words NA and None as categories",
        text("1,None,0", "2,y,1", "3,None,0", "4,y,1", head="a,kind,label\n"),
        column("kind", ["None", "y", "None", "y"]),
    ),
    case(
        "date.csv",
        "a date",
        text("1,2020-01-02,0", "2,2020-01-03,1", head="a,day,label\n"),
        noted("no inputs: day (date)"),
    ),
    case(
        "note.csv",
        "a text with commas and line ends",
        text('1,"a, b\nc",0', "2,d,1", head="a,note,label\n"),
        column("note", ["a, b\nc", "d"]),
    ),
    case(
        "patient.csv",
        "numbers that identify",
        text(head="patient,b,label\n"),
        column("patient", ["1", "2", "3", "4"]),
    ),
    case(
        "zeros.csv",
        "an identifier with leading zeros",
        text("01,5,0", "002,7,1", head="ward_id,b,label\n"),
        column("ward_id", ["01", "002"]),
    ),
    case(
        "owner.csv",
        "numbers given to natural:",
        text(),
        column("a", ["1", "2", "3", "4"]),
        owner="a",
    ),
    case(
        "no-owner.csv",
        "an unknown column for natural:",
        text(),
        r"must have a column c, got a, b",
        owner="c",
    ),
    case(
        "owner-gap.csv",
        "an owner without a name",
        text("1,5,0", ",7,1"),
        r"a of row 2 is missing, 1 in all\.$",
        owner="a",
    ),
    case(
        "no-label.csv",
        "an empty label",
        text("1,5,0", "2,7,"),
        r"label of row 2 must not be missing, got ''",
    ),
    case(
        "huge-label.csv",
        "a label of 1000000000",
        text("1,5,0", "2,7,1000000000", *ROWS[2:]),
        r"label of row 2 must be a class number in \[0, 1,048,576\), got '1000000000'",
    ),
    case(
        "half-label.csv",
        "a label of 0.5",
        text("1,5,0", "2,7,0.5", *ROWS[2:]),
        r"label of row 2 must be a class number .* got '0\.5'",
    ),
    case(
        "minus-label.csv",
        "a label of -1",
        text("1,5,0", "2,7,-1", *ROWS[2:]),
        r"label of row 2 must be a class number .* got '-1'",
    ),
    case(
        "word-label.csv",
        "a word among class numbers",
        text("1,5,0", "2,7,x", *ROWS[2:]),
        r"label of row 2 must be a class number .* got 'x'",
    ),
    case(
        "float-labels.csv",
        "labels 0.0 ... 11.0",
        text(*(f"{i},5,{i}.0" for i in range(12))),
        classes(list(range(12))),
    ),
    case(
        "named-labels.csv",
        "labels of words",
        text("1,5,yes", "2,7,no", "3,6,yes"),
        classes([1, 0, 1], ("no", "yes")),
    ),
    case(
        "none-labels.csv",
        "labels None and NA",
        text("1,5,None", "2,7,NA", "3,6,None"),
        classes([1, 0, 1], ("NA", "None")),
    ),
    case(
        "split.csv",
        "splits in any case",
        text(
            "1,5,0,Test",
            "2,7,1,train",
            "3,6,0,Val",
            "4,8,1,TRAIN",
            "5,9,1,validation",
            head="a,b,label,split\n",
        ),
        split((2, 2, 1), [1, 1, 0, 1, 0]),
    ),
    case(
        "split-2.csv",
        "splits training, valid, testing",
        text(
            "1,5,0,testing", "2,7,1,training", "3,6,0,valid", head="a,b,label,split\n"
        ),
        split((1, 1, 1), [1, 0, 0]),
    ),
    case(
        "dev.csv",
        "a split dev",
        text("1,5,0,train", "2,7,1,dev", head="a,b,label,split\n"),
        r"split of row 2 must be train, val or test, got 'dev'",
    ),
    case(
        "no-split.csv",
        "an empty split",
        text("1,5,0,train", "2,7,1,", head="a,b,label,split\n"),
        r"split of row 2 must be train, val or test",
    ),
    case(
        "no-train.csv",
        "test rows alone",
        text("1,5,0,test", head="a,b,label,split\n"),
        r"must have rows with split=train",
    ),
    case(
        "targets.csv",
        "two targets",
        text("1,5,.5", "2,7,1", head="a,target,target_2\n"),
        lambda data, path: np.testing.assert_allclose(data.y, [[5, 0.5], [7, 1]]),
    ),
    case(
        "target-gap.csv",
        "a missing target",
        text("1,5", "2,", head="a,target\n"),
        r"target of row 2 is missing, 1 in all\.$",
    ),
    case(
        "objects.json",
        "JSON rows",
        json.dumps([{"a": 1, "label": 0}, {"a": 2, "label": 1}]),
        inputs([1, 2], y=(0, 1)),
    ),
    case(
        "lines.jsonl",
        "JSON lines",
        lines({"a": 1, "label": 0}, {"label": 1, "a": 2}),
        inputs([1, 2], y=(0, 1)),
    ),
    case(
        "torn.jsonl",
        "half of a line",
        lines({"a": 1, "label": 0}) + '\n{"a": 2, "la',
        r"torn\.jsonl cannot be read \(.*line 2",
    ),
    case(
        "lists.jsonl",
        "rows that are lists",
        lines([1, 0], [2, 1]),
        r"row 1 must be an object, got \[1, 0\]",
    ),
    case(
        "list-cell.jsonl",
        "a list in a cell",
        lines({"a": [1], "label": 0}),
        r"a of row 1 must be a number or a text, got a list",
    ),
    case(
        "object-cell.jsonl",
        "an object in a cell",
        lines({"a": {"b": 1}, "label": 0}),
        r"a of row 1 must be a number or a text, got an object",
    ),
    case(
        "null.jsonl",
        "a null",
        lines({"a": 1, "label": 0}, {"a": None, "label": 1}),
        r"a of row 2 is missing",
    ),
    case(
        "absent.jsonl",
        "a row without a field",
        lines({"a": 1, "label": 0}, {"label": 1}),
        r"a of row 2 is missing",
    ),
    case(
        "no-label.jsonl",
        "a row without a label",
        lines({"a": 1, "label": 0}, {"a": 2}),
        r"label of row 2 must not be missing",
    ),
    case(
        "nan.jsonl",
        "NaN in JSON",
        '{"a": NaN, "label": 0}\n{"a": 1, "label": 1}',
        r"a of row 1 is missing",
    ),
    case(
        "twice.jsonl",
        "a name twice in an object",
        '{"a": 1, "a": 2, "label": 0}',
        r"cannot be read \(.*line 1.*a name twice",
    ),
    case(
        "text-number.jsonl",
        "a word among numbers",
        lines({"a": 1, "label": 0}, {"a": "x", "label": 1}),
        r"a of row 2 must be a number, got 'x'",
    ),
    case(
        "text-numbers.jsonl",
        "numbers as texts",
        lines({"a": "1", "label": "0"}, {"a": "2", "label": "1"}),
        inputs([1, 2], y=(0, 1)),
    ),
    case(
        "truth.jsonl",
        "booleans of JSON",
        lines({"a": True, "label": 0}, {"a": False, "label": 1}),
        inputs([1, 0], y=(0, 1)),
    ),
    case(
        "deep.json",
        "brackets nested 100,000 times",
        "[" * 100000,
        r"deep\.json cannot be read \(RecursionError",
    ),
    case(
        "object.json",
        "an object for a table",
        "{}",
        r"must hold rows with named columns",
    ),
    case("none.json", "no rows", "[]", r"must hold rows with named columns"),
    case("zero.jsonl", "no content", b"", r"must hold rows with named columns"),
    case(
        "huge-number.jsonl",
        "an integer of 400 digits",
        '{"a": ' + "9" * 400 + ', "label": 0}\n{"a": 1, "label": 1}',
        r"a of row 1 must be (finite|a number)",
    ),
]
