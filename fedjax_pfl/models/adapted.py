"""Models that train a few parameters of a frozen network: LoRA, biases, norms, prompts
or the head alone."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from flax import nnx, traverse_util

from fedjax_pfl import trees
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.kernels.convolution import gradient_by_rows
from fedjax_pfl.models import layers
from fedjax_pfl.models.nnx_model import DTYPES, composed, model
from fedjax_pfl.models.registry import Factory
from fedjax_pfl.models.transformer import DIVIDED, Block, Stack
from fedjax_pfl.options import Options
from fedjax_pfl.types import Array, Frozen, Model, PyTree, Stored

Path = tuple[str, ...]  # of a variable of the body
A, B = "lora_a", "lora_b"
WHERE = ("attention", "dense", "all")
PROMPT = "prompt"
STACK = "stack"  # of blocks with stacked variables
BLOCKS = ("unrolled", "scanned", "rematerialised")
NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.BatchNorm)
DENSE = (nnx.Linear, nnx.LinearGeneral)


class Adaptation(NamedTuple):
    """Parameters of a body that are trained."""

    name: str
    # (body, rngs), adds the parameters that the network does not have
    insert: Callable[[nnx.Module, nnx.Rngs], None]
    # (path of a variable, its layer) -> is it trained?
    trains: Callable[[Path, Any], bool]
    scale: float = 1.0  # factor of LoRA's products


def lora(
    rank: Annotated[int, Ge(1)] = 8,
    alpha: float | None = None,
    where: Literal["attention", "dense", "all"] = "attention",
    train: Literal["ab", "b"] = "ab",
) -> Adaptation:
    """Low-rank adaptation (Hu et al., ICLR 2022): x W + alpha/rank (x A) B.

    A is drawn from N(0, 1/rank^2) and B is zero, so that training starts from the base.

    Args:
      rank: r, 1 or more.
      alpha: numerator of the scale; default 2 rank.
      where: "attention" (dense layers in a module of that name), "dense" (all dense
        layers of the body) or "all" (its convolutions without groups, too).
      train: "ab", or "b" for FFA-LoRA (Sun et al., ICLR 2024): A is frozen as drawn,
        the same for all clients, so that the mean of the products is the product of
        the means.

    Raises:
      InputError: a value is out of range; or the network, once made, has no such layer.
    """
    check("rank", rank, 1, 10**6, whole=True)
    choose("where", where, WHERE)
    choose("train", train, ("ab", "b"))
    scale = (2 * rank if alpha is None else alpha) / rank
    chosen = {"ab": (A, B), "b": (B,)}[train]

    def insert(body: nnx.Module, rngs: nnx.Rngs) -> None:
        found = [
            part for path, part in nnx.iter_modules(body) if _matches(where, path, part)
        ]
        for layer in found:
            _add_lora(layer, rank, scale, rngs)
        if not found:
            raise InputError(
                f"{type(body).__name__} has no layer of lora(where={where!r})."
            )

    def trains(path: Path, layer: Any) -> bool:
        return any(name in path for name in chosen)

    return Adaptation(f"lora:{rank}", insert, trains, scale)


def ffa_lora(
    rank: Annotated[int, Ge(1)] = 8,
    alpha: float | None = None,
    where: Literal["attention", "dense", "all"] = "attention",
) -> Adaptation:
    """LoRA of which B alone is trained, and A is frozen as drawn (Sun et al., FFA-LoRA,
    ICLR 2024); the arguments are those of `lora`."""
    return lora(rank, alpha=alpha, where=where, train="b")


def bias() -> Adaptation:
    """All biases (Ben Zaken et al., BitFit, ACL 2022)."""
    return Adaptation("bias", _nothing, lambda path, _: path[-1] == "bias")


def norms() -> Adaptation:
    """Scales and biases of the normalisation layers."""
    return Adaptation("norms", _nothing, lambda _, layer: isinstance(layer, NORMS))


def head() -> Adaptation:
    """Nothing of the body."""
    return Adaptation("head", _nothing, lambda *_: False)


def prompt(tokens: Annotated[int, Ge(1)]) -> Adaptation:
    """Learned tokens before the others at the input of the first block (Jia et al.,
    Visual prompt tuning, ECCV 2022; Lester et al., EMNLP 2021).

    The body must have `blocks`, called as block(h [B, L, K], seen, ...); the tokens are
    removed after the last block, and have no position.

    Args:
      tokens: their number, 1 or more; drawn from N(0, 0.02^2).

    Raises:
      InputError: the number is out of range; or the network has no such blocks.
    """
    check("tokens", tokens, 1, 10**6, whole=True)

    def insert(body: nnx.Module, rngs: nnx.Rngs) -> None:
        blocks = list(getattr(body, "blocks", ()))
        widths = [_width(block) for block in blocks]
        if not blocks or None in widths:
            raise InputError(f"{type(body).__name__} has no transformer blocks.")
        for i, block in enumerate(blocks):
            block.prompted = (tokens, i == len(blocks) - 1)
            kind: Any = type(block)
            block.__class__ = _with_prompt(kind)
        small = nnx.initializers.normal(0.02, jnp.float32)
        blocks[0].prompt = nnx.Param(small(rngs.params(), (tokens, widths[0])))

    return Adaptation(f"prompt:{tokens}", insert, lambda path, _: path[-1] == PROMPT)


ADAPTATIONS = Options(
    "adapt",
    {
        "lora": lora,
        "ffa_lora": ffa_lora,
        "head": head,
        "bias": bias,
        "norms": norms,
        "prompt": prompt,
    },
    given=("alpha", "train"),
    own=lambda function: function(),
    makes=(Adaptation,),
)


def adapted(
    factory: Factory | str,
    how: Adaptation,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    base: PyTree = None,
    train_head: bool = True,
    base_dtype: str = "float32",
    blocks: str = "unrolled",
    **options: Any,
) -> Model:
    """Makes a Model whose variables are the adapters (body) and the head of a frozen
    network.

    A program takes the frozen variables as arguments, one copy for all clients. Batch
    norms normalise by the base's running statistics, which stay as they are.

    Args:
      factory: the network, as of `models.model`.
      how: what is trained of the body: `lora`, `bias`, `norms`, `head` or `prompt`.
      input_shape: as `num_classes` and `options` those of `models.model`.
      base: variables of the network, {"body", "head", "stats"}; training starts from
        them. A head of other shapes, as for other classes, is drawn anew. Default: the
        network's own draw under the key 0.
      train_head: False: the head is frozen, too.
      base_dtype: in which the frozen variables are held, "float32" or "bfloat16".
      blocks: of a transformer, "unrolled", "scanned" (the frozen variables are stacked,
        and the compiler sees one block) or "rematerialised" (likewise, and the
        derivative computes each block again, for less memory).

    Raises:
      InputError: the base does not have the network's variables, or the network no
        layer to adapt.
    """
    chosen: set[Path] = set()

    def change(body: nnx.Module, rngs: nnx.Rngs) -> None:
        how.insert(body, rngs)
        for path, layer in nnx.iter_modules(body):
            if isinstance(layer, layers.BatchNorm):
                layer.still = True
            chosen.update(_trained(how, tuple(map(str, path)), layer))

    def stack(body: nnx.Module, rngs: nnx.Rngs) -> None:
        change(body, rngs)
        _stack(body, blocks == "rematerialised")

    choose("base_dtype", base_dtype, DTYPES)
    choose("blocks", blocks, BLOCKS)
    make = functools.partial(model, factory, input_shape, num_classes, **options)
    whole = make(change=change)
    names = {
        path
        for path in _flat(jax.eval_shape(whole.init, jax.random.key(0)))
        if (train_head if path[0] == "head" else path[1:] in chosen)
    }
    start = _started(whole, base, names)
    own = {path: trees.read(x) for path, x in start.items() if path in names}
    rest = {
        path: _held(x, base_dtype) for path, x in start.items() if path not in names
    }

    @trees.traced_once
    def draw(key: Array) -> PyTree:
        return _some(whole.init(key), names)

    def init(key: Array) -> PyTree:
        return _nested(_flat(draw(key)) | own)

    def merge(variables: PyTree) -> PyTree:
        return _merged(_joined(variables, unstacked(trees.read(values))), how.scale)

    run, values = whole, _nested(rest)
    if blocks != "unrolled":
        run, values = make(change=stack), _stacked(values)
    axes = {path: _divided(path, x) for path, x in _flat(values).items()}
    functions = functools.partial(_functions, run)
    frozen = Frozen(values, functions, merge, _nested(axes), how.scale)
    features, logits, apply = frozen.functions(frozen.values)
    norms = _some(whole.bn_mask, names)
    prompted = any(path[-1] == PROMPT for path in names)
    return Model(
        init,
        features,
        logits,
        apply,
        norms,
        whole.num_features,
        frozen,
        None if prompted else run.cache,
        run.unembeds,
    )


def merged(given: Model, variables: PyTree) -> PyTree:
    """Returns the variables of the network without adapters that computes the same,
    W + alpha/rank A B in each layer with LoRA.

    Args:
      given: of `adapted`.
      variables: one client's.

    Raises:
      InputError: the model is not adapted, or has prompts.
    """
    if given.frozen is None:
        raise InputError("`given` must be a model made by models.adapted.")
    return given.frozen.merge(variables)


def shifted(given: Model, change: PyTree) -> Model:
    """Returns a model whose frozen kernels have a change added, in their own type.

    Args:
      given: of `adapted`.
      change: kernels [..., I, O] of layers of the body, by the paths of `merged`.
    """
    frozen = given.frozen
    assert frozen is not None
    tree = {"body": change}
    values = _added(
        frozen.values, _stacked(tree) if STACK in frozen.values["body"] else tree
    )

    def merge(variables: PyTree) -> PyTree:
        return _added(frozen.merge(variables), tree)

    features, head, apply = frozen.functions(values)
    frozen_now = frozen._replace(values=values, merge=merge)
    return given._replace(features=features, head=head, apply=apply, frozen=frozen_now)


def _added(tree: PyTree, change: PyTree) -> PyTree:
    """Returns variables with a change added to some of them."""
    flat = _flat(tree)
    for path, x in _flat(change).items():
        kernel = trees.read(flat[path])
        flat[path] = (kernel + x.reshape(kernel.shape)).astype(kernel.dtype)
    return _nested(flat)


def _started(whole: Model, base: PyTree, trained: set[Path]) -> dict[Path, Array]:
    """Returns the values that are not drawn by `init`: those of the base, and what is
    neither trained nor in the base."""
    key = jax.random.key(0)
    shapes = _flat(jax.eval_shape(whole.init, key))
    added = {path for path in shapes if {A, B, PROMPT} & set(path)}
    if base is None:
        drawn = _flat(jax.jit(whole.init)(key))
        base = _nested({p: x for p, x in drawn.items() if p not in added})
    known = {path: _array(x) for path, x in _flat(base).items()}
    new_head = any(
        known[path].shape != shape.shape if path in known else True
        for path, shape in shapes.items()
        if path[0] == "head"
    )
    for path, shape in shapes.items():
        if path in added or (path[0] == "head" and new_head):
            continue
        found = getattr(known.get(path), "shape", "none")
        if found != shape.shape:
            raise InputError(
                f"The base's variable {'/'.join(path)} must have the shape "
                f"{list(shape.shape)}, got {found}."
            )
    start = {path: known[path] for path in shapes if path in known}
    if new_head:
        start = {path: x for path, x in start.items() if path[0] != "head"}
    missing = shapes.keys() - start.keys() - trained
    if any(path[0] == "head" for path in missing):
        raise InputError("A frozen head must be the base's.")
    if missing:  # the others are not drawn
        rest = jax.jit(lambda key: _some(whole.init(key), missing))(key)
        start |= {path: x for path, x in _flat(rest).items() if path in missing}
    return start


def _divided(path: Path, x: Array) -> int:
    """Returns the axis of a variable that devices divide, -1: each has it whole."""
    stacked = STACK in path
    weight = path[-1] in ("kernel", "embedding") and len(x.shape) == 2 + stacked
    axis = DIVIDED.get(path[-2], -1) if weight else -1
    return axis if axis < 0 else axis + stacked


def _array(x: Any) -> Any:
    """Returns an array; shapes alone and stored arrays are returned unchanged."""
    return x if isinstance(x, (jax.ShapeDtypeStruct, Stored)) else jnp.asarray(x)


def _held(x: Any, dtype: str) -> Any:
    """Returns a frozen array, or its shape, in the type of the base."""
    if dtype == "float32" or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype))
    return x.astype(dtype)


def _stack(body: Any, again: bool) -> None:
    """Replaces the blocks of a transformer by a stack of them."""
    blocks = list(getattr(body, "blocks", ()))
    if not blocks or not all(isinstance(block, Block) for block in blocks):
        raise InputError(f"{type(body).__name__} has no transformer blocks to scan.")
    body.stack, body.blocks = Stack(blocks, again), nnx.List()


def _stacked(tree: PyTree) -> PyTree:
    """Returns variables of which those of all blocks are stacked, [depth, ...]."""
    blocks = tree["body"].get("blocks", {})
    each = [blocks[name] for name in sorted(blocks, key=int)]
    rest = {name: x for name, x in tree["body"].items() if name != "blocks"}
    if not each:
        return tree
    return tree | {"body": rest | {STACK: {"block": jax.tree.map(_joint, *each)}}}


def _joint(*leaves: Any) -> Any:
    """Stacks arrays, or only shapes, or stored arrays to a stored one."""
    if isinstance(leaves[0], Stored):
        shape = (len(leaves), *leaves[0].shape)
        return Stored(shape, leaves[0].dtype, functools.partial(_one_by_one, leaves))
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda *x: jnp.stack(x), *leaves)
    return jnp.stack(leaves)


def _one_by_one(leaves: tuple[Stored, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Reads and stacks arrays."""
    whole = np.empty((len(leaves), *leaves[0].shape), dtype)
    for row, x in zip(whole, leaves, strict=True):
        row[...] = x.load(dtype)
    return whole


def unstacked(tree: PyTree) -> PyTree:
    """Inverts `_stacked`."""
    if STACK not in tree["body"]:
        return tree
    rest = dict(tree["body"])
    whole = rest.pop(STACK)["block"]
    depth = len(jax.tree.leaves(whole)[0])
    each = {str(i): jax.tree.map(lambda x, i=i: x[i], whole) for i in range(depth)}
    return tree | {"body": rest | {"blocks": each}}


def _functions(whole: Model, held: PyTree) -> tuple[Callable[..., Any], ...]:
    """Returns `features`, `head` and `apply` of the trained variables, with the frozen
    ones `held`."""

    def features(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        if STACK in held["body"]:
            full = _joined(_stacked(variables), trees.read(held))
        else:
            full = _joined(variables, trees.read(held))
        h, _ = whole.features(full, x, mask=mask, train=train, key=key)
        return h, variables["stats"]

    def head(variables: PyTree, h: Array) -> Array:
        return whole.head(_joined(variables, trees.read(held["head"])), h)

    return features, head, composed(features, head)


def _nothing(body: nnx.Module, rngs: nnx.Rngs) -> None:
    """Adds no parameters."""


def _trained(how: Adaptation, path: Path, layer: Any) -> set[Path]:
    """Returns the paths of a layer's own variables that are trained."""
    own = (name for name, x in vars(layer).items() if isinstance(x, nnx.Param))
    return {(*path, name) for name in own if how.trains((*path, name), layer)}


def _matches(where: str, path: tuple[Any, ...], layer: Any) -> bool:
    """Returns True for the layers that `lora` adapts."""
    if where == "all" and isinstance(layer, nnx.Conv):
        return layer.feature_group_count == 1
    inside = any("att" in str(name).lower() for name in path)
    return isinstance(layer, DENSE) and (where != "attention" or inside)


def _add_lora(layer: Any, rank: int, scale: float, rngs: nnx.Rngs) -> None:
    """Adds A and B to a layer, which then adds their product to its result."""
    gaussian = nnx.initializers.normal(1 / rank, jnp.float32)
    if isinstance(layer, nnx.Conv):
        names = ("strides", "padding", "input_dilation", "kernel_dilation")
        given = {name: getattr(layer, name) for name in names}
        given |= {"conv_general_dilated": layer.conv_general_dilated}
        low = nnx.Conv(
            layer.in_features,
            rank,
            layer.kernel_size,
            use_bias=False,
            kernel_init=gaussian,
            rngs=rngs,
            **given,
        )
        setattr(layer, A, low)
    else:
        inside = int(np.prod(layer.in_features))
        setattr(layer, A, nnx.Param(gaussian(rngs.params(), (inside, rank))))
    outside = int(np.prod(layer.out_features))
    setattr(layer, B, nnx.Param(jnp.zeros((rank, outside), jnp.float32)))
    layer.lora_scale = scale
    kind: Any = type(layer)
    layer.__class__ = _with_lora(kind)


@functools.cache
def _with_lora(kind: Any) -> Any:
    """Returns a subclass of a layer that adds scale (x A) B to its result."""

    def low(self: Any, x: Array) -> Array:
        """x A: [..., I] -> [n, r] with the leading axes joined; of a convolution [B, H,
        W, I] -> [B, H', W', r]."""
        if issubclass(kind, nnx.Conv):
            return self.lora_a(x)
        a = self.lora_a[...]
        return x.reshape(-1, len(a)) @ gradient_by_rows(a)

    def call(self: Any, x: Array, *args: Any, **kwargs: Any) -> Array:
        y = kind.__call__(self, x, *args, **kwargs)
        change = (self.lora_scale * low(self, x)) @ self.lora_b[...]
        return y + change.reshape(y.shape).astype(y.dtype)

    return type(f"LoRA{kind.__name__}", (kind,), {"__call__": call})


def _width(block: nnx.Module) -> int | None:
    """Returns the width K of the tokens of a transformer block."""
    kinds = (nnx.LayerNorm, nnx.RMSNorm)
    norms = (part for _, part in nnx.iter_modules(block) if isinstance(part, kinds))
    return next((int(norm.num_features) for norm in norms), None)


@functools.cache
def _with_prompt(kind: Any) -> Any:
    """Returns a subclass of a block whose attention includes the prompt."""

    def call(self: Any, h: Array, seen: Array | None, *args: Any, **kw: Any) -> Array:
        count, last = self.prompted
        if hasattr(self, PROMPT):
            tokens = jnp.broadcast_to(self.prompt[...], (len(h), count, h.shape[-1]))
            h = jnp.concatenate([tokens.astype(h.dtype), h], axis=1)
        if seen is not None:
            seen = _seen_with(seen, count)
        h = kind.__call__(self, h, seen, *args, **kw)
        return h[:, count:] if last else h

    return type(f"Prompted{kind.__name__}", (kind,), {"__call__": call})


def _seen_with(seen: Array, count: int) -> Array:
    """Returns which positions see which, [b, count + L, count + L] of [b, L, L].

    All see the prompt; the prompt sees what every position sees.
    """
    if seen.shape[-2] > 1:
        by_all = jnp.all(seen, axis=-2, keepdims=True)
        by_prompt = jnp.broadcast_to(by_all, (len(seen), count, seen.shape[-1]))
        seen = jnp.concatenate([by_prompt, seen], axis=-2)
    return jnp.pad(seen, ((0, 0), (0, 0), (count, 0)), constant_values=True)


def _merged(tree: PyTree, scale: float) -> PyTree:
    """Returns the variables with LoRA's products added to the kernels."""
    flat = _flat(tree)
    if any(path[-1] == PROMPT for path in flat):
        raise InputError("Prompts cannot be merged into the network.")
    kept = {path: x for path, x in flat.items() if not {A, B} & set(path)}
    for path, low in flat.items():
        if A not in path:
            continue
        layer = path[: path.index(A)]
        change = scale * jnp.tensordot(low, flat[(*layer, B)], axes=1)
        kernel = kept[(*layer, "kernel")]
        kept[(*layer, "kernel")] = kernel + change.reshape(kernel.shape)
    return _nested(kept)


def _joined(a: PyTree, b: PyTree) -> PyTree:
    """Returns one nested dict of two with different leaves."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        raise InputError("Trained and frozen variables must differ.")
    both = {name: _joined(a[name], b[name]) for name in a.keys() & b.keys()}
    return a | b | both


def _some(tree: PyTree, names: set[Path]) -> PyTree:
    return _nested({path: x for path, x in _flat(tree).items() if path in names})


def _flat(tree: PyTree) -> dict[Path, Any]:
    return dict(traverse_util.flatten_dict(tree))


def _nested(flat: dict[Path, Any]) -> PyTree:
    """Returns the parts of a model's variables, which may be empty."""
    parts: dict[str, PyTree] = {"body": {}, "head": {}, "stats": {}}
    return parts | traverse_util.unflatten_dict(flat)
