"""The first page as a browser without scripts sees it."""

import html
import re

import pytest

from dexter import Predictor
from dexter.predict import MAX_PREVIEW_RANK, Word, new_label_id
from dexter.serving.page.ranking import highlight, score_steps, side_by_side
from dexter.serving.page.view import breakable
from dexter.serving.protocol import RankedLabel
from tests.serving.conftest import BASE

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def shown_names(page):
    return [html.unescape(name) for name in re.findall(r'<span class="name">(.*?)</span>', found_part(page))]


def found_part(page):
    return page.partition('id="found"')[2].partition("</ol>")[0]


def part_values(page):
    """The parts of a score by title, as the page shows them."""
    rows = re.findall(r'<th scope="row">([^<]+)</th>.*?<td>([-+\d.]+)</td></tr>', page.partition('class="parts"')[2])
    return {title: float(value) for title, value in rows}


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
    widths = [float(width) for width in re.findall(r'class="fill" x="0.0%" width="([\d.]+)%"', found_part(page))]
    assert 0 < widths[0] <= 100 and widths == sorted(widths, reverse=True)


def test_filters_of_the_form(client, world):
    text, texts = world.test.texts[0], dict(zip(world.label_ids, world.label_texts, strict=True))
    page = client.post("/", data={"text": text, "only": "L3\r\n L4 \n\nL5", "exclude": "L5"}).text
    assert sorted(shown_names(page)) == sorted([texts["L3"], texts["L4"]])
    assert "L3\nL4\nL5</textarea>" in page and '"only": ["L3", "L4", "L5"]' in html.unescape(page)
    torso = client.post("/v1/predict", json={"inputs": text, "k": 10, "bands": ["torso"]}).json()
    assert shown_names(client.post("/", data={"text": text, "band": "torso"}).text) == [
        label["text"] for label in torso["results"][0]["labels"]
    ]
    assert "No label is allowed by the filters" in client.post("/", data={"text": text, "band": "unseen"}).text
    refused = client.post("/", data={"text": text, "exclude": "nobody"})
    assert refused.status_code == 422 and "The run has no label with the id at position 1 of exclude" in refused.text


def test_why_opens_under_its_label(client, world):
    text = world.test.texts[0]
    label = client.post("/v1/predict", json={"inputs": text}).json()["results"][0]["labels"][1]
    page = client.post("/", data={"text": text, "why": label["id"]}).text
    assert page.count('aria-expanded="true"') == 1
    why = page.partition('data-testid="why"')[2]
    assert label["id"] in why and "Training texts" in why and '<mark class="for4">' in why
    assert "nearest first" in why and '"explanation"' not in html.unescape(page.partition('id="json"')[2])


RANKINGS = [
    {},
    {"dial": 0.35},
    {"neighbours": True},
    {"neighbours": False, "dial": 1.0},
    {"neighbours": True, "dial": 0.0},
]


@pytest.mark.parametrize("ranking", RANKINGS, ids=str)
def test_the_parts_add_up_to_the_score_that_is_shown(client, world, ranking):
    text = world.test.texts[3]
    found = client.post("/v1/predict", json={"inputs": text, "k": 10, **ranking}).json()["results"][0]["labels"]
    fields = {name: value if name == "dial" else "on" if value else "off" for name, value in ranking.items()}
    page = client.post("/", data={"text": text, "why": found[2]["id"], **fields}).text
    assert shown_names(page) == [label["text"] for label in found]
    parts = part_values(page)
    score = parts.pop("Score")
    assert score == pytest.approx(found[2]["score"], abs=6e-4)
    assert sum(parts.values()) == pytest.approx(score, abs=1e-3 * len(parts))
    assert bool({"Neighbours", "Neighbours by words"} & set(parts)) == ranking.get(
        "neighbours", uses_neighbours(client)
    )


def uses_neighbours(client):
    return client.app.state.runs.default.predictor.choice.uses_neighbours


def test_parts_are_steps_that_lead_to_the_score():
    steps = score_steps(
        {"encoder": 0.5, "encoder prior": -0.1, "classifier": 0.5, "classifier prior": -0.3, "neighbours": 0.25}
    )
    assert [step.title for step in steps] == ["Dual encoder", "Classifier", "Neighbours", "Label frequency", "Score"]
    assert [step.value for step in steps] == pytest.approx([0.5, 0.5, 0.25, -0.4, 0.85])
    assert [step.start for step in steps] == pytest.approx([0, 0.4, 0.8, 0.68, 0])
    assert [step.width for step in steps] == pytest.approx([0.4, 0.4, 0.2, 0.32, 0.68])
    below = score_steps({"encoder": -0.5, "another": 0.25})
    assert [(step.title, step.start, step.width) for step in below] == [
        ("Dual encoder", 0.0, 1.0),
        ("another", 0.0, 0.5),
        ("Score", 0.5, 0.5),
    ]
    assert [step.value for step in score_steps({})] == [0.0]


def test_a_text_is_cut_at_its_words():
    words = [
        Word(text=text, start=start, end=start + len(text), weight=weight)
        for text, start, weight in [("one", 1, 0.5), ("two", 5, -0.25), ("three", 9, 0.01)]
    ]
    pieces = highlight("(one two three)", words)
    assert "".join(piece.text for piece in pieces) == "(one two three)"
    assert [piece.level for piece in pieces if piece.text.isalpha()] == [4, -2, 0]
    nothing = Word(text="x", start=0, end=1, weight=0.0)
    assert highlight("", []) == [] and [piece.level for piece in highlight("x", [nothing])] == [0]


def test_long_words_may_break_and_are_escaped():
    assert breakable("scipy.cluster.hierarchy: <b>") == "scipy.<wbr>cluster.<wbr>hierarchy: &lt;b&gt;"
    assert breakable("a.b <i>") == "a.b &lt;i&gt;"


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
    assert names.index(new_label_id(text, ())) == rank - 1


def test_a_proposed_label_ranks_where_it_will_in_the_ranking_that_is_shown(client, world):
    text, label = world.test.texts[1], " ".join(world.test.texts[1].split()[:3])
    ranking = {"neighbours": "off" if uses_neighbours(client) else "on", "dial": "0.00"}
    page = client.post("/", data={"text": text, "label": label, **ranking}).text
    rank = int(re.search(r'class="big">#(\d+)', page).group(1))
    client.post("/", data={"text": text, "label": label, "action": "add"})
    asked = {"inputs": text, "k": 100, "dial": 0.0, "neighbours": ranking["neighbours"] == "on"}
    found = client.post("/v1/predict", json=asked).json()["results"][0]["labels"]
    assert [each["id"] for each in found].index(new_label_id(label, ())) == rank - 1


def test_a_link_adds_nothing(client):
    client.get("/", params={"text": "river", "label": "river", "action": "add"})
    assert client.get("/info").json()["runs"][0]["version"] == 0


def test_hostile_texts_are_shown_and_do_nothing(client):
    client.post("/v1/labels", json={"labels": [{"id": HOSTILE, "text": HOSTILE}]})
    page = client.post("/", data={"text": HOSTILE, "label": HOSTILE, "why": HOSTILE, "compare": "on"}).text
    assert "<script>alert" not in page and "<img" not in page
    assert html.escape(HOSTILE, quote=False)[:20] in page


def test_problems_are_shown_on_the_page(client):
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


def test_back_to_tuned_forgets_every_choice(client, world):
    away = {"text": world.test.texts[0], "dial": "0.00", "neighbours": "on"}
    page = client.post("/", data=away).text
    assert 'name="reset"' in page and "probabilities are known for the tuned ranking only" in page
    back = client.post("/", data={**away, "reset": "on"}).text
    assert 'name="reset"' not in back
    assert shown_names(back) == shown_names(client.post("/", data={"text": away["text"]}).text)


def test_bars_are_probabilities_where_they_are_known(client, world):
    text = world.test.texts[0]
    [best, *_] = client.post("/v1/predict", json={"inputs": text}).json()["results"][0]["labels"]
    page = found_part(client.post("/", data={"text": text}).text)
    if best.get("probability") is None:
        pytest.skip("this run has no probabilities")
    assert f'width="{100 * best["probability"]:.1f}%"' in page and f"{100 * best['probability']:.0f}%</span>" in page


def test_neighbours_are_chosen_and_compared(client, world):
    text = world.test.texts[0]
    page = client.post(
        "/", data={"text": text, "neighbours": "off" if uses_neighbours(client) else "on", "compare": "on"}
    ).text
    votes = not uses_neighbours(client)
    assert f'"neighbours": {str(votes).lower()}' in html.unescape(page)
    assert ("without neighbours" if votes else "with neighbours") in page


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

    first, second = side_by_side({"one": ranked("ab"), "two": ranked("bca")}, num_shown=2).values()
    assert [place.move for place in first] == [0, 0]
    assert [(place.label.id, place.move) for place in second] == [("b", 1), ("c", None)]


def test_a_proposal_without_a_text_has_no_rank(trained):
    predictor = Predictor.load(trained)
    proposal = predictor.preview_label(" ", predictor.labels.texts[0])
    assert proposal.rank is None and proposal.similar[0].same_text and proposal.duplicates
    assert MAX_PREVIEW_RANK >= 100


def test_ids_of_new_labels_are_free():
    assert new_label_id("C++ & Co.", ()) == "c-co"
    assert new_label_id("a b", {"a-b", "a-b-2"}) == "a-b-3"
    assert new_label_id("!!!", ()) == "label"
