"""A Hugging Face model and its tokenizer out of a folder that nobody vouches for.

Only safetensors weights are read and only transformers' own classes are built: custom code, adapters, pickled weights
and sizes that the weights do not bear out are refused before memory is taken. A weight that is missing is an error,
never a random number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dexter.encoders.folder import MAX_DIMENSION, read_object
from dexter.errors import ModelError
from dexter.files import write_json

# The keys of config.json that make transformers loop or allocate before any weight is seen.
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


def load_model(folder: Path) -> Any:
    """The base model of a folder in float32 with SDPA attention, without a pooling layer, in evaluation mode."""
    from transformers import AutoConfig, AutoModel

    check_folder(folder)
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
    """The folder's own tokenizer, as transformers' wrapper of a `tokenizers.Tokenizer`."""
    from transformers import AutoTokenizer

    with _as_model_errors(folder), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False, local_files_only=True)
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: the tokenizer has no fast version: save it as tokenizer.json first")
    # Some tokenizer.json files carry the padding and truncation of their last use; lengths are the encoder's matter.
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


def check_folder(folder: Path) -> None:
    """Refuse a folder that asks for foreign code or adapters, lacks safetensors, or names absurd sizes."""
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
    from transformers import MODEL_MAPPING

    if getattr(config, "is_encoder_decoder", False) or type(config) not in MODEL_MAPPING:
        raise ModelError(f"{folder}: model type {config.model_type!r} is not a text encoder")
    model_class = MODEL_MAPPING[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _takes_pooling_layer(model_class: Any) -> bool:
    return "add_pooling_layer" in inspect.signature(model_class.__init__).parameters


def _check_weights(folder: Path, model_class: Any, config: Any, options: dict[str, bool]) -> None:
    """Hold the sizes of config.json against the weights on disk, on a model that takes no memory."""
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
    """Turn what transformers raises on a bad folder into one clear line."""
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
    """Silence transformers' bars and reports for a moment; what matters in them is checked here."""
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
