"""Adapters on one frozen ViT-Tiny: the memory of a round by XLA's account, its products
on an accelerator, and client steps per second against PyTorch with peft, in turns in
one process.

    python -m benchmarks.adapters memory    # 1,000 clients, on shapes alone
    python -m benchmarks.adapters products v5e    # or h100; compiles ahead of time
    python -m benchmarks.adapters speed [NAME [clients [batch [turns]]]]

NAME is vit, llama-tiny or llama-60m; `speed` needs transformers and peft.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ahead, compiled, language, report
from fedjax_pfl import models, simulate, testing
from fedjax_pfl.engine import contract, memory, xla
from fedjax_pfl.kernels.platform import on
from fedjax_pfl.models import layers, nets, vit
from fedjax_pfl.models.transformer import Layout
from fedjax_pfl.types import Context, Model, Task

CLASSES, RANK = 10, 8
SIDE, PATCH = 32, 4
WIDTH, DEPTH, HEADS = 192, 12, 3
LR = 0.01
TOKENS = 128


def vit_tiny(input_shape: tuple[int, ...], num_classes: int, rngs: Any) -> nets.Net:
    """ViT-Tiny: 12 blocks of 3 heads, K = 192, the first position."""
    layout = Layout(WIDTH, HEADS, 4 * WIDTH, fused=False)
    body = vit.Patches(input_shape, PATCH, DEPTH, layout, rngs, pool="first", extra=1)
    return nets.Net(body, layers.linear(WIDTH, num_classes, rngs))


def task(model: Model, clients: int, batch: int, steps: int) -> Task:
    """Returns the task of clients with `steps` full batches each."""
    counts = np.zeros((clients, CLASSES), int)
    counts[:, 0] = batch * steps
    return testing.task(
        models=(model,),
        sizes=counts.sum(axis=1),
        class_counts=counts,
        architecture=np.zeros(clients, np.int32),
        num_classes=CLASSES,
        input=jax.ShapeDtypeStruct((SIDE, SIDE, 3), jnp.float32),
        prepare=lambda x: x,
        lr=LR,
        batch_size=batch,
        epochs=None,
        steps=steps,
    )


def adapted(**options: Any) -> Model:
    """Returns ViT-Tiny with LoRA in its attention."""
    how = models.lora(RANK, where="attention")
    return models.adapted(vit_tiny, how, (SIDE, SIDE, 3), CLASSES, **options)


def size(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def account(model: Model, clients: int, width: int, participation: float) -> Any:
    """Returns XLA's memory analysis of a round of Local."""
    given = task(model, clients, 4, 1)
    given = given._replace(participation=(participation, participation))
    program = simulate.program("local", given, width=width, checked=False)
    key, t = jax.eval_shape(lambda: jax.random.key(0)), jnp.int32(0)
    traced = {name: jnp.float32(0) for name in program.traced}
    f = contract.abstract(given)._replace(placement=program.placement)
    x = jax.ShapeDtypeStruct((64, SIDE, SIDE, 3), jnp.uint8)  # few examples
    y = jax.ShapeDtypeStruct((64,), jnp.int32)
    f = f._replace(examples=f.examples._replace(x=x, y=y))
    state = jax.eval_shape(program.init, key, traced, program.placement)
    run = jax.jit(program.round, donate_argnums=1)
    return run.lower(Context(key, traced, f, t), state, jnp.bool_(False)).compile()


def show_memory(clients: int = 1000, width: int = 4, cohort: float = 0.02) -> None:
    """Prints the bytes of a round with LoRA and with whole models."""
    shape = (SIDE, SIDE, 3)
    lora, whole = adapted(), models.model(vit_tiny, shape, CLASSES)
    key = jax.random.key(0)
    for name, model in (("LoRA", lora), ("whole models", whole)):
        held = 0 if model.frozen is None else size(model.frozen.values)
        each = size(jax.eval_shape(model.init, key))
        made = account(model, clients, width, cohort)
        m = made.memory_analysis()
        rows = {
            "base": held,
            f"{clients} clients' variables": clients * each,
            "arguments": m.argument_size_in_bytes,
            "temporary": m.temp_size_in_bytes,
            "peak": memory.account(made),
        }
        text = ", ".join(f"{k} {v / 2**20:,.1f} MiB" for k, v in rows.items())
        print(f"{name} ({each / 4:,.0f} parameters per client): {text}", flush=True)


def images(clients: int, batch: int, steps: int) -> tuple[Task, np.ndarray, np.ndarray]:
    """Returns the task of ViT-Tiny with LoRA, and random images and labels."""
    x = np.random.default_rng(0).normal(size=(clients * batch * steps, SIDE, SIDE, 3))
    given = task(adapted(), clients, batch, steps)
    return given, x.astype(np.float32), np.zeros(len(x), np.int32)


def texts(
    name: str, clients: int, batch: int, steps: int
) -> tuple[Task, np.ndarray, np.ndarray]:
    """Returns the task of a Llama with LoRA, random texts and their next tokens."""
    model = language.network(name, TOKENS, RANK, drawn=True)
    given = language.task(name, clients, TOKENS, batch, model)
    given = given._replace(lr=LR, epochs=None, steps=steps)
    size, words = clients * batch * steps, language.MODELS[name]["vocab_size"]
    rows = np.random.default_rng(0).integers(words, size=(size, TOKENS + 1))
    return given, rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)


def ours(
    given: Task, x: np.ndarray, y: np.ndarray, width: int, devices: int
) -> Callable[[], None]:
    """Returns a round of all clients' local steps."""
    program = simulate.program(
        "local", given, width=width, devices=devices, checked=False
    )
    clients = given.num_clients
    own = jnp.arange(len(x), dtype=jnp.int32).reshape(clients, -1)
    sizes = jnp.full(clients, own.shape[1], jnp.int32)
    f = contract.abstract(given)
    f = f._replace(
        examples=f.examples._replace(x=jnp.asarray(x), y=jnp.asarray(y)),
        train=f.train._replace(index=own, size=sizes),
        val=f.val._replace(index=own[:, :0], size=0 * sizes),
        test=f.test._replace(index=own[:, :1], size=0 * sizes + 1),
        class_counts=jnp.asarray(given.class_counts, jnp.int32),
    )
    f = simulate.with_frozen(f, given)._replace(placement=program.placement)
    key = jax.random.key(0)
    traced = {name: jnp.float32(x) for name, x in program.traced.items()}
    state = [program.place(jax.jit(program.init)(key, traced))]
    options = {"compiler_options": simulate.compiler_options()}
    step = jax.jit(program.round, donate_argnums=1, **options)

    def run() -> None:
        off = jnp.bool_(False)
        state[0], _ = step(Context(key, traced, f, jnp.int32(0)), state[0], off)
        jax.block_until_ready(state[0])

    return run


def their_network(name: str) -> Any:
    """Returns a network of transformers with peft's LoRA."""
    import peft
    import transformers

    given: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK}
    if name != "vit":
        config = transformers.LlamaConfig(**language.MODELS[name], use_cache=False)
        given["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
        plain = transformers.LlamaForCausalLM(config)
        return peft.get_peft_model(plain, peft.LoraConfig(**given))
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=SIDE,
        patch_size=PATCH,
        num_labels=CLASSES,
    )
    plain = transformers.ViTForImageClassification(config)
    given["target_modules"] = list(_targets(plain))
    given["modules_to_save"] = ["classifier"]
    return peft.get_peft_model(plain, peft.LoraConfig(**given))


def theirs(name: str, x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], None]:
    """Returns the same steps in PyTorch with peft, one client after the other.

    Args:
      x: examples [clients, n, ...], images channels first.
      y: labels [clients, n, ...].
    """
    import torch

    net = their_network(name)
    trained = [p for p in net.parameters() if p.requires_grad]
    print(f"peft trains {sum(p.numel() for p in trained):,} parameters", flush=True)
    rows = [[p.detach().clone() for p in trained] for _ in x]
    given, labels = torch.as_tensor(x), torch.as_tensor(y, dtype=torch.long)
    loss = torch.nn.CrossEntropyLoss()
    net.train()

    def run() -> None:
        for i in range(len(rows)):
            with torch.no_grad():
                for p, mine in zip(trained, rows[i], strict=True):
                    p.copy_(mine)
            rule = torch.optim.SGD(trained, lr=LR)
            parts = given[i].split(batch), labels[i].split(batch)
            for some, right in zip(*parts, strict=True):
                rule.zero_grad(set_to_none=True)
                logits = net(some).logits
                loss(logits.reshape(-1, logits.shape[-1]), right.reshape(-1)).backward()
                rule.step()
            rows[i] = [p.detach().clone() for p in trained]

    return run


def _targets(net: Any) -> set[str]:
    """Returns the names of the dense layers of the attention."""
    names = [name for name, part in net.named_modules() if hasattr(part, "in_features")]
    return {name for name in names if "attention" in name}


def show_speed(
    name: str = "vit", clients: int = 20, batch: int = 4, turns: int = 11
) -> None:
    """Prints client steps per second of both, in turns, and of a Llama its tokens and
    the share of the peak that its products with the base take."""
    made = images if name == "vit" else functools.partial(texts, name)
    given, x, y = made(clients, batch, 1)
    runs = {
        f"width {w} on {d} CPU devices": ours(given, x, y, w, d)
        for d in sorted({1, jax.device_count()})
        for w in (1, clients // d)
    }
    rows = np.moveaxis(x, -1, 1) if name == "vit" else x
    own = (a.reshape(clients, batch, *a.shape[1:]) for a in (rows, y))
    runs["PyTorch and peft, one client after the other"] = theirs(name, *own, batch)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for label, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn:  # the first compiles
                seconds[label].append(time.perf_counter() - begin)
    for label, found in seconds.items():
        rate = clients / statistics.median(found)
        each = ", ".join(f"{clients / s:.2f}" for s in found)
        print(f"{label}: {rate:.2f} client steps/s ({each})", flush=True)
        if name != "vit":
            count = rate * batch * TOKENS
            done = 4 * language.weights(given.model) * count / 1e9
            print(f"  {count:,.0f} tokens/s, {done:.0f} GFLOP/s in those products")
    print(f"peak of products: {report.matmul_peak():.0f} GFLOP/s")


def show_products(name: str, clients: int = 20, batch: int = 4) -> None:
    """Prints how many products of a round of all clients take a weight of the base, and
    how many take a copy of it per client."""
    target = ahead.TARGETS[name]
    if target.platform == "cuda":  # XLA finds no tiles for these products
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false"
    jax.config.update("jax_platforms", "cpu")
    platform = "tpu" if target.platform == "tpu" else "gpu"
    with on(platform), ahead.prepared(target) as (sharding, _):
        given = task(adapted(), clients, batch, 1)
        program = simulate.program("local", given, width=clients, checked=False)
        f = contract.abstract(given)._replace(placement=program.placement)
        text = ahead.lower(program, f, sharding).compile().as_text()
    base = {PATCH * PATCH * 3, WIDTH, 3 * WIDTH, 4 * WIDTH}  # sizes of its weights
    products = compiled.products(text)
    # a TPU's products have further dimensions of 1
    operands = [tuple(n for n in x if n > 1) for both in products for x in both]
    shared = sum(len(x) == 2 and set(x) <= base for x in operands)
    own = sum(len(x) == 3 and x[0] == clients and set(x[1:]) <= base for x in operands)
    print(f"{name}: products with one weight of the base for all clients: {shared}")
    print(f"{name}: products with a weight of the base per client: {own}")


if __name__ == "__main__":
    what, *values = sys.argv[1:]
    xla.split_cpu()
    if what == "memory":
        show_memory(*map(int, values))
    else:
        show = {"products": show_products, "speed": show_speed}[what]
        show(*values[:1], *map(int, values[1:]))
