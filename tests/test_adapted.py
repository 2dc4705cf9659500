"""Adapted models: what is trained, the frozen base as one argument of a round, the
contract of methods on them, and their merged variables."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from fedjax_pfl import models, simulate, testing
from fedjax_pfl.engine import contract
from fedjax_pfl.engine.placement import AXIS
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, low_rank, nets, text, vit
from fedjax_pfl.models.adapted import bias, head, lora, norms, prompt, shifted
from fedjax_pfl.models.transformer import Layout
from fedjax_pfl.types import Context, RunState, State

KEY, IMAGE, C = jax.random.key(0), (8, 8, 3), 4
WIDE = 256  # features of the base whose copies are counted
S = jax.ShapeDtypeStruct


def tiny_vit(input_shape, num_classes, rngs):
    body = vit.Patches(input_shape, 4, 2, Layout(16, 2, 64), rngs)
    return nets.Net(body, layers.linear(16, num_classes, rngs))


def tokens(input_shape, num_classes, rngs):
    body = text.Tokens(9, input_shape[0], 2, Layout(16, 2, 64), rngs)
    return nets.Net(body, layers.linear(16, num_classes, rngs))


def windowed(input_shape, num_classes, rngs):
    body = text.Tokens(9, 5, 2, Layout(16, 2, 64), rngs, windows=(None, 2))
    return nets.Net(body, layers.linear(16, num_classes, rngs))


class General(nnx.Module):
    """A dense layer of several axes."""

    def __init__(self, rngs):
        self.inner = nnx.LinearGeneral((2, 3), (4, 2), axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.inner(x.reshape(-1, 2, 3)).reshape(-1, 8)


def general(input_shape, num_classes, rngs):
    return nets.Net(General(rngs), layers.linear(8, num_classes, rngs))


def conv(input_shape, num_classes, rngs):
    return nets.lenet(input_shape, num_classes, rngs)


def deep(input_shape, num_classes, rngs):
    dense = [layers.linear(WIDE if i else toy.SHAPE[0], WIDE, rngs) for i in range(3)]
    return nets.Net(nnx.Sequential(*dense), layers.linear(WIDE, num_classes, rngs))


def noisy(tree, seed=3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), tree)


def inputs(shape, dtype=np.float32):
    x = np.random.default_rng(1).normal(size=(3, *shape))
    return jnp.asarray(x if dtype == np.float32 else np.abs(x * 3) + 1, dtype)


CASES = {
    "attention": (tiny_vit, IMAGE, lora(2)),
    "dense": (tiny_vit, IMAGE, lora(2, 5.0, where="dense")),
    "frozen_a": (toy.tiny_mlp, toy.SHAPE, lora(2, where="dense", train="b")),
    "general": (general, (6,), lora(2, where="dense")),
    "convolutions": (conv, (28, 28, 1), lora(2, where="all")),
    "bias": (tiny_vit, IMAGE, bias()),
    "norms": (toy.norm_net, toy.SHAPE, norms()),
    "head": (toy.tiny_mlp, toy.SHAPE, head()),
}


@pytest.mark.parametrize(
    "case", [toy.slow(x) if x in ("dense", "norms") else x for x in CASES]
)
def test_training_starts_from_the_base_and_merges_into_it(case):
    make, shape, how = CASES[case]
    plain = models.model(make, shape, C)
    base = noisy(jax.jit(plain.init)(KEY))
    net, x = models.adapted(make, how, shape, C, base=base), inputs(shape)
    v = net.init(jax.random.key(1))
    apply, run = (jax.jit(m.apply) for m in (plain, net))
    wanted = apply(base, x)[0]
    np.testing.assert_allclose(run(v, x)[0], wanted, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(jnp.asarray, noisy(v, 4))
    assert np.abs(run(moved, x)[0] - wanted).max() > 1e-3
    found = apply(models.merged(net, moved), x)[0]
    np.testing.assert_allclose(found, run(moved, x)[0], rtol=1e-4, atol=1e-4)
    trained, kept = (
        sum(x.size for x in jax.tree.leaves(tree)) for tree in (v, net.frozen.values)
    )
    added = sum(x.size for x in jax.tree.leaves(base))
    assert trained + kept >= added and trained < kept + 60


def test_lora_draws_a_and_has_the_scale_of_the_paper():
    net = models.adapted(toy.tiny_mlp, lora(4, 6.0, where="dense"), toy.SHAPE, C)
    v = net.init(jax.random.key(1))
    layer = v["body"]
    while "lora_a" not in layer:
        (layer,) = layer.values()
    assert set(layer) == {"lora_a", "lora_b"} and not layer["lora_b"].any()
    assert 0.1 < np.std(layer["lora_a"]) < 0.5  # 1 / rank
    layer["lora_b"] = jnp.ones_like(layer["lora_b"])
    (a,), (b,) = (
        [x for x in jax.tree.leaves(w["body"]) if x.ndim == 2]
        for w in (net.frozen.values, models.merged(net, v))
    )
    change = 6 / 4 * layer["lora_a"] @ layer["lora_b"]
    np.testing.assert_allclose(b - a, change, rtol=1e-4, atol=1e-5)


def test_ffa_lora_averages_the_products():
    """With one A for all clients the mean of A B_i is A times the mean of B_i."""
    how = lora(2, where="dense", train="b")
    net = models.adapted(toy.tiny_mlp, how, toy.SHAPE, C)
    several = [noisy(net.init(KEY), seed) for seed in range(3)]
    mean = jax.tree.map(lambda *x: sum(x) / 3, *several)
    products = [models.merged(net, v) for v in several]
    wanted = jax.tree.map(lambda *x: sum(x) / 3, *products)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        models.merged(net, mean),
        wanted,
    )


def test_running_statistics_stay():
    net = models.adapted(toy.norm_net, norms(), toy.SHAPE, C)
    v, x = net.init(KEY), inputs(toy.SHAPE)
    mask = jnp.array([True, True, False])
    train = net.apply(v, x, mask=mask, train=True)
    np.testing.assert_array_equal(train[0], net.apply(v, x, mask=mask)[0])
    assert train[1] == {} and jax.tree.leaves(net.frozen.values["stats"])


def test_a_prompt_is_seen_and_removed():
    options = {"input_dtype": jnp.int32}
    x = inputs((5,), np.int32)
    plain = models.model(tokens, (5,), C, positions=5, **options)
    base = jax.jit(plain.init)(KEY)
    make = functools.partial(models.adapted, tokens, positions=5, **options)
    net = make(prompt(2), (5,), C, base=base)
    v = net.init(jax.random.key(1))
    assert v["body"]["blocks"]["0"]["prompt"].shape == (2, 16)
    logits = net.apply(v, x)[0]
    assert logits.shape == (15, C)
    assert np.abs(logits - plain.apply(base, x)[0]).max() > 1e-4
    # causal: a later token changes nothing before it, through the prompt neither
    later = net.apply(v, x.at[:, -1].add(1))[0]
    before = [a.reshape(3, 5, C)[:, :4] for a in (logits, later)]
    np.testing.assert_allclose(*before, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="cannot be merged"):
        models.merged(net, v)


@pytest.mark.parametrize("blocks", ["scanned", toy.slow("rematerialised")])
@pytest.mark.parametrize("make", ["patches", "windows"])
def test_scanned_blocks_are_the_blocks_one_by_one(make, blocks):
    options: dict = {}
    factory, shape = tiny_vit, IMAGE
    if make == "windows":
        factory, shape = windowed, (5,)
        options = {"input_dtype": jnp.int32, "positions": 5}
    x = inputs(shape, np.float32 if make == "patches" else np.int32)
    plain = models.model(factory, shape, C, **options)
    base = noisy(jax.jit(plain.init)(KEY))
    how = functools.partial(models.adapted, factory, lora(2), shape, C, base=base)
    one, other = how(**options), how(blocks=blocks, **options)
    v = jax.tree.map(jnp.asarray, noisy(one.init(jax.random.key(1)), 4))
    loss = lambda net: lambda v: jnp.sum(net.apply(v, x)[0] ** 2)
    wanted, found = (jax.jit(jax.value_and_grad(loss(net)))(v) for net in (one, other))
    toy.assert_close(found, wanted, 1e-5)
    toy.assert_close(models.merged(other, v), models.merged(one, v), 1e-6)
    sizes = [
        sum(a.size for a in jax.tree.leaves(n.frozen.values)) for n in (one, other)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "case, blocks",
    [
        ("attention", "unrolled"),
        ("attention", "scanned"),
        ("general", "unrolled"),
        ("convolutions", "unrolled"),
    ],
)
def test_a_base_shifted_by_the_products_is_the_adapted_network(case, blocks):
    make, shape, how = CASES[case]
    net = models.adapted(make, how, shape, C, blocks=blocks)
    start, x = net.init(KEY), inputs(shape)
    v = jax.tree.map(jnp.asarray, noisy(start, 4)) | {"head": start["head"]}
    products = low_rank.products(v["body"])
    change = jax.tree.map(lambda x: net.frozen.scale * x, products)
    here = shifted(net, change)
    logits = [
        jax.jit(n.apply)(w, x)[0] for n, w in ((net, v), (here, start), (net, start))
    ]
    np.testing.assert_allclose(*logits[:2], rtol=1e-4, atol=1e-4)
    assert np.abs(logits[1] - logits[2]).max() > 1e-3
    toy.assert_close(models.merged(here, start), models.merged(net, v), 1e-5)


def test_scanned_blocks_must_be_alike():
    make = functools.partial(models.adapted, tokens, blocks="scanned", positions=5)
    with pytest.raises(InputError, match="same parameters"):
        make(prompt(2), (5,), C, input_dtype=jnp.int32)
    with pytest.raises(InputError, match="no transformer blocks"):
        models.adapted(toy.tiny_mlp, head(), toy.SHAPE, C, blocks="scanned")


def test_a_base_of_bfloat16_is_rounded_once():
    make = functools.partial(models.adapted, tiny_vit, lora(2), IMAGE, C)
    whole, half = make(), make(base_dtype="bfloat16")
    pairs = zip(*(jax.tree.leaves(n.frozen.values) for n in (whole, half)), strict=True)
    for x, y in pairs:
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x.astype(jnp.bfloat16), y)
    v, x = half.init(KEY), inputs(IMAGE)
    logits = half.apply(v, x)[0]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, whole.apply(v, x)[0], atol=0.03)


def test_a_base_must_fit():
    base = models.model(toy.tiny_mlp, toy.SHAPE, 7).init(KEY)
    net = models.adapted(toy.tiny_mlp, head(), toy.SHAPE, C, base=base)
    assert net.init(KEY)["head"]["kernel"].shape == (8, C)  # a new head
    wrong = functools.partial(models.adapted, toy.tiny_mlp, base=base)
    with pytest.raises(InputError, match="must have the shape"):
        wrong(head(), (5,), C)
    with pytest.raises(InputError, match="frozen head"):
        wrong(head(), toy.SHAPE, C, train_head=False)
    with pytest.raises(InputError, match="no layer of lora"):
        models.adapted(toy.tiny_mlp, lora(), toy.SHAPE, C)
    with pytest.raises(InputError, match="no transformer blocks"):
        models.adapted(toy.tiny_mlp, prompt(2), toy.SHAPE, C)
    with pytest.raises(InputError, match="must be a model made by"):
        models.merged(models.model(toy.tiny_mlp, toy.SHAPE, C), base)


def test_a_frozen_head_is_not_among_the_variables():
    base = models.model(toy.tiny_mlp, toy.SHAPE, C).init(KEY)
    how = lora(2, where="dense")
    net = models.adapted(toy.tiny_mlp, how, toy.SHAPE, C, base=base, train_head=False)
    v, x = net.init(KEY), inputs(toy.SHAPE)
    assert v["head"] == {}
    h = net.features(v, x)[0]
    np.testing.assert_array_equal(net.head(v["head"], h), net.apply(v, x)[0])


@functools.cache
def adapted_task(kind="lora"):
    how = {"lora": lora(2, where="dense"), "head": head()}[kind]
    net = models.adapted(toy.tiny_mlp, how, toy.SHAPE, toy.C)
    return testing.task(models=(net,))


@functools.cache
def subject(method, kind):
    return testing.subject(toy.METHODS[method], adapted_task(kind))


METHODS = [("ditto", "lora"), ("fedproto", "lora"), ("fedper", "head")]
METHODS += [
    toy.slow(*pair)
    for pair in (
        *(("fedavg", "lora"), ("fedrep", "lora"), ("apfl", "lora")),
        *(("fedala", "lora"), ("fedamp", "lora"), ("fedavg", "head")),
    )
]
RULES = ("order", "mask", "inactive", "nobody", "compilation", "scores", "traffic")


@pytest.mark.parametrize("method, kind", METHODS)
def test_methods_keep_their_contract_on_adapted_models(method, kind):
    for rule in RULES:
        testing.check(rule, subject(method, kind))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["layout", "dtype", "key", "held_out"])
def test_the_layout_does_not_matter_with_a_base(rule):
    testing.check(rule, subject("ditto", "lora"))


def large_task(clients):
    net = models.adapted(deep, lora(1, where="dense"), toy.SHAPE, toy.C)
    return testing.task(
        models=(net,),
        sizes=np.full(clients, 8),
        class_counts=np.full((clients, toy.C), 2),
        architecture=np.zeros(clients, np.int32),
    )


def lowered(task, width, devices):
    """Returns the round's arguments, jaxpr and executable."""
    program = simulate.program(
        "ditto", task, width=width, devices=devices, checked=False
    )
    key, t = jax.eval_shape(lambda: KEY), S((), jnp.int32)
    traced = {name: S((), jnp.float32) for name in program.traced}
    f = contract.abstract(task)._replace(placement=program.placement)
    state = jax.eval_shape(program.init, key, traced, program.placement)
    if program.mesh is not None:
        put = lambda tree, spec: jax.tree.map(
            lambda x: S(x.shape, x.dtype, sharding=NamedSharding(program.mesh, spec)),
            tree,
        )
        f, state = (
            put(f, P()),
            RunState(State(put(state.server, P()), put(state.clients, P(AXIS)))),
        )
    args = (Context(key, traced, f, t), state, S((), bool))
    run = jax.jit(program.round, donate_argnums=1)
    return jax.make_jaxpr(program.round)(*args), run.lower(*args).compile()


@pytest.mark.parametrize("width, devices", [(4, 2), toy.slow(1, 1), toy.slow(4, 1)])
def test_the_base_is_one_argument_whatever_the_clients(width, devices):
    base = 4 * sum(
        x.size for x in jax.tree.leaves(large_task(2).models[0].frozen.values)
    )
    found = {}
    for clients in (4, 1000):
        closed, made = lowered(large_task(clients), width, devices)
        assert max((np.size(x) for x in closed.consts), default=0) < WIDE
        text = made.as_text()
        assert not re.search(rf"\[(\d+,)?{WIDE},{WIDE}\]\S* constant", text)
        assert not re.search(rf"f32\[\d+,{WIDE},{WIDE}\]", text)  # no copy per client
        found[clients] = made.memory_analysis()
    sizes = {n: m.argument_size_in_bytes for n, m in found.items()}
    adapters = jax.eval_shape(large_task(4).models[0].init, KEY)
    each = 4 * sum(x.size for x in jax.tree.leaves(adapters))
    examples = 4 * (toy.SHAPE[0] + 40)
    grown = (sizes[1000] - sizes[4]) * devices / 996
    assert each <= grown <= each + devices * examples
    assert base <= sizes[4] < 1.2 * base
    # nor is there a copy among the temporary arrays
    assert found[4].temp_size_in_bytes < base / 2


def test_the_product_with_the_base_is_one_for_all_clients():
    text = lowered(large_task(4), 4, 1)[1].as_text()
    rows = 4 * 4  # clients times batch
    dots = re.findall(r"f32\[([\d,]+)\]\S* dot\(", text)
    assert f"{rows},{WIDE}" in dots


def test_a_federation_without_the_base_is_refused():
    program = simulate.program("fedavg", adapted_task(), checked=False)
    f, t = testing.federation(), jnp.int32(0)
    state = program.init(KEY, program.traced)
    with pytest.raises(InputError, match="with_frozen"):
        program.evaluate(Context(KEY, program.traced, f, t), state)
    with_base = simulate.with_frozen(f, adapted_task())
    assert len(with_base.frozen) == 2  # the kernel and the bias of one layer
    program.evaluate(Context(KEY, program.traced, with_base, t), state)


def test_architectures_share_the_arrays_of_one_base():
    base = jax.tree.map(jnp.asarray, models.model(toy.tiny_mlp, toy.SHAPE, C).init(KEY))
    hows = [lora(rank, where="dense") for rank in (1, 2)]
    nets = [models.adapted(toy.tiny_mlp, h, toy.SHAPE, C, base=base) for h in hows]
    task = testing.task(models=tuple(nets), architecture=np.arange(5) % 2)
    f = simulate.with_frozen(testing.federation(), task)
    assert len(f.frozen) == 2
    program = simulate.program("local", task, checked=False)
    results = list(simulate.rounds(program, KEY, f, rounds=1))
    assert np.isfinite(results[0].metrics.loss).all()
