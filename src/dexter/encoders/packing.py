"""Ragged batches of token ids as input of a transformer: packed without any padding, or padded with a mask.

*Packed* means that all texts of a batch lie end to end in one row. The linear layers, nearly all of the work, then
process real tokens only; attention, the one operation that must not mix texts, runs once per group of equally long
texts. The model's own code does everything else: `packed_attention` is registered with transformers.

Shapes: N texts, T tokens in all, L the longest text, A attention heads, D hidden size, S size of one head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dexter.encoders.folder import Pooling

PACKED_ATTENTION = "dexter_packed"

# Architectures whose positions are counted per text and given as an argument, so that packing changes nothing.
_COUNTED_FROM_ZERO = frozenset({"bert", "distilbert"})
_COUNTED_AFTER_PADDING = frozenset({"camembert", "roberta", "xlm-roberta"})


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Texts end to end, longest first, with what attention, pooling and restoring their order need."""

    ids: Tensor
    """[T]"""
    positions: Tensor
    """[T], position of each token in its text, from zero."""
    groups: list[tuple[int, int]]
    """(number of texts, their common length), in the order of the tokens."""
    order: Tensor
    """[N], position of each text of the caller among the sorted texts."""


def first_position(config: Any) -> int | None:
    """Return the position id of a text's first token in an architecture; None if it cannot be packed."""
    if getattr(config, "is_decoder", False) or getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    if config.model_type in _COUNTED_FROM_ZERO:
        return 0
    if config.model_type in _COUNTED_AFTER_PADDING:
        return int(config.pad_token_id) + 1
    return None


def register_packed_attention() -> None:
    """Register `packed_attention` with transformers as `PACKED_ATTENTION`; may be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def pack(ids_T: Tensor, offsets: Tensor) -> Packed:
    """Sort texts by falling length, so that equally long ones are neighbours."""
    lengths_N = offsets.diff()
    order_N = torch.argsort(lengths_N, descending=True, stable=True)
    sorted_lengths_N = lengths_N[order_N]
    sorted_starts_N = sorted_lengths_N.cumsum(0) - sorted_lengths_N
    positions_T = torch.arange(len(ids_T), device=ids_T.device) - sorted_starts_N.repeat_interleave(sorted_lengths_N)
    source_T = offsets[:-1][order_N].repeat_interleave(sorted_lengths_N) + positions_T
    lengths, counts = torch.unique_consecutive(sorted_lengths_N, return_counts=True)
    return Packed(
        ids=ids_T[source_T],
        positions=positions_T,
        groups=list(zip(counts.tolist(), lengths.tolist(), strict=True)),
        order=torch.argsort(order_N),
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_groups: list[tuple[int, int]],
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each text of a packed row; the signature is that of transformers' attention functions.

    Takes [1, A, T, S] and returns [1, T, A, S]. Tensors are split rather than sliced: the backward of a split is one
    concatenation, that of every slice fills a whole tensor with zeros.
    """
    sizes = [count * length for count, length in packed_groups]
    parts = [torch.split_with_sizes(tensor[0].transpose(0, 1), sizes) for tensor in (query, key, value)]
    attended = []
    for (count, length), *group in zip(packed_groups, *parts, strict=True):
        query_NALS, key_NALS, value_NALS = (part.unflatten(0, (count, length)).transpose(1, 2) for part in group)
        out_NALS = functional.scaled_dot_product_attention(
            query_NALS, key_NALS, value_NALS, dropout_p=dropout, scale=scaling
        )
        attended.append(out_NALS.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)[None], None


def pool_packed(states_TD: Tensor, packed: Packed, pooling: Pooling) -> Tensor:
    """Pool token states to one vector per text, [N, D], in the caller's order."""
    parts = torch.split_with_sizes(states_TD, [count * length for count, length in packed.groups])
    texts = [part.view(*group, -1) for part, group in zip(parts, packed.groups, strict=True)]
    pooled = [text.mean(dim=1) if pooling == "mean" else text[:, 0] for text in texts]
    return torch.cat(pooled)[packed.order]


def pad(ids_T: Tensor, offsets: Tensor, padding_id: int) -> tuple[Tensor, Tensor]:
    """Return the texts as rows of equal length, [N, L], and the mask of their real tokens."""
    lengths_N = offsets.diff()
    mask_NL = torch.arange(int(lengths_N.max()), device=ids_T.device) < lengths_N[:, None]
    ids_NL = torch.full(mask_NL.shape, padding_id, dtype=ids_T.dtype, device=ids_T.device)
    ids_NL[mask_NL] = ids_T
    return ids_NL, mask_NL


def pool_padded(states_NLD: Tensor, mask_NL: Tensor, pooling: Pooling) -> Tensor:
    """Pool the token states of padded rows to one vector per text, [N, D]."""
    if pooling == "cls":
        return states_NLD[:, 0]
    weight_NL1 = mask_NL[:, :, None].to(states_NLD.dtype)
    return (states_NLD * weight_NL1).sum(dim=1) / weight_NL1.sum(dim=1)
