"""omikuji as a baseline: Parabel's trees of linear classifiers on TF-IDF vectors (extra `baselines`).

It is trained in a process of its own: its progress bars, one line per example, cannot be turned off.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data import Dataset
from dexter.errors import ModelError, require
from dexter.evaluation.report import test_split
from dexter.types import TopK

SCRIPT = """
import json, sys, time
import omikuji
train_path, test_path, out_path, places, threads = sys.argv[1:]
clocks = [(time.process_time(), time.perf_counter())]
model = omikuji.Model.train_on_data(train_path, omikuji.Model.default_hyper_param(), int(threads))
clocks.append((time.process_time(), time.perf_counter()))
model.init_prediction_thread_pool(int(threads))
predicted = []
for line in open(test_path):
    pairs = [(int(feature), float(value)) for feature, value in (pair.split(":") for pair in line.split())]
    predicted.append(model.predict(pairs, top_k=int(places)) if pairs else [])
clocks.append((time.process_time(), time.perf_counter()))
json.dump({"clocks": clocks, "predicted": predicted}, open(out_path, "w"))
"""
"""What the process runs: default settings, three trees."""


def omikuji_trees(dataset: Dataset, k: int) -> TopK:
    """Train omikuji on the training queries and return the k best labels of every test query; -1 where it has fewer."""
    require("omikuji", extra="baselines", purpose="the baseline omikuji")
    texts = test_split(dataset).texts
    with tempfile.TemporaryDirectory() as folder:
        train_path, test_path, out_path = (Path(folder) / name for name in ("train.txt", "test.txt", "out.json"))
        train_vectors, test_vectors = tfidf(dataset.train.texts, texts)
        write_svmlight(train_path, train_vectors, dataset.train.relevance)
        test_path.write_text("".join(f"{features(test_vectors, row)}\n" for row in range(len(texts))))
        arguments = [str(path) for path in (train_path, test_path, out_path)]
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments, str(k), "1"], capture_output=True, check=False
        )
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ModelError(f"the baseline omikuji failed ({''.join(said)}): leave it out, or reinstall omikuji")
        predicted = json.loads(out_path.read_text())["predicted"]
    ids, scores = np.full((len(texts), k), -1, dtype=np.int64), np.full((len(texts), k), -np.inf, dtype=np.float32)
    for row, pairs in enumerate(predicted):
        ids[row, : len(pairs)] = [label for label, _ in pairs]
        scores[row, : len(pairs)] = [score for _, score in pairs]
    return TopK(ids, scores)


def tfidf(train_texts: Sequence[str], test_texts: Sequence[str]) -> tuple[csr_matrix, csr_matrix]:
    """Return unigram TF-IDF vectors of unit length."""
    text_features = require("sklearn.feature_extraction.text", extra="data", purpose="TF-IDF vectors")
    vectorizer: Any = text_features.TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    return vectorizer.fit_transform(train_texts), vectorizer.transform(test_texts)


def write_svmlight(path: Path, vectors: csr_matrix, relevance: csr_matrix) -> None:
    """Write the file omikuji trains on: a header, then the labels and features of one query per line.

    Queries without a feature are left out: omikuji refuses such lines, and there is nothing to learn from them.
    """
    rows = np.flatnonzero(np.diff(vectors.indptr))
    with path.open("w") as file:
        file.write(f"{len(rows)} {vectors.shape[1]} {relevance.shape[1]}\n")
        for row in rows.tolist():
            labels = relevance.indices[relevance.indptr[row] : relevance.indptr[row + 1]]
            file.write(f"{','.join(map(str, labels))} {features(vectors, row)}\n")


def features(vectors: csr_matrix, row: int) -> str:
    """Return a row's features as text, in ascending order."""
    part = slice(vectors.indptr[row], vectors.indptr[row + 1])
    order = np.argsort(vectors.indices[part])
    pairs = zip(vectors.indices[part][order], vectors.data[part][order], strict=True)
    return " ".join(f"{column}:{value:.6g}" for column, value in pairs)
