"""`/v1/labels`: listing, search, paging, changes that are made as a whole or refused, versions."""

import json
import shutil

import pytest

from dexter.serving.keys import make_key


def test_pages_hold_every_label_once(client, world):
    found, cursor = [], 0
    while cursor is not None:
        page = client.get("/v1/labels", params={"cursor": cursor, "limit": 10}).json()
        assert page["total"] == world.num_labels and len(page["labels"]) <= 10
        found += [label["id"] for label in page["labels"]]
        cursor = page["next"]
    assert found == list(world.label_ids)


def test_search_looks_in_texts_and_ids(client, world):
    page = client.get("/v1/labels", params={"q": "RIVER"}).json()
    assert [label["text"] for label in page["labels"]] == [text for text in world.label_texts if "river" in text]
    assert page["total"] == len(page["labels"]) > 0
    assert client.get("/v1/labels", params={"q": "l36"}).json()["labels"][0]["id"] == "L36"
    assert client.get("/v1/labels", params={"q": "nowhere"}).json()["labels"] == []


def test_a_label_competes_at_once_and_goes_again(client, world):
    text = "zither and zebra"
    added = client.post("/v1/labels", json={"labels": [{"id": "new", "text": text}]}).json()
    assert added == {"model": "default", "version": 1, "duplicates": []}
    assert client.get("/v1/labels", params={"q": "zither"}).json()["labels"] == [
        {"id": "new", "text": text, "count": 0}
    ]
    answer = client.post("/v1/predict", json={"inputs": "river stone", "k": 100}).json()
    assert answer["version"] == 1
    assert "new" in [label["id"] for label in answer["results"][0]["labels"]]
    removed = client.delete("/v1/labels", params={"id": "new"}).json()
    assert removed["version"] == 2
    assert client.get("/v1/labels").json()["total"] == world.num_labels


def test_a_removed_id_comes_back_only_when_told_so(client):
    assert client.delete("/v1/labels", params={"id": "L3"}).status_code == 200
    again = {"labels": [{"id": "L3", "text": "zither"}]}
    assert client.post("/v1/labels", json=again).status_code == 409
    assert client.post("/v1/labels", json={**again, "reuse_ids": True}).status_code == 200


def test_a_label_gets_a_new_text(client):
    renamed = client.patch("/v1/labels", json={"labels": [{"id": "L3", "text": "zither"}]}).json()
    assert renamed["version"] == 1
    assert client.get("/v1/labels", params={"q": "zither"}).json()["labels"][0]["id"] == "L3"
    assert client.patch("/v1/labels", json={"labels": [{"id": "nobody", "text": "x"}]}).status_code == 404


def test_a_label_like_another_is_told(client, world):
    text = world.label_texts[5]
    near = client.get("/v1/labels/similar", params={"text": text, "k": 2}).json()
    assert near["labels"][0]["id"] == "L5" and near["labels"][0]["similarity"] == pytest.approx(1.0, abs=1e-5)
    added = client.post("/v1/labels", json={"labels": [{"id": "twin", "text": text.upper()}]}).json()
    assert [(each["id"], each["resembles"][0]["id"]) for each in added["duplicates"]] == [("twin", "L5")]


def test_ids_with_any_characters(client):
    strange = "http://example.org/a b?c=d&e#ü"
    assert client.post("/v1/labels", json={"labels": [{"id": strange, "text": "x"}]}).status_code == 200
    assert client.get("/v1/labels", params={"q": strange}).json()["total"] == 1
    assert client.delete("/v1/labels", params={"id": [strange]}).status_code == 200


@pytest.mark.parametrize(
    ("labels", "status"),
    [
        ([{"id": "fresh", "text": "a"}, {"id": "L0", "text": "b"}], 409),
        ([{"id": "fresh", "text": "a"}, {"id": "fresh", "text": "b"}], 409),
        ([{"id": "fresh", "text": "a"}, {"id": "", "text": "b"}], 422),
        ([{"id": "fresh", "text": ""}], 422),
        ([{"id": "fresh", "text": "half \ud800 a pair"}], 400),
        ([], 422),
    ],
)
def test_a_refused_edit_changes_nothing(client, world, labels, status):
    body = json.dumps({"labels": labels})
    answer = client.post("/v1/labels", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    page = client.get("/v1/labels").json()
    assert page["total"] == world.num_labels and page["version"] == 0


def test_a_refusal_names_the_label_by_position_and_never_by_id(client):
    taken = client.post("/v1/labels", json={"labels": [{"id": "fresh", "text": "a"}, {"id": "L0", "text": "b"}]}).json()
    assert taken["code"] == "taken" and "position 2" in taken["detail"] and "L0" not in taken["detail"]
    twice = client.delete("/v1/labels", params={"id": ["L0", "L1", "L0"]})
    assert twice.status_code == 404 and "the id at position 3 of the request is given twice" in twice.json()["detail"]
    assert client.delete("/v1/labels", params={"id": "L5"}).status_code == 200
    retired = client.post("/v1/labels", json={"labels": [{"id": "L5", "text": "a"}]}).json()
    assert (retired["status"], retired["code"]) == (409, "refused") and "reuse_ids" in retired["detail"]


def test_removing_needs_known_labels_and_leaves_one(client, world):
    assert client.delete("/v1/labels", params={"id": ["L0", "nobody"]}).status_code == 404
    assert client.delete("/v1/labels").status_code == 422
    assert client.delete("/v1/labels", params={"id": list(world.label_ids)}).status_code == 409
    assert client.get("/v1/labels").json()["total"] == world.num_labels


def test_an_edit_of_an_older_version_is_refused(client):
    new = {"labels": [{"id": "new", "text": "x"}]}
    assert client.post("/v1/labels", json=new, headers={"If-Match": '"7"'}).status_code == 412
    assert client.post("/v1/labels", json=new, headers={"If-Match": "newest"}).status_code == 422
    assert client.post("/v1/labels", json=new, headers={"If-Match": '"0"'}).json()["version"] == 1
    assert client.delete("/v1/labels", params={"id": "new"}, headers={"If-Match": "0"}).status_code == 412
    assert client.delete("/v1/labels", params={"id": "new"}, headers={"If-Match": "1"}).json()["version"] == 2


def test_edits_are_listed_with_their_authors_and_undone(connect, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    names = {"ann": "a-key-of-ann-that-may-edit", "bob": "a-key-of-bob-that-may-read"}
    keys = (make_key("ann", names["ann"]), make_key("bob", names["bob"], "read"))
    client = connect({"run": tmp_path / "run"}, keys=keys)
    ann, bob = ({"X-API-Key": names[name]} for name in ("ann", "bob"))
    client.post("/v1/labels", json={"labels": [{"id": "new", "text": "x"}]}, headers=ann)
    client.post("/v1/labels", json={"labels": [{"id": "other", "text": "y"}]}, headers=ann)
    assert client.post("/v1/labels/undo", json={}, headers=bob).status_code == 403
    for odd in (True, "1", 1.0, 0, 2**70):
        assert client.post("/v1/labels/undo", json={"edit": odd}, headers=ann).status_code == 422
    assert client.post("/v1/labels/undo", json={"edit": 1}, headers=ann).json()["version"] == 3
    assert client.post("/v1/labels/undo", json={"edit": 1}, headers=ann).status_code == 409
    assert client.get("/v1/labels", params={"q": "new"}, headers=bob).json()["total"] == 0
    edits = client.get("/v1/labels/history", headers=bob).json()["edits"]
    assert [(edit["version"], edit["undoes"], edit["is_undone"]) for edit in edits] == [
        (3, 1, False),
        (2, None, False),
        (1, None, True),
    ]
    assert {edit["author"] for edit in edits} == {"ann"}
    of_new = client.get("/v1/labels/history", params={"id": "new", "limit": 1}, headers=bob).json()
    assert [edit["version"] for edit in of_new["edits"]] == [3] and of_new["version"] == 3
