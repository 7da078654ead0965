"""`data check`: every kind of finding is found, counted and located; counts, bands and plots say what is there."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data.check import check, zipf_text
from dexter.data.dataset import Dataset, Split
from dexter.data.findings import MESSAGES, row_lines
from dexter.data.formats import load_dataset, save_dataset
from dexter.evaluation.plots import save_zipf_plot


def make_split(texts, labels, num_labels, uids=None, filtered=None) -> Split:
    relevance = np.zeros((len(texts), num_labels), np.float32)
    for row, columns in enumerate(labels):
        relevance[row, list(columns)] = 1
    uids = uids or [f"q{row}" for row in range(len(texts))]
    return Split(texts=texts, uids=uids, relevance=csr_matrix(relevance), filtered=filtered)


def make_dataset(train, test=None, *, label_texts, label_ids=None, source=None) -> Dataset:
    label_ids = label_ids or [f"l{column}" for column in range(len(label_texts))]
    return Dataset(
        name="made", label_texts=label_texts, label_ids=label_ids, train=train, test=test, source=source or {}
    )


CLEAN = {
    "train": make_split(["one", "two"], [[0], [1]], 2),
    "test": make_split(["three"], [[0]], 2, uids=["t0"]),
    "label_texts": ["first", "second"],
}


def only_finding(dataset: Dataset):
    (finding,) = check(dataset).findings
    assert finding.message == MESSAGES[finding.kind]
    return finding


def test_clean_data_has_no_problems():
    report = check(make_dataset(**CLEAN))
    assert report.findings == ()
    assert "No problems found." in report.render()


def test_works_without_a_test_split():
    report = check(make_dataset(CLEAN["train"], label_texts=CLEAN["label_texts"]))
    assert report.findings == ()
    assert list(report.counts.splits) == ["train"]
    assert report.render()


@pytest.mark.parametrize(
    ("kind", "changes", "places"),
    [
        (
            "empty-text",
            {"train": make_split(["one", " \t", "two"], [[0], [1], [1]], 2), "test": make_split([""], [[0]], 2)},
            ["train row 1 ('q1')", "test row 0 ('q0')"],
        ),
        (
            "duplicate-text",
            {"train": make_split(["one", "two", "one", "one"], [[0], [1], [1], [0]], 2)},
            ["train row 2 ('q2') and train row 0 ('q0')", "train row 3 ('q3') and train row 0 ('q0')"],
        ),
        (
            "train-test-overlap",
            {"test": make_split(["new", "two"], [[0], [0]], 2)},
            ["test row 1 ('q1') and train row 1 ('q1')"],
        ),
        (
            "row-without-labels",
            {"train": make_split(["one", "two", "none"], [[0], [1], []], 2)},
            ["train row 2 ('q2')"],
        ),
        ("label-without-text", {"label_texts": ["first", " "]}, ["label 'l1'"]),
        ("label-text-is-uri", {"label_texts": ["first", "https://x/second"]}, ["label 'l1'"]),
        ("duplicate-label-text", {"label_texts": ["first", "first"]}, ["label 'l1' and label 'l0'"]),
        ("unused-label", {"train": make_split(["one"], [[0]], 2)}, ["label 'l1'"]),
        (
            "self-pair",
            {"train": make_split(["first", "two"], [[0], [1]], 2), "test": make_split(["x"], [[1]], 2, uids=["l1"])},
            ["train row 0 ('q0')", "test row 0 ('l1')"],
        ),
        (
            # Item l0 points to l1 in train, item l1 (known by its text) points back to l0 in test.
            "reciprocal-pair",
            {
                "train": make_split(["one", "two"], [[1], [1]], 2, uids=["l0", "q"]),
                "test": make_split(["second"], [[0]], 2),
            },
            ["test row 0 ('q0') and train row 0 ('l0')"],
        ),
    ],
)
def test_each_kind_of_finding(kind, changes, places):
    finding = only_finding(make_dataset(**CLEAN | changes))
    assert finding.kind == kind
    assert finding.total == len(places)
    assert [str(example) for example in finding.examples] == places
    assert 0 < finding.total <= finding.out_of


def test_every_kind_is_tested():
    kinds = {parameters[0] for parameters in test_each_kind_of_finding.pytestmark[0].args[1]}
    assert kinds == set(MESSAGES)


def test_row_numbers_are_no_identity():
    train = make_split(["one", "two"], [[0], [1]], 2, uids=["0", "1"])
    dataset = make_dataset(train, label_texts=["first", "second"], label_ids=["0", "1"])
    assert check(dataset).findings == ()


def test_reciprocal_pairs_equal_a_loop():
    generator = np.random.default_rng(3)
    num_items = 60
    relevance = generator.random((num_items, num_items)) < 0.1
    np.fill_diagonal(relevance, False)
    ids = [f"item{number}" for number in range(num_items)]
    order = generator.permutation(num_items)
    rows = {"train": order[:40], "test": order[40:]}
    splits = {
        name: Split(
            texts=[f"text {row}" for row in part],
            uids=[ids[row] for row in part],
            relevance=csr_matrix(relevance[part]),
        )
        for name, part in rows.items()
    }
    dataset = make_dataset(**splits, label_texts=[f"label {name}" for name in ids], label_ids=ids)
    expected = sum(relevance[a, b] and relevance[b, a] for a in rows["test"] for b in rows["train"])
    (finding,) = [finding for finding in check(dataset).findings if finding.kind == "reciprocal-pair"]
    assert finding.total == expected > 0


def write_folder(folder: Path, *, blank_line: bool = False, gz: bool = False) -> Dataset:
    """The JSONL layout with an empty text in row 1 of train and label 1 unused."""
    rows = [{"uid": "a", "text": "one", "labels": [0]}, {"uid": "b", "text": "", "labels": [0]}]
    labels = [{"uid": "l0", "text": "first"}, {"uid": "l1", "text": "second"}]
    names = {"trn.jsonl": rows, "lbl.jsonl": labels}
    for name, records in names.items():
        text = ("\n\n" if blank_line else "\n").join(json.dumps(record) for record in records) + "\n"
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / name).write_text(text)
    suffix = ".gz" if gz else ""
    return make_dataset(
        make_split(["one", ""], [[0], [0]], 2, uids=["a", "b"]),
        label_texts=["first", "second"],
        source={"format": "jsonl", f"trn.jsonl{suffix}": "sha", f"lbl.jsonl{suffix}": "sha"},
    )


@pytest.mark.parametrize(("blank_line", "line"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("gz", [False, True])
def test_problems_name_file_and_line(tmp_path, blank_line, line, gz):
    dataset = write_folder(tmp_path, blank_line=blank_line, gz=gz)
    report = check(dataset, folder=tmp_path)
    suffix = ".gz" if gz else ""
    places = {finding.kind: str(finding.examples[0]) for finding in report.findings}
    assert places == {
        "empty-text": f"{tmp_path}/trn.jsonl{suffix}:{line}",
        "unused-label": f"{tmp_path}/lbl.jsonl{suffix}:{line}",
    }
    assert f"trn.jsonl{suffix}:{line}" in report.render()


def test_lines_are_not_guessed(tmp_path):
    dataset = write_folder(tmp_path)
    with open(tmp_path / "trn.jsonl", "a") as handle:
        handle.write("a line that was skipped on reading\n")
    (empty, _) = check(dataset, folder=tmp_path).findings
    assert str(empty.examples[0]) == "train row 1 ('b')"
    (empty, _) = check(dataset).findings
    assert str(empty.examples[0]) == "train row 1 ('b')"


def test_row_lines(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("header\nfirst\n\nthird\n")
    assert row_lines(path, num_rows=2, num_header=1).tolist() == [2, 4]
    assert row_lines(path, num_rows=3, num_header=0).tolist() == [1, 2, 4]
    assert row_lines(path, num_rows=4, num_header=0).tolist() == [1, 2, 3, 4]
    assert row_lines(path, num_rows=3, num_header=1).tolist() == [2, 3, 4]
    assert row_lines(path, num_rows=5, num_header=1) is None
    assert row_lines(tmp_path / "absent", num_rows=5, num_header=1) is None


@pytest.mark.parametrize(
    ("format_name", "file_name", "line"),
    [
        ("jsonl", "trn.jsonl", 3),
        ("xmc-json", "trn.json", 3),
        ("dexml", "raw/trn_X.txt", 3),
        ("xmc-text", "raw/trn_X.txt", 3),
        ("fasttext", "train.txt", 3),
        ("annif", "train.tsv", 3),
        ("csv", "train.csv", 4),
        ("tsv", "train.tsv", 4),
    ],
)
def test_lines_in_the_other_formats(tmp_path, format_name, file_name, line):
    split = make_split(["one", "two", "one"], [[0], [1], [1]], 2)
    dataset = make_dataset(split, CLEAN["test"], label_texts=["first", "second"])
    save_dataset(dataset, tmp_path / "data", format=format_name, gzip=False)
    report = check(load_dataset(tmp_path / "data"), folder=tmp_path / "data")
    (finding,) = [finding for finding in report.findings if finding.kind == "duplicate-text"]
    source = finding.examples[0].row
    assert source.path is not None
    assert "one" in Path(source.path).read_text().splitlines()[line - 1]
    assert (Path(source.path).name, source.line) == (Path(file_name).name, line)


def test_single_file_data_sets_have_lines_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n{}\n")
    train = make_split(["one", ""], [[0], [1]], 2)
    dataset = make_dataset(train, label_texts=["first", "second"], source={"format": "jsonl", "rows.jsonl": "sha"})
    (finding,) = check(dataset, folder=path).findings
    assert str(finding.examples[0]) == f"{path}:2"


def test_counts_and_bands():
    counts = [150, 101, 100, 10, 9, 1, 0]
    num_rows = 160
    relevance = np.zeros((num_rows, len(counts)), np.float32)
    for column, size in enumerate(counts):
        relevance[:size, column] = 1
    texts = [f"text number {row}" for row in range(num_rows)]
    train = Split(texts=texts, uids=texts, relevance=csr_matrix(relevance), filtered=csr_matrix(relevance[:, ::-1] > 0))
    test = make_split(["unseen text"], [[0, 6]], len(counts))
    dataset = make_dataset(train, test, label_texts=[f"label {column}" for column in range(len(counts))])
    bands = check(dataset).bands
    assert {name: band.labels for name, band in bands.items()} == {"frequent": 2, "torso": 2, "tail": 2, "unseen": 1}
    assert {name: band.pairs["train"] for name, band in bands.items()} == {
        "frequent": 251, "torso": 110, "tail": 10, "unseen": 0,
    }  # fmt: skip
    assert bands["unseen"].pairs["test"] == 1
    report = check(dataset)
    sizes = report.counts.splits["train"]
    assert (sizes.queries, sizes.pairs, sizes.filter_pairs, sizes.labels_per_query_max) == (160, 371, 371, 6)
    assert sizes.words_per_query_mean == 3
    assert (report.counts.labels, report.counts.queries_per_label_max) == (7, 150)
    assert report.counts.queries_per_label_median == 10


def test_json_is_plain(tmp_path):
    report = check(write_folder(tmp_path), folder=tmp_path)
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert value["counts"]["splits"]["train"]["queries"] == 2
    assert value["bands"]["tail"]["labels"] == 1
    assert value["findings"][0]["examples"][0]["row"]["line"] == 2


def test_render_keeps_to_the_width():
    train = make_split(["one", "two", "one", ""], [[0], [1], [], [0]], 3)
    report = check(make_dataset(train, label_texts=["a", "a", " "]))
    lines = report.render().splitlines()
    assert max(map(len, lines)) <= 100
    assert any("█" in line for line in lines)
    assert any("by rank" in line for line in lines)
    assert any(line.startswith("frequent  over 100") for line in lines)


@pytest.mark.parametrize("counts", [[5], [1, 1, 1], [1000, 100, 10, 1, 0], list(range(1, 3000))])
def test_zipf_text(counts):
    text = zipf_text(np.array(counts), width=60, height=6)
    rows = [line.partition("┤")[2] for line in text.splitlines() if "┤" in line]
    assert len(rows) == 6
    assert len({len(row) for row in rows}) == 1
    drawn = np.array([[character != "\u2800" for character in row] for row in rows])
    assert drawn.any(axis=0).all(), "the curve has no gap"
    assert drawn[0, 0] or max(counts) == 1, "the most frequent label is on top"


def test_zipf_text_without_labels():
    assert "no label" in zipf_text(np.zeros(3, int), width=60)


def test_zipf_png(tmp_path):
    pytest.importorskip("matplotlib")
    save_zipf_plot(np.array([3, 0, 200, 1]), tmp_path / "zipf.png", title="made")
    assert (tmp_path / "zipf.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["zipf.png"]


def test_two_million_pairs_are_quick():
    generator = np.random.default_rng(0)
    num_rows, num_labels = 25_000, 100_000
    columns = generator.integers(0, num_labels, 2_000_000)
    rows = np.repeat(np.arange(num_rows), 80)
    relevance = csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(num_rows, num_labels))
    texts = [f"text {row}" for row in range(num_rows)]
    split = Split(texts=texts, uids=[f"l{row}" for row in range(num_rows)], relevance=relevance)
    test = split.select(range(5_000))
    dataset = make_dataset(split, test, label_texts=[f"label {column}" for column in range(num_labels)])
    start = time.process_time()
    report = check(dataset)
    assert time.process_time() - start < 10
    assert {finding.kind for finding in report.findings} >= {"train-test-overlap", "self-pair"}


@pytest.mark.slow
def test_moby_thesaurus_is_as_reciprocal_as_its_readme_says():
    shared = Path(os.environ.get("DEXTER_SHARED", Path(__file__).parents[3] / "shared"))
    folder = shared / "data" / "moby-thesaurus"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here: set DEXTER_SHARED to the folder that holds data/moby-thesaurus")
    report = check(load_dataset(folder), folder=folder)
    (finding,) = report.findings
    assert finding.kind == "reciprocal-pair"
    assert round(100 * finding.total / finding.out_of, 1) == 46.8
    assert finding.examples[0].row.line is not None
