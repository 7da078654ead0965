"""The first page as a browser without scripts sees it."""

import html
import re

import pytest

from dexter import Predictor
from dexter.explain import Word
from dexter.serving.page.comparing import side_by_side
from dexter.serving.page.proposing import PLACES, free_id, propose
from dexter.serving.page.why import highlight
from dexter.serving.protocol import RankedLabel
from tests.serving.conftest import BASE

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def shown_names(page):
    return [html.unescape(name) for name in re.findall(r'<span class="name">(.*?)</span>', found_part(page))]


def found_part(page):
    return page.partition('id="found"')[2].partition("</ol>")[0]


def test_an_empty_page_has_a_form_and_examples(client, world):
    page = client.get("/").text
    assert '<textarea id="text"' in page and "Labels appear here" in page
    examples = [html.unescape(text) for text in re.findall(r'value="([^"]*)" class="chip"', page)]
    assert examples and all(text.strip() for text in examples)
    assert "<script>" not in page and " style=" not in page and " onclick=" not in page


@pytest.mark.parametrize("method", ["get", "post"])
def test_labels_of_a_text_without_scripts(client, world, method):
    text = world.test.texts[0]
    sent = {"params": {"text": text}} if method == "get" else {"data": {"text": text}}
    page = getattr(client, method)("/", **sent).text
    expected = client.post("/v1/predict", json={"inputs": text, "k": 10}).json()["results"][0]["labels"]
    assert shown_names(page) == [label["text"] for label in expected]
    assert html.escape(text) in page
    widths = [float(width) for width in re.findall(r'class="fill" width="([\d.]+)%"', found_part(page))]
    assert 0 < widths[0] <= 100 and widths == sorted(widths, reverse=True)


def test_why_opens_under_its_label(client, world):
    text = world.test.texts[0]
    label = client.post("/v1/predict", json={"inputs": text}).json()["results"][0]["labels"][1]
    page = client.post("/", data={"text": text, "why": label["id"]}).text
    assert page.count('aria-expanded="true"') == 1
    why = page.partition('data-testid="why"')[2]
    assert label["id"] in why and "Training texts" in why
    assert f"<b>{label['score']:.3f}</b>" in why and '<mark class="for4">' in why


def test_a_text_is_cut_at_its_words():
    words = [Word("one", 1, 4, 0.5), Word("two", 5, 8, -0.25), Word("three", 9, 14, 0.01)]
    pieces = highlight("(one two three)", words)
    assert "".join(piece.text for piece in pieces) == "(one two three)"
    assert [piece.level for piece in pieces if piece.text.isalpha()] == [4, -2, 0]
    assert highlight("", []) == [] and [piece.level for piece in highlight("x", [Word("x", 0, 1, 0.0)])] == [0]


def test_a_proposed_label_ranks_where_it_will_when_added(client, world):
    text = world.test.texts[0]
    page = client.post("/", data={"text": text, "label": text}).text
    rank = int(re.search(r'class="big">#(\d+)', page).group(1))
    assert "Resembles" in page and "Add this label" in page
    assert client.get("/info").json()["runs"][0]["version"] == 0
    added = client.post("/", data={"text": text, "label": text, "action": "add"}).text
    assert 'data-testid="added"' in added
    names = [
        label["id"]
        for label in client.post("/v1/predict", json={"inputs": text, "k": 100}).json()["results"][0]["labels"]
    ]
    assert names.index(free_id(text, ())) == rank - 1


def test_a_link_adds_nothing(client):
    client.get("/", params={"text": "river", "label": "river", "action": "add"})
    assert client.get("/info").json()["runs"][0]["version"] == 0


def test_hostile_texts_are_shown_and_do_nothing(client):
    client.post("/v1/labels", json={"labels": [{"id": HOSTILE, "text": HOSTILE}]})
    page = client.post("/", data={"text": HOSTILE, "label": HOSTILE, "why": HOSTILE, "compare": "on"}).text
    assert "<script>alert" not in page and "<img" not in page
    assert html.escape(HOSTILE, quote=False)[:20] in page


def test_problems_are_told_on_the_page(client):
    answer = client.post("/", data={"text": "river", "head": "classifier"})
    assert answer.status_code == 422 and 'role="alert"' in answer.text
    assert client.post("/", data={"text": "x", "head": "<b>"}).status_code == 422
    assert client.post("/", json={"text": "x"}).status_code == 415
    assert client.get("/", params={"model": "nobody"}).status_code == 404


def test_the_dial_is_turned_and_what_is_tuned_is_left_alone(client, world):
    text = world.test.texts[0]
    tuned = client.get("/").text
    dial = float(re.search(r'name="dial"[^>]* value="([\d.]+)"', tuned).group(1))
    same = client.post("/", data={"text": text, "dial": f"{dial + 0.01:.2f}"}).text
    assert '"dial":' not in html.unescape(same)
    turned = 0.0 if dial > 0.5 else 1.0
    page = client.post("/", data={"text": text, "dial": str(turned)}).text
    assert f'"dial": {turned}' in html.unescape(page) and f'value="{turned:.2f}"' in page
    asked = client.post("/v1/predict", json={"inputs": text, "k": 10, "dial": turned}).json()["results"][0]["labels"]
    assert shown_names(page) == [label["text"] for label in asked]
    assert client.post("/", data={"text": text, "dial": "nan"}).status_code == 200


def test_bars_are_probabilities_where_they_are_known(client, world):
    text = world.test.texts[0]
    [best, *_] = client.post("/v1/predict", json={"inputs": text}).json()["results"][0]["labels"]
    page = found_part(client.post("/", data={"text": text}).text)
    if best.get("probability") is None:
        pytest.skip("this run has no probabilities")
    assert f'width="{100 * best["probability"]:.1f}%"' in page and f"{100 * best['probability']:.0f}%</span>" in page


def test_memory_is_chosen_and_compared(client, world):
    text = world.test.texts[0]
    page = client.post("/", data={"text": text, "memory": "on", "compare": "on"}).text
    assert '"memory": true' in html.unescape(page) and "without memory" in page


def test_the_command_asks_the_same(client, world):
    page = client.post("/", data={"text": "it's $HOME `x`"}).text
    curl = html.unescape(re.search(r'data-testid="curl">(.*?)</pre>', page, re.S).group(1))
    assert curl.startswith(f"curl -s {BASE}/v1/predict ") and "'\"'\"'" in curl


def test_every_run_can_be_chosen(connect, trained):
    client = connect({"first": Predictor.load(trained), "second": Predictor.load(trained)})
    page = client.get("/", params={"model": "second", "text": "river"}).text
    assert "<option selected>second</option>" in page
    assert '<input type="hidden" name="model" value="second">' in page


def test_moves_are_counted_from_the_first_ranking():
    def ranked(names):
        return [RankedLabel(id=name, text=name, score=1.0, rank=rank) for rank, name in enumerate(names, start=1)]

    first, second = side_by_side({"one": ranked("ab"), "two": ranked("bca")}, shown=2)
    assert [place.move for place in first.places] == [0, 0]
    assert [(place.label.id, place.move) for place in second.places] == [("b", 1), ("c", None)]
    assert side_by_side({}, shown=2) == []


def test_a_proposal_without_a_text_has_no_rank(trained):
    predictor = Predictor.load(trained)
    proposal = propose(predictor, " ", predictor.labels.texts[0])
    assert proposal.rank is None and proposal.similar[0].same_text and proposal.duplicates
    assert PLACES >= 100


def test_ids_of_new_labels_are_free():
    assert free_id("C++ & Co.", ()) == "c-co"
    assert free_id("a b", {"a-b", "a-b-2"}) == "a-b-3"
    assert free_id("!!!", ()) == "label"
