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
    away = {"status": "interrupted", "data_dir": "/data" * 20}
    made.run(tmp_path / "runs" / "b", "local", gain=0.0, **away)
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
    header = re.findall(r"<th>(.*?)</th>", clients)[:4]
    assert header == ["method", "client", "before", "after"]
    assert re.search(r"<td>local</td>\s*<td>3</td>\s*<td>60.0</td>", clients)
    assert "<script>" in text and "&lt;td" not in text
    lines = re.findall(r"<d[td]>(.*?)</d[td]>", text[: text.index("<table")])
    titles = ["Data", "Partition", "Clients", "Model", "Seeds"]
    assert lines[::2] == titles and lines[-1] == "0, 1"
    assert "overflow: auto" not in text and "max-height" not in text  # nothing is cut
    assert f"<td>{'/data' * 20}</td>" in text
    assert text.index("<h2>Settings that differ") < text.index("<th>algo")


def test_the_head_has_defaults_that_act_and_other_values(tmp_path):
    dirichlet = {"partition": "dirichlet_hsu", "alpha": 0.1, "data_fraction": 0.5}
    runs = [made.run(tmp_path / "a", **dirichlet, clients=3, malicious="0.5:sign_flip")]
    assert report.head(runs) == {
        "Data": "digits; data_fraction=0.5",
        "Partition": "dirichlet_hsu; alpha=0.1",
        "Clients": "3; malicious=0.5:sign_flip",
        "Model": "auto",
        "Seeds": "0",
    }
    runs += [made.run(tmp_path / "b", partition="iid", seed=1)]
    found = report.head(runs)
    assert found["Partition"] == "dirichlet_hsu, iid; alpha=0.1"
    assert found["Seeds"] == "0, 1" and found["Clients"].startswith("3, 20;")


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
