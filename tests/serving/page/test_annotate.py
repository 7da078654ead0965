"""The page /annotate without scripts: suggest, tick, add, save; refused with what was chosen still there; escaped."""

import re

from dexter.serving.keys import make_key

TEXT = "the old ferry timetable of the harbor office"


def first(client):
    return client.post("/v1/predict", json={"inputs": TEXT, "k": 1}).json()["results"][0]["labels"][0]["id"]


def test_texts_get_suggestions_and_what_is_saved_counts_at_once(client, world):
    page = client.post("/annotate", data={"texts": f"{TEXT}\n\n<script>alert(1)</script>\n"}).text
    assert page.count('data-testid="item"') == 2 and "<script>alert" not in page
    boxes = re.findall(r'name="(keep-0-\d+)" value="([^"]+)"', page)
    assert len(boxes) == 10
    name, label = boxes[7]
    fields = {"text-0": TEXT, name: label, "more-0": world.label_texts[30], "text-1": "skipped", "action": "save"}
    saved = client.post("/annotate", data=fields).text
    assert "1 saved" in saved and "examples.jsonl" in saved
    [example] = client.get("/v1/examples").json()["examples"]
    assert set(example["labels"]) == {label, "L30"} and first(client) in (label, "L30")


def test_a_refusal_keeps_what_was_chosen(client):
    fields = {"text-0": TEXT, "keep-0-0": "L9", "more-0": "nobody <b>", "action": "save"}
    answer = client.post("/annotate", data=fields)
    assert (
        answer.status_code == 422
        and "nobody &lt;b&gt;" in answer.text
        and "has a label that the run lacks" in answer.text
    )
    empty = client.post("/annotate", data={"text-0": TEXT, "action": "save"})
    assert empty.status_code == 422 and client.get("/v1/examples").json()["total"] == 0


def test_a_link_saves_nothing_and_neither_does_a_reader(client, connect):
    assert client.get("/annotate", params={"text-0": TEXT, "keep-0-0": "L9", "action": "save"}).status_code == 200
    assert client.get("/v1/examples").json()["total"] == 0
    guarded = connect(keys=(make_key("reader", "r" * 20, "read"),))
    headers = {"X-API-Key": "r" * 20}
    assert guarded.post("/annotate", data={"texts": TEXT}, headers=headers).status_code == 200
    fields = {"text-0": TEXT, "keep-0-0": "L9", "action": "save"}
    assert guarded.post("/annotate", data=fields, headers=headers).status_code == 403
