r"""Speed of prediction beside others, stored as records; the plots and tables of docs/speed.md are made from these.

    export OMP_NUM_THREADS=1 OPENBLAS_CORETYPE=SkylakeX    # faiss's OpenBLAS may not know a new CPU: name it if so
    python bench/speed.py runs runs/stackexchange4=stackexchange4 runs/debian-related=debian-related \
        --omikuji /tmp/omikuji/bin/python --pecos /tmp/pecos/bin/python     # -> bench/records/speed-runs.json
    python bench/speed.py cold runs/debian-related                          # a cold start alone, to stdout
    python bench/speed.py index runs/debian-related                         # -> bench/records/speed-index.json
    python bench/speed.py show                                              # plots to docs/plots, tables to stdout

Processor milliseconds of one thread, unless said: other programs on the machine disturb them least. *runs*: a test text
from its characters to its best five labels, and 512 texts at once, all systems in one call. omikuji and PECOS are
trained here on TF-IDF features, whose making counts; for sentence-transformers (MiniLM) and model2vec (a table of the
size of the run's own) faiss Flat searches the label vectors, and what they would predict does not matter. *Cold* is a
whole `dexter predict`, the least of three. *index*: labels alone, by number and by backend, k = 20.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dexter.data import Dataset
from dexter.evaluation.omikuji import features, tfidf, write_svmlight
from dexter.index import build
from dexter.predict.predictor import Predictor
from shared_data import load

RECORDS = Path(__file__).parent / "records"
PLOTS = Path(__file__).parents[1] / "docs" / "plots"
SINGLE, BATCH, K = 200, 512, 5
SIZES, BACKENDS, MAX_GRAPH = (2_000, 10_000, 30_000, 100_000), ("exact", "pq", "hnsw"), 30_000
"""A graph of more labels takes minutes to build."""
OMIKUJI = """
import json, os, sys, time, omikuji
folder, single = sys.argv[1], int(sys.argv[2])
if not os.path.exists(f"{folder}/omikuji/settings.json"):
    model = omikuji.Model.train_on_data(f"{folder}/train.txt", omikuji.Model.default_hyper_param(), 1)
    model.save(f"{folder}/omikuji")
model = omikuji.Model.load(f"{folder}/omikuji")
model.init_prediction_thread_pool(1)
lines = [[pair.split(":") for pair in line.split()] for line in open(f"{folder}/test.txt")]
rows = [[(int(feature), float(value)) for feature, value in line] for line in lines]
times = []
for row in rows:
    started = time.process_time()
    if row:
        model.predict(row, top_k=5)
    times.append(time.process_time() - started)
json.dump({"single": times[:single], "batch": sum(times)}, open(f"{folder}/out.json", "w"))
"""
PECOS = """
import json, os, sys, time
import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import load_npz
folder, single = sys.argv[1], int(sys.argv[2])
X, Y, X_test = (load_npz(f"{folder}/{name}.npz").astype(np.float32).tocsr() for name in ("train", "labels", "test"))
if not os.path.exists(f"{folder}/pecos/param.json"):
    tree = Indexer.gen(LabelEmbeddingFactory.create(Y, X), seed=0, threads=1)
    XLinearModel.train(X, Y, C=tree, threads=1).save(f"{folder}/pecos")
model = XLinearModel.load(f"{folder}/pecos", is_predict_only=True)
times = []
for row in range(single):
    started = time.process_time()
    model.predict(X_test[row], only_topk=5, threads=1)
    times.append(time.process_time() - started)
started = time.process_time()
model.predict(X_test, only_topk=5, threads=1)
json.dump({"single": times, "batch": time.process_time() - started}, open(f"{folder}/out.json", "w"))
"""


def clocked(call: Callable[..., object], *given: object) -> float:
    """Return the processor seconds of a call."""
    started = time.process_time()
    call(*given)
    return time.process_time() - started


def record(system: str, single: Sequence[float], batches: Sequence[float], **more: Any) -> dict[str, Any]:
    """Make a record from the seconds of single texts and of batches, of which the fastest counts."""
    p50, p99 = (round(1e3 * float(np.percentile(single, percent)), 3) for percent in (50, 99))
    made = {"system": system, "one_text_p50_ms": p50, "one_text_p99_ms": p99, **more}
    made["batch_texts_per_s"] = round(BATCH / min(batches))
    print(json.dumps(made), flush=True)
    return made


def measured(system: str, predict: Callable[[list[str]], object], texts: list[str], **more: Any) -> dict[str, Any]:
    """Measure a system in this process, warm."""
    for text in texts[:40]:
        predict([text])
    single = [clocked(predict, [text]) for text in texts[:SINGLE]]
    predict(texts[:64])
    return record(system, single, [clocked(predict, texts) for _ in range(2)], **more)


def measure_run(run: Path, dataset: Dataset, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a run and its peers on test texts, the slowest last."""
    assert dataset.test is not None
    texts = (list(dataset.test.texts) * BATCH)[:BATCH]
    predictor, plain = Predictor.load(run), Predictor.load(run, neighbours=False)
    files = sum(path.stat().st_size for path in (run / "model").rglob("*") if path.is_file()) // 2**20
    cold = cold_start(run, texts[0])
    yield measured("dexter", lambda each: predictor.predict(each, K), texts, **cold, files_mb=files)
    yield measured("dexter, no neighbours", lambda each: plain.predict(each, K), texts)
    if arguments.omikuji or arguments.pecos:
        interpreters = {"omikuji": arguments.omikuji, "PECOS XR-Linear": arguments.pecos}
        folder = arguments.work / dataset.name
        folder.mkdir(parents=True, exist_ok=True)
        yield from measure_linear(dataset, texts, interpreters, folder)
    yield from measure_encoders(predictor, texts)


def measure_encoders(predictor: Predictor, texts: list[str]) -> Iterator[dict[str, Any]]:
    """Measure encoders with faiss Flat over as many label vectors."""
    import faiss
    from model2vec import StaticModel
    from sentence_transformers import SentenceTransformer

    from dexter.encoders.pretrained import locate_minilm
    from dexter.encoders.static_arrays import StaticArrays

    faiss.omp_set_num_threads(1)
    encoder = predictor.model.encoder
    assert isinstance(encoder, StaticArrays)
    tokenizer = encoder.tokens.tokenizer
    static = StaticModel(encoder.table_RD[: tokenizer.get_vocab_size()].copy(), tokenizer, normalize=True)
    minilm = SentenceTransformer(str(locate_minilm()), device="cpu")
    flat = faiss.IndexFlatIP(predictor.dimension)
    flat.add(np.ascontiguousarray(predictor.label_embeddings()))
    encoders: dict[str, Callable[[list[str]], Any]] = {
        "model2vec + faiss Flat": static.encode,
        "sentence-transformers + faiss Flat": lambda each: minilm.encode(each, show_progress_bar=False),
    }
    for name, encode in encoders.items():
        yield measured(name, lambda each, encode=encode: flat.search(np.asarray(encode(each), np.float32), K), texts)


def measure_linear(
    dataset: Dataset, texts: list[str], interpreters: dict[str, str | None], folder: Path
) -> list[dict[str, Any]]:
    """Train linear models in other interpreters, unless the folder has them, and measure them with their features."""
    from scipy.sparse import save_npz
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32).fit(dataset.train.texts)
    single = [clocked(vectorizer.transform, [text]) for text in texts[:SINGLE]]
    batch = clocked(vectorizer.transform, texts)
    train_vectors, test_vectors = tfidf(dataset.train.texts, texts)
    write_svmlight(folder / "train.txt", train_vectors, dataset.train.relevance)
    (folder / "test.txt").write_text("".join(f"{features(test_vectors, row)}\n" for row in range(len(texts))))
    for name, matrix in (("train", train_vectors), ("labels", dataset.train.relevance), ("test", test_vectors)):
        save_npz(folder / f"{name}.npz", matrix, compressed=False)
    records = []
    for name, code in (("omikuji", OMIKUJI), ("PECOS XR-Linear", PECOS)):
        if interpreter := interpreters[name]:
            command = [interpreter, "-c", code, str(folder), str(SINGLE)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            found = json.loads((folder / "out.json").read_text())
            records.append(record(name, np.add(single, found["single"]).tolist(), [batch + found["batch"]]))
    return records


def cold_start(run: Path, text: str) -> dict[str, float]:
    """Return the least seconds of three calls of `dexter predict`, after one that compiles its modules."""
    cpu, wall = [], []
    with tempfile.TemporaryDirectory() as compiled:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-m", "dexter", "predict", str(run), text]
        for _ in range(4):
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment)
            wall.append(time.perf_counter() - started)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"cold_wall_s": round(min(wall[1:]), 3), "cold_cpu_s": round(min(cpu[1:]), 3)}


def measure_index(run: Path) -> list[dict[str, Any]]:
    """Measure search alone by the number of labels and by backend; exact search and faiss Flat in turns."""
    import faiss

    faiss.omp_set_num_threads(1)
    predictor, generator = Predictor.load(run), np.random.default_rng(0)
    real_LD = predictor.label_embeddings()
    queries_ND = predictor.model.encode_queries(predictor.sample_training_texts(2 * BATCH))[:BATCH]
    records = []
    for size in SIZES:
        chosen = real_LD[generator.integers(0, len(real_LD), size)] if size > len(real_LD) else real_LD[:size]
        noise = generator.standard_normal(chosen.shape, dtype=np.float32) * np.float32(0.5 / np.sqrt(chosen.shape[1]))
        vectors_LD = np.ascontiguousarray(chosen + noise * np.linalg.norm(chosen, axis=1, keepdims=True))
        flat = faiss.IndexFlatIP(vectors_LD.shape[1])
        flat.add(vectors_LD)
        backends = [name for name in BACKENDS if name != "hnsw" or size <= MAX_GRAPH]
        searches = {f"dexter {name}": build(name, vectors_LD, queries_ND=queries_ND[::2]).search for name in backends}
        searches["faiss Flat"] = flat.search
        times: dict[str, list[list[float]]] = {name: [[], []] for name in searches}
        for turn in range(5):
            for name, search in searches.items():
                few = [clocked(search, queries_ND[row : row + 1], 20) for row in range(20)]
                if turn:
                    times[name][0] += few
                    times[name][1].append(clocked(search, queries_ND, 20))
        records += [record(name, *each, labels=size) for name, each in times.items()]
    return records


def store(name: str, records: list[dict[str, Any]]) -> None:
    RECORDS.mkdir(exist_ok=True)
    machine = {"cpu": cpu_name(), "python": platform.python_version(), "numpy": np.__version__}
    written = json.dumps({"machine": machine, "records": records}, indent=1)
    (RECORDS / f"speed-{name}.json").write_text(written + "\n", encoding="utf-8")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}"


def show() -> None:
    """Draw the plots from the records, and print them as tables."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dexter"
    from matplotlib import pyplot

    PLOTS.mkdir(exist_ok=True)
    runs, index = (
        json.loads((RECORDS / f"speed-{name}.json").read_text(encoding="utf-8"))["records"]
        for name in ("runs", "index")
    )
    columns = {"one_text_p50_ms": "one text, processor ms", "batch_texts_per_s": "texts per processor second"}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    sizes = sorted({each["labels"] for each in runs})
    systems = list(dict.fromkeys(each["system"] for each in runs))
    for axes, (key, title) in zip(panels, columns.items(), strict=True):
        for place, size in enumerate(sizes):
            values = {each["system"]: each[key] for each in runs if each["labels"] == size}
            bars = [(systems.index(name) + 0.4 * place, value) for name, value in values.items()]
            axes.barh(*zip(*bars, strict=True), height=0.38, label=f"{size:,} labels")
        axes.set(
            xscale="log", title=title, yticks=range(len(systems)), yticklabels=systems if axes is panels[0] else []
        )
        axes.invert_yaxis()
    panels[0].legend()
    figure.savefig(PLOTS / "speed-systems.svg", metadata={"Date": None})
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axes, (key, title) in zip(panels, columns.items(), strict=True):
        for name in dict.fromkeys(each["system"] for each in index):
            points = [(each["labels"], each[key]) for each in index if each["system"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xscale="log", yscale="log", title=title.replace("text", "query"), xlabel="labels")
    panels[0].legend()
    figure.savefig(PLOTS / "speed-index.svg", metadata={"Date": None})
    for records in (runs, index):
        names = [name for name in records[0] if name not in ("cold_wall_s", "cold_cpu_s", "files_mb")]
        print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
        for each in records:
            print(f"| {' | '.join(str(each[name]) for name in names)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "cold", "index", "show"])
    parser.add_argument("runs", nargs="*", help="run folders: RUN=DATASET for `runs`, RUN for others")
    parser.add_argument("--omikuji", metavar="PYTHON", help="an interpreter that has omikuji")
    parser.add_argument("--work", type=Path, default=Path("/tmp/dexter-speed"), help="keeps the peers' trained models")
    parser.add_argument("--pecos", metavar="PYTHON", help="an interpreter that has libpecos")
    arguments = parser.parse_args()
    if arguments.what == "show":
        show()
        return
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: it is read when NumPy is imported"
    if arguments.what == "cold":
        for run in arguments.runs:
            print(run, json.dumps(cold_start(Path(run), "how do I install a module for the kernel")), flush=True)
        return
    if arguments.what == "index":
        store("index", measure_index(Path(arguments.runs[0])))
        return
    pairs = [argument.rpartition("=") for argument in arguments.runs]
    path = RECORDS / "speed-runs.json"
    records = json.loads(path.read_text(encoding="utf-8"))["records"] if path.exists() else []
    for run, _, name in pairs:
        dataset = load(name)
        records = [each for each in records if each["data"] != dataset.name]
        for each in measure_run(Path(run), dataset, arguments):
            records.append({"data": dataset.name, "labels": dataset.num_labels, **each})
            store("runs", records)


if __name__ == "__main__":
    main()
