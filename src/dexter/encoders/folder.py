"""The sentence-transformers folder, read and written without that package.

    modules.json                        the stages in order: Transformer, Pooling, Dense ..., Normalize
    1_Pooling/config.json               mean or first token
    2_Dense/config.json, model.safetensors   a projection, one folder per layer; absent without projection
    config_sentence_transformers.json   the prefixes, as prompts "query" and "document"
    sentence_bert_config.json           the longest text, in tokens
    config.json, model.safetensors, tokenizer.json ...   the Hugging Face model, written by the encoder
    dexter_encoder.json                 what the format cannot express: the length of each side, dropout

A folder without modules.json is a plain Hugging Face model, which leaves all settings open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError
from dexter.files import read_json, read_object, write_json
from dexter.tensor_files import write_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

Pooling = Literal["mean", "cls"]
"""How token states become one vector: their mean, or that of the first token."""

ENCODER_FILE = "dexter_encoder.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
MAX_DIMENSION = 65_536
_MODULE_TYPE = "sentence_transformers.models."
_SENTENCE = "sentence_embedding"
_LEGACY_POOLING = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_ACTIVATIONS = (
    "torch.nn.modules.linear.Identity",
    *(f"torch.nn.modules.activation.{name}" for name in ("Tanh", "ReLU", "GELU", "SiLU")),
)


def _no_layers() -> nn.Sequential:
    from torch import nn

    return nn.Sequential()


@dataclass(frozen=True, kw_only=True)
class TransformerSettings:
    """How a transformer's token states become a vector, and limits on texts; None where a folder does not say."""

    pooling: Pooling | None = None
    projection: nn.Sequential = field(default_factory=_no_layers)
    """Linear layers, each followed by its activation; empty without projection."""
    normalize: bool | None = None
    query_prefix: str = ""
    label_prefix: str = ""
    max_length: int | None = None
    """Longest text in tokens that a folder allows, for queries and labels."""
    max_length_query: int | None = None
    max_length_label: int | None = None
    dropout: float | None = None


def read_settings(folder: Path) -> TransformerSettings:
    """Read the settings of a folder; raise `ModelError` for a stage that is not supported."""
    if not (folder / "modules.json").is_file():
        return TransformerSettings()
    from torch import nn

    pooling: Pooling | None = None
    normalize = False
    layers: list[nn.Module] = []
    for kind, path in _stages(folder):
        if kind == "Pooling":
            pooling = _read_pooling(path)
        elif kind == "Dense":
            layers += _read_dense(path)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(
                f"{folder / 'modules.json'}: stage {kind!r} is not supported: expected Transformer, Pooling (mean or "
                "cls), Dense and Normalize"
            )
    if pooling is None:
        raise ModelError(f"{folder / 'modules.json'}: no Pooling stage: this is not an encoder of whole texts")
    return TransformerSettings(
        pooling=pooling, projection=nn.Sequential(*layers), normalize=normalize, **_read_limits(folder)
    )


def write_settings(folder: Path, settings: TransformerSettings, *, hidden_size: int) -> None:
    """Write all files but those of the Hugging Face model; no setting may be open."""
    assert settings.pooling is not None
    assert settings.max_length_query is not None
    assert settings.max_length_label is not None
    stages = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for first in range(0, len(settings.projection), 2):
        stages.append((f"{len(stages)}_Dense", "Dense"))
        _write_dense(folder / stages[-1][0], settings.projection[first], settings.projection[first + 1])
    if settings.normalize:
        stages.append((f"{len(stages)}_Normalize", "Normalize"))
    _write_modules(folder, stages)
    write_json(folder / "1_Pooling" / "config.json", _pooling_config(settings.pooling, hidden_size))
    _write_prompts(folder, query=settings.query_prefix, label=settings.label_prefix, normalize=bool(settings.normalize))
    longest = max(settings.max_length_query, settings.max_length_label)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    write_json(
        folder / ENCODER_FILE,
        {
            "kind": "transformer",
            "max_length_query": settings.max_length_query,
            "max_length_label": settings.max_length_label,
            "dropout": settings.dropout,
        },
    )


def write_static_folder(
    folder: Path,
    *,
    table_RD: NDArray[np.floating],
    tokenizer: Tokenizer,
    normalize: bool,
    max_length: int | None = None,
) -> None:
    """Write a token table as a sentence-transformers `StaticEmbedding`, which averages the rows of a text's tokens.

    `StaticEmbedding` tokenises without special tokens, and without truncation unless the tokenizer itself truncates: to
    `max_length` tokens, where that is given. A *weighted* mean is written by multiplying each row by its token's
    weight: then only the divisor differs, which `normalize` removes. model2vec loads the folder too, and reads whole
    texts: it would cut characters where this cuts tokens.
    """
    if table_RD.ndim != 2 or table_RD.shape[0] < tokenizer.get_vocab_size():
        raise ModelError(
            f"{folder}: the token table has shape {table_RD.shape}: expected one row for each of the "
            f"{tokenizer.get_vocab_size()} entries of the tokenizer"
        )
    stage = folder / "0_StaticEmbedding"
    stage.mkdir(parents=True, exist_ok=True)
    write_tensors(stage / "model.safetensors", {"embedding.weight": table_RD.astype(np.float32, copy=False)})
    if max_length is not None:
        tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        tokenizer.enable_truncation(max_length)
    tokenizer.save(str(stage / "tokenizer.json"))
    stages = [(stage.name, "StaticEmbedding")]
    _write_modules(folder, [*stages, ("1_Normalize", "Normalize")] if normalize else stages)
    for_model2vec = {"normalize": normalize, "max_length": None}
    _write_prompts(folder, query="", label="", normalize=normalize, others=for_model2vec)


def _stages(folder: Path) -> list[tuple[str, Path]]:
    """Return (class name, folder) of every stage; refuse custom code and stages outside the folder."""
    path = folder / "modules.json"
    stages = []
    listed = read_json(path)
    for entry in listed if isinstance(listed, list) else [None]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise ModelError(f"{path}: expected a list of objects with type and path")
        if not entry["type"].startswith("sentence_transformers."):
            raise ModelError(f"{path}: stage {entry['type']!r} is custom code, which is never run")
        stage = (folder / entry["path"]).resolve()
        if not stage.is_relative_to(folder.resolve()):
            raise ModelError(f"{path}: stage path {entry['path']!r} points outside the folder")
        stages.append((entry["type"].rpartition(".")[2], stage))
    return stages


def _read_pooling(folder: Path) -> Pooling:
    config = read_object(folder / "config.json")
    modes = config.get("pooling_mode", [])
    modes = [modes] if isinstance(modes, str) else list(modes)
    modes = modes or [
        _LEGACY_POOLING.get(key, key) for key, on in config.items() if key.startswith("pooling_mode_") and on is True
    ]
    for supported in get_args(Pooling):
        if modes == [supported] and config.get("include_prompt", True):
            return supported  # type: ignore[no-any-return]
    raise ModelError(
        f"{folder / 'config.json'}: pooling {modes or 'unnamed'} is not supported: expected mean or cls with prompt"
    )


def _read_dense(folder: Path) -> tuple[nn.Linear, nn.Module]:
    """Read a linear layer and its activation; sizes are checked before memory is allocated."""
    from safetensors import SafetensorError, safe_open
    from torch import nn

    config = read_object(folder / "config.json")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    source = config.get("module_input_name", _SENTENCE)
    if activation not in _ACTIVATIONS or config.get("use_residual") or source != _SENTENCE:
        raise ModelError(
            f"{folder / 'config.json'}: this Dense stage is not supported: expected a layer on the pooled vector "
            f"without residual, with an activation among {', '.join(_ACTIVATIONS)}"
        )
    sizes: list[Any] = [config.get("in_features"), config.get("out_features")]
    if not all(isinstance(size, int) and 0 < size <= MAX_DIMENSION for size in sizes):
        raise ModelError(f"{folder / 'config.json'}: Dense sizes {sizes}: expected 1 to {MAX_DIMENSION:,}")
    bias = config.get("bias", True) is True
    weights = folder / "model.safetensors"
    try:
        with safe_open(weights, framework="pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
            if shapes != {"linear.weight": (sizes[1], sizes[0])} | ({"linear.bias": (sizes[1],)} if bias else {}):
                raise ModelError(f"{weights}: holds {shapes}, which is not the Dense layer of its config.json")
            state = {name.removeprefix("linear."): stored.get_tensor(name).float() for name in shapes}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{weights}: missing or damaged ({error}): restore the folder from its source") from None
    # On the meta device no memory and no random numbers are spent on values that are replaced at once.
    linear = nn.Linear(sizes[0], sizes[1], bias=bias, device="meta")
    linear.load_state_dict(state, assign=True)
    return linear, getattr(nn, activation.rpartition(".")[2])()


def _write_dense(folder: Path, linear: nn.Module, activation: nn.Module) -> None:
    from safetensors.torch import save_file
    from torch import nn

    assert isinstance(linear, nn.Linear)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{type(activation).__module__}.{type(activation).__name__}",
    }
    write_json(folder / "config.json", config)
    state = {f"linear.{name}": value.detach().cpu().contiguous() for name, value in linear.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _read_limits(folder: Path) -> dict[str, Any]:
    """Read prefixes, lengths and dropout; those in our own file, if present, take precedence."""
    prompts = _optional_object(folder / _PROMPTS_FILE).get("prompts") or {}
    document = prompts.get("document") or prompts.get("passage")
    own = _optional_object(folder / ENCODER_FILE)
    settings = {
        "query_prefix": prompts.get("query") or "",
        "label_prefix": document or "",
        "max_length": _optional_object(folder / "sentence_bert_config.json").get("max_seq_length"),
        "max_length_query": own.get("max_length_query"),
        "max_length_label": own.get("max_length_label"),
        "dropout": own.get("dropout"),
    }
    for name, expected in (("prefix", str), ("length", int | None), ("dropout", float | int | None)):
        for key, value in settings.items():
            if name in key and not isinstance(value, expected):
                raise ModelError(f"{folder}: {key} is {value!r} in the folder's settings: expected {expected}")
    return settings


def _optional_object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _pooling_config(pooling: Pooling, hidden_size: int) -> dict[str, Any]:
    """Describe the pooling with the older keys, which every version of sentence-transformers reads."""
    return {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }


def _write_modules(folder: Path, stages: list[tuple[str, str]]) -> None:
    entries = [
        {"idx": position, "name": str(position), "path": path, "type": _MODULE_TYPE + kind}
        for position, (path, kind) in enumerate(stages)
    ]
    write_json(folder / "modules.json", entries)


def _write_prompts(
    folder: Path, *, query: str, label: str, normalize: bool, others: Mapping[str, Any] = MappingProxyType({})
) -> None:
    config = {
        **others,
        "prompts": {"query": query, "document": label},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine" if normalize else "dot",
    }
    write_json(folder / _PROMPTS_FILE, config)
