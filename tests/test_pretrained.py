"""Networks in folders of Hugging Face against PyTorch's outputs, and adapters in peft's
layout."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiment.runs import run

from fedjax_pfl import models
from fedjax_pfl.data import datasets
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import export, results
from fedjax_pfl.models import checkpoints, families, peft, pretrained, vit

TOKENS, LENGTH, CLASSES = 30, 7, 3
RNG = np.random.default_rng(0)
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
IMAGES = SMALL | {"image_size": 8, "patch_size": 4, "num_labels": CLASSES}
TEXT = SMALL | {"vocab_size": TOKENS, "max_position_embeddings": 12}
LLAMA = TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2}
WINDOWED = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}
GEMMA = {
    "head_dim": 6,
    "query_pre_attn_scalar": 5,
    "sliding_window": 3,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.7,
    "attn_implementation": "eager",  # the other has no cap
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}


def saved(folder, kind, settings, **more):
    """A network of transformers with drawn weights, in a folder."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    name, _, task = kind.partition(" ")
    config = getattr(transformers, f"{name}Config")(**settings)
    network = getattr(transformers, f"{name}{task}")(config).eval()
    for parameter in network.parameters():  # norms and biases, too
        parameter.data += 0.1 * torch.randn(parameter.shape)
    network.save_pretrained(folder, **more)
    return network


def images(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def texts(padding=True):
    x = RNG.integers(1, TOKENS, (4, LENGTH))
    kept = np.array([LENGTH, 4, 2, 1]) if padding else np.full(4, LENGTH)
    return np.where(np.arange(LENGTH) < kept[:, None], x, 0).astype(np.int32)


def theirs(network, *given, **named):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return network(*map(torch.as_tensor, given), **named)


def ours(folder, x, classes, **options):
    model = pretrained.model(str(folder), x.shape[1:], classes, **options)
    w = model.init(jax.random.key(1))
    return model, w, jax.jit(lambda w, x: model.apply(w, x)[0])(w, jnp.asarray(x))


def close(found, wanted, tolerance=2e-5):
    wanted = getattr(wanted, "numpy", lambda: wanted)()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViT ForImageClassification", {}),
        ("ViT ForImageClassification", {"qkv_bias": False, "hidden_act": "relu"}),
        ("DeiT ForImageClassification", {}),
        ("Dinov2 ForImageClassification", {"mlp_ratio": 2, "layerscale_value": 0.5}),
    ],
)
def test_image_classifiers_have_the_outputs_of_pytorch(kind, settings, tmp_path):
    network = saved(tmp_path, kind, IMAGES | settings)
    x = images(3, 8, 8, 3)
    wanted = theirs(network, x.transpose(0, 3, 1, 2)).logits
    close(ours(tmp_path, x, CLASSES)[2], wanted)
    _, w, _ = ours(tmp_path, x, 5)  # another number of classes: a new head
    assert w["head"]["kernel"].shape[1] == 5


@pytest.mark.parametrize("kind", ["CLIP VisionModel", "CLIPVision", "CLIP Model"])
def test_the_image_tower_of_clip_has_the_features_of_pytorch(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    if kind == "CLIP Model":
        text = TEXT | {"bos_token_id": 1, "eos_token_id": 2}
        given = {"vision_config": IMAGES, "text_config": text}
        network = saved(tmp_path, kind, given).vision_model
    else:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        config = transformers.CLIPVisionConfig(**IMAGES, projection_dim=8)
        end = "" if kind == "CLIP VisionModel" else "WithProjection"
        network = getattr(transformers, f"CLIPVisionModel{end}")(config).eval()
        network.save_pretrained(tmp_path)
        network = network.vision_model if end else network
    x = images(3, 8, 8, 3)
    wanted = theirs(network, x.transpose(0, 3, 1, 2)).pooler_output
    model, w, _ = ours(tmp_path, x, CLASSES)
    close(model.features(w, jnp.asarray(x))[0], wanted)


def test_images_are_resized_and_normalised_and_positions_interpolated(tmp_path):
    network = saved(tmp_path, "ViT ForImageClassification", IMAGES)
    given = {"size": {"height": 16, "width": 16}, "image_mean": [0.1, 0.2, 0.3]}
    given["image_std"] = [0.5, 0.6, 0.7]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    x = images(2, 4, 4, 3)
    large = np.asarray(jax.image.resize(x, (2, 16, 16, 3), "linear"))
    pixels = ((large + 1) / 2 - given["image_mean"]) / given["image_std"]
    pixels = pixels.transpose(0, 3, 1, 2).astype(np.float32)
    wanted = theirs(network, pixels, interpolate_pos_encoding=True).logits
    close(ours(tmp_path, x, CLASSES)[2], wanted)


PROCESSORS = [
    ("ViT", {"size": {"height": 16, "width": 16}}),
    ("ViT", {"size": {"height": 8, "width": 8}, "resample": 3}),
    ("ViT", {"size": {"height": 8, "width": 8}, "resample": 1}),
    ("ViT", {"size": {"height": 8, "width": 8}, "do_rescale": False}),
    ("ViT", {"size": {"height": 8, "width": 8}, "rescale_factor": 1 / 128}),
    ("ViT", {"size": {"height": 8, "width": 8}, "do_normalize": False}),
    ("DeiT", {"size": {"height": 12, "width": 12}, "crop_size": 8}),
    ("Dinov2", {"size": {"shortest_edge": 12}, "crop_size": 8}),
    ("Dinov2", {"size": {"shortest_edge": 8}, "crop_size": 8, "resample": 2}),
    ("Dinov2", {"do_resize": False, "crop_size": 8}),
]


@pytest.mark.parametrize(("kind", "settings"), PROCESSORS)
@pytest.mark.parametrize("shape", [(20, 20), (11, 15), (17, 9)])
def test_images_are_prepared_as_by_transformers(kind, settings, shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    network = saved(tmp_path, f"{kind} ForImageClassification", IMAGES)
    name = {"Dinov2": "Bit"}.get(kind, kind)
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**settings)
    processor.save_pretrained(tmp_path)
    x = RNG.integers(0, 256, (3, *shape, 3)).astype(np.uint8)
    pixels = processor(images=list(x), return_tensors="np")["pixel_values"]
    given = datasets.prepare_images(jnp.asarray(x))
    config = checkpoints.read_config(tmp_path)
    side = config["side"]
    found = vit.prepared(given, config["pixels"], side, side)
    level = 1 / (255 * np.min(config["pixels"].deviation))
    # Pillow rounds to 256 levels, once per axis
    close(found, pixels.transpose(0, 2, 3, 1), 1.5 * level)
    wanted = (
        theirs(network, pixels, interpolate_pos_encoding=True).logits
        if kind == "ViT"
        else theirs(network, pixels).logits
    )
    close(ours(tmp_path, given, CLASSES)[2], wanted, 0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 8, "width": 16}}, "'size' must be a square"),
        (
            {"size": 8, "do_normalize": False, "resample": 0},
            "'resample' must be 1 or 2 or 3, got 0",
        ),
        ({"size": {"shortest_edge": 8}}, "'shortest_edge' needs do_center_crop"),
        ({"size": 8}, "has no 'image_mean'"),
        ({}, "has no 'size'"),
        (
            {"size": 8, "do_center_crop": True, "crop_size": 12},
            "'size' must be at least 'crop_size', got 8",
        ),
    ],
)
def test_other_image_processors_are_refused(settings, message, tmp_path):
    saved(tmp_path, "ViT ForImageClassification", IMAGES)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        checkpoints.read_config(tmp_path)


def test_images_that_are_not_resized_have_the_sides_of_the_network(tmp_path):
    saved(tmp_path, "ViT ForImageClassification", IMAGES)
    given = {"do_resize": False, "do_normalize": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match="needs images of 8x8 pixels, got 9x9"):
        ours(tmp_path, images(2, 9, 9, 3), CLASSES)


def test_an_index_names_no_file_outside_of_its_folder(tmp_path):
    saved(tmp_path, "ViT ForImageClassification", IMAGES)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    index = {"weight_map": {"a": "../other.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"must name files of its folder, got '\.\./o"):
        checkpoints.weight_files(inner)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Bert ForSequenceClassification", TEXT),
        ("DistilBert ForSequenceClassification", DISTIL | {"vocab_size": TOKENS}),
    ],
)
def test_text_classifiers_have_the_outputs_of_pytorch(kind, settings, tmp_path):
    network = saved(tmp_path, kind, settings | {"num_labels": CLASSES})
    x = texts()
    torch = pytest.importorskip("torch")
    seen = torch.as_tensor(x != 0)
    wanted = theirs(network, x.astype(int), attention_mask=seen).logits
    close(ours(tmp_path, x, CLASSES, **TOKENS_IN)[2], wanted)


TOKENS_IN = {"input_dtype": jnp.int32, "vocabulary": TOKENS}


def test_an_encoder_without_pooler_has_the_mean_over_tokens(tmp_path):
    network = saved(tmp_path, "DistilBert Model", DISTIL | {"vocab_size": TOKENS})
    x = texts()
    torch = pytest.importorskip("torch")
    seen = torch.as_tensor(x != 0)
    h = theirs(network, x.astype(int), attention_mask=seen).last_hidden_state
    wanted = (h * seen[..., None]).sum(1) / seen.sum(1)[:, None]
    model, w, _ = ours(tmp_path, x, CLASSES, **TOKENS_IN)
    close(model.features(w, jnp.asarray(x))[0], wanted)
    model, w, _ = ours(tmp_path, x, CLASSES, positions=LENGTH, **TOKENS_IN)
    found = model.features(w, jnp.asarray(x))[0].reshape(h.shape)
    close(np.asarray(found)[x != 0], h[seen])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPT2 LMHeadModel", GPT2 | {"vocab_size": TOKENS}),
        ("GPT2 LMHeadModel", GPT2 | {"vocab_size": 30, "tie_word_embeddings": False}),
        ("Llama ForCausalLM", LLAMA),
        ("Llama ForCausalLM", LLAMA | {"tie_word_embeddings": True, "head_dim": 6}),
        ("Llama ForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
        ("Llama ForCausalLM", LLAMA | {"rope_parameters": LLAMA3}),
        ("Mistral ForCausalLM", LLAMA | {"sliding_window": 3}),
        ("Qwen2 ForCausalLM", LLAMA),
        ("Qwen2 ForCausalLM", LLAMA | WINDOWED),
        ("Qwen3 ForCausalLM", LLAMA | {"head_dim": 6}),
        ("Gemma2 ForCausalLM", LLAMA | GEMMA),
        ("Gemma2 ForCausalLM", LLAMA | GEMMA | {"tie_word_embeddings": False}),
    ],
)
def test_decoders_have_the_logits_of_pytorch(kind, settings, tmp_path):
    network = saved(tmp_path, kind, settings)
    x = texts(padding=False)
    x[0, 2] = 0  # a token like others
    wanted = theirs(network, x.astype(int)).logits.reshape(-1, TOKENS)
    close(ours(tmp_path, x, TOKENS, positions=LENGTH, **TOKENS_IN)[2], wanted)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, [5, 5, 5]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None, None]),
        ({"model_type": "qwen2", "sliding_window": 5}, [None, None, None]),
        ({"model_type": "qwen2", "sliding_window": 2} | WINDOWED, [None, 2, 2]),
        ({"model_type": "gemma2", "sliding_window": 5}, [5, None, 5]),
        ({"model_type": "llama", "sliding_window": 5}, [None, None, None]),
    ],
)
def test_windows_of_a_config_without_types_of_layers(settings, wanted):
    """Transformers 4 wrote none."""
    found = families.windows(families.Config(settings), 3)
    assert list(found) == wanted


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen3", "Gemma2"])
def test_decoders_classify_by_the_last_token(kind, tmp_path):
    settings = GPT2 if kind == "GPT2" else LLAMA
    settings = settings | (GEMMA if kind == "Gemma2" else {})
    settings = settings | {"vocab_size": TOKENS, "pad_token_id": 0}
    settings["num_labels"] = CLASSES
    network = saved(tmp_path, f"{kind} ForSequenceClassification", settings)
    x = texts()
    close(ours(tmp_path, x, CLASSES, **TOKENS_IN)[2], theirs(network, x.astype(int))[0])


def test_weights_in_parts_and_in_bfloat16_are_read(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    network = saved(tmp_path / "whole", "Llama ForCausalLM", LLAMA)
    network.to(torch.bfloat16).save_pretrained(tmp_path / "parts", max_shard_size=2000)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    whole, parts = (
        pretrained.load(str(tmp_path / name)).variables for name in ("whole", "parts")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01), whole, parts)
    assert {x.dtype for x in jax.tree.leaves(parts)} == {np.dtype(np.float32)}
    digests = {pretrained.digest(str(tmp_path / x)) for x in ("whole", "parts")}
    assert len(digests) == 2


def written(folder, config, tensors):
    """A folder that needs no other library than safetensors."""
    library = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    library.save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_wrong_folders_are_refused_with_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        pretrained.load(str(tmp_path))
    gpt2 = GPT2 | {"model_type": "gpt2", "vocab_size": 5}
    refused = [
        ({"model_type": "t5"}, {}, "Unknown model_type 't5'"),
        ({"n_embd": 16}, {}, "has no 'model_type'"),
        ({"model_type": "gpt2", "n_embd": 16}, {}, "has no 'n_head'"),
        (gpt2 | {"activation_function": "mish"}, {}, "activation_function 'mish'"),
        (gpt2 | {"scale_attn_weights": False}, {}, "'scale_attn_weights' must be True"),
        (gpt2, {}, "has no tensor"),
        (gpt2, {"h.0.attn.c_proj.bias": np.zeros(3)}, r"must be \[16\], got \[3\]"),
        (
            {"model_type": "vit", "image_size": 8, "patch_size": 3, **SMALL},
            {},
            "multiple of the 3 pixels",
        ),
    ]
    for config, tensors, message in refused:
        folder = written(tmp_path, config, tensors | {"x": np.zeros(1)})
        with pytest.raises(InputError, match=message):
            pretrained.load(folder)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"must hold config\.json and model"):
        pretrained.load(str(tmp_path))


VOCABULARY = {"!": 0, "a": 1, "b": 2, " ": 3, "<end>": 4}
SPEECH = {"ann": "ab ab! " * 12, "bob": "ba! " * 20, "cy": "aab b" * 16}


def silent(folder):
    """A GPT-2 whose logits are equal, and a tokenizer of characters."""
    k, layers = GPT2["n_embd"], range(GPT2["n_layer"])
    zeros = lambda *shape: np.zeros(shape, np.float32)
    tensors = {"wte.weight": np.eye(5, k, dtype=np.float32), "wpe.weight": zeros(12, k)}
    linear = {
        "attn.c_attn": 3 * k,
        "attn.c_proj": k,
        "mlp.c_fc": 4 * k,
        "mlp.c_proj": k,
    }
    for start in [f"h.{i}.{name}" for i in layers for name in ("ln_1", "ln_2")] + [
        "ln_f"
    ]:
        tensors |= {f"{start}.weight": zeros(k) + 1, f"{start}.bias": zeros(k)}
    for i in layers:
        for name, width in linear.items():
            rows = 4 * k if name == "mlp.c_proj" else k
            tensors[f"h.{i}.{name}.weight"] = zeros(rows, width)
            tensors[f"h.{i}.{name}.bias"] = zeros(width)
    tensors["ln_f.weight"] = zeros(k)
    config = GPT2 | {"model_type": "gpt2", "vocab_size": 5}
    path = written(folder, config, tensors)
    library = pytest.importorskip("tokenizers", reason="needs tokenizers")
    made = library.Tokenizer(library.models.BPE(VOCABULARY, []))
    made.save(str(folder / "tokenizer.json"))
    return path


@pytest.mark.parametrize("flag", ["--model=pretrained:", "--adapt=lora:2 --base="])
def test_clients_tune_a_decoder_on_their_texts(flag, tmp_path):
    folder = silent(tmp_path / "base")
    (tmp_path / "texts.json").write_text(json.dumps(SPEECH))
    argv = f"--algo=ditto --dataset=text:{tmp_path}/texts.json --max_length=8 --lr=0.1"
    argv += (
        " --partition=natural:speaker --metrics=perplexity --rounds=2 --optimizer=adam"
    )
    argv += f" --workdir={tmp_path}/run {flag}{folder}"
    assert run(*argv.split()) == 0
    found = results.load(tmp_path / "run")
    assert found.experiment.dataset.words == tuple(VOCABULARY)
    assert found.config["model"] == f"pretrained:{folder}"
    scores = found.metrics["pre/perplexity"]
    np.testing.assert_allclose(scores.iloc[0], len(VOCABULARY), rtol=1e-5)
    argv = [f"{tmp_path}/run", "--client=bob", "--peft"]
    if "lora" not in flag:
        assert scores.iloc[-1] < 4.9
        assert run(*argv, command=export.main) == 2
        return
    assert run(*argv, command=export.main) == 0
    lines, x = export.write(tmp_path / "run", 1), found.experiment.dataset.x[:2]
    exec(lines, {"x": jnp.asarray(x)}, made := {})
    np.testing.assert_allclose(made["logits"], found.predictor(1)(x), atol=1e-6)
    written = json.loads(
        (tmp_path / "run/client-bob-peft/adapter_config.json").read_text()
    )
    assert written["base_model_name_or_path"] == folder and written["r"] == 2
    assert "transformer.h.1.attn.c_attn" in written["target_modules"]


def test_inputs_must_fit_the_network(tmp_path):
    saved(tmp_path, "GPT2 LMHeadModel", GPT2 | {"vocab_size": TOKENS})
    given = {"input_dtype": jnp.int32, "positions": LENGTH}
    with pytest.raises(InputError, match="has 30 tokens, the data set 40"):
        pretrained.model(str(tmp_path), (LENGTH,), 40, vocabulary=40, **given)
    with pytest.raises(InputError, match="at most 12 tokens, got 13"):
        pretrained.model(str(tmp_path), (13,), TOKENS, vocabulary=TOKENS, **given)


@pytest.mark.parametrize(
    ("kind", "settings", "where"),
    [
        ("ViT ForImageClassification", IMAGES, "attention"),
        ("ViT ForImageClassification", IMAGES, "dense"),  # with the patches
        ("Dinov2 ForImageClassification", IMAGES | {"mlp_ratio": 2}, "attention"),
        ("Bert ForSequenceClassification", TEXT | {"num_labels": CLASSES}, "dense"),
        ("GPT2 LMHeadModel", GPT2 | {"vocab_size": TOKENS}, "dense"),
        ("Llama ForCausalLM", LLAMA, "attention"),
        ("Qwen3 ForCausalLM", LLAMA | {"head_dim": 6}, "dense"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
def test_peft_loads_an_adapter_with_the_same_outputs(kind, settings, where, tmp_path):
    peft_library = pytest.importorskip("peft", reason="needs peft")
    network = saved(tmp_path / "base", kind, settings)
    found = pretrained.load(str(tmp_path / "base"))
    options, classes, x = TOKENS_IN, CLASSES, texts(padding=False)
    if "Image" in kind:
        options, x = {}, images(3, 8, 8, 3)
    elif "Sequence" not in kind:
        options, classes = TOKENS_IN | {"positions": LENGTH}, TOKENS
    how = models.lora(rank=2, alpha=3, where=where)
    model = models.adapted(
        found.factory, how, x.shape[1:], classes, base=found.variables, **options
    )
    w = jax.tree.map(
        lambda a: a + 0.3 * RNG.normal(size=a.shape).astype(np.float32),
        jax.device_get(model.init(jax.random.key(0))),
    )
    peft.save(tmp_path / "adapter", str(tmp_path / "base"), model, w, how.scale)
    network = peft_library.PeftModel.from_pretrained(network, tmp_path / "adapter")
    given = x.transpose(0, 3, 1, 2) if "Image" in kind else x.astype(int)
    wanted = theirs(network.eval(), given).logits
    close(model.apply(w, jnp.asarray(x))[0], wanted.reshape(-1, classes), 1e-4)
