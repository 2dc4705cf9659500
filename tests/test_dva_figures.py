"""FedDVA's figures and probes, on an encoder and a decoder of which it is known what z
and c hold."""

import numpy as np
import pytest
from PIL import Image

from experiments import dva_figures as figures, dva_run

SIDE = 12
GRID = np.stack(np.meshgrid(np.arange(2, SIDE), np.arange(2, SIDE), indexing="ij"), -1)
KINDS = ("plain", "sine")


def decode(z, c):
    """A blob at z, the brightness of the first row and of the first column by c."""
    z, c = (np.asarray(part)[:, None, None] for part in (z, c))
    x = np.full((len(z), SIDE, SIDE, 1), -1.0)
    x[:, 2:, 2:, 0] = 2 * np.exp(-(((GRID[None] - 6.5 - z) / 1.3) ** 2).sum(-1)) - 1
    x[:, :1, 1:], x[:, 1:, :1] = c[..., :1], c[..., 1:]
    return np.clip(x, -1, 1)


def encode(x):
    light = (np.asarray(x)[:, 2:, 2:, 0] + 1)[..., None]
    z = (light * GRID).sum((1, 2)) / light.sum((1, 2)) - 6.5
    return z, np.stack([x[:, 0, 1:].mean((1, 2)), x[:, 1:, 0].mean((1, 2))], -1)


def views(clients=4, n=40):
    """Four classes, the corners of z; a client's kind, its place modulo 2, is the sign
    of c."""
    made = []
    for client in range(clients):
        rng = np.random.default_rng(client)
        y = np.arange(n) % 4
        z = 2 * np.stack([y // 2, y % 2], -1) - 1 + rng.normal(0, 0.2, (n, 2))
        c = np.array([[0.5, -0.5]]) * (1 - 2 * (client % 2)) + rng.normal(
            0, 0.05, (n, 2)
        )
        made.append(figures.View(f"client {client}", decode(z, c), y, encode, decode))
    return made


def written(folder, *names):
    """Both files of each figure; the width and the share of pixels that are not white
    of the PNG."""
    for name in names:
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        picture = np.asarray(Image.open(folder / f"{name}.png").convert("L"))
        assert picture.shape[1] > 200 and np.mean(picture < 250) > 0.01
    assert {path.stem for path in folder.iterdir()} == set(names)


def test_reconstructions(tmp_path):
    figures.reconstructions(tmp_path / "reconstructions", views(2), columns=5)
    written(tmp_path, "reconstructions")


@pytest.mark.slow  # three figures; the planes that they draw are below
def test_manifolds(tmp_path):
    clients = views()
    figures.manifolds(tmp_path, clients[0], figures.latents(clients)[1])
    written(tmp_path, "manifold_zc", "manifold_z", "manifold_c")


def test_scatter(tmp_path):
    figures.scatter(tmp_path / "tsne", views(3, 20))
    written(tmp_path, "tsne")


def test_swaps(tmp_path):
    figures.swaps(tmp_path / "swaps", *views(2), columns=4)
    written(tmp_path, "swaps")


def test_paths_follow_the_widest_axis():
    rng = np.random.default_rng(0)
    points = (
        rng.normal(size=(500, 1)) * np.array([[3.0, 4.0, 0.0]])
        + rng.normal(size=(500, 3)) * 0.01
        + 1
    )
    path = figures.path_through(points, 5)
    assert np.allclose(path[2], points.mean(axis=0)) and np.allclose(
        np.ptp(path, axis=0), [12, 16, 0], rtol=0.1, atol=0.1
    )
    plane = figures.plane_through(points, 5)
    assert plane.shape == (5, 5, 3) and np.allclose(plane[:, 2], path)


@pytest.mark.parametrize("d, shape", [(1, (1, 8, 1)), (2, (8, 8, 2))])
def test_planes_of_few_dimensions(d, shape):
    assert (
        figures.plane_through(np.random.default_rng(0).normal(size=(20, d))).shape
        == shape
    )


def test_one_image_has_a_path_of_one_point():
    assert np.ptp(figures.plane_through(np.ones((1, 3))), axis=(0, 1)).max() == 0


def test_probes_find_what_is_there():
    found = figures.probes(views(), [KINDS[k % 2] for k in range(4)])
    assert found["kind_from_c"] > 0.95 and found["label_from_z"] > 0.95
    assert found["kind_from_z"] < 0.7 and found["label_from_c"] < 0.5
    assert (found["kind_chance"], found["label_chance"]) == (0.5, 0.25)
    assert -1 <= found["silhouette_z"] < found["silhouette_c"] <= 1


def test_a_probe_of_one_kind_is_right():
    assert figures.probes(views(), ["plain"] * 4)["kind_from_c"] == 1


def test_of_one_client_there_are_no_clusters_and_of_one_class_no_doubt():
    assert np.isnan(figures.probes(views(1), ["plain"])["silhouette_z"])
    answers = dva_run._classifier(np.zeros((3, 2, 2, 1)), np.array([5, 5, 5]))(
        np.ones((4, 2, 2, 1))
    )
    assert answers.tolist() == [5] * 4


def test_swapping_c_keeps_the_class():
    client = views(1)[0]
    by_blob = lambda x: (encode(x)[0] > 0) @ np.array([2, 1])
    assert figures.swap_accuracy(client, by_blob) > 0.95
    mixed = client._replace(encode=lambda x: (encode(x)[1], encode(x)[0]))
    assert figures.swap_accuracy(mixed, by_blob) < 0.6
    assert np.isnan(
        figures.swap_accuracy(client._replace(y=np.zeros(40, int)), by_blob)
    )


def test_a_foreign_z_shows_the_decoders_kind():
    clients, kinds = views(), [KINDS[k % 2] for k in range(4)]
    by_edge = lambda x: np.where(encode(x)[1][:, 0] > 0, *KINDS)
    assert figures.swap_kind(clients, kinds, by_edge) == 1
    foreign = [view._replace(x=clients[k - 1].x) for k, view in enumerate(clients)]
    assert figures.swap_kind(foreign, kinds, by_edge) == 0
    assert np.isnan(figures.swap_kind(clients, ["plain"] * 4, by_edge))
