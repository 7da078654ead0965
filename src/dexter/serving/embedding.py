"""`/v1/embeddings` in OpenAI's form: the vectors whose inner products are the encoder's scores."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from dexter.serving.protocol import Embedding, EmbeddingsRequest, EmbeddingsResponse, Usage, to_json

if TYPE_CHECKING:
    from dexter.model.model import Model
    from dexter.serving.service import Service

Side = Literal["query", "label"]


class Embedded(NamedTuple):
    """A text's vector, and how many tokens were read."""

    vector_D: NDArray[np.float32]
    num_tokens: int


def embed_texts(model: Model, texts: Sequence[str], *, side: Side) -> list[Embedded]:
    """Embed texts as queries or as labels, without the label prior."""
    import torch

    tokens = model.encoder.tokenize(texts, side=side)
    with torch.inference_mode():
        vectors_ND = model.head.queries(model.encode_tokens(tokens, side=side))
    if model.head.prior is not None:
        vectors_ND = vectors_ND[:, :-1]
    return [Embedded(*each) for each in zip(vectors_ND.cpu().numpy(), tokens.lengths.tolist(), strict=True)]


def embedding_routes(service: Service) -> APIRouter:
    """POST /v1/embeddings."""
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", response_model=EmbeddingsResponse)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Embed texts; the fields are those of OpenAI's API."""
        run = service.run(body.model)
        inputs = service.read_texts([body.input] if isinstance(body.input, str) else body.input)
        embedded = await service.ask(run.embed(inputs.texts, side=body.side, gone=request.is_disconnected))
        num_tokens = sum(each.num_tokens for each in embedded)
        return to_json(
            EmbeddingsResponse(
                data=[
                    Embedding(index=index, embedding=_encode(each.vector_D, body.encoding_format))
                    for index, each in enumerate(embedded)
                ],
                model=run.name,
                usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
                inputs_left_out=inputs.num_left_out,
            )
        )

    return router


def _encode(vector_D: NDArray[np.float32], form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode("ascii")
    return [float(value) for value in vector_D]
