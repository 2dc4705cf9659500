"""Figures: what they draw, from made runs."""

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks import latents
from experiment import made, runs
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import attention, figures, results


def lines(figure, panel=0):
    """{label: [x, y]} of a panel."""
    return {
        x.get_label(): np.array(x.get_data(), float) for x in figure.axes[panel].lines
    }


@pytest.fixture
def sweep(tmp_path):
    for seed in (0, 1):
        made.run(tmp_path / f"a{seed}", seed=seed, gain=0.1 + 0.02 * seed)
    made.run(tmp_path / "b", "local", gain=0.0)
    return results.find([tmp_path])


def test_curves_are_means_over_seeds(sweep):
    drawn = figures.figures(sweep)
    assert set(drawn) == {"curves", "clients", "costs"}
    before, after = (lines(drawn["curves"], panel) for panel in (0, 1))
    np.testing.assert_allclose(
        before["fedavg"], [[0, 1, 2, 3], [0.5, 0.61, 0.72, 0.83]]
    )
    np.testing.assert_allclose(after["fedavg"][0], [1, 2, 3])
    assert before["majority baseline"][1][0] == 0.25
    assert len(drawn["curves"].axes[0].collections) == 2  # bands
    np.testing.assert_allclose(lines(drawn["costs"])["fedavg"][0], np.arange(4) * 0.006)


def test_before_and_after_have_one_scale_in_percent(tmp_path):
    """The loss has its own; a training without it would stretch the others."""
    figure = figures.of_run(made.run(tmp_path / "a"))
    before, after, loss = figure.axes
    assert before.get_ylim() == after.get_ylim() != loss.get_ylim()
    format = before.yaxis.get_major_formatter()
    assert [format(x) for x in (0.2, 0.925)] == ["20 %", "92.5 %"]
    assert "%" not in loss.yaxis.get_major_formatter()(0.2)


def test_more_than_eight_curves_are_small_multiples(tmp_path):
    for i in range(9):
        made.run(tmp_path / f"{i}", gain=0.01 * i, lr=0.1 * (i + 1))
    drawn = figures.figures(results.find([tmp_path]))
    panels = [x for x in drawn["curves"].axes if x.get_title()]
    assert panels[0].get_title() == "fedavg, lr=0.1" and len(panels) == 9
    found = {x.get_label(): x.get_ydata() for x in panels[8].lines}
    np.testing.assert_allclose(
        found["Before local training"], 0.5 + 0.08 * np.arange(4)
    )
    np.testing.assert_allclose(
        found["After local training"], 0.58 + 0.08 * np.arange(3)
    )
    assert len({axes.get_ylim() for axes in panels}) == 1
    by = [axes.get_xlabel() for axes in drawn["costs"].axes if axes.get_xlabel()]
    assert by == ["MB sent and received"] * 5 + ["seconds of training"] * 5


def test_attacked_runs_have_the_curve_of_benign_clients(tmp_path):
    made.run(tmp_path / "a", malicious="0.2:sign_flip")
    table = results.frame([tmp_path / "a"])
    benign = table[table["score"] == "acc"].assign(score="benign_acc", macro=0.9)
    figure = figures.curves(pd.concat([table, benign]), "acc")
    assert set(lines(figure)["fedavg"][1]) == {0.9}
    assert "benign clients" in figure.get_supylabel()


def test_compressed_runs_are_drawn_by_what_clients_sent(tmp_path):
    for name in ("top_k:0.1", "qsgd:4"):
        made.run(tmp_path / name, compress=name)
    drawn = figures.figures(results.find([tmp_path]))["uploads"]
    found = lines(drawn)["fedavg, compress=qsgd:4"]
    np.testing.assert_allclose(found[0], np.arange(4) * 0.002)
    np.testing.assert_allclose(found[1], [0.5, 0.6, 0.7, 0.8])
    assert {axes.get_xscale() for axes in drawn.axes} == {"log"}
    assert not any(axes.collections for axes in drawn.axes)


def test_clients_are_drawn_from_the_worst_to_the_best(sweep):
    found = lines(figures.clients(sweep))["local"]
    np.testing.assert_allclose(found[1][[0, -1]], [0.4, 0.6])
    for run in sweep:
        run.summary["headline"]["better"] = "min"
    found = lines(figures.clients(sweep))["local"]
    np.testing.assert_allclose(found[1][[0, -1]], [0.6, 0.4])


def test_one_run_has_its_loss(tmp_path):
    drawn = figures.figures([made.run(tmp_path / "a", "mnfl")])
    np.testing.assert_allclose(
        drawn["curves"].axes[2].lines[0].get_ydata(), [1, 1 / 2, 1 / 3]
    )


def test_a_methods_own_values_are_drawn_per_client(tmp_path):
    run = made.run(tmp_path / "a", "apfl")
    assert figures.own_values([run]) is None
    path, lines = run.path / "scores.jsonl", []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        alpha = [0.1 * i + row["round"] for i in row["ids"]]
        lines.append(json.dumps(row | {"method": {"alpha": alpha}}))
    path.write_text("\n".join(lines))
    (axes,) = figures.own_values([results.load(run.path)]).axes
    mean, *clients = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(mean, 0.15 + np.arange(4))
    np.testing.assert_allclose(clients[2], 0.2 + np.arange(4))


def test_the_partition_has_a_bubble_per_client_and_class():
    figure = figures.partition([[5, 0, 1], [0, 2, 0]], "title")
    (points,) = figure.axes[0].collections
    assert points.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1]]
    np.testing.assert_allclose(points.get_sizes(), [200, 40, 80])


def test_axes_of_a_partition_have_integers_or_names():
    axes = figures.partition([[5, 0], [0, 2]], "", ["H1", "H2"], ["0", "1"]).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["H1", "H2"]
    assert all(float(y).is_integer() for y in axes.get_yticks())


def test_the_command_writes_png_and_pdf(sweep, tmp_path, capsys):
    assert figures.main([str(tmp_path), f"--output={tmp_path / 'drawn'}"]) == 0
    written = {file.name for file in (tmp_path / "drawn").iterdir()}
    names = ("curves", "clients", "costs")
    assert written == {f"{x}.{kind}" for x in names for kind in ("png", "pdf")}
    assert "curves.png" in capsys.readouterr().out


def test_a_partition_that_cannot_be_read_is_left_out(tmp_path, monkeypatch, caplog):
    made.run(tmp_path / "run")  # without inputs.json, as of an earlier version

    def gone(path):
        raise InputError("The data set is gone.")

    monkeypatch.setattr(results, "rebuilt", gone)
    assert figures.main([str(tmp_path / "run")]) == 0
    written = {file.name for file in (tmp_path / "run" / "figures").iterdir()}
    assert "curves.png" in written and "partition.png" not in written
    assert "Not drawn: partition.png. " in caplog.text and "is gone" in caplog.text


def test_attention_has_a_row_per_prediction():
    image, maps = np.ones((3, 8, 8, 1)), np.zeros((3, 4, 4))
    figure = attention.figure({"image": image, "global": maps, "all": maps + 2})
    drawn = [axes.images for axes in figure.axes]
    assert [len(images) for images in drawn] == [1] * 3 + [2] * 6
    assert drawn[8][1].get_extent() == [-0.5, 7.5, 7.5, -0.5]


NET = """
from fedjax_pfl.models import layers, nets

def net(input_shape, num_classes, rngs):
    body = nets.Conv("net", input_shape, (4,), (2,), (6,), rngs)
    return nets.Net(body, layers.linear(6, num_classes, rngs))
"""


@pytest.mark.slow
def test_attention_is_that_of_each_head(tmp_path):
    """FedCP scores both heads alone; their maps are drawn before the sum's."""
    path, file = tmp_path / "run", tmp_path / "net.py"
    file.write_text(NET)
    given = [*runs.SMALL, f"--model={file}:net", "--algo=fedcp", "--rounds=1"]
    assert runs.run(*given, f"--workdir={path}") == 0
    assert figures.main([str(path), "--attention=1"]) == 0
    assert (path / "figures" / "attention.png").stat().st_size
    found = attention.maps(results.load(path), 1, images=3)
    assert list(found) == ["image", "global", "personal", "all"]
    assert all(np.isfinite(x).all() and len(x) == 3 for x in found.values())
    assert found["all"].max() > 0 and found["all"].min() == 0
    assert np.any(found["global"] != found["personal"])
    size = results.load(path).experiment.partition.test_sizes[1]
    assert len(attention.maps(results.load(path), 1, images=size + 5)["image"]) == size
    with pytest.raises(InputError, match="`client` must be in"):
        attention.maps(results.load(path), 5)


@pytest.mark.slow
def test_probes_find_what_each_latent_holds():
    """z holds the label and c the client."""
    rng = np.random.default_rng(0)
    client, label = np.repeat([0, 1, 2], 60), np.tile([0, 1], 90)
    z = np.stack([label, client * 0], 1) * 5 + rng.normal(size=(180, 2))
    c = np.eye(3)[client] * 9 + rng.normal(size=(180, 3))
    kinds = np.array(["a", "b", "a"])[client]
    columns = {"client": client, "kind": kinds, "label": label}
    found = latents.probes(pd.DataFrame(columns).assign(z=list(z), c=list(c)))
    assert found["label_from_z"] > 0.95 > 0.65 > found["label_from_c"]
    assert found["kind_from_c"] > 0.95 and found["kind_from_z"] < 0.75
    assert found["kind_chance"] == pytest.approx(2 / 3) and found["label_chance"] == 0.5
    assert found["silhouette_c"] > 0.7 > 0.1 > found["silhouette_z"]


def test_few_labels_find_the_digit_where_it_is():
    """z holds the label, c nothing, and the pixels noise."""
    rng, label = np.random.default_rng(0), np.tile([0, 1], 60)
    z = np.stack([label, label * 0], 1) * 5 + rng.normal(size=(120, 2))
    c, x = rng.normal(size=(120, 2)), rng.normal(size=(120, 2, 2, 1))
    of = pd.DataFrame({"label": label, "z": list(z), "c": list(c), "x": list(x)})
    found = latents.few_labels(of).loc[50]
    assert list(found.index) == ["z", "c", "z and c", "pixels"]
    assert min(found["z"], found["z and c"]) > 0.95 > 0.65 > max(found[["c", "pixels"]])
