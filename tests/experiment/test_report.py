"""The command `report`: tables in four formats."""

import re

import pytest

from experiment import made
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import report


@pytest.fixture
def sweep(tmp_path):
    for seed in (0, 1):
        made.run(tmp_path / "runs" / f"a{seed}", seed=seed, gain=0.1)
    made.run(tmp_path / "runs" / "b", "local", gain=0.0, status="interrupted")
    return str(tmp_path / "runs")


def printed(capsys, *argv):
    assert report.main(argv) == 0
    return capsys.readouterr().out


def test_markdown(sweep, capsys):
    text = printed(capsys, sweep, "--target=0.7,0.8")
    assert text.startswith("acc (%) after the last round\n\n| method ")
    assert re.search(r"\| fedavg +\| 80.0 ± 0.0 ", text)
    assert re.search(r"First reached: pre/acc\n\n\| method +\| rounds to 70.0 % ", text)
    assert text.rstrip().endswith("b: interrupted.")


def test_one_method_has_all_scores_at_a_chosen_round(sweep, capsys):
    text = printed(capsys, f"{sweep}/a0", "--best=val/acc")
    assert "after the round with the best val/acc" in text
    assert re.search(r"acc_present \(%\) +\| before +\| 85.0 ", text)


def test_csv_has_numbers(sweep, capsys):
    head, *rows = printed(capsys, sweep, "--format=csv").splitlines()
    assert head.startswith("label,point,score,macro_mean,macro_std,")
    values = next(row for row in rows if row.startswith("fedavg,pre,acc,")).split(",")
    assert float(values[3]) == pytest.approx(0.8)


@pytest.mark.slow
def test_html_is_one_file_with_figures_and_every_client(sweep, tmp_path, capsys):
    file = tmp_path / "page.html"
    out = printed(capsys, sweep, "--format=html", f"--output={file}")
    text = file.read_text()
    assert out.strip() == str(file) and text.count("data:image/svg+xml;base64,") == 3
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    clients = text[text.index("<h2>Clients") :]
    assert re.search(r"<td>local</td>\s*<td>3</td>\s*<td>60.0</td>", clients)
    assert "<script>" in text and "&lt;td" not in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--format=pdf"], "pdf"),
        (["--target=many"], "must be numbers"),
        (["--target=0.5", "--score=pre/nothing"], "pre/nothing"),
        (["--formt=csv"], "--format"),
    ],
)
def test_wrong_flags(sweep, argv, message):
    with pytest.raises(InputError, match=re.escape(message)):
        report.main([sweep, *argv])
