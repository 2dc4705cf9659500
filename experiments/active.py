"""Which parts of a method have an effect at its defaults: how far it is from itself
without one.

    python -m experiments.active [METHOD ...]

trains each method, as --rounds=5 of the digits preset does, with its defaults and
without each of its parts below, and writes how far apart the two are to
benchmarks/results/active.json, which --describe and the methods' pages show. Without
names all methods are renewed.
"""

import functools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments import build, entry, flags, scores, settings
from experiments.files import Row, write_text
from experiments.presets import PRESETS
from fedjax_pfl import simulate
from fedjax_pfl.engine import xla
from fedjax_pfl.errors import choose
from fedjax_pfl.models import layers, nets

FILE = Path(__file__).parent.parent / "benchmarks" / "results" / "active.json"
ROUNDS, WIDTH = 5, 4
_EVERY: dict[str, Any] = {"eval_every": ROUNDS, "state_every": ROUNDS}
# less than both, and a part is idle: of the score (0.1 points), of the parameters' norm
FEW, NEAR = 0.001, 0.01
_NO_PARAMETERS = ("stats", "start")  # in the state beside them
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Part(NamedTuple):
    """A part of a method, and how it is switched off."""

    what: str
    hparams: Mapping[str, str] = _NOTHING  # by these hyperparameters
    method: str = ""  # or by taking this method instead


class Method(NamedTuple):
    """A row of the table."""

    # where in the State the parameters are that a client predicts with; later ones
    # replace earlier ones
    models: str
    parts: tuple[Part, ...]
    settings: Mapping[str, Any] = _NOTHING  # over the preset's
    why: str = ""  # without parts: why there are none


def narrow(
    input_shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Half as wide as the preset's multilayer perceptron."""
    return nets.mlp(input_shape, num_classes, rngs, hidden=32)


class Normed(nnx.Module):
    """The body of `normed`."""

    def __init__(self, din: int, rngs: nnx.Rngs):
        self.dense, self.norm = (
            nets.Dense(din, (64,), rngs),
            layers.BatchNorm(64, rngs=rngs),
        )

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        return self.norm(self.dense(x), mask, train)


def normed(
    input_shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs
) -> nnx.Module:
    """The preset's multilayer perceptron, with batch norm after its hidden layer."""
    return nets.Net(
        Normed(math.prod(input_shape), rngs), layers.linear(64, num_classes, rngs)
    )


WIDTHS = {"model": "mlp,experiments.active:narrow", "features": 32}
NORM = {"model": "experiments.active:normed"}
PUBLIC = WIDTHS | {"public": "synthetic:200"}
TUNING = Part("the fine-tuning before a prediction", {"fine_tune_epochs": "0"})
EXAMPLES = Part("the training on public examples", {"passes": "0"})
TASKS = Part("the tasks of one class each", {"tasks": "single"})
TABLE = {
    "local": Method(
        "clients", (), why="Nothing travels: it is what others are without their parts."
    ),
    "fedavg": Method("server", (Part("the averaging", method="local"),)),
    "fedavg_ft": Method("server", (TUNING,)),
    "fedprox": Method("server", (Part("the proximal term", {"mu": "0"}),)),
    "scaffold": Method("server.w", (Part("the control variates", method="fedavg"),)),
    "per_fedavg": Method("server", (Part("the inner step", {"alpha": "0"}),)),
    "pfedme": Method("clients.theta", (Part("the averaging", {"beta": "0"}),)),
    "fedper": Method("server+clients", (Part("the personal head", method="fedavg"),)),
    "fedrep": Method(
        "server+clients", (Part("the head's phase of its own", method="fedper"),)
    ),
    "lg_fedavg": Method("server+clients", (Part("the shared head", method="local"),)),
    "fedbabu": Method("server", (TUNING, Part("the frozen head", method="fedavg_ft"))),
    "fedbn": Method(
        "server+clients", (Part("the personal batch norm", method="fedavg"),), NORM
    ),
    "fedma": Method(
        "server",
        (
            Part("the matching", {"matching": "identity"}),
            Part("the retraining", {"retrain_epochs": "0"}),
        ),
    ),
    "pfedma": Method(
        "server", (TUNING, Part("the matching", {"matching": "identity"}))
    ),
    "fedrod": Method(
        "server",
        (
            Part("the balanced loss", {"gamma": "0"}),
            Part("the second head", method="fedavg"),
        ),
    ),
    "ditto": Method("clients.v", (Part("the proximal term", {"lam": "0"}),)),
    "apfl": Method(
        "clients.v",
        (
            Part(
                "the mixture with the global model", {"alpha": "1", "adaptive": "false"}
            ),
            Part("the learning of its weight", {"adaptive": "false"}),
        ),
    ),
    "fedamp": Method(
        "server.w", (Part("the proximal term to the mixture", {"lam": "0"}),)
    ),
    "fedphp": Method(
        "clients.h",
        (
            Part("the teacher", {"lam": "0"}),
            Part("the average over rounds", {"mu0": "0"}),
        ),
    ),
    "fedala": Method("server+clients.w", (Part("the blending", {"lr_weights": "0"}),)),
    "fedfomo": Method(
        "server.models", (Part("the others' models", {"received": "1"}),)
    ),
    "pfedhn": Method(
        "server.h", (Part("the hypernetwork's learning", {"hyper_lr": "0"}),)
    ),
    "mocha": Method(
        "server.w",
        (Part("the relations", {"relate_every": str(ROUNDS + 1)}),),
        {"model": "linear"},
    ),
    "fedproto": Method("clients", (Part("the prototypes", {"lam": "0"}),), WIDTHS),
    "fd": Method(
        "clients.w", (Part("the others' predictions", {"gamma": "0"}),), WIDTHS
    ),
    "fml": Method(
        "clients.w", (Part("the small model's predictions", {"alpha": "1"}),), WIDTHS
    ),
    "fedkd": Method("clients.w", (Part("the distillation", method="local"),), WIDTHS),
    "fedapen": Method(
        "clients.w",
        (
            Part("the learning of the weight", {"lam_epochs": "0"}),
            Part("the small model", method="local"),
        ),
        WIDTHS,
    ),
    "mnfl": Method("server.w", (Part("the learned coefficients", {"coef_lr": "0"}),)),
    "mnfl_het": Method(
        "clients",
        (Part("the learned coefficients", {"coef_lr": "0"}), EXAMPLES),
        PUBLIC,
    ),
    "fedmd": Method("clients", (EXAMPLES,), PUBLIC),
    "sim_pfd": Method(
        "clients", (Part("the similarities", method="fedmd"), EXAMPLES), PUBLIC
    ),
    "topk_pfd": Method(
        "clients", (Part("the choice of neighbours", method="fedmd"), EXAMPLES), PUBLIC
    ),
    "feddf": Method("server", (Part("the distillation", {"passes": "0"}),), PUBLIC),
    "pfeddf": Method(
        "server", (TUNING, Part("the distillation", {"passes": "0"})), PUBLIC
    ),
    "fedem": Method("server", (Part("the mixture", {"components": "1"}),)),
    "fedcp": Method(
        "server+clients",
        (
            Part("the MMD", {"lam": "0"}),
            Part("the policy network", {"without": "cpn"}),
            Part("both and the global head", method="fedper"),
        ),
    ),
    "feddva": Method(
        "server",
        (Part("the regulariser of c", {"beta": "0"}),),
        {"clients": 20, "lr": 0.001, "optimizer": "adam", "hparams": {"hidden": "64"}},
    ),
    "pfedc": Method(
        "server", (TASKS, Part("the minimum-norm weights", {"weighting": "uniform"}))
    ),
    "privacy_pfedc": Method("server", (TASKS,), {"hparams": {"backend": "plain"}}),
    "pfedafm": Method(
        "clients", (Part("the shared extractor", {"lr_alpha": "0"}),), WIDTHS
    ),
}


@functools.cache
def _compiled(
    method: str, given: str
) -> tuple[build.Experiment, simulate.Program, simulate.Compiled]:
    experiment = build.prepare(
        settings.resolve({"algo": method, "rounds": ROUNDS} | json.loads(given))
    )
    program = experiment.program(WIDTH)
    return (
        experiment,
        program,
        simulate.compiled(program, experiment.key, experiment.federation, **_EVERY),
    )


@functools.cache
def _trained(method: str, given: str, hparams: str) -> tuple[str, np.ndarray, Any]:
    """The headline's name, every client's after the rounds [N], and the state; values
    of floats need no further compilation."""
    wanted: dict[str, str] = json.loads(hparams)
    experiment, program, functions = _compiled(method, given)
    if not wanted.keys() <= program.traced.keys():
        more = dict(json.loads(given))
        more["hparams"] = more.get("hparams", {}) | wanted
        experiment, program, functions = _compiled(method, json.dumps(more))
        wanted = {}
    program = program._replace(
        traced=program.traced | {name: float(value) for name, value in wanted.items()}
    )
    arguments = program, experiment.key, experiment.federation
    *_, last = simulate.rounds(*arguments, rounds=ROUNDS, functions=functions, **_EVERY)
    assert last.state is not None and last.pre is not None
    name = experiment.headline[0]
    return name, last.pre[name], jax.device_get(program.unplace(last.state))


def parameters(state: Any, where: str) -> dict[str, np.ndarray]:
    """The leaves at `Method.models` of a state, by their paths there."""
    found = {}
    for path in where.split("+"):
        tree = functools.reduce(
            lambda tree, name: tree[name],
            path.split(".")[1:],
            getattr(state, path.split(".")[0]),
        )
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(keys)
            if not any(part in name for part in _NO_PARAMETERS):
                found[name] = np.asarray(leaf, np.float64)
    return found


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """||a - b|| / ||b|| over the leaves that both have; one model stands for each
    client's where the other has many."""
    squares = np.zeros(2)
    for name in a.keys() & b.keys():
        x, y = (
            leaf[None] if leaf.ndim < max(a[name].ndim, b[name].ndim) else leaf
            for leaf in (a[name], b[name])
        )
        x, y = np.broadcast_arrays(x, y)
        squares += np.sum((x - y) ** 2), np.sum(y**2)
    return float(np.sqrt(squares[0] / squares[1]))


def measure(name: str) -> list[Row]:
    """For each part of a method: the mean score of its clients with and without it, the
    mean and the largest difference of a client's, and the distance of the
    parameters."""
    row, found = TABLE[name], []
    given = json.dumps(dict(row.settings))
    for part in row.parts:
        score, full, state = _trained(name, given, "{}")
        other = part.method or name
        _, without, reduced = _trained(other, given, json.dumps(dict(part.hparams)))
        differences = np.abs(full - without)
        apart = distance(
            *(
                parameters(s, TABLE[m].models)
                for s, m in ((state, name), (reduced, other))
            )
        )
        values = {
            "with": full.mean(),
            "without": without.mean(),
            "mean": differences.mean(),
        }
        values |= {"largest": differences.max(), "parameters": apart}
        found.append(
            {"score": score}
            | {key: float(f"{value:.4g}") for key, value in values.items()}
        )
    return found


def idle(found: Row) -> bool:
    """Does a measured part of a method do next to nothing?"""
    return found["mean"] < FEW and found["parameters"] < NEAR


def where(name: str) -> str:
    """The setting in which a method's parts are measured."""
    said = [
        f"--{flag}={value}"
        for flag, value in TABLE[name].settings.items()
        if flag != "hparams"
    ]
    hparams = {
        **PRESETS["digits"].hparams.get(name, {}),
        **TABLE[name].settings.get("hparams", {}),
    }
    said += [f"--hparam={key}={value}" for key, value in hparams.items()]
    return (
        f"preset digits, {ROUNDS} rounds, `pre`, seed "
        f"0{'; ' * bool(said)}{' '.join(said)}"
    )


def lines(name: str) -> list[str]:
    """What is known of the parts of a method, a sentence each; nothing of a user's own
    method."""
    row = TABLE.get(name)
    if row is None or row.why:
        return [row.why] if row else []
    known = _known().get(name, [])
    # of a part that is not measured: nothing
    return [_sentence(*pair) for pair in zip(row.parts, known, strict=False)]


def _known() -> dict[str, list[Row]]:
    """What was measured, by method; nothing without the file."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def _sentence(part: Part, found: Row) -> str:
    show = functools.partial(scores.shown, found["score"], digits=2)
    how = " ".join(
        [
            f"--algo={part.method}" * bool(part.method),
            *(f"{name}={value}" for name, value in part.hparams.items()),
        ]
    ).strip()
    unit = " points" if scores.is_share(found["score"]) else ""
    text = (
        f"Without {part.what} ({how}) `{found['score']}` is {show(found['without'])}, "
        f"with it {show(found['with'])}"
    )
    text += (
        f"; a client's differs by {show(found['mean'])}{unit} in the mean, "
        f"{show(found['largest'])} at most; the "
    )
    apart = found["parameters"]
    text += (
        f"parameters differ by {apart:.2g} of their norm."
        if apart
        else "parameters are the same."
    )
    return text + (" Idle at the defaults on this data." if idle(found) else "")


def main(argv: list[str]) -> str:
    """Renews what is known of the methods named, or of all, and returns it in words."""
    xla.keep_compilations()
    names = [
        choose("method", name, TABLE)
        for name in flags.parse(argv, {}, words=True).words
    ] or list(TABLE)
    known = _known()
    for name in names:
        known[name] = measure(name)
        rows = [
            f' "{method}": {json.dumps(known[method])}'
            for method in TABLE
            if method in known
        ]
        write_text(FILE, "{\n" + ",\n".join(rows) + "\n}\n")
    return "\n".join("\n  ".join([name, *lines(name)]) for name in names)


if __name__ == "__main__":
    sys.exit(entry.enter(main, __doc__))
