"""The checks of `benchmarks.originals` that compare one formula, and what all checks
share.

Each cuts a function of an authors' repository and gives it the numbers that its
counterpart here gets.
"""

import copy
import functools
import importlib
import itertools
import math
import os
import random
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.originals import check, cut
from fedjax_pfl import losses, testing
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.models.vae import Gaussian
from fedjax_pfl.testing import synthetic
from fedjax_pfl.types import Federation, State, Task

N, SIZES, C = synthetic.N, synthetic.SIZES, synthetic.C
WIDTH = 8  # features of the small network
LR, EPOCHS = 0.1, 3
RNG = np.random.default_rng(0)
# the authors' code asks for a GPU by name
torch.Tensor.cuda = nn.Module.cuda = lambda self, *_: self


def here(name: str) -> Any:
    """Returns a module of `fedjax_pfl.algorithms`; a factory hides the one of its
    name."""
    return importlib.import_module(f"fedjax_pfl.algorithms.{name}")


def names(**more: Any) -> dict[str, Any]:
    """Returns the globals that most files need."""
    known = {"torch": torch, "nn": nn, "F": F, "np": np, "copy": copy, "math": math}
    known |= {"deepcopy": copy.deepcopy, "random": random, "OrderedDict": OrderedDict}
    known |= {"defaultdict": defaultdict, "device": "cpu", "print": lambda *_: None}
    return known | more


def of(kind: type, **fields: Any) -> Any:
    """Returns an object of a class with these fields, without calling `__init__`."""
    made = kind.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def tensor(x: Any) -> torch.Tensor:
    """Returns a float32 tensor."""
    return torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)


def random_array(*shape: int) -> np.ndarray:
    """Returns normal draws."""
    return RNG.normal(size=shape).astype(np.float32)


class Net(nn.Module):
    """The multilayer perceptron of the synthetic task."""

    def __init__(self, w: list[np.ndarray]):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, C)
        pairs = (self.base[0], w[:2]), (self.head, w[2:])
        for layer, (kernel, bias) in pairs:
            layer.weight.data, layer.bias.data = tensor(kernel.T), tensor(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


class WithFeatures(Net):
    """The same network, which returns features, too."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.base(x)
        return h, self.head(h)


def weights(variables: Any) -> list[np.ndarray]:
    """Returns kernels and biases of body and head."""
    layer, head = variables["body"]["layers"]["0"], variables["head"]
    parts = layer["kernel"], layer["bias"], head["kernel"], head["bias"]
    return [np.asarray(x) for x in parts]


def values(net: Net) -> list[np.ndarray]:
    """Returns the weights of a network as `weights` does."""
    w = [net.base[0].weight.T, net.base[0].bias, net.head.weight.T, net.head.bias]
    return [x.detach().numpy() for x in w]


def flat(w: list[np.ndarray]) -> np.ndarray:
    """Returns all weights in the order of PyTorch's parameters."""
    return np.concatenate([x.T.ravel() for x in w])


@functools.cache
def data(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the examples (x, y) of client i."""
    f = synthetic.federation()
    at = np.asarray(f.train.index)[i, : SIZES[i]]
    y = torch.tensor(np.asarray(f.examples.y)[at]).long()
    return tensor(np.asarray(f.examples.x)[at]), y


def ours(
    method: str,
    rounds: int = 1,
    last: tuple[int, ...] = tuple(range(N)),
    task: dict[str, Any] | None = None,
    federation: Federation | None = None,
    **hparams: Any,
) -> list[State]:
    """Returns the states before, between and after rounds, on the host.

    Args:
      last: the clients of the last round; all take part in the others.
      task: options of the task that differ. Each client's data are one batch.
      federation: default the synthetic one.
    """
    given = {"batch_size": int(SIZES.max()), "epochs": EPOCHS, "lr": LR, "rounds": 9}
    made: Task = testing.task(**(given | (task or {})))
    factory = functools.partial(ALGORITHMS[method], **hparams)
    subject = testing.subject(factory, made, start=State(None, None))
    start = subject.init(jax.random.key(3), subject.traced)
    states, ids = [jax.device_get(start)], np.arange(N, dtype=np.int32)
    for t in range(rounds):
        active = np.isin(ids, last) if t == rounds - 1 else np.ones(N, bool)
        now = {"state": states[-1], "ids": ids, "active": active, "t": t}
        new, _ = testing.run(subject, federation=federation, **now)
        states.append(new)
    return states


def network() -> list[np.ndarray]:
    """Returns random weights of the small network."""
    return [random_array(*shape) for shape in ((6, WIDTH), (WIDTH,), (WIDTH, C), (C,))]


def row(state: Any, i: int) -> Any:
    """Returns the row of client i."""
    return jax.tree.map(lambda x: x[i], state.clients)


@check(
    "cfl",
    "felisat/clustered-federated-learning",
    "cosines, norms of updates, and the bipartition of two groups",
    "the bipartition is the paper's optimal one, theirs complete linkage",
)
def _cfl(checkout: Path) -> dict[str, Any]:
    from sklearn.cluster import AgglomerativeClustering

    def agglomerative(affinity: str, linkage: str) -> Any:
        return AgglomerativeClustering(metric=affinity, linkage=linkage)

    known = names(AgglomerativeClustering=agglomerative)
    for name in ("flatten", "pairwise_angles", "FederatedTrainingDevice"):
        cut(checkout / "fl_devices.py", name, known)
    server = of(cut(checkout / "fl_devices.py", "Server", known))
    groups = np.repeat([1, -1], (3, 4)).astype(np.float32)
    updates = groups[:, None] * random_array(1, 30) + random_array(7, 30) / 2
    clients = [types.SimpleNamespace(dW={"w": tensor(x)}) for x in updates]
    cosines = server.compute_pairwise_similarities(clients)
    halves = server.cluster_clients(cosines)
    first = halves[0] if 0 in halves[0] else halves[1]
    gram = updates @ updates.T
    norms = np.sqrt(np.diag(gram))
    cosine = gram / norms[:, None] / norms[None]
    half = here("cfl").bipartition(jnp.array(cosine), jnp.ones(7, bool))
    mean = np.sqrt(gram.mean())
    return {
        "cosines": (cosines, cosine),
        "largest norm": (server.compute_max_update_norm(clients), norms.max()),
        "mean norm": (server.compute_mean_update_norm(clients), mean),
        "bipartition": (np.isin(np.arange(7), first), ~np.asarray(half)),
    }


@check(
    "apple",
    "ljaiverson/pFL-APPLE",
    "combination of core models, first coefficients, decay and gradient of the penalty",
    "the penalty has the paper's 1/2: compared at half their mu",
)
def _apple(checkout: Path) -> dict[str, Any]:
    net = cut(checkout / "utils/models.py", "Net", names())
    client = cut(checkout / "utils/models.py", "ClientNet", names(Net=net))
    p, p0 = np.float32([0.5, 0.2, 0.3]), np.float32([0.4, 0.4, 0.2])
    made = client(3, 1, 4, ps=p.tolist())
    parameters = dict(made.named_parameters())
    theirs = {k: x.detach().numpy() for k, x in made.compress().named_parameters()}
    cores = {
        name: np.stack(
            [parameters[f"{layer}s.{i}.{part}"].detach().numpy() for i in range(3)]
        )
        for name in theirs
        for layer, part in [name.split(".")]
    }
    mine = here("apple").combine(jnp.array(p), cores)
    pairs = {"combination": (list(theirs.values()), [mine[k] for k in theirs])}
    coefficient = cut(checkout / "utils/losses.py", "get_reg_coef", names())
    args = types.SimpleNamespace(mu=0.1, num_rounds=40)
    args.reg_last_round_over_total_round = 0.5
    for args.scheduler in ("cosine", "exponential"):
        decay = [coefficient(args, r) for r in range(25)]
        schedule = here("apple").schedule(jnp.arange(25), 20, args.scheduler)
        pairs[args.scheduler] = (decay, 0.1 * schedule)
    v = tensor(p).requires_grad_()
    cut(checkout / "utils/losses.py", "reg_loss", names())(
        v, tensor(p0), 0.05
    ).backward()
    pairs["penalty"] = (v.grad, 0.1 * (p - p0))
    start = cut(checkout / "utils/apple.py", "init_pss", names())(SIZES.tolist())[0]
    return pairs | {"p_0": (start, ours("apple", rounds=0)[0].clients["p"][0])}


@check(
    "pfedfda",
    "cj-mclaughlin/pFedFDA",
    "means, covariance and logits of the Gaussians",
    "beta by a grid search, theirs by L-BFGS; features of the trained body",
)
def _pfedfda(checkout: Path) -> dict[str, Any]:
    file = checkout / "clients/client_fedfda.py"
    client = cut(file, "ClientFedFDA", names(Client=object))
    h, y = random_array(20, WIDTH), np.array([0] * 9 + [1] * 10 + [3])
    other, prior = random_array(WIDTH, C), np.float32([0.4, 0.3, 0.2, 0.1])
    fields = {"num_classes": C, "device": "cpu", "D": WIDTH, "eps": 1e-4}
    fields |= {"min_samples": 2, "global_means": tensor(other.T)}
    made = of(client, model=Net(network()), **fields)
    found, scatter, _, _ = made.compute_mle_statistics(feats=tensor(h), labels=y)
    rest = list(tensor(other.T))
    means = torch.stack(
        [b if a is None else a for a, b in zip(found, rest, strict=True)]
    )
    cov = scatter / 19 + 1e-4 + torch.eye(WIDTH)
    pfedfda = here("pfedfda")
    g = pfedfda.estimate(jnp.array(h), jnp.array(y), jnp.ones(20, bool), 1.0, other)
    z = made.lda_classify(tensor(h), means, cov, tensor(prior))
    head = pfedfda.classifier(g, prior, 1e-4)
    return {
        "means": (means.T, g.mean),
        "covariance": (cov, g.cov),
        "logits": (z, pfedfda.logits(head, h)),
    }


def _hypernetwork(file: Path, inputs: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Compares what the hypernetwork of pFedHN and PeFLL generates."""
    kind = cut(file, "CNNHyper", names(spectral_norm=None))
    theirs = kind(5, 3, in_channels=1, out_dim=4, n_kernels=2, hidden_dim=7, n_hidden=2)
    e = random_array(3)
    made = {k: x.detach().numpy() for k, x in theirs(inputs(theirs, tensor(e))).items()}

    def linear(layer: Any, *shape: int) -> dict[str, Any]:
        kernel, bias = layer.weight.T.detach().numpy(), layer.bias.detach().numpy()
        return {
            "kernel": kernel.reshape(len(kernel), *shape),
            "bias": bias.reshape(shape),
        }

    short = {"conv": "c", "fc": "l", ".weight": "_weights", ".bias": "_bias"}
    heads = {}
    for name, x in made.items():
        layer = name
        for old, new in short.items():
            layer = layer.replace(old, new)
        heads[name] = linear(getattr(theirs, layer), *x.shape)
    mlp = [x for x in theirs.mlp if isinstance(x, nn.Linear)]
    hidden = [linear(x, x.out_features) for x in mlp]
    target = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in made.items()}
    psi = {"hidden": hidden, "heads": heads}
    mine = here("hypernetworks").generate(psi, e, target)
    return {"theta": (list(made.values()), [mine[k] for k in made])}


@check("pfedhn", "AvivSham/pFedHN", "the model that the hypernetwork generates")
def _pfedhn(checkout: Path) -> dict[str, Any]:
    def inputs(net: Any, e: torch.Tensor) -> torch.Tensor:
        net.embeddings.weight.data[2] = e
        return torch.tensor([2])

    return _hypernetwork(checkout / "experiments/pfedhn/models.py", inputs)


@check(
    "pefll",
    "pefllauthors/PeFLL",
    "the model that the hypernetwork generates",
    "another embedding network, whose output is normalised over its own entries",
)
def _pefll(checkout: Path) -> dict[str, Any]:
    return _hypernetwork(checkout / "models.py", lambda net, e: e)


@check(
    "floco",
    "dennis-grinwald/floco",
    "projection to the simplex, energy, and the centres of the regions",
    "the signs of principal components",
)
def _floco(checkout: Path) -> dict[str, Any]:
    from sklearn import decomposition

    file, floco = checkout / "src/server/floco.py", here("floco")
    rows = random_array(6, 12)
    kappa = np.asarray(floco.components(jnp.array(rows @ rows.T), jnp.ones(6, bool), 3))

    class SameSigns:
        """PCA with the signs of this library."""

        def __init__(self, n_components: int):
            self.pca = decomposition.PCA(n_components=n_components)

        def fit_transform(self, x: np.ndarray) -> np.ndarray:
            found = self.pca.fit_transform(x)
            return found * np.sign(np.sum(found * kappa, axis=0))

    known = names(decomposition=types.SimpleNamespace(PCA=SameSigns))
    project = cut(file, "_project_client_onto_simplex", known)
    energy = cut(file, "_riesz_s_energy", known)
    points = project(kappa, z=0.7)
    shares = points / points.sum(axis=1, keepdims=True)
    e = np.log(float(floco.energy(jnp.array(shares), jnp.ones(6, bool))) / 15)
    packages = {
        i: {"regular_model_params": {"classifier._weights.0": tensor(x)}}
        for i, x in enumerate(rows)
    }
    found = cut(file, "project_clients", known)(packages, 3, False)
    gram = jnp.array(rows @ rows.T)
    return {
        "projection": (shares, floco.project(jnp.array(kappa), 0.7)),
        "energy": (energy(shares), e),
        "centres": (found, floco.centers(gram, jnp.ones(6, bool), 3)),
    }


@check(
    "pfedsim",
    "KarhouTam/FL-bench",
    "similarity of the heads, and the mixture of bodies",
    "running statistics are mixed with the bodies",
)
def _pfedsim(checkout: Path) -> dict[str, Any]:
    kind = cut(
        checkout / "src/server/pfedsim.py",
        "pFedSimServer",
        names(FedAvgServer=object, DictConfig=Any, Namespace=Any, track=None),
    )
    kernels, bodies = random_array(4, WIDTH, C), random_array(4, 5)
    kernels[1] = kernels[0] + kernels[1] / 3
    kernels[3] = kernels[2] + kernels[3] / 2
    clients = {
        i: {"classifier.weight": tensor(k.T), "base": tensor(b)}
        for i, (k, b) in enumerate(zip(kernels, bodies, strict=True))
    }
    server = of(kind, clients_personal_model_params=clients, selected_clients=range(4))
    server.weight_matrix, server.testing = torch.eye(4), False
    server.current_epoch = server.warmup_round = 1
    server.params_name_join_aggregation = ["base"]
    server.update_weight_matrix()
    pfedsim = here("pfedsim")
    phi = np.asarray(pfedsim.similarity(jnp.array(kernels))).copy()
    np.fill_diagonal(phi, 1)
    mixed = server.get_client_model_params(0)["personal_model_params"]["base"]
    mine = np.asarray(pfedsim.weights(jnp.array(phi)))[0] @ bodies
    return {"similarity": (server.weight_matrix, phi), "body": (mixed, mine)}


@check(
    "fedsr",
    "atuannguyen/FedSR",
    "norm of the representation and its divergence",
)
def _fedsr(checkout: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    mean, spread, z = (tensor(random_array(9, WIDTH)) for _ in range(3))
    sigma = F.softplus(spread)

    class Meter:
        """Keeps the values in the order of the meters."""

        def update(self, value: Any, count: int) -> None:
            seen[str(len(seen))] = float(value)

        def average(self) -> float:
            return 0.0

    kind = cut(
        checkout / "src/methods/FedSR.py",
        "Model",
        names(Base=nn.Module, AverageMeter=Meter, distributions=torch.distributions),
    )
    r_mean, r_sigma = random_array(C, WIDTH), random_array(C, WIDTH)
    model = of(kind, device="cpu", L2R_coeff=1.0, CMI_coeff=1.0, C=torch.tensor(0.7))
    model.r_mu, model.r_sigma = tensor(r_mean), tensor(r_sigma)
    model.featurize = lambda x, return_dist: (z, (mean, sigma))
    model.cls = nn.Linear(WIDTH, C)
    model.optim = torch.optim.SGD(model.cls.parameters(), lr=0.0)
    y = torch.arange(9) % C
    model.train_client([(z, y)])
    prior = {"mean": r_mean, "sigma": r_sigma, "scale": 0.7}
    gap = here("fedsr").divergence(mean.numpy(), sigma.numpy(), prior, y.numpy())
    norm = np.mean(np.linalg.norm(z.numpy(), axis=1))
    return {"norm": (seen["2"], norm), "divergence": (seen["3"], np.mean(gap))}


@check(
    "knn_per",
    "omarfoq/knn-per",
    "votes of the nearest neighbours",
    "one weight of the neighbours for all clients, theirs tuned for each",
)
def _knn_per(checkout: Path) -> dict[str, Any]:
    kind = cut(checkout / "client.py", "KNNPerClient", names(Client=object))
    h, store, labels = (
        random_array(7, WIDTH),
        random_array(30, WIDTH),
        np.arange(30) % C,
    )

    def search(x: np.ndarray, k: int) -> Any:
        d2 = np.sum((x[:, None] - store[None]) ** 2, axis=2)
        near = np.argsort(d2, axis=1)[:, :k]
        return np.take_along_axis(d2, near, axis=1), near

    index = types.SimpleNamespace(search=search)
    client = of(kind, n_train_samples=30, features_dimension=WIDTH, num_classes=C, k=10)
    client.datastore = types.SimpleNamespace(index=index, labels=labels)
    client.capacity, client.features_flag, client.datastore_flag = 30, True, True
    client.test_features = h
    client.gather_knn_outputs(scale=1.3)
    mine = here("knn_per").neighbours(
        jnp.array(h), (jnp.array(store), jnp.array(labels)), 10, 1.3, C
    )
    return {"votes": (client.test_knn_outputs, mine)}


@check(
    "fedap",
    "microsoft/PersonalizedFL",
    "weights by the distances of running statistics",
    "the statistics of FedBN's warm-up in place of a pretrained model's",
)
def _fedap(checkout: Path) -> dict[str, Any]:
    known = names()
    cut(checkout / "alg/fedap.py", "get_wasserstein", known)
    matrix = cut(checkout / "alg/fedap.py", "get_weight_matrix1", known)
    means, spreads = random_array(5, 2, 6), np.exp(random_array(5, 2, 6))
    args = types.SimpleNamespace(model_momentum=0.4)
    theirs = matrix(args, list(means), list(spreads), None)
    stats = {
        str(layer): {
            "mean": jnp.array(means[:, layer]),
            "var": jnp.array(spreads[:, layer]),
        }
        for layer in range(2)
    }
    mine = here("fedap").weights(stats, jnp.ones(5, bool), jnp.arange(5), 0.4)
    return {"weights": (theirs, np.asarray(mine) + 0.4 * np.eye(5))}


@check(
    "fedtgp",
    "TsingZ0/FedTGP",
    "margin from the clients' prototypes, and a step of the global ones",
    "the server's step size is the clients', as there",
)
def _fedtgp(checkout: Path) -> dict[str, Any]:
    file = checkout / "system/flcore/servers/servertgp.py"
    protos = random_array(3, C, WIDTH)
    known = names(Server=object, load_item=lambda role, *_: uploads[role])
    uploads: dict[Any, Any] = {i: dict(enumerate(tensor(protos[i]))) for i in range(3)}
    cut(file, "proto_cluster", known)
    kind = cut(file, "FedTGP", known)
    clients = [
        types.SimpleNamespace(role=i, id=i, save_folder_name="") for i in range(3)
    ]
    server = of(kind, selected_clients=clients, num_classes=C, device="cpu")
    server.receive_protos()
    fedtgp = here("fedtgp")
    has = jnp.ones((3, C), bool)
    gap = fedtgp.largest_gap(jnp.array(protos.transpose(0, 2, 1)), has)
    table = nn.Embedding(C, WIDTH)
    before = table.weight.detach().numpy().copy()

    class Global(nn.Module):
        """Prototypes that are their own parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, classes: Any) -> torch.Tensor:
            return self.table(torch.as_tensor(classes))

    uploads["Server"] = Global()
    loader = lambda pairs, *_, **__: [
        (torch.stack([p for p, _ in pairs]), [k for _, k in pairs])
    ]
    known |= {"DataLoader": loader, "save_item": lambda *_: None}
    server.__class__.update_TGP.__globals__.update(known)
    server.server_learning_rate, server.server_epochs, server.batch_size = LR, 1, 99
    server.CEloss, server.margin_threthold = nn.CrossEntropyLoss(), 100.0
    server.role, server.save_folder_name = "Server", ""
    server.update_TGP()
    y = jnp.tile(jnp.arange(C), 3)
    h = jnp.array(protos.reshape(-1, WIDTH))
    slope = jax.grad(fedtgp.contrast)(jnp.array(before), h, y, jnp.ones(12, bool), gap)
    return {
        "margin": (server.max_gap, gap),
        "prototypes": (table.weight.detach(), before - LR * np.asarray(slope)),
    }


@check(
    "fedcac",
    "kxzxvbk/Fling",
    "critical parameters, their overlap, and the collaborators' mean",
)
def _fedcac(checkout: Path) -> dict[str, Any]:
    folder, fedcac = checkout / "fling/component", here("fedcac")
    client = cut(
        folder / "client/fedcac_client.py",
        "FedCACClient.evaluate_critical_parameter",
        names(Tuple=tuple),
    )
    old, new = [network() for _ in range(4)], [network() for _ in range(4)]
    fake = types.SimpleNamespace(model=nn.Linear(1, 1), device="cpu")
    theirs = [
        client(fake, Net(a), Net(b), 0.3)[0] for a, b in zip(old, new, strict=True)
    ]
    masks = [fedcac.critical(a, b, 0.3) for a, b in zip(old, new, strict=True)]
    mine = np.stack([flat([np.asarray(x) for x in m]) for m in masks])
    overlap = fedcac.overlap({"m": jnp.array(mine)})
    near = fedcac.collaborators(overlap, jnp.ones(4, bool), 2 / 10)
    share = np.asarray(near) / np.sum(near, axis=1, keepdims=True)
    kind = cut(
        folder / "group/fedcac_group.py",
        "FedCACServerGroup.get_customized_global_models",
        names(),
    )
    clients = [
        types.SimpleNamespace(
            critical_parameter=m, model=Net(w), customized_model=Net(w)
        )
        for m, w in zip(theirs, new, strict=True)
    ]
    learn = types.SimpleNamespace(beta=10, device="cpu")
    args = types.SimpleNamespace(learn=learn)
    args.client = types.SimpleNamespace(client_num=4)
    kind(types.SimpleNamespace(args=args, clients=clients, epoch=1))
    mixed = [np.tensordot(share[0], np.stack([w[k] for w in new]), 1) for k in range(4)]
    return {
        "masks": (np.stack(theirs), mine),
        "mean": (values(clients[0].customized_model), mixed),
    }


@check("fedem", "omarfoq/FedEM", "responsibilities and mixing weights of the E-step")
def _fedem(checkout: Path) -> dict[str, Any]:
    kind = cut(checkout / "client.py", "MixtureClient", names(Client=object))
    loss, pi = np.exp(random_array(3, 11)), np.float32([0.2, 0.5, 0.3])
    ensemble = types.SimpleNamespace(learners_weights=tensor(pi))
    ensemble.gather_losses = lambda _: tensor(loss)
    client = of(kind, learners_ensemble=ensemble, val_iterator=None)
    client.update_sample_weights()
    client.update_learners_weights()
    q = here("fedem").responsibilities(jnp.array(pi), jnp.array(loss.T))
    return {
        "responsibilities": (client.samples_weights.T, q),
        "weights": (ensemble.learners_weights, np.mean(q, axis=0)),
    }


@check("fedntd", "Lee-Gihun/FedNTD", "loss, and its gradient by the logits")
def _fedntd(checkout: Path) -> dict[str, Any]:
    folder, known = checkout / "algorithms/fedntd", names()
    cut(folder / "utils.py", "refine_as_not_true", known)
    z, teacher, y = random_array(9, C), random_array(9, C), np.arange(9) % C
    loss = cut(folder / "criterion.py", "NTD_Loss", known)(C, tau=2.0, beta=0.7)
    v = tensor(z).requires_grad_()
    value = loss(v, torch.tensor(y), tensor(teacher))
    value.backward()
    not_true = here("fedntd").not_true

    def mine(z: Any) -> Any:
        target = not_true(jnp.array(teacher), y, 2.0)
        p = jnp.exp(target) * (1 - jax.nn.one_hot(y, C))
        gap = jnp.sum(p * (target - not_true(z, y, 2.0)), axis=1)
        plain = losses.cross_entropy(z, jnp.array(y), jnp.ones(9, bool))
        return plain + 0.7 * 4 * jnp.mean(gap)

    found, slope = jax.value_and_grad(mine)(jnp.array(z))
    return {"loss": (value.item(), found), "gradient": (v.grad, slope)}


@check("fedcp", "TsingZ0/FedCP", "maximum mean discrepancy, and its gradient")
def _fedcp(checkout: Path) -> dict[str, Any]:
    mmd = cut(checkout / "system/flcore/clients/clientcp.py", "MMD", names())
    h, u = random_array(9, WIDTH), random_array(9, WIDTH) + 1
    v = tensor(h).requires_grad_()
    value = mmd(v, tensor(u), "rbf")
    value.backward()
    mine = lambda h: losses.mmd(h, jnp.array(u), jnp.ones(9, bool))
    found, slope = jax.value_and_grad(mine)(jnp.array(h))
    return {"mmd": (value.item(), found), "gradient": (v.grad, slope)}


@check(
    "fedfomo",
    "NVlabs/FedFomo",
    "first-order benefits of other models",
    "0.00001 is added to the distances",
)
def _fedfomo(checkout: Path) -> dict[str, Any]:
    known = names(args=types.SimpleNamespace(baseline_model="own", model_delta_norm=2))
    known["compute_parameter_difference"] = lambda a, b, norm: np.linalg.norm(
        flat(values(a)) - flat(values(b))
    )
    weigh = cut(checkout / "federation.py", "compute_fomo_weights", known)
    base, *others = [network() for _ in range(4)]
    nets, found = (
        [Net(w) for w in (base, *others)],
        {0: 2.0, 1: 1.0, 2: 2.5, 3: 0.3},
    )
    value = {id(net): found[i] for i, net in enumerate(nets)}
    client = types.SimpleNamespace(args=None)
    client.eval = lambda epoch, model, args: value[id(model)]
    theirs = weigh(client, nets[0], nets[1:], parameter_distance=True)
    as_tree = lambda w: {"body": w[:2], "head": w[2:], "stats": {}}
    benefit = here("fedfomo").benefit
    mine = [
        benefit(found[i], found[0], as_tree(w), as_tree(base))
        for i, w in enumerate(others, start=1)
    ]
    return {"benefits": (theirs, np.stack(mine))}


@check(
    "pfedla",
    "KarhouTam/pFedLA",
    "weights of the layers",
    "another author's repository; its hypernetwork steps in the other direction",
)
def _pfedla(checkout: Path) -> dict[str, Any]:
    forward = cut(
        checkout / "src/utils/models.py",
        "HyperNetwork.forward",
        names(Tuple=tuple, Dict=dict, List=list),
    )
    sizes = (5, 6, 6, 6)
    mlp = [
        x for i, o in itertools.pairwise(sizes) for x in (nn.Linear(i, o), nn.ReLU())
    ]
    fc = {name: nn.Linear(6, N) for name in ("a", "b")}
    net = types.SimpleNamespace(
        embedding=nn.Embedding(N, 5),
        mlp=nn.Sequential(*mlp),
        fc_layers=fc,
        K=0,
        blocks_name=["a", "b"],
        device="cpu",
        client_num=N,
        load_hn=lambda: None,
    )
    alpha, _ = forward(net, 2)
    theirs = torch.stack([alpha[name] / alpha[name].sum() for name in "ab"])
    kernel = lambda x: x.weight.T.detach().numpy()
    bias = lambda x: x.bias.detach().numpy()
    psi = {
        "mlp": [{"kernel": kernel(x), "bias": bias(x)} for x in mlp[::2]],
        "head": {
            "kernel": np.stack([kernel(fc[k]) for k in "ab"], axis=1),
            "bias": np.stack([bias(fc[k]) for k in "ab"]),
        },
    }
    v = net.embedding.weight.detach().numpy()[2]
    mine = here("pfedla").weights(psi, v, jnp.ones(N, bool), 2)
    return {"weights": (theirs.detach(), mine)}


@check(
    "feddva",
    "pysleepy/FedDVA",
    "divergence of the latents, and the bound of c's regulariser",
    "0.01 in their denominators is `floor` here",
)
def _feddva(checkout: Path) -> dict[str, Any]:
    bound = cut(checkout / "models/funcs.py", "loss_reg_c", names())
    mean, log_var = random_array(9, 5), random_array(9, 5)
    dva = here("feddva.dva")
    q = Gaussian(jnp.array(mean), jnp.array(log_var))
    mine = dva.mixture_bound(q, jnp.ones(9, bool), 0.01)
    v = tensor(mean).requires_grad_()
    theirs = bound(v, tensor(log_var))
    theirs.sum().backward()
    total = lambda m: jnp.sum(
        dva.mixture_bound(q._replace(mean=m), jnp.ones(9, bool), 0.01)
    )
    slope = jax.grad(total)(q.mean)
    return {"bound": (theirs.detach(), mine), "gradient": (v.grad, slope)}


@check(
    "pfedafm",
    "LipingYi/pFedAFM",
    "weight of the small model's features",
)
def _pfedafm(checkout: Path) -> dict[str, Any]:
    file = checkout / "pFedAFM_Codes/experiments/FLHetero/Models/trainable_params.py"
    mix = cut(file, "vector_alpha", names())()
    alpha = np.abs(random_array(500))
    mix.alpha.data = tensor(alpha)
    own, small = random_array(4, 500), random_array(4, 500)
    theirs = tensor(own) * tensor(alpha) + mix(tensor(small)).detach()
    mine = here("pfedafm").mixture(jnp.array(alpha), jnp.array(own), jnp.array(small))
    return {"features": (theirs, mine)}


@check(
    "gpfl",
    "TsingZ0/GPFL",
    "conditional valve, and the loss of the class embeddings",
    "the conditions come from the received embeddings, as in the paper",
)
def _gpfl(checkout: Path) -> dict[str, Any]:
    from fedjax_pfl import models

    file, gpfl = checkout / "system/flcore/servers/servergp.py", here("gpfl")
    valve = cut(file, "CoV", names())(WIDTH)
    h, condition = random_array(9, WIDTH), random_array(WIDTH)
    network = models.network(lambda rngs: gpfl.Valve(WIDTH, rngs))
    params = network.init(jax.random.key(0))["params"]
    parts = ("gamma", valve.Conditional_gamma), ("beta", valve.Conditional_beta)
    for name, part in parts:
        part[2].weight.data, part[2].bias.data = (
            tensor(random_array(WIDTH)) for _ in "ab"
        )
        linear = {"kernel": part[0].weight.T, "bias": part[0].bias}
        norm = {"scale": part[2].weight, "bias": part[2].bias}
        found = {name: linear, f"{name}_norm": norm}
        params |= jax.tree.map(lambda x: x.detach().numpy(), found)
    given = {"params": params, "stats": {}}
    mine = network.apply(given, (jnp.array(h), jnp.array(condition)[None]))[0]
    embedding = cut(file, "GCE", names())(WIDTH, C)
    y = torch.arange(9) % C
    table = embedding.embedding.weight.detach().numpy()
    cosine = gpfl.unit(jnp.array(h)) @ gpfl.unit(jnp.array(table)).T
    loss = losses.cross_entropy(cosine, jnp.array(y.numpy()), jnp.ones(9, bool))
    return {
        "valve": (valve(tensor(h), tensor(condition)).detach(), mine),
        "loss": (embedding(tensor(h), y).item(), loss),
    }


@check(
    "fedgen",
    "zhuangdizhu/FedGen",
    "features that the generator makes",
    "their term that makes features differ is not built (serverpFedGen.py:140), nor a "
    "bias that the batch norm removes",
)
def _fedgen(checkout: Path) -> dict[str, Any]:
    from fedjax_pfl import models

    noise, hidden = 6, 7
    known = names(GENERATORCONFIGS={"": (hidden, WIDTH, 1, C, noise)})
    file = checkout / "FLAlgorithms/trainmodel/generator.py"
    cut(file, "DiversityLoss", known)
    theirs = cut(file, "Generator", known)("")
    inner, norm, _, outer = *theirs.fc_layers, theirs.representation_layer
    for x in (norm.weight, norm.bias):
        x.data = tensor(random_array(hidden))
    y = torch.arange(9) % C
    made = theirs(y)
    params = {
        "inner": {"kernel": inner.weight.T},
        "norm": {"scale": norm.weight, "bias": norm.bias},
        "outer": {"kernel": outer.weight.T, "bias": outer.bias},
    }
    params = jax.tree.map(lambda x: x.detach().numpy(), params)
    kind = here("fedgen").Generator
    network = models.network(
        lambda rngs: kind(noise + C, hidden, WIDTH, rngs), bn_stats="batch"
    )
    x = np.concatenate([made["eps"].numpy(), np.eye(C, dtype=np.float32)[y]], axis=1)
    given = {"params": params, "stats": {}}
    mine = network.apply(given, x, mask=jnp.ones(len(y), bool), train=True)[0]
    return {"features": (made["output"].detach(), mine)}


@check(
    "fedadmm",
    "YonghaiGong/FedADMM",
    "two rounds: local training, server's model, dual variables",
    "the task's optimizer and epochs; theirs: momentum 0.5, random epochs",
)
def _fedadmm(checkout: Path) -> dict[str, Any]:
    kind = cut(checkout / "FedADMM/src/update.py", "LocalUpdate", names(Dataset=object))
    args = types.SimpleNamespace(lr=LR, momentum=0, fixed=1, local_ep=EPOCHS, rho=0.01)
    args.verbose, args.device = 0, "cpu"
    states = ours("fedadmm", rounds=2)
    start = weights(states[0].server["w"])
    theta, log = Net(start).state_dict(), types.SimpleNamespace()
    log.add_scalar = lambda *_: None
    common = {"args": args, "criterion": nn.CrossEntropyLoss(), "logger": log}
    clients = []
    for i in range(N):
        alpha = {k: torch.zeros_like(x) for k, x in theta.items()}
        loader = [data(i)]
        made = of(kind, model=Net(start), alpha=alpha, trainloader=loader, **common)
        clients.append(made)
    for _ in range(2):
        sums = [c.update_weights(0, copy.deepcopy(theta))[1] for c in clients]
        theta = {k: theta[k] + sum(s[k] for s in sums) / N for k in theta}
    final = Net(start)
    final.load_state_dict(theta)
    dual = [x.numpy().T for x in clients[1].alpha.values()]
    mine = weights(row(states[2], 1)["y"])
    return {
        "server": (values(final), weights(states[2].server["w"])),
        "dual variables": (dual, mine),
    }


@check(
    "fedpac",
    "JianXu95/FedPAC",
    "weights of the heads",
    "another solver of the quadratic program",
)
def _fedpac(checkout: Path) -> dict[str, Any]:
    import cvxpy

    def eig(matrix: torch.Tensor, eigenvectors: bool) -> Any:
        found, vectors = torch.linalg.eigh(matrix)
        return torch.stack([found, torch.zeros_like(found)], 1), vectors

    known = names(cvx=cvxpy)
    known["torch"] = types.SimpleNamespace(**(vars(torch) | {"eig": eig}))
    cut(checkout / "tools.py", "pairwise", known)
    solve = cut(checkout / "tools.py", "get_head_agg_weight", known)
    h, v = random_array(4, C, WIDTH) / 3, np.float32([0.5, 0.9, 0.2, 0.4])
    theirs = np.array(solve(4, v, [tensor(x) for x in h]), np.float64)
    flat_h = jnp.array(h.reshape(4, -1))
    mine = here("fedpac").combination(jnp.array(v), flat_h, jnp.ones(4, bool))
    return {"weights": (theirs / theirs.sum(axis=1, keepdims=True), mine)}


@check(
    "flute",
    "RenpuLiu/flute",
    "the server's step of the heads",
    "the step size, 0.5 over the number of clients there",
)
def _flute(checkout: Path) -> dict[str, Any]:
    import contextlib

    owned = {0: [0, 1], 1: [1, 2, 3]}
    known = names(open=lambda *_: contextlib.nullcontext())
    known["torch"] = types.SimpleNamespace(**(vars(torch) | {"load": lambda _: owned}))
    kind = cut(checkout / "models/Update.py", "ServerUpdateNC2", known)
    kernels = random_array(2, 64, C)
    heads = {
        i: {"fc3.weight": tensor(k.T), "fc3.bias": torch.zeros(C)}
        for i, k in enumerate(kernels)
    }
    args = types.SimpleNamespace(num_classes=C, dataset="cifar10")
    kind(args, heads, [0, 1]).train()
    collapse, mine = here("flute").collapse, []
    for i, kernel in enumerate(kernels):
        has = jnp.isin(jnp.arange(C), jnp.array(owned[i]))
        mine.append(kernel - 0.25 * np.asarray(jax.grad(collapse)(kernel, has)))
    theirs = [heads[i]["fc3.weight"].detach().numpy().T for i in range(2)]
    return {"heads": (theirs, mine)}


@check(
    "flora",
    "ATP-1010/FederatedLLM",
    "the stacked matrices of three clients, of one rank and of several",
    "theirs adapt language models, without a head",
)
def _flora(checkout: Path) -> dict[str, Any]:
    from fedjax_pfl.models import low_rank

    sizes, pairs = [5, 9, 2], {}
    p = jnp.array(sizes, jnp.float32) / sum(sizes)
    file = checkout / "fed_utils/model_aggregation.py"
    for heter, ranks in ((False, [3, 3, 3]), (True, [3, 1, 2])):
        # [I, r] and [r, O] with zeros beyond a client's rank
        a, b = random_array(3, 6, 3), random_array(3, 3, WIDTH)
        clients = [
            {"A": tensor(a[k, :, :r].T), "B": tensor(b[k, :r].T)}
            for k, r in enumerate(ranks)
        ]
        kept: list[Any] = []
        known = names(os=os, normalize=F.normalize, ZeroPad2d=nn.ZeroPad2d)
        load = lambda path, clients=clients, **_: clients[
            int(Path(path).parent.name.split("_")[-1])
        ]
        stand_in = {"load": load, "save": lambda x, _, kept=kept: kept.append(x)}
        known["torch"] = types.SimpleNamespace(**(vars(torch) | stand_in))
        merge = cut(file, "FedAvg", known)
        given = ("", dict(enumerate(sizes)), 0, True, 3, heter, ranks, False, False)
        merge(None, range(3), *given)
        has = jnp.arange(3) < jnp.array(ranks)[:, None]
        body = {"lora_a": jnp.array(a) * has[:, None], "lora_b": b * has[..., None]}
        stack = low_rank.stacked(body, p)
        real = np.asarray(has).ravel()
        mine = stack["lora_a"][:, real].T, stack["lora_b"][real].T
        pairs[f"ranks {ranks}"] = ([kept[0]["A"], kept[0]["B"]], mine)
        product = low_rank.product(stack["lora_a"], stack["lora_b"])
        pairs[f"product, ranks {ranks}"] = ((kept[0]["B"] @ kept[0]["A"]).T, product)
    return pairs
