"""The transformer encoder: any Hugging Face text encoder, pooled, optionally projected and normalised.

Texts are given as ragged token ids, special tokens included. On a CPU known architectures run packed, without padding
(`dexter.encoders.packing`); elsewhere a batch is padded to its longest text, and `micro_batches` groups texts of nearly
equal length. Models are loaded by `dexter.encoders.pretrained`, settings read and written by `dexter.encoders.folder`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dexter.data.tokens import LimitedTokenizer, Tokens
from dexter.encoders import embed
from dexter.encoders.folder import Pooling, TransformerSettings, read_settings, write_settings
from dexter.encoders.packing import (
    PACKED_ATTENTION,
    first_position,
    pack,
    pad,
    pool_packed,
    pool_padded,
    register_packed_attention,
)
from dexter.encoders.pretrained import MINILM, load_model, load_tokenizer, locate, save_model
from dexter.errors import ModelError, UsageError
from dexter.products import faster_linear_layers
from dexter.types import Side

MAX_LENGTH_QUERY = 128
MAX_LENGTH_LABEL = 32
# With about a thousand tokens the activations stay in a CPU's cache; an accelerator needs more to be busy.
_TOKENS_PER_BATCH_CPU = 1_024
_TOKENS_PER_BATCH = 16_384
_SHORTEST_LIMIT = 3
# Generous: only texts whose first tokens span a page of blanks or noise are truncated by it.
_CHARACTERS_PER_TOKEN = 64


class TransformerOptions(TypedDict, total=False):
    """Settings that override those of a pretrained folder; None or missing leaves the folder's."""

    pooling: Pooling | None
    """Mean of the token states (default) or state of the first token (cls)."""
    projection: int | None
    """Size of a new linear layer after pooling."""
    normalize: bool | None
    """Scale vectors to length one (default)."""
    max_length_query: int | None
    max_length_label: int | None
    """Maximum tokens of a text, special tokens included (default 128 and 32)."""
    query_prefix: str | None
    label_prefix: str | None
    """Text put before every text of that side."""
    dropout: float | None
    """Probability of every dropout in training; by default the model's own."""


class TransformerEncoder(nn.Module):
    """Text to vector through a transformer; created by `from_pretrained`, `load` or `random`."""

    def __init__(self, model: Any, tokenizer: Any, settings: TransformerSettings) -> None:
        super().__init__()
        _check_fit(model, tokenizer, settings)
        register_packed_attention()
        self.model = model
        self.projection = settings.projection
        self.settings = settings
        self.tokens_per_batch: int | None = None
        """Tokens per micro-batch; None means about 1k on a CPU and 16k elsewhere."""
        self.packed: bool | None = None
        """Whether to run without padding; None means on a CPU. Ignored if the architecture cannot be packed."""
        self.dimension = _dimension(settings.projection, hidden_size=model.config.hidden_size)
        self._pretrained_tokenizer = tokenizer
        self._limited_tokenizers: dict[Side, LimitedTokenizer] = {}
        self.padding_id = int(tokenizer.pad_token_id or 0)
        self.first_position = first_position(model.config)
        """Position id of a text's first token; None if the architecture cannot be packed."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path = MINILM,
        *,
        device: torch.device | str = "cpu",
        **options: Unpack[TransformerOptions],
    ) -> Self:
        """Load an encoder from "minilm", a sentence-transformers or plain Hugging Face folder, or a hub name."""
        folder = locate(name_or_path)
        settings = read_settings(folder)
        model = load_model(folder)
        settings = _resolve(settings, hidden_size=model.config.hidden_size, options=options)
        _set_dropout(model, settings.dropout)
        return cls(model, load_tokenizer(folder), settings).to(device)

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Read an encoder written by `save`."""
        if not Path(folder).is_dir():
            raise ModelError(f"{folder}: no such encoder folder")
        return cls.from_pretrained(folder, device=device)

    @classmethod
    def random(
        cls,
        texts: Sequence[str],
        *,
        num_layers: int = 2,
        hidden_size: int = 64,
        num_heads: int = 2,
        num_words: int = 2_000,
        seed: int = 0,
        **options: Unpack[TransformerOptions],
    ) -> Self:
        """Create a small BERT with random weights whose vocabulary is the commonest words of texts; needs no files."""
        import transformers

        library: Any = transformers  # whose constructors carry no types

        tokenizer = _word_tokenizer(texts, num_words=num_words)
        config = library.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=4 * hidden_size,
            attn_implementation="sdpa",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = library.BertModel(config, add_pooling_layer=False).eval()
            settings = _resolve(TransformerSettings(), hidden_size=hidden_size, options=options)
        _set_dropout(model, settings.dropout)
        return cls(model, tokenizer, settings)

    def tokenize(self, texts: Sequence[str], *, side: Side, progress: bool = False) -> Tokens:
        """Tokenise texts with the prefix and length of their side, special tokens included; no row is empty."""
        prefix = self.settings.query_prefix if side == "query" else self.settings.label_prefix
        tokens = self._limited_tokenizer(side).tokenize(
            [prefix + text for text in texts] if prefix else texts, progress=progress
        )
        return _fill_empty(tokens, self.padding_id)

    def split_query(self, text: str) -> list[str]:
        """Cut a query text into windows of the length that is read."""
        return self._limited_tokenizer("query").split(text)

    def _limited_tokenizer(self, side: Side) -> LimitedTokenizer:
        """Return the tokenizer with the limits of a side, created on first use."""
        if side not in self._limited_tokenizers:
            max_length = self.settings.max_length_query if side == "query" else self.settings.max_length_label
            assert max_length is not None
            self._limited_tokenizers[side] = LimitedTokenizer(
                self._pretrained_tokenizer.backend_tokenizer,
                max_length=max_length,
                max_characters=_CHARACTERS_PER_TOKEN * max_length,
                special_tokens=True,
            )
        return self._limited_tokenizers[side]

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Embed N texts given as token ids end to end and their N + 1 offsets: float32 [N, dimension]."""
        if len(offsets) == 1:
            return torch.zeros(0, self.dimension, device=ids.device)
        pooled = self._forward_packed(ids, offsets) if self._packs(ids.device) else self._forward_padded(ids, offsets)
        vectors = self.projection(pooled).float()
        return functional.normalize(vectors, dim=-1) if self.settings.normalize else vectors

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Embed texts without dropout, where the weights are, and return an array."""
        vectors_ND: NDArray[np.float32] = embed(self, tokens).numpy()
        return vectors_ND

    def micro_batches(self, lengths: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Group texts of similar length, longest first, into batches of about `tokens_per_batch` tokens."""
        budget = self.tokens_per_batch or (
            _TOKENS_PER_BATCH_CPU if self.model.device.type == "cpu" else _TOKENS_PER_BATCH
        )
        order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
        batches = []
        start = 0
        while start < len(order):
            stop = start + max(1, budget // int(lengths[order[start]]))
            batches.append(order[start:stop])
            start = stop
        return batches

    def save(self, folder: str | Path) -> None:
        """Write a sentence-transformers folder; wrap in `dexter.files.atomic_folder` to make this atomic."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(folder, self.model, self._pretrained_tokenizer)
        write_settings(folder, self.settings, hidden_size=self.model.config.hidden_size)

    def use_eager_attention(self) -> None:
        """Compute attention by matrix products and a softmax, as the ONNX exporter needs, until the next forward."""
        self._attend_with("eager")

    def checkpoint_activations(self) -> None:
        """Keep only the input of each layer for the backward pass, and compute the rest again with the same dropout."""
        if not self.model.supports_gradient_checkpointing:
            raise UsageError(
                f"train.activation_checkpointing: {type(self.model).__name__} cannot compute its layers again: "
                "set train.activation_checkpointing=false"
            )
        # What is computed again must choose the library that was chosen the first time.
        both: dict[str, Any] = {"context_fn": lambda: (faster_linear_layers(), faster_linear_layers())}
        settings = {"use_reentrant": False, **(both if self.model.device.type == "cpu" else {})}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)

    def compile_model(self) -> None:
        """Compile the model with torch.compile and try it once; batches are padded from now on.

        Packing would compile anew for each set of lengths. Dropout draws from torch's own generators, so that gradient
        caching can replay it.
        """
        self.packed = False
        self.model.compile(dynamic=True, options={"fallback_random": True})
        ids = torch.full((7,), self.padding_id, device=self.model.device)
        offsets = torch.tensor([0, 4, 7], device=self.model.device)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                self(ids, offsets).sum().backward()
        except Exception as error:  # the compiler, its back ends and the model raise anything
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UsageError(f"train.compile: torch.compile failed ({reason}): set train.compile=false") from error
        self.zero_grad(set_to_none=True)

    def _packs(self, device: torch.device) -> bool:
        wanted = device.type == "cpu" if self.packed is None else self.packed
        return wanted and self.first_position is not None

    def _forward_packed(self, ids: Tensor, offsets: Tensor) -> Tensor:
        assert self.first_position is not None
        self._attend_with(PACKED_ATTENTION)
        packed = pack(ids, offsets)
        with faster_linear_layers():
            states_1TD = self.model(
                input_ids=packed.ids[None],
                position_ids=packed.positions[None] + self.first_position,
                packed_groups=packed.groups,
            ).last_hidden_state
        return pool_packed(states_1TD[0], packed, self._pooling)

    def _forward_padded(self, ids: Tensor, offsets: Tensor) -> Tensor:
        self._attend_with("sdpa" if self.model._supports_sdpa else "eager")
        ids_NL, mask_NL = pad(ids, offsets, self.padding_id)
        states_NLD = self.model(input_ids=ids_NL, attention_mask=mask_NL.long()).last_hidden_state
        return pool_padded(states_NLD, mask_NL, self._pooling)

    @property
    def _pooling(self) -> Pooling:
        assert self.settings.pooling is not None
        return self.settings.pooling

    def _attend_with(self, implementation: str) -> None:
        if self.model.config._attn_implementation != implementation:
            self.model.set_attn_implementation(implementation)


def _resolve(settings: TransformerSettings, *, hidden_size: int, options: TransformerOptions) -> TransformerSettings:
    """Override a folder's settings by the caller's options, and fill what is open with defaults."""
    chosen = {name: value for name, value in options.items() if value is not None and name != "projection"}
    projection = options.get("projection")
    if projection is not None:
        if settings.projection:
            raise UsageError(f"projection = {projection}: this encoder has a projection already: leave it out")
        if projection < 1:
            raise UsageError(f"projection = {projection}: expected the size of a vector, at least 1")
        settings = replace(settings, projection=nn.Sequential(nn.Linear(hidden_size, projection), nn.Identity()))
    longest = settings.max_length or MAX_LENGTH_QUERY
    defaults: dict[str, Any] = {
        "pooling": settings.pooling or "mean",
        "normalize": settings.normalize is not False,
        "max_length_query": settings.max_length_query or min(longest, MAX_LENGTH_QUERY),
        "max_length_label": settings.max_length_label or min(longest, MAX_LENGTH_LABEL),
    }
    resolved = replace(settings, **{**defaults, **chosen})
    if resolved.pooling not in ("mean", "cls"):
        raise UsageError(f"pooling = {resolved.pooling!r}: expected 'mean' or 'cls'")
    if resolved.dropout is not None and not 0.0 <= resolved.dropout < 1.0:
        raise UsageError(f"dropout = {resolved.dropout}: expected at least 0 and less than 1")
    return resolved


def _dimension(projection: nn.Sequential, *, hidden_size: int) -> int:
    """Return the size of the vectors: of the last linear layer, or of the model's states."""
    sizes = [layer.out_features for layer in projection if isinstance(layer, nn.Linear)]
    return sizes[-1] if sizes else hidden_size


def _check_fit(model: Any, tokenizer: Any, settings: TransformerSettings) -> None:
    """Raise unless tokenizer, lengths and projection fit the model."""
    num_rows = model.get_input_embeddings().num_embeddings
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    if largest_id >= num_rows:
        raise ModelError(f"the tokenizer has ids up to {largest_id}, the model {num_rows} tokens: they do not match")
    positions = getattr(model.config, "max_position_embeddings", None)
    limit = positions - (first_position(model.config) or 0) if positions else None
    for name in ("max_length_query", "max_length_label"):
        length = getattr(settings, name)
        if length < _SHORTEST_LIMIT or (limit is not None and length > limit):
            raise UsageError(f"{name} = {length}: expected {_SHORTEST_LIMIT} to {limit or 'any number of'} tokens")
    if settings.projection and settings.projection[0].in_features != model.config.hidden_size:
        raise ModelError(
            f"the projection takes {settings.projection[0].in_features} values, the model gives "
            f"{model.config.hidden_size}: these files do not belong together"
        )


def _set_dropout(model: nn.Module, dropout: float | None) -> None:
    """Set every dropout of a model, unless it is None; the saved config.json keeps the model's own values."""
    if dropout is None:
        return
    probability = float(dropout)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, probability)


def _fill_empty(tokens: Tokens, token_id: int) -> Tokens:
    """Give one token to texts without any, which occur if a tokenizer adds no special tokens."""
    empty = tokens.lengths == 0
    if not empty.any():
        return tokens
    ids = np.insert(tokens.ids, tokens.offsets[:-1][empty], token_id)
    offsets = tokens.offsets + np.concatenate([[0], np.cumsum(empty)])
    return Tokens(ids=ids, offsets=offsets)


def _word_tokenizer(texts: Sequence[str], *, num_words: int) -> Any:
    """Return a BERT-like tokenizer of the commonest words, with single characters for all others."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = sorted(set(chain.from_iterable(words)))
    commonest = sorted(words, key=lambda word: (-words[word], word))[:num_words]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries = dict.fromkeys([*special, *characters, *(f"##{character}" for character in characters), *commonest])
    vocabulary = {entry: position for position, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special[1]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    wrapper: Any = transformers.PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True)))
