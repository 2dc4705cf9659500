"""Frozen networks in files, read one tensor at a time to the devices that hold them."""

import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_base_devices import LENGTH, LLAMA, TEXT, WORDS, task as cached_task

from fedjax_pfl import models, simulate
from fedjax_pfl.engine import frozen
from fedjax_pfl.models import checkpoints, pretrained
from fedjax_pfl.testing import synthetic
from fedjax_pfl.types import Stored

library = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
BOTH = ("float32", "bfloat16")
task = cached_task.__wrapped__  # a model has no hash


def tensors():
    """Weights of a tiny Llama, by their names in the file."""
    draw, width, hidden = np.random.default_rng(0), 16, LLAMA["intermediate_size"]
    shapes = {"embed_tokens": (WORDS, width), "norm": (width,)}
    for i in range(LLAMA["num_hidden_layers"]):
        parts = {f"self_attn.{name}_proj": (width, width) for name in "qo"}
        parts |= {f"self_attn.{name}_proj": (width // 2, width) for name in "kv"}
        parts |= {f"mlp.{name}_proj": (hidden, width) for name in ("gate", "up")}
        parts |= {"mlp.down_proj": (width, hidden), "input_layernorm": (width,)}
        parts |= {"post_attention_layernorm": (width,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in parts.items()}
    return {
        f"model.{name}.weight": draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module", params=BOTH)
def folder(request, tmp_path_factory):
    """A folder with the weights in three parts, of one type."""
    path = tmp_path_factory.mktemp(request.param)
    (path / "config.json").write_text(json.dumps(LLAMA))
    where, given = {}, tensors()
    for i in range(3):
        name = f"model-{i}.safetensors"
        part = {x: given[x].astype(request.param) for x in list(given)[i::3]}
        library.save_file(part, path / name)
        where |= dict.fromkeys(part, name)
    index = json.dumps({"weight_map": where})
    (path / "model.safetensors.index.json").write_text(index)
    return str(path)


def network(folder, base=None, **options):
    found = pretrained.load(folder)
    return models.adapted(
        found.factory,
        models.lora(2),
        TEXT.shape,
        WORDS,
        base=found.variables if base is None else base,
        positions=LENGTH,
        vocabulary=WORDS,
        input_dtype=jnp.int32,
        **options,
    )


def stored(net):
    return [x for x in frozen.values(task(net)) if isinstance(x, Stored)]


@pytest.mark.parametrize(
    ("dtype", "blocks"), [("float32", "unrolled"), ("bfloat16", "scanned")]
)
def test_values_are_those_of_the_whole_read_at_once(folder, dtype, blocks):
    options = {"base_dtype": dtype, "blocks": blocks}
    whole = jax.tree.map(jnp.asarray, pretrained.load(folder).variables)
    wanted = network(folder, whole, **options)
    found = network(folder, **options)
    assert stored(found) and not stored(wanted)
    held = (frozen.values(frozen.placed(task(x))) for x in (found, wanted))
    for x, y in zip(*held, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    w, x = found.init(jax.random.key(1)), np.ones((2, LENGTH), np.int32)
    outputs = (jax.jit(net.apply)(w, x)[0] for net in (found, wanted))
    np.testing.assert_array_equal(*outputs)
    whole = (models.merged(net, w) for net in (found, wanted))
    jax.tree.map(np.testing.assert_array_equal, *whole)


@pytest.mark.parametrize("blocks", ["unrolled", "scanned"])
def test_the_host_holds_one_tensor_at_a_time(folder, blocks, monkeypatch):
    seen, count, whole = [], [], checkpoints.Files.read

    def read(self, name, dtype):
        # those before are copied, and freed
        assert not [x for x in seen if x() is not None]
        found = whole(self, name, np.dtype(kind)).copy()
        seen.append(weakref.ref(found))
        count.append(name)
        return found

    monkeypatch.setattr(checkpoints.Files, "read", read)
    other = {"float32": "bfloat16", "bfloat16": "float32"}  # a copy in each case
    kind = next(x for x in BOTH if f"/{x}" in folder)
    net = network(folder, base_dtype=other[kind], blocks=blocks)
    assert not count
    given = task(net)
    layout = {"devices": 4, "base_devices": 2}
    made = simulate.program("fedavg", given, checked=False, **layout)
    assert len(count) == len(set(count)) == len(tensors())
    again = simulate.program("fedavg", given, checked=False, **layout)
    assert len(count) == len(tensors())  # programs share the arrays
    held = frozen.values(made.task)
    assert all(map(lambda x, y: x is y, held, frozen.values(again.task)))
    for x, where in zip(held, frozen.places(made.task, made.mesh), strict=True):
        assert x.sharding == where
    parts = [x for x in held if x.addressable_shards[0].data.size < x.size]
    assert len(parts) >= 8


@pytest.mark.parametrize("dtype", BOTH)
def test_large_tensors_are_read_in_pieces(folder, dtype, monkeypatch):
    body = pretrained.load(folder).variables["body"]
    wanted = jax.tree.map(lambda x: x.read().astype(dtype), body)
    monkeypatch.setattr(checkpoints, "PIECE", 50)
    found = jax.tree.map(lambda x: x.astype(dtype).read(), body)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_federation_has_the_arrays_on_the_device(folder):
    net = network(folder)
    given = simulate.with_frozen(synthetic.federation(input=TEXT), task(net))
    assert all(isinstance(x, jax.Array) for x in given.frozen)
    again = simulate.with_frozen(given, task(net))
    assert all(map(lambda x, y: x is y, given.frozen, again.frozen))
