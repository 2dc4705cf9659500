"""Language models for `benchmarks.ahead`: shapes alone, a base that devices share."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec as P

from fedjax_pfl import simulate, testing
from fedjax_pfl.data.datasets import prepare_integers
from fedjax_pfl.engine import contract, frozen, placement
from fedjax_pfl.engine.program import Program
from fedjax_pfl.engine.xla import OPTIONS
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.models import families, nnx_model
from fedjax_pfl.models.adapted import adapted, lora
from fedjax_pfl.models.checkpoints import Config
from fedjax_pfl.types import Context, Model, Task

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
MODELS = {
    "llama3-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    | {"tie_word_embeddings": False},
    "llama3-1b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    # 60 million parameters
    "llama-60m": _LLAMA
    | {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 10}
    | {"num_attention_heads": 10, "num_key_value_heads": 10, "vocab_size": 16_000},
    # of two blocks
    "llama-tiny": _LLAMA
    | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    | {"vocab_size": 1024},
}
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


class Absent:
    """The files of a network that is not there."""

    def find(self, name: str) -> None:
        """Finds nothing."""


def network(name: str, length: int, rank: int = 8, *, drawn: bool = False) -> Model:
    """Returns a model with LoRA whose base are shapes, held in bfloat16; or is drawn,
    in float32."""
    settings = MODELS[name]
    family = families.TYPES["llama"](Config(settings), Absent())  # type: ignore[arg-type]
    words = settings["vocab_size"]
    options: dict[str, Any] = {
        "positions": length,
        "vocabulary": words,
        "input_dtype": jnp.int32,
    }
    if drawn:
        return adapted(family.factory, lora(rank), (length,), words, **options)
    options["compute_dtype"] = "bfloat16"
    plain = nnx_model.model(family.factory, (length,), words, **options)
    base = jax.eval_shape(plain.init, jax.random.key(0))
    options |= {"base_dtype": "bfloat16", "blocks": "rematerialised", "base": base}
    return adapted(family.factory, lora(rank), (length,), words, **options)


def task(
    name: str, clients: int, length: int, batch: int = 1, model: Model | None = None
) -> Task:
    """Returns a task of `clients` with a batch of texts each; without a `model` its
    base are shapes."""
    words = MODELS[name]["vocab_size"]
    text = jax.ShapeDtypeStruct((length,), jnp.int32)
    return testing.task(
        models=(network(name, length) if model is None else model,),
        input=text,
        label=text,
        prepare=prepare_integers,
        num_classes=words,
        class_counts=np.ones((clients, words), np.int32),
        sizes=np.full(clients, batch),
        batch_size=batch,
        epochs=1,
    )


@contextmanager
def devices(found: list[jax.Device]) -> Iterator[None]:
    """Makes programs for devices that this machine does not have."""
    with mock.patch.object(placement, "take", lambda count: found[:count]):
        yield


def lower(program: Program) -> jax.stages.Lowered:
    """Lowers a round on shapes, placed as `simulate.rounds` places arrays."""
    mesh, of = program.mesh, program.task
    assert mesh is not None and of is not None

    def at(spec: P) -> Any:
        where = NamedSharding(mesh, spec)
        return lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=where)

    everywhere, rows = at(P()), at(P(placement.AXIS))
    held = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        for x, where in zip(frozen.values(of), frozen.places(of, mesh), strict=True)
    )
    federation = contract.abstract(of)._replace(frozen=None)
    federation = federation._replace(placement=program.placement)
    key = jax.eval_shape(lambda: jax.random.key(0))
    traced = {name: np.float32(x) for name, x in program.traced.items()}
    state = jax.eval_shape(program.init, key, traced, program.placement)
    state, rest = jax.tree.map(everywhere, (state, (key, traced, federation)))
    state = state.with_rows(jax.tree.map(rows, state.rows))
    context = Context(*rest, everywhere(np.int32(0)))
    context = context._replace(federation=rest[2]._replace(frozen=held))
    options = {"compiler_options": OPTIONS.get(platform(), {})}
    train = jax.jit(program.round, donate_argnums=1, **options)  # type: ignore[arg-type]
    return train.lower(context, state, everywhere(np.bool_(False)))


def program(
    name: str, algo: str, *, clients: int, length: int, **layout: int
) -> Program:
    """Returns the program of a method; `layout` has width, devices and base_devices."""
    return simulate.program(algo, task(name, clients, length), checked=False, **layout)


def weights(model: Model) -> int:
    """Returns the size of the frozen weights that a token is multiplied with, which
    include a tied embedding as the last layer."""
    assert model.frozen is not None
    flat = traverse_util.flatten_dict(model.frozen.values)
    tied = not any("unembed" in path for path in flat)
    names = ("kernel", "embedding") if tied else ("kernel",)
    return sum(x.size for path, x in flat.items() if path[-1] in names)


def operations(program: Program) -> int:
    """Returns the operations of a token in the products of a local step with the
    weights of the base: forwards, again in the derivative, and the derivative by the
    inputs."""
    assert program.task is not None
    return 3 * 2 * weights(program.task.model)


def collectives(text: str) -> Counter[str]:
    """Returns the bytes that each kind of collective of a compiled program moves, each
    operation counted once, in however many turns of a loop it runs."""
    found: Counter[str] = Counter()
    for shape, kind in re.findall(
        rf"= (\S+?\[[\d,]*\])\S* ({COLLECTIVES})(?:-start)?\(", text
    ):
        dtype, _, sizes = shape.strip("(").partition("[")
        count = np.prod([int(x) for x in sizes.strip("]").split(",") if x])
        found[kind] += int(count) * {"bf16": 2, "f16": 2, "s8": 1}.get(dtype, 4)
    return found
