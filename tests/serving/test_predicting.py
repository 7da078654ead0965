"""`/v1/predict` answers as the predictor does, and says what it has cut off."""

import json
from dataclasses import replace

import pytest

from dexter import Predictor


def predict(client, inputs, **fields):
    return client.post("/v1/predict", json={"inputs": inputs, **fields})


def test_answers_are_those_of_the_predictor(client, trained, world):
    texts = world.test.texts[:7]
    expected = Predictor.load(trained).predict(texts, k=4)
    found = predict(client, texts, k=4).json()
    assert found["model"] == "default" and found["version"] == 0 and found["inputs_left_out"] == 0
    assert len(found["results"]) == len(texts)
    for result, labels in zip(found["results"], expected, strict=True):
        assert [entry["id"] for entry in result["labels"]] == [label.id for label in labels]
        assert [entry["text"] for entry in result["labels"]] == [label.text for label in labels]
        assert [entry["score"] for entry in result["labels"]] == pytest.approx([label.score for label in labels])
        assert [entry["rank"] for entry in result["labels"]] == [1, 2, 3, 4]


def test_one_text_many_texts_and_texts_with_ids(client):
    one = predict(client, "river stone").json()["results"]
    many = predict(client, ["river stone", {"id": "mine", "text": "river stone"}]).json()["results"]
    assert len(one) == 1 and len(one[0]["labels"]) == 5
    for result in many:
        assert [label["id"] for label in result["labels"]] == [label["id"] for label in one[0]["labels"]]
    assert (many[0]["id"], many[1]["id"]) == (None, "mine")


def found_ids(answer):
    assert answer.status_code == 200, answer.text
    return [[label["id"] for label in result["labels"]] for result in answer.json()["results"]]


def test_filters_are_those_of_the_predictor(client, trained, world):
    predictor, texts = Predictor.load(trained), list(world.test.texts[:3])
    for filters in ({"exclude": ["L0", "L1"]}, {"only": ["L3", "L4"]}, {"bands": ["torso"], "exclude": ["L5"]}):
        expected = [[label.id for label in labels] for labels in predictor.predict(texts, 5, **filters)]
        assert found_ids(predict(client, texts, **filters)) == expected
    assert found_ids(predict(client, texts, only=[])) == [[], [], []]


@pytest.mark.parametrize("name", ["exclude", "only"])
def test_unknown_labels_in_a_filter_are_refused_by_position(client, name):
    answer = predict(client, "river", **{name: ["L1", "nobody"]})
    assert answer.status_code == 422 and "nobody" not in answer.text
    assert answer.json()["detail"] == f"the run has no label with the id at position 2 of {name}"
    assert predict(client, "river", bands=["head"]).status_code == 422


def test_the_id_of_a_text_leaves_its_own_label_out(connect, trained, world):
    predictor = Predictor.load(trained)
    facts = predictor.model.facts | {"own_labels": {"setting": "auto", "by_id": True}}
    client = connect(Predictor(replace(predictor.model, facts=facts), predictor.choice))
    text = world.label_texts[4]
    inputs = [{"id": "L4", "text": text}, text, {"id": "L5", "text": text}]
    first, second, third = found_ids(predict(client, inputs, k=37))
    assert "L4" not in first and "L4" in second and "L4" in third and "L5" not in third
    [alone] = found_ids(predict(client, text, id="L4", k=37))
    assert alone == first
    assert predict(client, [text], id="L4").status_code == 422
    assert client.get("/info").json()["runs"][0]["excludes_own_labels"] is True


def test_more_labels_than_there_are(client, world):
    assert len(predict(client, "river", k=500).json()["results"][0]["labels"]) == world.num_labels


def test_what_is_too_long_or_too_many_is_cut_and_flagged(connect):
    client = connect(max_inputs=2, max_characters=11)
    found = predict(client, ["river stone", "river stone and then some", "cloud"]).json()
    assert [result["truncated"] for result in found["results"]] == [False, True]
    first, second = ([label["id"] for label in result["labels"]] for result in found["results"])
    assert first == second
    assert found["inputs_left_out"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": []},
        {"inputs": ""},
        {"inputs": ["river", " \n"]},
        {"inputs": [7]},
        {"inputs": "river", "k": 0},
        {"inputs": "river", "k": 1_001},
        {"inputs": "river", "k": 1.5},
        {"inputs": "river", "head": "tail"},
        {"inputs": "river", "head": "classifier"},
        {"inputs": "river", "kay": 3},
        {"inputs": {"id": "a", "text": "b"}},
        ["river"],
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(client, body):
    answer = client.post("/v1/predict", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_run_is_asked_by_its_name(connect, trained):
    first, second = Predictor.load(trained), Predictor.load(trained)
    second.add_labels([("new", "river stone")])
    client = connect({"one": first, "two": second})
    assert predict(client, "river stone").json()["model"] == "one"
    found = predict(client, "river stone", model="two", k=100).json()
    assert found["model"] == "two" and "new" in [label["id"] for label in found["results"][0]["labels"]]
    assert predict(client, "river", model="three").status_code == 404
    assert predict(client, "river", model="../one").status_code == 404


def test_probabilities_and_a_threshold(client, trained, world):
    text = world.test.texts[0]
    expected = Predictor.load(trained)
    assert expected.calibration is not None
    found = predict(client, text, k=20).json()["results"][0]["labels"]
    chances = [label["probability"] for label in found]
    assert chances == pytest.approx([label.probability for label in expected.predict([text], k=20)[0]])
    above = predict(client, text, threshold=0.2).json()["results"][0]["labels"]
    assert [label["id"] for label in above] == [label["id"] for label in found if label["probability"] >= 0.2]
    assert 0 < len(above) < 20
    assert predict(client, text, threshold=0.2, k=1).json()["results"][0]["labels"] == above[:1]


@pytest.mark.parametrize("choice", [{"dial": 0.0}, {"dial": 0.31}, {"neighbours": True}, {"neighbours": False}])
def test_each_request_chooses_how_labels_are_ranked(client, trained, world, choice):
    text = world.test.texts[1]
    [expected] = Predictor.load(trained, **choice).predict([text], k=9)
    found = predict(client, text, k=9, **choice).json()["results"][0]["labels"]
    assert [label["id"] for label in found] == [label.id for label in expected]
    assert [label["score"] for label in found] == pytest.approx([label.score for label in expected], abs=1e-6)
    assert [label["probability"] for label in found] == pytest.approx([label.probability for label in expected])


def test_a_threshold_needs_probabilities(client):
    answer = predict(client, "river", threshold=0.5, dial=0.123)
    assert answer.status_code == 422 and answer.json()["code"] == "threshold"
    assert predict(client, "river", threshold=0.0).status_code == 422


@pytest.mark.parametrize("choice", [{}, {"dial": 0.5}])
def test_each_label_can_be_explained(client, trained, world, choice):
    text = world.test.texts[2]
    found = predict(client, [text, "river"], k=3, explain=True, **choice).json()["results"]
    assert [len(result["labels"]) for result in found] == [3, 3]
    predictor = Predictor.load(trained, **choice)
    for label in found[0]["labels"]:
        expected = predictor.explain(text, label["id"])
        assert sum(label["explanation"]["parts"].values()) == pytest.approx(label["score"], abs=1e-4)
        assert label["explanation"]["band"] == expected.band and label["explanation"]["count"] == expected.count
        assert [word["text"] for word in label["explanation"]["words"]] == text.split()
        assert [near["id"] for near in label["explanation"]["neighbours"]] == [near.id for near in expected.neighbours]
    assert predict(client, text).json()["results"][0]["labels"][0]["explanation"] is None
    assert predict(client, [text] * 5, explain=True).status_code == 422
    assert predict(client, text, k=21, explain=True).status_code == 422
