"""Data sets as published: recognised by name, counts and fields; constants and fields kept beside the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.data.test_formats import sample

from dexter.data import Dataset, Split, load_dataset, save_dataset
from dexter.data.benchmarks import BENCHMARKS, describe_benchmark, find_benchmark
from dexter.data.check import check
from dexter.data.dataset import freeze
from dexter.data.formats import FORMATS
from dexter.errors import DataError, UsageError

WRITABLE = [name for name, one in FORMATS.items() if one.write is not None]


def of_counts(num_train: int, num_test: int, num_labels: int, *, name: str, **more: object) -> Dataset:
    """A data set of these counts whose texts are numbers and which has no pairs."""
    from scipy.sparse import csr_matrix

    def split(size: int) -> Split:
        numbers = [str(number) for number in range(size)]
        return Split(numbers, numbers, freeze(csr_matrix((size, num_labels), dtype="float32")))

    numbers = [str(number) for number in range(num_labels)]
    return Dataset(name, numbers, numbers, split(num_train), split(num_test) if num_test else None, **more)  # type: ignore[arg-type]


def write_records(folder: Path, *, content: str | None = "body") -> Path:
    """The files that a data set of titles and one of full texts share."""
    more = {} if content is None else {"content": content}
    folder.mkdir(parents=True)
    (folder / "lbl.json").write_text(json.dumps({"uid": "a", "title": "label", **more}) + "\n")
    for name in ("trn", "tst"):
        row = {"uid": name, "title": f"{name} title", **more, "target_ind": [0], "target_rel": [1.0]}
        (folder / f"{name}.json").write_text(json.dumps(row) + "\n")
    return folder


# The table


def test_the_table_is_the_published_one() -> None:
    """Literal values: XML repository 2025-02; the second EURLex-4K is that of X-Transformer and DEXML."""
    rows = [
        ("EURLex-4K", 15539, 3809, 3993, None, 0.55, 1.5),
        ("EURLex-4K", 15449, 3865, 3956, None, 0.55, 1.5),
        ("LF-AmazonTitles-131K", 294805, 134835, 131073, ("title",), 0.6, 2.6),
        ("LF-Amazon-131K", 294805, 134835, 131073, ("title", "content"), 0.6, 2.6),
        ("LF-WikiSeeAlsoTitles-320K", 693082, 177515, 312330, ("title",), 0.55, 1.5),
        ("LF-WikiSeeAlso-320K", 693082, 177515, 312330, ("title", "content"), 0.55, 1.5),
        ("LF-WikiTitles-500K", 1813391, 783743, 501070, ("title",), 0.5, 0.4),
        ("LF-Wikipedia-500K", 1813391, 783743, 501070, ("title", "content"), 0.5, 0.4),
        ("LF-AmazonTitles-1.3M", 2248619, 970237, 1305265, ("title",), 0.6, 2.6),
    ]
    assert [(one.name, *one.counts, one.text_fields, *one.propensity) for one in BENCHMARKS] == rows
    assert all(one.source for one in BENCHMARKS)


def test_constants_are_found_by_name_or_else_by_counts() -> None:
    """That the first of several is taken is safe: those that share a name or counts have the same constants."""
    for one in BENCHMARKS:
        assert {other.propensity for other in BENCHMARKS if one.counts == other.counts} == {one.propensity}
        for name, counts in ((one.name, (1, 1, 1)), ("mine", one.counts)):
            found = find_benchmark(name, counts)
            assert found is not None
            assert found.propensity == one.propensity
    assert find_benchmark("mine", (1, 1, 1)) is None


DEXML_EURLEX = "this is EURLex-4K as published (15,449 / 3,865 / 3,956; the variant of DEXML"
OTHER_EURLEX = "this is EURLex-4K as published (15,539 / 3,809 / 3,993; the repository's variant"


@pytest.mark.parametrize(
    ("counts", "name", "says"),
    [
        ((15_449, 3_865, 3_956), "eurlex", DEXML_EURLEX),
        ((15_449, 3_865, 3_956), "EURLex-4K", DEXML_EURLEX),
        ((15_539, 3_809, 3_993), "EURLex-4K", OTHER_EURLEX),
        ((15_449, 0, 3_956), "eurlex", "this is not EURLex-4K as published (15,449 / 3,865 / 3,956"),
        ((15_449, 0, 3_956), "eurlex", "0 test queries instead of 3,865"),
        ((15_448, 3_865, 3_955), "e", "15,448 training queries instead of 15,449; 3,955 labels instead of 3,956"),
        ((30, 20, 10), "EURLex-4K-small", "30 training queries instead of 15,"),
        ((30, 20, 10), "mine", None),
    ],
)
def test_a_copy_is_recognised_or_its_differences_named(
    counts: tuple[int, int, int], name: str, says: str | None
) -> None:
    found = describe_benchmark(of_counts(*counts, name=name))
    assert found is None if says is None else found is not None and says in found


AMAZON = (294_805, 134_835, 131_073)


def test_titles_and_full_texts_differ_by_the_fields_read() -> None:
    full = of_counts(*AMAZON, name="a", propensity=(0.6, 2.6), text_fields=("title", "content"))
    assert describe_benchmark(full) == "this is LF-Amazon-131K as published (294,805 / 134,835 / 131,073)"

    def described(**more: object) -> str | None:
        parts = {"label_texts": full.label_texts, "label_ids": full.label_ids, "train": full.train, "test": full.test}
        return describe_benchmark(Dataset(**({"name": "a", "propensity": (0.6, 2.6)} | parts | more)))  # type: ignore[arg-type]

    titles = described(text_fields=("title",))
    assert titles == "this is LF-AmazonTitles-131K as published (294,805 / 134,835 / 131,073)"
    contrary = described(name="LF-Amazon-131K", text_fields=("title",))
    assert contrary == f"{titles}, although its name says LF-Amazon-131K"
    unknown = described()
    assert unknown is not None
    assert "LF-AmazonTitles-131K" in unknown
    assert "LF-Amazon-131K" in unknown
    assert "nothing says whether its texts are titles alone" in unknown
    by_name = described(name="lf_amazontitles_131k")
    assert by_name == titles
    constants = described(text_fields=("title",), propensity=(0.55, 1.5))
    assert constants is not None
    assert "propensity constants 0.55 / 1.5 instead of 0.6 / 2.6" in constants


def test_data_check_says_it(tmp_path: Path) -> None:
    save_dataset(sample(), tmp_path / "LF-WikiTitles-500K")
    report = check(load_dataset(tmp_path / "LF-WikiTitles-500K"))
    assert report.published is not None
    assert "3 labels instead of 501,070" in report.published
    assert report.to_json()["published"] == report.published
    assert "this is not LF-WikiTitles-500K" in report.render()
    assert check(sample()).published is None


# dataset.json


@pytest.mark.parametrize("kind", WRITABLE)
def test_constants_and_fields_are_kept_by_every_format(tmp_path: Path, kind: str) -> None:
    data = sample()
    stored = Dataset("x", data.label_texts, data.label_ids, data.train, data.test, {}, (0.7, 2.0), ("title", "content"))
    save_dataset(stored, tmp_path / "out", format=kind)
    back = load_dataset(tmp_path / "out")
    assert (back.propensity, back.text_fields) == ((0.7, 2.0), ("title", "content"))
    assert back.train.texts == stored.train.texts
    assert "dataset.json" in back.source
    save_dataset(back, tmp_path / "again", format="jsonl")  # data convert
    assert load_dataset(tmp_path / "again").propensity == (0.7, 2.0)
    assert load_dataset(tmp_path / "again", text_fields=["title", "content"]).text_fields == ("title", "content")
    with pytest.raises(UsageError, match=r"text_fields is title, but .*dataset.json says title,content"):
        load_dataset(tmp_path / "again", text_fields=["title"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON: correct it or remove it"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected an object with propensity and text_fields"),
        ('{"propensities": [1, 2]}', "expected an object with propensity and text_fields"),
        ('{"propensity": 0.5}', "propensity is 0.5: expected two numbers (a, b) above 0"),
        ('{"propensity": [0.5]}', "expected two numbers"),
        ('{"propensity": [0.5, "x"]}', "expected two numbers"),
        ('{"propensity": [0.5, NaN]}', "expected two numbers"),
        ('{"propensity": [0.5, -1]}', "expected two numbers"),
        ('{"propensity": [true, 1]}', "expected two numbers"),
        ('{"text_fields": "title"}', 'expected ("title",) or'),
        ('{"text_fields": ["body"]}', "text_fields is ['body']: expected"),
        ('{"text_fields": 3}', "text_fields is 3: expected"),
    ],
)
def test_a_malformed_description_is_refused(tmp_path: Path, content: str, says: str) -> None:
    save_dataset(sample(), tmp_path / "out")
    (tmp_path / "out/dataset.json").write_text(content)
    with pytest.raises(DataError) as caught:
        load_dataset(tmp_path / "out")
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith(str(tmp_path / "out/dataset.json"))
    assert says in str(caught.value)


def test_constants_are_checked() -> None:
    data = sample()
    with pytest.raises(DataError, match="propensity is"):
        Dataset("x", data.label_texts, data.label_ids, data.train, propensity=(0.5, 0.0))


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("LF-AmazonTitles-1.3M", (0.6, 2.6)),
        ("lf_amazon_131k", (0.6, 2.6)),
        ("LF-Wikipedia-500K", (0.5, 0.4)),
        ("LF-WikiSeeAlso-320K", (0.55, 1.5)),
        ("mine", (0.55, 1.5)),
    ],
)
def test_published_names_bring_their_constants(
    tmp_path: Path, name: str, constants: tuple[float, float], logged: list[str]
) -> None:
    folder = write_records(tmp_path / name)
    assert load_dataset(folder).propensity == constants
    assert any("propensity constants" in line for line in logged) == (name != "mine")
    (folder / "dataset.json").write_text('{"propensity": [0.7, 2]}')
    assert load_dataset(folder).propensity == (0.7, 2.0)


# Titles or full texts


def test_fields_are_chosen_by_argument_name_or_announced(tmp_path: Path, logged: list[str]) -> None:
    mine = write_records(tmp_path / "mine")
    both, titles = load_dataset(mine), load_dataset(mine, text_fields=("title",))
    assert (both.train.texts, both.label_texts) == (("trn title body",), ("label body",))
    assert (titles.train.texts, titles.label_texts) == (("trn title",), ("label",))
    assert (both.text_fields, titles.text_fields) == (("title", "content"), ("title",))
    assert sum("texts are title and content" in line for line in logged) == 1  # not where it was asked for
    logged.clear()
    by_name = load_dataset(write_records(tmp_path / "LF-AmazonTitles-131K"))
    assert by_name.train.texts == ("trn title",)
    assert any("texts are the title alone, as the name LF-AmazonTitles-131K says" in line for line in logged)
    asked = load_dataset(tmp_path / "LF-AmazonTitles-131K", text_fields=("title", "content"))
    assert asked.train.texts == ("trn title body",)
    (mine / "dataset.json").write_text('{"text_fields": ["title"]}')
    assert load_dataset(mine).train.texts == ("trn title",)


@pytest.mark.parametrize("content", [None, ""])
def test_files_without_content_are_titles(tmp_path: Path, content: str | None, logged: list[str]) -> None:
    data = load_dataset(write_records(tmp_path / "mine", content=content))
    assert (data.train.texts, data.text_fields) == (("trn title",), ("title",))
    assert not any("texts are" in line for line in logged)


def test_fields_that_cannot_be_chosen_are_refused(tmp_path: Path) -> None:
    save_dataset(sample(), tmp_path / "out")
    with pytest.raises(UsageError, match="text_fields applies to xmc-json, not to jsonl"):
        load_dataset(tmp_path / "out", text_fields=("title",))
    with pytest.raises(UsageError, match=r"text_fields is \['body'\]"):
        load_dataset(tmp_path / "out", text_fields=["body"])
    with pytest.raises(UsageError, match="built-in data set pydocs"):
        load_dataset("pydocs", text_fields=("title",))
