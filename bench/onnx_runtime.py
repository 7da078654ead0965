"""Query encoding with torch and with ONNX Runtime in float32 and int8: texts per second, and the change of P@k.

The same MiniLM weights on the same queries, turn by turn in one process, in many texts at a time and one by one. One
thread; processor seconds, tokenising not counted (all three tokenise alike).

    python bench/onnx_runtime.py                                  # stackexchange4; needs the extras minilm and onnx
    python bench/onnx_runtime.py --data debian-related --texts 1000

P@k is that of untrained MiniLM, ranking the labels by their texts; `dexter export RUN --int8 --data DATA` prints the
change for a trained run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import shared_data
from dexter.data.tokens import Tokens
from dexter.encoders.onnx import OnnxEncoder, export_graph, quantize_graph
from dexter.encoders.transformer import TransformerEncoder
from dexter.index.exact import search
from dexter.metrics import score

Embed = Callable[[Tokens], Tensor]
NUM_ALONE = 64


def make_ways(encoder: TransformerEncoder) -> dict[str, Embed]:
    """Return the three ways to embed by name; prints the time and size of the graphs."""
    started = time.process_time()
    graph = export_graph(encoder)
    exported = time.process_time()
    quantized = quantize_graph(graph)
    print(f"export {exported - started:.1f} CPU s, quantising {time.process_time() - exported:.1f} CPU s; ", end="")
    print(f"float32 {len(graph) / 2**20:.1f} MB, int8 {len(quantized) / 2**20:.1f} MB")
    path = Path("encoder.onnx")
    return {
        "torch float32": encoder.embed,
        "ONNX float32": OnnxEncoder(graph, encoder, precision="float32", path=path).embed,
        "ONNX int8": OnnxEncoder(quantized, encoder, precision="int8", path=path).embed,
    }


def seconds(way: Embed, parts: list[Tokens]) -> float:
    """Return the processor seconds of all parts, one after the other."""
    started = time.process_time()
    for part in parts:
        way(part)
    return time.process_time() - started


def bench_speed(ways: dict[str, Embed], tokens: Tokens, *, repeats: int) -> None:
    """Print texts per second, medians of the repeats, with the ratio to the first way."""
    alone = [tokens.part(slice(row, row + 1)) for row in range(min(NUM_ALONE, len(tokens)))]
    cases = {f"{len(tokens):,} at a time": [tokens], "one by one": alone}
    print(f"\n{'texts / CPU s':24}", *(f"{name:>18}" for name in cases))
    spent: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for way, case in ((way, case) for case in cases for way in ways):
            spent.setdefault((way, case), []).append(seconds(ways[way], cases[case]))
    rates = {key: sum(map(len, cases[key[1]])) / statistics.median(times) for key, times in spent.items()}
    for way in ways:
        cells = [f"{rates[way, case]:.1f} ({rates[way, case] / rates[next(iter(ways)), case]:.2f}x)" for case in cases]
        print(f"{way:24}", *(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stackexchange4", help="a data set of the shared ones")
    parser.add_argument("--texts", type=int, default=512, help="test queries")
    parser.add_argument("--length", type=int, default=64, help="tokens of a query at most")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    data = shared_data.load(arguments.data)
    assert data.test is not None
    split = data.test.select(np.arange(min(arguments.texts, len(data.test))))
    encoder = TransformerEncoder.from_pretrained("minilm", max_length_query=arguments.length)
    tokens = encoder.tokenize(split.texts, side="query")
    print(f"{data.name}: {len(split):,} test queries, {tokens.lengths.mean():.1f} tokens on average")
    ways = make_ways(encoder)
    labels_LD = encoder.embed(encoder.tokenize(data.label_texts, side="label"))
    vectors = {name: way(tokens) for name, way in ways.items()}
    for name, vectors_ND in vectors.items():
        metrics = score(search(vectors_ND, labels_LD, 5).ids, split.relevance, data.train.relevance, ks=(1, 3, 5))
        largest = np.abs(vectors_ND - vectors["torch float32"]).max()
        shown = " / ".join(f"{metrics[f'P@{k}']:.2f}" for k in (1, 3, 5))
        print(f"{name:24} P@1/3/5 {shown}; largest difference from torch {largest:.1e}")
    bench_speed(ways, tokens, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
