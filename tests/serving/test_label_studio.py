"""Label Studio's requests to a machine learning backend, in the shapes of its public client and its tests."""

import base64

import pytest

from dexter.serving.keys import make_key
from dexter.serving.label_studio import LabelConfig, read_labels

CHOICES = """
<View>
  <Text name="body" value="$article"/>
  <Choices name="topic" toName="body" choice="multiple" showInLine="true">
    %s
  </Choices>
</View>"""
PROJECT = "1.1700000000"


def config(world):
    return CHOICES % "".join(f'<Choice value="{text}"/>' for text in world.label_texts)


def predict(client, tasks, label_config, path="/label-studio/predict"):
    params = {"login": None, "password": None, "context": None}
    body = {"tasks": tasks, "model_version": "1", "project": PROJECT, "label_config": label_config, "params": params}
    return client.post(path, json=body)


def annotated(action, text, value, label_config, task=5):
    kind = next(iter(value))
    item = {"id": "x1", "type": kind, "value": value, "to_name": "body", "from_name": "topic", "origin": "manual"}
    return {
        "action": action,
        "annotation": {"id": 3, "result": [item], "completed_by": 1, "was_cancelled": False, "lead_time": 2.1},
        "task": {"id": task, "data": {"article": text}, "project": 1, "total_annotations": 1},
        "project": {"id": 1, "title": "News", "label_config": label_config},
    }


def test_health_and_setup(client):
    assert client.get("/label-studio/health").json()["status"] == "UP"
    body = {"project": PROJECT, "schema": "<View></View>", "hostname": "http://localhost:8080", "access_token": "t"}
    version = client.post("/label-studio/setup", json={**body, "extra_params": {}}).json()["model_version"]
    assert version == client.get("/label-studio/default/health").json()["model_version"]
    assert client.get("/label-studio/nobody/health").status_code == 404


def test_choices_are_the_first_20_predictions(client, world):
    texts = world.test.texts[:9]
    tasks = [{"id": row, "data": {"article": text}, "is_labeled": False} for row, text in enumerate(texts)]
    answer = predict(client, [*tasks, {"id": 99, "data": {"article": None}}], config(world)).json()
    assert len(answer["results"]) == 10 and answer["results"][9]["result"] == []
    found = client.post("/v1/predict", json={"inputs": texts, "k": 20}).json()["results"]
    for suggested, expected in zip(answer["results"], found, strict=False):
        [item] = suggested["result"]
        assert (item["from_name"], item["to_name"], item["type"]) == ("topic", "body", "choices")
        assert item["value"]["choices"] == [label["text"] for label in expected["labels"]]
        assert suggested["model_version"] == answer["model_version"]


def test_the_request_of_the_tools_own_test_is_answered(client):
    body = {"tasks": {"id": 1}, "label_config": "<View></View>", "project": PROJECT, "params": {"context": {}}}
    assert client.post("/label-studio/predict", json=body).status_code == 200
    webhook = {"action": "ANNOTATION_CREATED", "project": {"id": 1, "label_config": "<View></View>"}}
    assert client.post("/label-studio/webhook", json=webhook).status_code == 201
    assert client.post("/label-studio/webhook", json={"action": "START_TRAINING"}).json() == {"status": "ignored"}


def test_a_single_choice_gets_one_and_a_taxonomy_gets_paths(client, world):
    text = world.test.texts[0]
    best = client.post("/v1/predict", json={"inputs": text, "k": 2}).json()["results"][0]["labels"]
    single = config(world).replace('choice="multiple"', 'choice="single"')
    [result] = predict(client, [{"data": {"article": text}}], single).json()["results"]
    assert result["result"][0]["value"]["choices"] == [best[0]["text"]]
    taxonomy = (
        '<View><Taxonomy name="t" toName="body"><Choice value="All">'
        f'<Choice value="One" alias="{best[0]["id"]}"/><Choice value="{best[1]["text"]}"></Choice>'
        '</Choice></Taxonomy><Text name="body" value="$article"/></View>'
    )
    [result] = predict(client, [{"data": {"article": text}}], taxonomy).json()["results"]
    assert result["result"][0]["type"] == "taxonomy"
    assert result["result"][0]["value"]["taxonomy"] == [["All", "One"], ["All", best[1]["text"]]]


def test_an_annotation_becomes_an_example_and_its_update_replaces_it(client, world):
    text, shown = "the old ferry timetable of the harbor office", config(world)

    def suggest():
        [result] = predict(client, [{"data": {"article": text}}], shown).json()["results"]
        return result["result"][0]["value"]["choices"][0]

    for action, label in (("ANNOTATION_CREATED", 9), ("ANNOTATION_UPDATED", 12)):
        value = {"choices": [world.label_texts[label]]}
        answer = client.post("/label-studio/webhook", json=annotated(action, text, value, shown))
        assert answer.status_code == 201 and answer.json()["status"] == "added"
        assert suggest() == world.label_texts[label]
    [example] = client.get("/v1/examples").json()["examples"]
    assert (example["labels"], example["text"]) == (["L12"], text)
    unknown = annotated("ANNOTATION_CREATED", text, {"choices": ["nobody"]}, shown)
    assert client.post("/label-studio/webhook", json=unknown).status_code == 422


def test_a_key_is_the_password_and_readers_get_suggestions_only(connect, world):
    client = connect(keys=(make_key("reader", "r" * 20, "read"),))
    headers = {"Authorization": "Basic " + base64.b64encode(b"any:" + b"r" * 20).decode()}
    assert client.get("/label-studio/health").status_code == 401
    assert client.get("/label-studio/health", headers=headers).status_code == 200
    value = {"taxonomy": [["All", world.label_texts[3]]]}
    body = annotated("ANNOTATION_CREATED", "a text", value, config(world))
    assert client.post("/label-studio/webhook", json=body, headers=headers).status_code == 403


@pytest.mark.parametrize("xml", ["", "<View>", "<Choices", "<!DOCTYPE x [<!ENTITY a 'b'>]><Choices name='&a;'/>", None])
def test_a_configuration_that_says_little_is_as_in_the_template(xml):
    found = LabelConfig.parse(xml)
    assert (found.kind, found.to_name, found.text_field) == ("choices", "text", "text")


def test_results_of_other_shapes_have_no_labels():
    shapes = [{}, {"value": None}, {"value": {"choices": [1, None]}}, {"value": {"taxonomy": [[]]}}, {"value": "x"}]
    assert read_labels(shapes) == []
