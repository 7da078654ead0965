"""Own labels: found by id and by text, not where numbers agree by chance, and then filter pairs beside those given."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split
from dexter.data.check import check
from dexter.data.own_labels import OwnLabels, find_own_labels


def related_items(*, ids=None, query_texts=None, num_positive=0, size=100, filtered=None):
    """Items that point to the next one; the first half of the queries have a label of their own."""
    ids = ids or [f"item {chr(97 + row % 26)}{row}x" for row in range(size)]
    texts = [f"The thing {row} " for row in range(size)]
    relevance = np.zeros((size, size // 2))
    for row in range(size):
        relevance[row, (row + 1) % (size // 2)] = 1
        if row < num_positive:
            relevance[row, row] = 1
    train = Split(query_texts or [f"{text}: what it does" for text in texts], ids, csr_matrix(relevance), filtered)
    return Dataset("related", texts[: size // 2], ids[: size // 2], train, train)


def filter_pairs(split):
    return set() if split.filtered is None else set(zip(*map(np.ndarray.tolist, split.filtered.nonzero()), strict=True))


def test_own_labels_by_id_are_left_out_where_none_is_relevant():
    dataset = related_items()
    found = find_own_labels(dataset, "auto")
    assert (found.by_id, found.by_text, found.num_with_own, found.num_positive) == (True, False, 50, 0)
    assert found.describe() == (
        "50 of 100 queries have a label of their own; none is positive: left out of losses, mining and predictions "
        "(data.own_labels = auto)"
    )
    own = {(row, row) for row in range(50)}
    assert filter_pairs(found.filter_train(dataset).train) == filter_pairs(found.filter_test(dataset).test) == own
    assert OwnLabels.from_json(found.to_json()) == found


def test_own_labels_by_text_ignore_case_and_spaces():
    texts = [f"  the   THING {row}" for row in range(100)]
    dataset = related_items(ids=[f"query {row}" for row in range(100)], query_texts=texts)
    dataset = Dataset("related", dataset.label_texts, [f"label {row}" for row in range(50)], dataset.train)
    found = find_own_labels(dataset, "auto")
    assert (found.by_id, found.by_text, found.num_with_own) == (False, True, 50)
    assert filter_pairs(found.filter_train(dataset).train) == {(row, row) for row in range(50)}


@pytest.mark.parametrize("form", ["{}", "Q{}", "doc-{}"])
def test_numbers_that_agree_by_chance_are_no_own_labels(form):
    dataset = related_items(
        ids=[form.format(row) for row in range(100)], query_texts=[f"About {row}" for row in range(100)]
    )
    found = find_own_labels(dataset, "auto")
    assert not found.excludes and found.num_by_chance == 50
    assert "taken for a coincidence" in found.describe()
    assert found.filter_train(dataset) is dataset


def test_numbers_count_where_texts_begin_alike():
    found = find_own_labels(related_items(ids=[str(row) for row in range(100)]), "auto")
    assert found.by_id and found.num_with_own == 50 and found.num_by_chance == 0


def test_own_labels_that_are_relevant_stay():
    found = find_own_labels(related_items(num_positive=10), "auto")
    assert not found.excludes and (found.num_with_own, found.num_positive) == (50, 10)
    assert "10 of these pairs are positive: treated as any other label" in found.describe()
    few = find_own_labels(related_items(num_positive=2, size=1000), "auto")
    assert few.by_id and few.num_positive == 2


def test_few_own_labels_decide_nothing():
    assert not find_own_labels(related_items(size=38), "auto").excludes
    assert find_own_labels(related_items(size=40), "auto").excludes


def test_data_without_own_labels_say_nothing(world):
    found = find_own_labels(world, "auto")
    assert not found.excludes and found.describe() == ""


def test_the_setting_overrides_the_data():
    assert not find_own_labels(related_items(), "keep").excludes
    numbered = related_items(ids=[str(row) for row in range(100)], query_texts=["a text"] * 100, num_positive=10)
    forced = find_own_labels(numbered, "exclude")
    assert forced.by_id and forced.by_text and "excluded nevertheless" in forced.describe()
    assert len(filter_pairs(forced.filter_train(numbered).train)) == 50


def test_given_filter_pairs_stay():
    given = csr_matrix(([1.0, 1.0], ([3, 60], [3, 7])), shape=(100, 50))
    dataset = related_items(filtered=given)
    filtered = find_own_labels(dataset, "auto").filter_train(dataset).train
    assert filter_pairs(filtered) == {(row, row) for row in range(50)} | {(60, 7)}
    assert set(filtered.filtered.data.tolist()) == {1.0}


def test_data_check_reports_own_labels(world):
    report = check(related_items())
    shown = " ".join(report.render().split())
    assert "50 of 100 queries have a label of their own; none is positive" in shown
    assert report.to_json()["own_labels"]["by_id"] is True
    assert "of their own" not in check(world).render()
