"""The same local training steps in PyTorch, eager, on the same CPU or a GPU;
`benchmarks.throughput --pytorch` shows them.

Processes of their own run them, so that PyTorch's threads and JAX's do not compete:
either one that uses every core, or one a core with a thread each; on a GPU one. Both
memory formats are measured, NCHW and channels last.

And what running a checkout of PFLlib or of HtFLlib takes, for `benchmarks.peers` and
`benchmarks.agreement`.
"""

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import time
import types
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report
from benchmarks.recipes import Recipe
from fedjax_pfl.errors import InputError

WIDTHS = (64, 64, 128, 256, 512)  # of ResNet-18's stem and stages
TIMEOUT = 300  # seconds a process waits for the others, one of which may have failed
# channels and paddings of the 5x5 convolutions, widths of the linear layers
NETS: dict[str, tuple] = {
    "linear": ((), (), ()),
    "mlp": ((), (), (64,)),
    "mlp28": ((), (), (64,)),
    "lenet": ((6, 16), (2, 0), (120, 84)),
    "cnn": ((32, 64), (0, 0), (512,)),
}
# by which a checkout is known
SERVERS = {"PFLlib": "serveravg", "HtFLlib": "serverproto"}
MISSING = ("torchvision", "h5py")  # what the libraries import and is not used here
DATASET = "Cifar10"  # its name decides how they read it


class Options(types.SimpleNamespace):
    """What a library's command line would hand on."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it asks for an option {name!r} that is not known here")


def installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def check(path: str | None, library: str) -> str:
    """Returns the checkout of a library.

    Raises:
      InputError: there is none, or no PyTorch.
    """
    if not path:
        raise InputError(
            "There is nothing to compare with: give --pfllib=PATH, a checkout of "
            "github.com/TsingZ0/PFLlib, "
            "or --htfllib=PATH, one of github.com/TsingZ0/HtFLlib."
        )
    flag, file = f"--{library.lower()}", f"system/flcore/servers/{SERVERS[library]}.py"
    if not (Path(path) / file).exists():
        raise InputError(
            f"{flag}={path} is no checkout of {library}: there is no {file} in it."
        )
    if not installed():
        raise InputError(f"{flag} needs PyTorch: pip install -e '.[benchmarks]'.")
    return path


@contextlib.contextmanager
def told(library: str) -> Iterator[None]:
    """Says in one sentence what a checkout lacks that is of another version, or what it
    imports in vain.

    Raises:
      InputError: the library cannot be run.
    """
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"The checkout of {library} cannot be run here: {error}."
        ) from error
    except (AttributeError, TypeError, FileNotFoundError) as error:
        raise InputError(
            f"The checkout of {library} is of another version than those known here: "
            f"{error}."
        ) from error


def options(recipe: Recipe, rounds: int, device: str) -> dict[str, Any]:
    """The options that both libraries read; nothing is evaluated after the first of the
    rounds."""
    given = {
        "dataset": DATASET,
        "device": device,
        "goal": "time",
        "save_folder_name": "temp",
        "few_shot": 0,
    }
    given |= {
        "num_classes": recipe.classes,
        "num_clients": recipe.clients,
        "batch_size": recipe.batch,
    }
    given |= {
        "global_rounds": rounds,
        "eval_gap": rounds + 1,
        "local_epochs": 1,
        "local_learning_rate": recipe.lr,
    }
    given |= {
        "join_ratio": 1.0,
        "random_join_ratio": False,
        "top_cnt": 100,
        "time_threthold": 10_000,
    }
    given |= dict.fromkeys(
        ("client_drop_rate", "train_slow_rate", "send_slow_rate"), 0.0
    )
    return given | dict.fromkeys(("time_select", "auto_break"), False)


def training(clients: Sequence[Any]) -> float:
    """Seconds of a round, the mean, by the count of a library's clients."""
    return sum(
        x.train_time_cost["total_cost"] / x.train_time_cost["num_rounds"]
        for x in clients
    )


def import_from(checkout: str, threads: int | None = None) -> None:
    """Makes what is in a checkout's folder `system` importable here, on all cores or so
    many threads; what it imports and is not used here is stood in for where it is
    missing."""
    import torch

    torch.set_num_threads(threads or report.cores())
    for name in MISSING:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.join(os.path.abspath(checkout), "system"))


def device() -> str:
    """Where PyTorch runs, `cpu` or `cuda`: where JAX does.

    Raises:
      InputError: JAX has an accelerator, and PyTorch finds no GPU.
    """
    if jax.default_backend() == "cpu":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "--pytorch: JAX runs on an accelerator and PyTorch finds no GPU, so leave "
            "it out here."
        )
    return "cuda"


def steps_per_second(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    batch: int,
    processes: int,
    steps: int,
    repeats: int,
    device: str = "cpu",
) -> dict[str, float]:
    """Steps a second of all processes together, for each memory format; the median of
    the repetitions.

    Args:
      model: its name in `setting`.
      shape: (height, width, channels) of an image.
      classes: C.
      batch: examples a step.
      processes: how many train side by side, on an equal share of the cores.
      steps: of a process in a repetition.
      repeats: the number of repetitions.
      device: see `device`.
    """
    spawn = multiprocessing.get_context("spawn")
    threads = max(1, report.cores() // processes)
    rates = {}
    for form in ("NCHW", "channels last"):
        args = (model, shape, classes, batch, form, threads, steps, repeats, device)
        options = {
            "mp_context": spawn,
            "initializer": _meet,
            "initargs": (spawn.Barrier(processes),),
        }
        with futures.ProcessPoolExecutor(processes, **options) as pool:
            runs = [pool.submit(_work, *args) for _ in range(processes)]
            rates[form] = processes * steps / statistics.median(runs[0].result())
    return rates


def _meet(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _work(
    model, shape, classes, batch, form, threads, steps, repeats, device
) -> list[float]:
    """Seconds of each repetition in one process, which begin and end for all processes
    at once."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    last = torch.channels_last if form == "channels last" else torch.contiguous_format
    net = _network(model, shape, classes).to(device, memory_format=last)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(
        rng.integers(0, 256, (100, shape[2], *shape[:2]), np.uint8)
    ).to(device)
    labels = torch.from_numpy(rng.integers(0, classes, 100)).to(device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step() -> None:
        rows = torch.randperm(100, device=device)[:batch]
        x = ((images[rows].float() / 255 - 0.5) / 0.5).contiguous(memory_format=last)
        loss = torch.nn.functional.cross_entropy(net(x), labels[rows])
        sgd.zero_grad()
        loss.backward()
        sgd.step()

    step(), finish()
    seconds = []
    for _ in range(repeats):
        _barrier.wait(TIMEOUT)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        _barrier.wait(TIMEOUT)
        seconds.append(time.perf_counter() - begin)
    return seconds


def parameters(variables: Any, channels: int) -> list[np.ndarray]:
    """Our parameters of a network of NETS, in the order and layout of PyTorch's:
    convolutions OIHW, linear kernels transposed, the first linear one with its inputs
    by channel.

    Args:
      variables: as `Model.init` makes them.
      channels: of the images, [B, H, W, channels].
    """
    body, values = variables["body"], []
    for _, conv in sorted(body.get("convs", {}).items()):
        values += [np.transpose(conv["kernel"], (3, 2, 0, 1)), np.asarray(conv["bias"])]
        channels = conv["kernel"].shape[-1]
    layers = [
        layer for _, layer in sorted(body.get("dense", body).get("layers", {}).items())
    ]
    for i, layer in enumerate([*layers, variables["head"]]):
        kernel = np.asarray(layer["kernel"])
        # its inputs are pixels by channel here, [H W, C], and channels by pixel there
        if i == 0:
            kernel = (
                kernel.reshape(-1, channels, kernel.shape[1])
                .transpose(1, 0, 2)
                .reshape(kernel.shape)
            )
        values += [kernel.T, np.asarray(layer["bias"])]
    return values


def _network(model: str, shape: tuple[int, ...], classes: int) -> Any:
    from torch import nn

    if model == "resnet18":
        return _resnet(classes)
    height, width, cin = shape
    channels, paddings, widths = NETS[model]
    layers: list[Any] = []
    for cout, padding in zip(channels, paddings, strict=True):
        layers += [nn.Conv2d(cin, cout, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        cin, height, width = (
            cout,
            (height + 2 * padding - 4) // 2,
            (width + 2 * padding - 4) // 2,
        )
    layers, size = [*layers, nn.Flatten()], cin * height * width
    for width in widths:
        layers, size = [*layers, nn.Linear(size, width), nn.ReLU()], width
    return nn.Sequential(*layers, nn.Linear(size, classes))


def _resnet(classes: int) -> Any:
    """ResNet-18 for small images; torchvision has the one for large images only."""
    from torch import nn

    def conv(cin: int, cout: int, side: int, stride: int) -> list[Any]:
        return [
            nn.Conv2d(cin, cout, side, stride, side // 2, bias=False),
            nn.BatchNorm2d(cout),
        ]

    class Block(nn.Module):
        def __init__(self, cin: int, cout: int):
            super().__init__()
            stride = 1 if cin == cout else 2
            self.main = nn.Sequential(
                *conv(cin, cout, 3, stride), nn.ReLU(), *conv(cout, cout, 3, 1)
            )
            self.shortcut = nn.Sequential(
                *(conv(cin, cout, 1, stride) if cin != cout else [])
            )

        def forward(self, x):
            return nn.functional.relu(self.main(x) + self.shortcut(x))

    pairs = [pair for a, b in itertools.pairwise(WIDTHS) for pair in ((a, b), (b, b))]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes)]
    return nn.Sequential(
        *conv(3, 64, 3, 1), nn.ReLU(), *(Block(*pair) for pair in pairs), *ends
    )
