"""Networks of the model types of Hugging Face, and the names of their weights.

Names: a module of the network, such as `blocks.0.attention.q`, has the variables of a
module of the file, such as `encoder.layer.0.attention.attention.query`."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.models import layers
from fedjax_pfl.models.checkpoints import Config, Files
from fedjax_pfl.models.nets import Net, Shape, check_images
from fedjax_pfl.models.registry import Factory
from fedjax_pfl.models.text import Tokens, check_tokens
from fedjax_pfl.models.transformer import Layout
from fedjax_pfl.models.vit import Patches
from fedjax_pfl.types import Array

# names of heads and of what belongs to them: they have no prefix
HEADS = ("classifier", "pre_classifier", "lm_head", "score")
_ATTENTION = (
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
)
_PERCEPTRON = (
    ("encoder.layer.", "layers."),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)
_RENAMED = {
    "vit": _ATTENTION + _PERCEPTRON,
    "deit": _ATTENTION + _PERCEPTRON,
    "dinov2": _ATTENTION,
}
Edit = Callable[[np.ndarray, Files], np.ndarray]


class Family(NamedTuple):
    """A kind of networks.

    Attributes:
      factory: (input_shape, num_classes, rngs) -> Net.
      example: arguments of the factory for a network with all parts of the body.
      prefix: of all names in the file but those of heads; a file may do without.
      names: module of the body, or "head" -> module in the file. An entry with a full
        name of a parameter has one in the file.
      edits: {parameter, `blocks.{}` in all blocks: (its value in the file, files) ->
        value}.
      transposed: linear layers in the file are [out, in].
      renamed: (part of a module's name in the file, part in transformers 5).
    """

    factory: Factory
    example: dict[str, Any]
    prefix: str
    names: Mapping[str, str]
    edits: Mapping[str, Edit] = MappingProxyType({})
    transposed: bool = True
    renamed: tuple[tuple[str, str], ...] = ()

    def file_name(self, path: tuple[str, ...]) -> str:
        """Returns the name in the file, without prefix, of a module or parameter of the
        body, or of ("head",)."""
        own = general(path)
        if own not in self.names:
            raise InputError(f"The network has no {'.'.join(path)} in Hugging Face's.")
        return self.names[own].format(*filter(str.isdecimal, path))


def general(path: tuple[str, ...]) -> str:
    """Returns the name of a module or parameter, the same in all blocks."""
    own = ".".join(path)
    if path[0] != "blocks":
        return own
    return own.replace(f"blocks.{path[1]}", "blocks.{}", 1)


def _block_names(base: str, attention: str, **others: str) -> dict[str, str]:
    """Returns names of a block's modules.

    Args:
      base: of blocks in the file, such as `encoder.layer.{}.`.
      attention: names of q, k, v and the output, with spaces between.
      **others: names of norm_0, norm_1, inner, outer and others.
    """
    parts = dict(zip(("q", "k", "v", "out"), attention.split(), strict=True))
    names = {f"attention.{own}": theirs for own, theirs in parts.items()}
    names |= {re.sub(r"_(\d)$", r"s.\1", x): theirs for x, theirs in others.items()}
    return {f"blocks.{{}}.{own}": base + theirs for own, theirs in names.items()}


def _patches(
    config: Config,
    files: Files,
    layout: Layout,
    prefix: str,
    names: dict[str, str],
    tokens: tuple[str, ...],
    **form: Any,
) -> Family:
    """Returns a family of vision transformers.

    Args:
      prefix: of names in the file.
      names: as of `Family`.
      tokens: parameters in the file of the tokens before the patches.
      **form: further arguments of `Patches`.
    """
    kind, size, patch = config["model_type"], config["image_size"], config["patch_size"]
    side, channels = config.get("side", size), config.get("num_channels", 3)
    for name, value in (("image_size", size), ("patch_size", patch)):
        if not isinstance(value, int):
            raise InputError(f"{config.path}: {name!r} must be one number.")
    if side % patch:
        raise InputError(
            f"`image_size` must be a multiple of the {patch} pixels of a patch, got "
            f"{side}."
        )
    depth, pool = config["num_hidden_layers"], form.get("pool", "first")
    pixels = config.get("pixels")
    form |= {"pool": pool, "pixels": pixels}
    extra = len(tokens)

    def factory(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
        check_images(kind, input_shape)
        if input_shape[-1] != channels:
            raise InputError(
                f"Model {kind!r} needs images of {channels} channels, got input shape "
                f"{tuple(input_shape)}."
            )
        seen = (side, side) if pixels is None else pixels.resized(*input_shape[:2])
        if min(seen) < side or (config.get("whole", False) and seen != (side, side)):
            raise InputError(
                f"Model {kind!r} needs images of {side}x{side} pixels, got "
                f"{seen[0]}x{seen[1]} after resizing."
            )
        shape = (side, side, channels)
        body = Patches(shape, patch, depth, layout, rngs, extra=extra, **form)
        features = layout.width * (2 if pool == "both" else 1)
        return Net(body, layers.linear(features, num_classes, rngs))

    def positions(value: np.ndarray, _: Files) -> np.ndarray:
        rows = value.reshape(-1, value.shape[-1])
        return resampled(rows, extra, side // patch)

    def first(_: np.ndarray, files: Files) -> np.ndarray:
        return np.stack([files.read(name).reshape(-1) for name in tokens])

    example = {"input_shape": (side, side, channels)}
    edits: dict[str, Edit] = dict(places=positions, tokens=first)
    names = names | {"tokens": tokens[0]}
    renamed = _RENAMED.get(kind, ())
    return Family(factory, example, prefix, names, edits, renamed=renamed)


def resampled(table: np.ndarray, extra: int, side: int) -> np.ndarray:
    """Returns positions [extra + side^2, K] of another square grid, by PyTorch's
    bicubic interpolation.

    Args:
      table: [extra + n^2, K].
      extra: tokens before the patches.
      side: patches per side.
    """
    before, grid = table[:extra], table[extra:]
    old = math.isqrt(len(grid))
    if old == side or old * old != len(grid):
        return table
    at = (np.arange(side) + 0.5) * old / side - 0.5  # [side], in the old grid
    weights = np.zeros((side, old), np.float32)
    for step in range(-1, 3):
        column = np.floor(at).astype(int) + step
        weight = _cubic(np.abs(at - column))
        np.add.at(weights, (np.arange(side), column.clip(0, old - 1)), weight)
    grid = grid.reshape(old, old, -1)
    grid = np.einsum("ia,jb,abk->ijk", weights, weights, grid)
    return np.concatenate([before, grid.reshape(side * side, -1)])


def _cubic(d: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Weights of cubic convolution at distances d, PyTorch's a."""
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _layout(config: Config, **form: Any) -> Layout:
    """Returns the layout of a block, of the settings of most model types."""
    given: dict[str, Any] = {
        "epsilon": config.get("layer_norm_eps", 1e-12),
        "rate": config.get("hidden_dropout_prob", 0.0),
        "fused": False,
    }
    if "activation" not in form:
        given["activation"] = config.activation("hidden_act", "gelu")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    hidden = form.pop("hidden", None) or config["intermediate_size"]
    return Layout(width, heads, hidden, **given | form)


def _vit(config: Config, files: Files, *, distilled: bool = False) -> Family:
    kind = config["model_type"]
    names = {
        "embed": "embeddings.patch_embeddings.projection",
        **dict(places="embeddings.position_embeddings"),
        "norm": "layernorm",
        "head": "classifier",
        **_block_names(
            "encoder.layer.{}.",
            "attention.attention.query attention.attention.key "
            "attention.attention.value attention.output.dense",
            norm_0="layernorm_before",
            norm_1="layernorm_after",
            inner="intermediate.dense",
            outer="output.dense",
        ),
    }
    layout = _layout(config, qkv_bias=config.get("qkv_bias", True))
    tokens = ["embeddings.cls_token"] + ["embeddings.distillation_token"] * distilled
    return _patches(config, files, layout, f"{kind}.", names, tuple(tokens))


def _dinov2(config: Config, files: Files) -> Family:
    config.only("use_swiglu_ffn", False)
    names = {
        "embed": "embeddings.patch_embeddings.projection",
        **dict(places="embeddings.position_embeddings"),
        "norm": "layernorm",
        "head": "classifier",
        **_block_names(
            "encoder.layer.{}.",
            "attention.attention.query attention.attention.key "
            "attention.attention.value attention.output.dense",
            norm_0="norm1",
            norm_1="norm2",
            inner="mlp.fc1",
            outer="mlp.fc2",
            scale_0="layer_scale1.lambda1",
            scale_1="layer_scale2.lambda1",
        ),
    }
    layout = _layout(
        config,
        hidden=int(config["hidden_size"] * config.get("mlp_ratio", 4)),
        epsilon=config.get("layer_norm_eps", 1e-6),
        qkv_bias=config.get("qkv_bias", True),
        scaled=True,
    )
    tokens = ("embeddings.cls_token",)
    return _patches(config, files, layout, "dinov2.", names, tokens, pool="both")


def _clip(config: Config, files: Files) -> Family:
    names = {
        "embed": "embeddings.patch_embedding",
        **dict(places="embeddings.position_embedding.weight"),
        "first_norm": "pre_layrnorm",
        "norm": "post_layernorm",
        **_block_names(
            "encoder.layers.{}.",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
            norm_0="layer_norm1",
            norm_1="layer_norm2",
            inner="mlp.fc1",
            outer="mlp.fc2",
        ),
    }
    layout = _layout(
        config,
        activation=config.activation("hidden_act", "quick_gelu"),
        epsilon=config.get("layer_norm_eps", 1e-5),
    )
    tokens = ("embeddings.class_embedding",)
    form = {"first_norm": True, "embed_bias": False}
    return _patches(config, files, layout, "vision_model.", names, tokens, **form)


def _encoder(
    config: Config,
    layout: Layout,
    pooler: str,
    depth: int,
    **family: Any,
) -> Family:
    """Returns a family of encoders of tokens: features of the first token after a
    pooler with this activation; "": the mean over tokens."""
    kind, size = config["model_type"], config["vocab_size"]
    longest = config["max_position_embeddings"]

    def factory(
        input_shape: Shape,
        num_classes: int,
        rngs: nnx.Rngs,
        *,
        vocabulary: int | None = None,
        positions: int | None = None,
    ) -> Net:
        _check_text(kind, input_shape, vocabulary, size, longest)
        pool = "first" if pooler else "mean"
        if positions is not None:
            pool = "all"
        body = Tokens(
            size,
            longest,
            depth,
            layout,
            rngs,
            causal=False,
            first_norm=True,
            pool=pool,
            pooler=pooler if pool == "first" else "",
        )
        return Net(body, layers.linear(layout.width, num_classes, rngs))

    example = {"input_shape": (1,), "vocabulary": size}
    return Family(factory, example, **family)


def _check_text(
    kind: str, shape: Shape, vocabulary: int | None, size: int, longest: int
) -> None:
    """Raises InputError unless inputs are tokens that the network knows."""
    if check_tokens(kind, shape, vocabulary) > size:
        raise InputError(
            f"Model {kind!r} has {size} tokens, the data set {vocabulary}. Use the "
            "model's tokenizer.json as --tokenizer."
        )
    if shape[0] > longest:
        raise InputError(
            f"Model {kind!r} takes at most {longest} tokens, got {shape[0]}. Lower "
            "--max_length."
        )


def _bert(config: Config, files: Files) -> Family:
    config.only("position_embedding_type", "absolute")
    names = {
        "embedding": "embeddings.word_embeddings",
        **dict(places="embeddings.position_embeddings.weight"),
        "first_norm": "embeddings.LayerNorm",
        "pooler": "pooler.dense",
        "head": "classifier",
        **_block_names(
            "encoder.layer.{}.",
            "attention.self.query attention.self.key attention.self.value "
            "attention.output.dense",
            norm_0="attention.output.LayerNorm",
            norm_1="output.LayerNorm",
            inner="intermediate.dense",
            outer="output.dense",
        ),
    }
    pooled = any(
        files.find(f"{start}pooler.dense.weight") is not None for start in ("", "bert.")
    )

    def positions(value: np.ndarray, files: Files) -> np.ndarray:
        # all tokens are of the first type
        return value + files.read("embeddings.token_type_embeddings.weight")[:1]

    return _encoder(
        config,
        _layout(config, post_norm=True),
        "tanh" if pooled else "",
        config["num_hidden_layers"],
        prefix="bert.",
        names=names,
        edits=dict(places=positions),
    )


def _distilbert(config: Config, files: Files) -> Family:
    names = {
        "embedding": "embeddings.word_embeddings",
        **dict(places="embeddings.position_embeddings.weight"),
        "first_norm": "embeddings.LayerNorm",
        "pooler": "pre_classifier",
        "head": "classifier",
        **_block_names(
            "transformer.layer.{}.",
            "attention.q_lin attention.k_lin attention.v_lin attention.out_lin",
            norm_0="sa_layer_norm",
            norm_1="output_layer_norm",
            inner="ffn.lin1",
            outer="ffn.lin2",
        ),
    }
    layout = Layout(
        config["dim"],
        config["n_heads"],
        config["hidden_dim"],
        config.get("dropout", 0.1),
        config.activation("activation", "gelu"),
        epsilon=1e-12,
        post_norm=True,
        fused=False,
    )
    return _encoder(
        config,
        layout,
        "relu" if files.find("pre_classifier.weight") else "",
        config["n_layers"],
        prefix="distilbert.",
        names=names,
    )


class Outputs(nnx.Module):
    """The head of a network whose body ends in logits."""

    def __call__(self, h: Array) -> Array:
        return h


def _decoder(
    config: Config,
    files: Files,
    layout: Layout,
    longest: int,
    depth: int,
    tied: bool,
    form: Mapping[str, Any] = MappingProxyType({}),
    **family: Any,
) -> Family:
    """Returns a family of causal networks of tokens.

    For the next token the body ends in logits, as the head belongs to the network; for
    a label per text a new head takes the features of the last token.

    Args:
      form: further arguments of `Tokens`."""
    kind, size = config["model_type"], config["vocab_size"]

    def factory(
        input_shape: Shape,
        num_classes: int,
        rngs: nnx.Rngs,
        *,
        vocabulary: int | None = None,
        positions: int | None = None,
        packed: bool = False,
    ) -> Net:
        _check_text(kind, input_shape, vocabulary, size, longest)
        pool = "last" if positions is None else "all"
        if positions is not None and num_classes == vocabulary:
            pool = "logits"
        body = Tokens(
            size,
            longest,
            depth,
            layout,
            rngs,
            pool=pool,
            masked=False,
            tied=tied,
            outputs=num_classes,
            packed=packed,
            **form,
        )
        if pool == "logits":
            return Net(body, Outputs())
        head = layers.linear(layout.width, num_classes, rngs, use_bias=False)
        return Net(body, head)

    example: dict[str, Any] = {"input_shape": (1,), "vocabulary": 2}
    if tied or files.find("lm_head.weight"):
        example["positions"] = 1
    return Family(factory, example, **family)


def _gpt2(config: Config, files: Files) -> Family:
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    names = {
        "embedding": "wte",
        **dict(places="wpe.weight"),
        "norm": "ln_f",
        "unembed": "lm_head",
        "head": "score",
        "blocks.{}.attention.qkv": "h.{}.attn.c_attn",
        "blocks.{}.attention.out": "h.{}.attn.c_proj",
        "blocks.{}.norms.0": "h.{}.ln_1",
        "blocks.{}.norms.1": "h.{}.ln_2",
        "blocks.{}.inner": "h.{}.mlp.c_fc",
        "blocks.{}.outer": "h.{}.mlp.c_proj",
    }
    layout = Layout(
        config["n_embd"],
        config["n_head"],
        config.get("n_inner") or 4 * config["n_embd"],
        config.get("resid_pdrop", 0.1),
        config.activation("activation_function", "gelu_new"),
        epsilon=config.get("layer_norm_epsilon", 1e-5),
    )
    return _decoder(
        config,
        files,
        layout,
        config["n_positions"],
        config["n_layer"],
        config.get("tie_word_embeddings", True),
        prefix="transformer.",
        names=names,
        # all but this layer
        edits={"unembed.kernel": lambda value, _: value.T},
        transposed=False,
    )


class Kind(NamedTuple):
    """A model type by its differences from Llama's."""

    qkv_bias: bool | None = None  # None: as config.json says
    qk_norm: bool = False
    # (config, block) -> whether it has a window, where config.json does not say
    window: Callable[[Config, int], bool] = lambda config, block: False
    tied: bool = False
    # norms after the branches, too, whose scales are stored less 1; scaled embeddings;
    # capped logits
    gemma: bool = False


def _late(config: Config, block: int) -> bool:
    used: bool = config.get("use_sliding_window", False)
    return used and block >= config.get("max_window_layers", 28)


KINDS = {
    "llama": Kind(),
    "mistral": Kind(window=lambda config, block: True),
    "qwen2": Kind(qkv_bias=True, window=_late),
    "qwen3": Kind(qk_norm=True, window=_late),
    "gemma2": Kind(window=lambda config, block: block % 2 == 0, tied=True, gemma=True),
}


def windows(config: Config, depth: int) -> tuple[int | None, ...]:
    """Returns the window of each block, None where it sees all positions."""
    kind = KINDS[config["model_type"]]
    windowed = [kind.window(config, block) for block in range(depth)]
    if "layer_types" in config:
        windowed = [name == "sliding_attention" for name in config["layer_types"]]
    size = config.get("sliding_window")
    return tuple(size if found else None for found in windowed)


def _llama(config: Config, files: Files) -> Family:
    """Returns a family of the model types in KINDS."""
    kind = KINDS[config["model_type"]]
    attention = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
    parts = {
        "norm_0": "input_layernorm",
        "norm_1": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "inner": "mlp.up_proj",
        "outer": "mlp.down_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    if kind.gemma:
        parts |= {
            "norm_1": "pre_feedforward_layernorm",
            "after.0": "post_attention_layernorm",
            "after.1": "post_feedforward_layernorm",
        }
    names = {
        "embedding": "embed_tokens",
        "norm": "norm",
        "unembed": "lm_head",
        "head": "score",
        **_block_names("layers.{}.", attention, **parts),
    }
    width, heads = config["hidden_size"], config["num_attention_heads"]
    biased = config.get("attention_bias", False)
    size = config.get("head_dim") or width // heads
    activation = "hidden_activation" if kind.gemma else "hidden_act"
    depth = config["num_hidden_layers"]
    layout = _layout(
        config,
        activation=config.activation(
            activation, "gelu_pytorch_tanh" if kind.gemma else "silu"
        ),
        norm="rms",
        epsilon=config.get("rms_norm_eps", 1e-6),
        gated=True,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=size,
        query=config.get("query_pre_attn_scalar"),
        qk_norm=kind.qk_norm,
        cap=config.get("attn_logit_softcapping"),
        qkv_bias=biased if kind.qkv_bias is None else kind.qkv_bias,
        out_bias=biased,
        mlp_bias=config.get("mlp_bias", False),
        rotary=rotary(config, size),
        both_norms=kind.gemma,
    )
    form: dict[str, Any] = {"windows": windows(config, depth)}
    if kind.gemma:
        form |= {"scale": width**0.5, "cap": config.get("final_logit_softcapping")}
    scales = [f"{name}.scale" for name in names if "norm" in name or "after" in name]
    return _decoder(
        config,
        files,
        layout,
        config["max_position_embeddings"],
        depth,
        config.get("tie_word_embeddings", kind.tied),
        form,
        prefix="model.",
        names=names,
        edits=dict.fromkeys(scales, lambda value, _: value + 1) if kind.gemma else {},
    )


def rotary(config: Config, size: int) -> tuple[float, ...]:
    """Returns the frequencies [size / 2] of rotary positions, of the kinds "default",
    "linear" and "llama3"."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {"rope_theta": config.get("rope_theta", 10000.0)} | given
    kind = str(given.get("rope_type", given.get("type", "default")))
    choose("rope_type", kind, ("default", "linear", "llama3"))
    f = given["rope_theta"] ** (-np.arange(0, size, 2) / size)
    if kind == "linear":
        f = f / given["factor"]
    elif kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        turns = given["original_max_position_embeddings"] * f / (2 * math.pi)
        share = ((turns - low) / (high - low)).clip(0, 1)
        f = (1 - share) * f / given["factor"] + share * f
    return tuple(f.tolist())


TYPES: dict[str, Callable[[Config, Files], Family]] = {
    "vit": _vit,
    "deit": functools.partial(_vit, distilled=True),
    "dinov2": _dinov2,
    "clip": _clip,
    "clip_vision_model": _clip,
    "bert": _bert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    **dict.fromkeys(KINDS, _llama),
}
