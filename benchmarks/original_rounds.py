"""The checks of `benchmarks.originals` that run local training, and mostly the server's
step, of an authors' repository for some rounds."""

import contextlib
import functools
import io
import itertools
import threading
import time
import types
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from benchmarks.original_functions import (
    EPOCHS,
    LR,
    SIZES,
    WIDTH,
    C,
    N,
    Net,
    data,
    flat,
    names,
    of,
    ours,
    row,
    tensor,
    values,
    weights,
)
from benchmarks.originals import check, cut
from fedjax_pfl import local_training, losses
from fedjax_pfl.testing import synthetic
from fedjax_pfl.types import Federation

BATCH = int(SIZES.max())
SOME = (0, 2, 3)  # the clients of a round in which not all take part
LOADERS = [[data(i)] for i in range(N)]
cross_entropy = nn.CrossEntropyLoss()


class Three(Net):
    """The small network, which returns its features twice, too."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.base(x)
        return h, h, self.head(h)


class LogitsFirst(Net):
    """The small network, which returns its features, too."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.base(x)
        return self.head(h), h


class FeaturesFirst(Net):
    """The small network, which returns its features, too."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.base(x)
        return h, self.head(h)


def momentum(weight: float) -> Any:
    """Returns SGD with momentum as `Task.optimizer`."""
    return functools.partial(optax.sgd, momentum=weight)


def mean(nets: Iterable[Any], share: Any = SIZES) -> list[np.ndarray]:
    """Returns the mean of the networks' weights, by training examples."""
    share = np.asarray(share, np.float32) / np.sum(share)
    models = [values(net) for net in nets]
    return [np.tensordot(share, np.stack(x), 1) for x in zip(*models, strict=True)]


def train(net: Any, i: int, epochs: int = EPOCHS) -> None:
    """Trains a network on client i by plain SGD."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(epochs):
        x, y = data(i)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()


def copied(w: list[np.ndarray]) -> list[np.ndarray]:
    """Returns weights that may be changed in place."""
    return [x.copy() for x in w]


def gradient(net: Net) -> list[np.ndarray]:
    """Returns the gradient of a network as `weights` returns its weights."""
    layers = net.base[0], net.head
    slopes = [(x.weight.grad.T.numpy(), x.bias.grad.numpy()) for x in layers]
    return [x for pair in slopes for x in pair]


class Everyone:
    """An all-reduce of threads, one per client."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(N, timeout=60), []

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> None:
        self.given.append(tensor.clone())
        self.barrier.wait()
        total = sum(self.given)
        if self.barrier.wait() == 0:
            self.given.clear()
        self.barrier.wait()
        tensor.copy_(total)


def repeated() -> Federation:
    """The synthetic federation where a client's examples all equal its first one: then
    no step depends on the order of the batches."""
    f = synthetic.federation()
    first = jnp.broadcast_to(f.train.index[:, :1], f.train.index.shape)
    return f._replace(train=f.train._replace(index=first))


@check(
    "fednova",
    "JYWa/FedNova",
    "two rounds of clients with 3 to 15 steps",
    "their forms for momentum and a proximal term are not built",
)
def _fednova(checkout: Path) -> dict[str, Any]:
    known = names(Optimizer=torch.optim.Optimizer, required=object())
    operation = types.SimpleNamespace(SUM=None)
    known["dist"] = types.SimpleNamespace(
        all_reduce=Everyone().all_reduce, ReduceOp=operation
    )
    for name in ("flatten_tensors", "unflatten_tensors", "communicate"):
        cut(checkout / "comm_helpers.py", name, known)
    kind = cut(checkout / "distoptim/FedNova.py", "FedNova", known)
    size, batch = SIZES / SIZES.sum(), 4
    states = ours("fednova", 2, task={"batch_size": batch}, federation=repeated())
    nets = [Net(weights(states[0].server)) for _ in range(N)]
    optimizers = [
        kind(net.parameters(), ratio=float(size[i]), gmf=0, lr=LR)
        for i, net in enumerate(nets)
    ]
    for _ in range(2):
        for i, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            x, y = data(i)
            for _ in range(EPOCHS * -(-int(SIZES[i]) // batch)):
                optimizer.zero_grad()
                cross_entropy(net(x[:1]), y[:1]).backward()
                optimizer.step()
        with ThreadPoolExecutor(N) as threads:
            list(threads.map(lambda x: x.average(), optimizers))
    return {"server": (values(nets[1]), weights(states[2].server))}


@check(
    "moon",
    "QinbinLi/MOON",
    "two rounds of local training",
    "features before the last layer, theirs a projection of them (model.py:562)",
)
def _moon(checkout: Path) -> dict[str, Any]:
    def accuracy(*_: Any, get_confusion_matrix: bool = False, **__: Any) -> Any:
        return (0, 0, 0) if get_confusion_matrix else (0, 0)

    logger = types.SimpleNamespace(info=lambda *_: None)
    known = names(optim=torch.optim, compute_accuracy=accuracy, logger=logger)
    local = cut(checkout / "main.py", "train_net_fedcon", known)
    args, task = types.SimpleNamespace(reg=0), {"optimizer": momentum(0.9)}
    states = ours("moon", 2, task=task, mu=1.5, tau=0.5)
    w = weights(states[0].server)
    previous = [Three(w) for _ in range(N)]
    for _ in range(2):
        nets = [Three(w) for _ in range(N)]
        for i, net in enumerate(nets):
            rest = EPOCHS, LR, "sgd", 1.5, 0.5, args, 0
            local(i, net, Three(w), [previous[i]], LOADERS[i], [], *rest)
        previous, w = nets, mean(nets)
    return {"server": (w, weights(states[2].server))}


def _regularised(checkout: Path) -> dict[str, Any]:
    """Returns the globals of FedDyn's utils_general.py."""
    loader = types.SimpleNamespace(DataLoader=lambda examples, **_: [examples])
    known = names(data=loader, Dataset=lambda x, y, **_: (x, y), max_norm=10)
    for name in (
        "get_mdl_params",
        "set_client_from_params",
        "train_feddyn_mdl",
        "train_scaffold_mdl",
    ):
        cut(checkout / "utils_general.py", name, known)
    return known


@check(
    "feddyn",
    "alpemreacar/FedDyn",
    "local training of two rounds, and the clients' linear terms",
    "they divide alpha by a client's relative size (utils_methods.py:387) "
    "and clip gradients at 10",
)
def _feddyn(checkout: Path) -> dict[str, Any]:
    known, alpha = _regularised(checkout), 0.1
    states = ours("feddyn", 2, last=SOME, alpha=alpha)
    start = weights(states[0].server["w"])
    cloud, history = flat(start), np.zeros((N, len(flat(start))), np.float32)
    for chosen in (range(N), SOME):
        trained = {}
        for i in chosen:
            net = known["set_client_from_params"](Net(start), cloud)
            given = torch.tensor(cloud), torch.tensor(history[i]), *data(i)
            rest = LR, BATCH, EPOCHS, EPOCHS + 1, 0, ""
            known["train_feddyn_mdl"](net, lambda: Net(start), alpha, *given, *rest)
            trained[i] = known["get_mdl_params"]([net])[0]
            history[i] += trained[i] - cloud
        # utils_methods.py:396
        cloud = np.mean(list(trained.values()), axis=0) + np.mean(history, axis=0)
    g = [flat(weights(row(states[2], i)["g"])) for i in range(N)]
    return {
        "server": (cloud, flat(weights(states[2].server["w"]))),
        "linear terms": (-alpha * history, np.stack(g)),
    }


@check(
    "scaffold",
    "alpemreacar/FedDyn",
    "local training of two rounds, and the control variates",
    "another author's repository, which scales c by a client's relative size "
    "(utils_methods.py:225) and clips gradients at 10",
)
def _scaffold(checkout: Path) -> dict[str, Any]:
    known = _regularised(checkout)
    states = ours("scaffold", 2, last=SOME)
    start = weights(states[0].server["w"])
    server, control = flat(start), np.zeros((N + 1, len(flat(start))), np.float32)
    for chosen in (range(N), SOME):
        trained, change = {}, 0
        for i in chosen:
            net = known["set_client_from_params"](Net(start), server)
            given = torch.tensor(control[N] - control[i]), *data(i)
            rest = LR, BATCH, EPOCHS, EPOCHS + 1, 0, ""
            known["train_scaffold_mdl"](net, lambda: Net(start), *given, *rest)
            trained[i] = known["get_mdl_params"]([net])[0]
            # utils_methods.py:229
            new = control[i] - control[N] + (server - trained[i]) / EPOCHS / LR
            change, control[i] = change + new - control[i], new
        server = np.mean(list(trained.values()), axis=0)
        control[N] += change / N
    own = [flat(weights(row(states[2], i)["c"])) for i in range(N)]
    common = flat(weights(states[2].server["c"]))
    return {
        "server": (server, flat(weights(states[2].server["w"]))),
        "control variates": (control, np.stack([*own, common])),
    }


@check(
    "fedala",
    "TsingZ0/FedALA",
    "three rounds: the learned weights of the head, and local training",
    "the first learning ends after 100 epochs at the latest",
)
def _fedala(checkout: Path) -> dict[str, Any]:
    known = names(DataLoader=torch.utils.data.DataLoader, List=list, Tuple=tuple)
    kind = cut(checkout / "system/utils/ALA.py", "ALA", known)
    states = ours("fedala", 3, percent=100.0)
    w = weights(states[0].server)
    rest = BATCH, 100, 2
    clients = [
        kind(i, cross_entropy, list(zip(*data(i), strict=True)), *rest)
        for i in range(N)
    ]
    nets = [Net(w) for _ in range(N)]
    for _ in range(3):
        for i, net in enumerate(nets):
            clients[i].adaptive_local_aggregation(Net(w), net)
            train(net, i)
        w = mean(nets)
    kernel, bias = (x.numpy().T for x in clients[1].weights)
    learned = row(states[3], 1)["weights"]["head"]
    return {
        "server": (w, weights(states[3].server)),
        "weights": ([kernel, bias], [learned["kernel"], learned["bias"]]),
    }


@check(
    "feddbe",
    "TsingZ0/DBE",
    "three rounds: the common mean, local training, and the clients' vectors",
    "models of the first round are averaged, theirs discarded (serverDBE.py:18)",
)
def _feddbe(checkout: Path) -> dict[str, Any]:
    file = checkout / "system/flcore/clients/clientDBE.py"
    kind = cut(file, "clientDBE", names(Client=object, time=time))
    states = ours("feddbe", 3, kappa=5.0, momentum=0.3)
    w, clients = weights(states[0].server["w"]), []
    common = {"klw": 5.0, "momentum": 0.3, "global_mean": None, "loss": cross_entropy}
    common |= {"local_epochs": EPOCHS, "device": "cpu", "learning_rate_decay": False}
    for i in range(N):
        made = of(kind, train_slow=False, train_time_cost=defaultdict(int), **common)
        made.load_train_data = lambda i=i: LOADERS[i]
        made.running_mean = torch.zeros(WIDTH)
        made.num_batches_tracked = torch.tensor(0)
        made.client_mean = nn.Parameter(torch.zeros(WIDTH))
        made.opt_client_mean = torch.optim.SGD([made.client_mean], lr=LR)
        clients.append(made)
    for _ in range(3):
        for made in clients:
            made.model = Net(w)
            made.optimizer = torch.optim.SGD(made.model.parameters(), lr=LR)
            made.train()
        w = mean(made.model for made in clients)
        if clients[0].global_mean is None:
            means = torch.stack([made.running_mean for made in clients])
            center = tensor(SIZES / SIZES.sum()) @ means
            for made in clients:
                made.global_mean = center
    vectors = [made.client_mean.detach().numpy() for made in clients]
    return {
        "server": (w, weights(states[3].server["w"])),
        "mean": (center, states[3].server["mean"]),
        "vectors": (np.stack(vectors), states[3].clients["z"]),
    }


@check(
    "fedas",
    "xiyuanyang45/FedAS",
    "two rounds: alignment, local training, and the mean by Fisher information",
    "each client aligns a copy; theirs align the server's own model one after another "
    "(serveras.py:39), in batches of 16",
)
def _fedas(checkout: Path) -> dict[str, Any]:
    folder = checkout / "system/flcore"
    known = names(Client=object, time=time, grad=torch.autograd.grad)
    kind = cut(folder / "clients/clientas.py", "clientAS", known)
    cut(folder / "servers/serverbase.py", "Server", known)
    server = of(cut(folder / "servers/serveras.py", "FedAS", known))
    states = ours("fedas", 2, align_lr=0.01)
    w = weights(row(states[0], 0)["w"])
    clients = []
    common = {"wo_local": False, "privacy": False, "num_classes": C, "device": "cpu"}
    common |= {"local_epochs": EPOCHS, "train_slow": False, "loss": cross_entropy}
    for i in range(N):
        made = of(kind, learning_rate_decay=False, model=Net(w), **common)
        made.fim_trace_history, made.train_time_cost = [], defaultdict(int)
        made.load_train_data = lambda batch_size=None, i=i: LOADERS[i]
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=LR)
        clients.append(made)
    server.global_model, server.clients, server.uploaded_ids = Net(w), clients, range(N)
    for _ in range(2):
        for made in clients:
            made.set_parameters(Net(values(server.global_model)), 0)
            made.train(True)
        server.uploaded_models = [made.model for made in clients]
        server.aggregate_wrt_fisher()
    layer = states[2].server["body"]["layers"]["0"]
    return {
        "body": (values(server.global_model)[:2], [layer["kernel"], layer["bias"]]),
        "model": (values(clients[1].model), weights(row(states[2], 1)["w"])),
    }


def _users(checkout: Path, kind: str, file: str, states: Any, **fields: Any) -> Any:
    """Returns the server of pFedMe's repository, with its users."""
    folder = checkout / "FLAlgorithms"
    known = names(Optimizer=torch.optim.Optimizer)
    for name in ("MySGD", "pFedMeOptimizer"):
        cut(folder / "optimizers/fedoptimizer.py", name, known)
    cut(folder / "users/userbase.py", "User", known)
    made = cut(folder / "users" / file, kind, known)
    w, users = weights(states[0].server), []
    for i in range(N):
        user = of(made, model=Net(w), loss=cross_entropy, train_samples=int(SIZES[i]))
        user.get_next_train_batch = lambda i=i: data(i)
        user.local_model = [x.detach().clone() for x in user.model.parameters()]
        for name, value in ({"local_epochs": EPOCHS} | fields).items():
            setattr(user, name, value)
        users.append(user)
    server = of(cut(folder / "servers/serverbase.py", "Server", known), model=Net(w))
    server.users = server.selected_users = users
    return server, known


@check(
    "pfedme",
    "CharlieDinh/pFedMe",
    "two rounds: the inner steps, the local ones, and the mixture at the server",
    "their weight decay of 0.001 in the inner steps (fedoptimizer.py:64) is left out",
)
def _pfedme(checkout: Path) -> dict[str, Any]:
    lr, inner, lam, beta = 0.02, 0.05, 15.0, 0.7
    given = {"inner_steps": 4, "inner_lr": inner, "lam": lam, "beta": beta}
    states = ours("pfedme", 2, task={"lr": lr}, **given)
    fields = {"K": 4, "personal_learning_rate": inner, "lamda": lam}
    file = "userpFedMe.py"
    server, known = _users(
        checkout, "UserpFedMe", file, states, learning_rate=lr, **fields
    )
    server.beta = beta
    for user in server.users:
        parameters = user.model.parameters()
        user.optimizer = known["pFedMeOptimizer"](parameters, inner, lam, mu=0)
    for _ in range(2):
        server.send_parameters()
        for user in server.users:
            user.train(0)
        server.persionalized_aggregate_parameters()
    return {"server": (values(server.model), weights(states[2].server))}


@check(
    "per_fedavg",
    "CharlieDinh/pFedMe",
    "two rounds of first-order meta-steps",
    "another author's repository",
)
def _per_fedavg(checkout: Path) -> dict[str, Any]:
    states = ours("per_fedavg", 2, alpha=0.1, beta=0.05)
    server, known = _users(checkout, "UserPerAvg", "userperavg.py", states, beta=0.05)
    for user in server.users:
        user.optimizer = known["MySGD"](user.model.parameters(), lr=0.1)
    for _ in range(2):
        server.send_parameters()
        for user in server.users:
            user.train(0)
        server.aggregate_parameters()
    return {"server": (values(server.model), weights(states[2].server))}


@check(
    "fedproto",
    "yuetan031/FedProto",
    "two rounds of local training, and the mean prototypes",
    "prototypes of the trained model; theirs are of the last epoch's steps "
    "(update.py:177)",
)
def _fedproto(checkout: Path) -> dict[str, Any]:
    known = names()
    average = cut(checkout / "lib/utils.py", "agg_func", known)
    aggregate = cut(checkout / "lib/utils.py", "proto_aggregation", known)
    kind = cut(checkout / "lib/update.py", "LocalUpdate", known)
    args = types.SimpleNamespace(optimizer="sgd", lr=LR, train_ep=EPOCHS, ld=1.0)
    args.num_classes, args.verbose = C, 0
    states = ours("fedproto", 2, task={"optimizer": momentum(0.5)}, lam=1.0)
    nets = [LogitsFirst(weights(row(states[0], i))) for i in range(N)]
    prototypes: dict[int, Any] = {}
    for _ in range(2):
        sent = {}
        for i, net in enumerate(nets):
            local = of(kind, args=args, trainloader=LOADERS[i], device="cpu")
            local.criterion = cross_entropy
            local.update_weights_het(args, i, prototypes, net, 0)
            x, y = data(i)
            h = net(x)[1].detach()
            sent[i] = average({k: list(h[y == k]) for k in y.unique().tolist()})
        prototypes = aggregate(sent)
    table = torch.stack([prototypes[k][0] for k in range(C)], dim=1)
    return {
        "prototypes": (table, states[2].server["proto"]),
        "model": (values(nets[1]), weights(row(states[2], 1))),
    }


@check(
    "ditto",
    "litian96/ditto",
    "two rounds of the global and the personal models",
    "the mean is by training examples, theirs uniform over clients drawn by size "
    "(fedbase.py:139)",
)
def _ditto(checkout: Path) -> dict[str, Any]:
    states, lam = ours("ditto", 2, lam=0.5), 0.5
    w = weights(states[0].server)

    class Model:
        """A list of weights in place of the authors' TensorFlow graph."""

        def set_params(self, params: list[np.ndarray]) -> None:
            self.params = params

        def get_params(self) -> list[np.ndarray]:
            return self.params

    class Client:
        """A client whose batch is all of its data."""

        def __init__(self, i: int):
            self.train_data = data(i)

        def get_loss(self) -> float:
            return 0.0

        def solve_sgd(self, batch: Any) -> Any:
            net, (x, y) = Net(model.params), batch
            cross_entropy(net(x), y).backward()
            slope = gradient(net)
            pairs = zip(model.params, slope, strict=True)
            model.params = [w - LR * g for w, g in pairs]
            return None, (len(y), slope), 0.0

    model, share = Model(), SIZES / SIZES.sum()
    known = names(gen_batch=lambda examples, *_: itertools.repeat(examples))
    server = types.SimpleNamespace(
        clients=[Client(i) for i in range(N)],
        client_model=model,
        global_model=copied(w),
        local_models=[copied(w) for _ in range(N)],
        simple_average=lambda updates: [
            np.tensordot(share, np.stack(x), 1) for x in zip(*updates, strict=True)
        ],
        **{"seed": 0, "num_corrupted": 0, "dataset": "", "eval_every": 10, "q": 0},
        **{"batch_size": BATCH, "clients_per_round": N, "num_rounds": 1, "lam": lam},
        **{"local_iters": EPOCHS, "learning_rate": LR, "dynamic_lam": False},
        **dict.fromkeys(("gradient_clipping", "median", "k_norm", "krum", "mkrum"), 0),
    )
    server.select_clients = lambda **_: (range(N), server.clients)
    cut(checkout / "flearn/trainers_MTL/ditto.py", "Server.train", known)(server)
    return {
        "server": (server.global_model, weights(states[2].server)),
        "personal": (server.local_models[1], weights(row(states[2], 1)["v"])),
    }


@check(
    "fedrep",
    "lgcollins/FedRep",
    "two rounds of three epochs of the head and two of the body",
    "their momentum of 0.5 and weight decay are given to the optimizer",
)
def _fedrep(checkout: Path) -> dict[str, Any]:
    def decayed(lr: Any) -> Any:
        def kernels(params: Any) -> Any:
            return jax.tree.map(lambda x: x.ndim > 1, params)

        decay = optax.add_decayed_weights(1e-4, mask=kernels)
        return optax.chain(decay, optax.sgd(lr, momentum=0.5))

    kind = cut(checkout / "models/Update.py", "LocalUpdate", names())
    args = types.SimpleNamespace(alg="fedrep", local_ep=5, local_rep_ep=2, dataset="")
    args.local_updates, args.device = 1000, "cpu"
    given = {"head_epochs": 3, "body_epochs": 2}
    states = ours("fedrep", 2, task={"optimizer": decayed}, **given)
    head = row(states[0], 0)["head"]
    w = weights({**states[0].server, "head": head})
    heads = [w[2:]] * N
    for _ in range(2):
        nets = [Net(w[:2] + heads[i]) for i in range(N)]
        for i, net in enumerate(nets):
            local = of(kind, args=args, loss_func=cross_entropy, ldr_train=LOADERS[i])
            local.indd = None
            local.train(net, ["base.0.weight", "base.0.bias"], lr=LR)
            heads[i] = values(net)[2:]
        w = mean(nets)
    head = row(states[2], 1)["head"]
    mine = weights({**states[2].server, "head": head})
    return {"body": (w[:2], mine[:2]), "head": (heads[1], mine[2:])}


class Linear(Net):
    """The small network, whose last layer is named as the authors' is."""

    def __init__(self, w: list[np.ndarray]):
        super().__init__(w)
        self.linear = self._modules.pop("head")

    @property
    def head(self) -> Any:
        return self.linear


@check(
    "fedbabu",
    "jhoon-oh/FedBABU",
    "two rounds of the body's training",
    "the mean is by training examples, theirs uniform (main_fed.py:103)",
)
def _fedbabu(checkout: Path) -> dict[str, Any]:
    kind = cut(checkout / "models/Update.py", "LocalUpdate", names())
    args = types.SimpleNamespace(momentum=0.9, wd=0, local_ep=EPOCHS, device="cpu")
    states = ours("fedbabu", 2, task={"optimizer": momentum(0.9)})
    w = weights(states[0].server)
    for _ in range(2):
        nets = [Linear(w) for _ in range(N)]
        for i, net in enumerate(nets):
            local = of(kind, args=args, loss_func=cross_entropy, ldr_train=LOADERS[i])
            local.pretrain = False
            local.train(net, body_lr=LR, head_lr=0.0)
        w = mean(nets)
    return {"server": (w, weights(states[2].server))}


def _script(loaders: list[Any], **more: Any) -> dict[str, Any]:
    """Returns the globals that the scripts of FedSSA and FedMRL need."""
    count = len(loaders)
    ignored = lambda *_, **__: None
    writer = types.SimpleNamespace(writerow=ignored, writerows=ignored)
    nodes = types.SimpleNamespace(
        train_sample_count=[1] * count,
        eval_sample_count=[0] * count,
        test_sample_count=[0] * count,
        train_loaders=loaders,
        test_loaders=[[]] * count,
    )
    known = names(trange=range, Path=Path, BaseNodes=lambda *_, **__: nodes)
    known["open"] = lambda *_, **__: contextlib.nullcontext(io.StringIO())
    known["csv"] = types.SimpleNamespace(writer=lambda *_, **__: writer)
    known["logging"] = types.SimpleNamespace(info=ignored)
    known["pickle"] = types.SimpleNamespace(dump=ignored)
    known["os"] = types.SimpleNamespace(rename=ignored)
    scores = ("TestAcc", "test_acc", "test_acc_small")
    scores += ("test_acc_small_single", "test_acc_large_single")
    return known | dict.fromkeys(scores, lambda *_: (torch.zeros(()), 0.0)) | more


@check(
    "fedssa",
    "LipingYi/FedSSA",
    "three rounds of the script, with `variant=code`",
    "by default the weights of the fused heads sum to 1, theirs do not "
    "(FedSSA_hetero.py:234)",
)
def _fedssa(checkout: Path) -> dict[str, Any]:
    states = ours(
        "fedssa", 3, task={"optimizer": momentum(0.9)}, mu=0.5, variant="code"
    )
    made: list[Net] = []

    def network(**_: Any) -> Net:
        made.append(LogitsFirst(weights(row(states[0], len(made)))))
        return made[-1]

    known = _script(LOADERS, **{f"CNN_{k}": network for k in range(1, 6)})
    folder = checkout / "FedSSA/experiments/FLHetero"
    script = cut(folder / "FedSSA_hetero.py", "train", known)
    given = {"data_name": "cifar10", "num_classes": C, "num_nodes": N, "frac": 1}
    given |= {"steps": 3, "inner_steps": EPOCHS, "optim": "sgd", "lr": LR}
    given |= {"inner_lr": LR, "wd": 0, "inner_wd": 0, "save_path": ".", "device": "cpu"}
    unused = ("data_path", "classes_per_node", "embed_lr", "embed_dim", "hyper_hid")
    unused += ("n_hidden", "n_kernels", "bs", "eval_every", "seed")
    script(**given, **dict.fromkeys(unused, 0))
    mine = [weights(row(states[3], i)) for i in range(N)]
    return {f"client {i}": (values(made[i]), mine[i]) for i in range(N)}


@check(
    "fedgh",
    "LipingYi/FedGH",
    "two rounds of the script on each client, with `server_lr=0`",
    "their server's optimizer holds a client's network, so the common head is never "
    "trained (FedGH.py:101 and 260); their momentum is left out",
)
def _fedgh(checkout: Path) -> dict[str, Any]:
    states = ours("fedgh", 2, server_lr=0.0, server_epochs=1)
    head = states[0].server["head"]

    class Header(nn.Module):
        """A head alone, with the names of the whole network."""

        def __init__(self, w: list[np.ndarray]):
            super().__init__()
            self.head = Net(w).head

        def forward(self, h: torch.Tensor) -> Any:
            return self.head(h)

    def sgd(params: Any, lr: float, **_: Any) -> Any:
        return torch.optim.SGD(params, lr=lr)

    optimizers = types.SimpleNamespace(SGD=sgd, Adam=torch.optim.Adam)
    file = checkout / "FedGH_Codes/experiments/FLHetero/FedGH.py"
    given = {"data_name": "cifar10", "num_nodes": 1, "fraction": 1, "steps": 2}
    given |= {"epochs": EPOCHS, "optim": "sgd", "lr": LR, "wd": 0, "save_path": "."}
    unused = ("data_path", "classes_per_node", "inner_lr", "embed_lr", "inner_wd")
    unused += ("embed_dim", "hyper_hid", "n_hidden", "n_kernels", "bs", "eval_every")
    unused += ("seed", "total_classes")
    pairs = {}
    for i in range(N):
        start = weights({**row(states[0], i), "head": head})
        net, common, seen = LogitsFirst(start), Header(start), []

        def score(net: Net, *_: Any, seen: list[Any] = seen) -> Any:
            seen.append(copied(values(net)))
            return torch.zeros(()), 0.0

        made = {"test_acc": score, "CNN_1": lambda net=net, **_: net}
        known = _script([LOADERS[i]], FC=lambda common=common, **_: common, **made)
        known["torch"] = types.SimpleNamespace(**(vars(torch) | {"optim": optimizers}))
        cut(file, "train", known)(**given, **dict.fromkeys(unused, 0), device="cpu")
        mine = weights({**row(states[2], i), "head": states[2].server["head"]})
        theirs = [common.head.weight.T.detach(), common.head.bias.detach()]
        pairs[f"client {i}"] = (seen[-1][:2] + theirs, mine)
    return pairs


class Fused(Net):
    """The small network, whose head reads features that it is given."""

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> Any:  # type: ignore[override]
        return self.head(r), self.base(x)


@check(
    "fedmrl",
    "LipingYi/FedMRL",
    "a round of the script on each client: both models and the projector",
    "the mean over the clients is ours: they keep one small model by reference, so its "
    "mean is the last client's (FedMRL_hetero.py:351)",
)
def _fedmrl(checkout: Path) -> dict[str, Any]:
    from fedjax_pfl import models
    from fedjax_pfl.models import nets

    width = 500  # of both models in the script
    mlp = lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=width)
    net = models.model(mlp, synthetic.SHAPE, C)
    task = {"models": (net,), "shared": net, "optimizer": momentum(0.9)}
    states = ours("fedmrl", 1, task=task)
    small, own = weights(states[0].server), weights(row(states[0], 0)["w"])
    bias, kernel = jax.tree.leaves(row(states[0], 0)["projector"])
    folder = checkout / "experiments/FLHetero"
    kind = cut(folder / "Models/CNNs.py", "projector", names())
    given = {"data_name": "cifar10", "num_nodes": 1, "fraction": 1, "steps": 1}
    given |= {"epochs": EPOCHS, "lr": LR, "wd": 0, "save_path": ".", "device": "cpu"}
    unused = ("data_path", "classes_per_node", "optim", "inner_lr", "embed_lr")
    unused += ("inner_wd", "embed_dim", "hyper_hid", "n_hidden", "n_kernels", "bs")
    unused += ("eval_every", "seed", "LowProb")
    trained = []
    for i in range(N):
        projector = kind(2 * width, width)
        projector.fc3.weight.data = tensor(kernel.T)
        projector.fc3.bias.data = tensor(bias)
        parts = Fused(small), Fused(own), projector
        made = {f"CNN_{k}_large": lambda net=parts[1], **_: net for k in range(1, 6)}
        made |= {"CNN_5_small": lambda net=parts[0], **_: net}
        made |= {"projector": lambda net=projector, **_: net}
        script = cut(
            folder / "FedMRL_hetero.py", "train", _script([LOADERS[i]], **made)
        )
        script(**given, **dict.fromkeys(unused, 0))
        trained.append(parts)
    mine, fc = row(states[1], 1), trained[1][2].fc3
    theirs = [fc.bias.detach(), fc.weight.T.detach()]
    return {
        "small model": (mean(x[0] for x in trained), weights(states[1].server)),
        "own model": (values(trained[1][1]), weights(mine["w"])),
        "projector": (theirs, jax.tree.leaves(mine["projector"])),
    }


class Endless:
    """A loader that yields a client's data for ever."""

    def __init__(self, i: int):
        self.batch = data(i)

    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> Any:
        return self.batch

    next = __next__  # as the authors' code calls it


class Averager:
    """The authors' meter, whose values are not read here."""

    def add(self, value: float) -> None:
        pass

    def item(self) -> float:
        return 0.0


@check(
    "fedphp",
    "lxcnju/FedRepo",
    "three rounds: local training under the inherited model, and its mixture",
    "the MMD has fixed bandwidths, theirs follow the mean distance (tools.py:17)",
)
def _fedphp(checkout: Path) -> dict[str, Any]:
    def mmd(h: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        def kernel(a: torch.Tensor, b: torch.Tensor) -> Any:
            d2 = ((a[:, None] - b[None]) ** 2).sum(dim=2)
            return sum(torch.exp(-d2 / (2 * v)) for v in losses.VARIANCES)

        return (kernel(h, h) + kernel(u, u) - 2 * kernel(h, u)).mean()

    known = names(Averager=Averager, mmd_rbf_noaccelerate=mmd)
    cut(checkout / "tools.py", "construct_optimizer", known)
    kind = cut(checkout / "algorithms/fedphp.py", "FedPHP", known)
    args = types.SimpleNamespace(lr=LR, cuda=False, local_steps=EPOCHS, momentum=0)
    args.weight_decay, args.optimizer, args.max_grad_norm = 0, "SGD", 1e9
    args.reg_way, args.reg_lamb, args.c_ratio, args.max_round = "MMD", 0.3, 1, 9
    states = ours("fedphp", 3, lam=0.3)
    run = of(kind, args=args, cnts=dict.fromkeys(range(N), 0))
    run.test = lambda **_: (0.0, 0.0)
    model = FeaturesFirst(weights(states[0].server))
    inherited = [FeaturesFirst(values(model)) for _ in range(N)]
    share = {i: float(SIZES[i] / SIZES.sum()) for i in range(N)}
    for t in range(3):
        local = {i: FeaturesFirst(values(model)) for i in range(N)}
        for i in range(N):
            run.update_local(t, i, local[i], inherited[i], Endless(i), None)
            run.cnts[i] += 1
        run.update_global(t, model, local, share)
    return {
        "server": (values(model), weights(states[3].server)),
        "inherited": (values(inherited[1]), weights(row(states[3], 1)["h"])),
    }


@contextlib.contextmanager
def innerloop_ctx(model: nn.Module, optimizer: Any) -> Any:
    """The function of the library higher of this name, for one network and SGD."""
    params, lr = dict(model.named_parameters()), optimizer.param_groups[0]["lr"]

    def step(loss: torch.Tensor) -> None:
        slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        for name, slope in zip(list(params), slopes, strict=True):
            params[name] = params[name] - lr * slope

    def forward(x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, params, (x,))

    yield forward, types.SimpleNamespace(step=step)


@check(
    "fedl2g",
    "TsingZ0/FedL2G",
    "two rounds: guided training, the guidance's gradients, and the server's step",
    "a share of the examples is held out, theirs are the first batches "
    "(clientl2g_logit.py:64)",
)
def _fedl2g(checkout: Path) -> dict[str, Any]:
    items: dict[Any, Any] = {}
    held = [int(x) for x in local_training.held_out(jnp.array(SIZES), 0.3)]

    def examples(_: Any, i: int, **__: Any) -> Any:
        found = list(zip(*data(i), strict=True))
        # held out are the last ones here, and the first ones there
        return found[len(found) - held[i] :] + found[: len(found) - held[i]]

    def loader(given: Any, *_: Any, **__: Any) -> Any:
        x, y = zip(*given, strict=True)
        return [(torch.stack(x), torch.stack(y))]

    higher = types.SimpleNamespace(innerloop_ctx=innerloop_ctx)
    known = names(Client=object, Server=object, time=time, higher=higher)
    known |= {"DataLoader": loader, "read_client_data": examples}
    known |= {"sdp_kernel": lambda **_: contextlib.nullcontext()}
    known |= {"load_item": lambda role, name, _: items[role, name]}
    known["save_item"] = lambda item, role, name, _: items.update({(role, name): item})
    folder = checkout / "system/flcore"
    kind = cut(folder / "clients/clientl2g_logit.py", "clientL2G", known)
    cut(folder / "servers/serverl2g_logit.py", "grads_aggregate", known)
    server = of(cut(folder / "servers/serverl2g_logit.py", "FedL2G", known))
    rate = 10.0  # large, so that the guidance moves
    states = ours("fedl2g", 2, server_lr=rate, warmup=1, quiz=0.3)
    table = tensor(states[0].server["guide"])
    guide = nn.Embedding.from_pretrained(table, freeze=False)
    server.guiding_vec, server.num_classes, server.device = guide, C, "cpu"
    server.optimizer = torch.optim.SGD(guide.parameters(), lr=rate)
    server.role, server.save_folder_name = "Server", ""
    items["Server", "guiding_vec"] = guide
    common = {"loss": cross_entropy, "loss_mse": nn.MSELoss(), "learning_rate": LR}
    common |= {"local_epochs": EPOCHS, "train_slow": False, "device": "cpu"}
    common |= {"meta_study_batches": 1, "meta_quiz_batches": 1, "dataset": ""}
    common |= {"save_folder_name": "", "batch_size": BATCH}
    clients = []
    for i in range(N):
        made = of(kind, id=i, role=i, num_quiz=held[i], **common)
        made.train_time_cost = defaultdict(int)
        items[i, "model"] = Net(weights(row(states[0], i)))
        clients.append(made)
    for t in range(2):
        for made in clients:
            if t >= 1:
                made.train()
            if made.num_quiz:
                made.meta_study()
        server.uploaded_ids = [made.id for made in clients if made.num_quiz]
        server.uploaded_gs = [items[i, "grads"] for i in server.uploaded_ids]
        server.aggregate_grads()
    first, last = (states[t].server["guide"] for t in (0, 2))
    return {
        "guidance": (guide.weight.detach() - tensor(first), last - first),
        "model": (values(items[1, "model"]), weights(row(states[2], 1))),
    }
