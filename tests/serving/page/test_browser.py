"""The page in a real browser: what it does, what it never does, and how it looks on a narrow screen."""

import csv
import json
import os
import shutil
import threading
import time

import pytest
import uvicorn

import dexter
from dexter.evaluation.runs import evaluate_run
from dexter.serving.app import create_app
from dexter.serving.settings import ServeSettings
from tests.conftest import SMALL

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = os.environ.get("DEXTER_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: install it, or set DEXTER_CHROMIUM to its path"),
]
HOSTILE = '<script>window.hacked=1</script><img src=x onerror="window.hacked=2">\'"><b>bold'


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """The folder of a run with both heads, evaluated."""
    folder = tmp_path_factory.mktemp("browsed") / "run"
    settings = {**SMALL, "head.classifier": True, "encoder.normalize": False, "head.projection": 16}
    dexter.train(world, recipe="dexter", out=folder, overrides=settings)
    evaluate_run(folder, world)
    return folder


@pytest.fixture(scope="module")
def address(run):
    """Where the run is served."""
    settings = ServeSettings(port=0, keep_edits=False)
    server = uvicorn.Server(uvicorn.Config(create_app({"world": run}, settings), port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser, address):
    """Open a page; at the end nothing may have been complained of."""
    contexts, complaints = [], []

    def go(path="/", **options):
        context = browser.new_context(base_url=address, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path)
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def type_text(page, text):
    page.get_by_test_id("text").fill(text)
    page.wait_for_selector(".labels li")


def test_labels_appear_while_typing_and_open_why(visit, world):
    page = visit()
    type_text(page, world.test.texts[0])
    assert page.locator(".labels > li").count() == 10
    assert page.locator("#announcer").inner_text().startswith("10 labels, best: ")
    page.locator(".label").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-testid="why"]')
    assert page.locator(".label").nth(1).get_attribute("aria-expanded") == "true"
    # The list was drawn anew, and the keyboard is still where it was.
    assert page.evaluate("document.activeElement.dataset.key") == page.locator(".label").nth(1).get_attribute(
        "data-key"
    )
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-testid="why"]', state="detached")


def test_an_example_fills_the_text(visit):
    page = visit()
    page.get_by_test_id("example").first.click()
    page.wait_for_selector(".labels li")
    assert page.get_by_test_id("text").input_value().strip()


def test_heads_side_by_side_and_copies(visit, world):
    page = visit()
    type_text(page, world.test.texts[1])
    page.get_by_test_id("compare").check()
    page.wait_for_selector('[data-testid="columns"]')
    assert page.locator('[data-testid="columns"] > section').count() == 3
    assert page.locator(".move").count() == 20
    page.get_by_test_id("head").select_option("encoder")
    page.wait_for_selector('[data-testid="columns"] > section:first-child[aria-label="encoder"]')
    page.locator(".share summary").click()
    assert '"head": "encoder"' in page.get_by_test_id("curl").inner_text()
    assert json.loads(page.get_by_test_id("json").inner_text())["results"]
    page.locator('[data-copy="json"]').click()
    page.wait_for_selector('[data-copy="json"]:is(:text("Copied"), :text("Selected"))')


def test_a_new_label_is_previewed_added_and_harmless(visit):
    page = visit()
    type_text(page, HOSTILE)
    page.get_by_test_id("new-label").fill(HOSTILE)
    page.wait_for_selector('[data-testid="proposal"] .big')
    rank = int(page.locator('[data-testid="proposal"] .big').inner_text().removeprefix("#"))
    page.get_by_test_id("add").click()
    page.wait_for_selector('[data-testid="added"]')
    assert page.get_by_test_id("new-label").input_value() == ""
    assert HOSTILE in page.locator(".labels .name").nth(rank - 1).inner_text()
    page.locator(".label").nth(rank - 1).click()
    page.wait_for_selector('[data-testid="why"]')
    for path in ("/labels?q=script", "/map"):
        page.goto(path)
        assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0
    page.get_by_test_id("find").fill("<script>")
    assert HOSTILE[:20] in page.get_by_test_id("tip").inner_text()
    assert page.evaluate("window.hacked") is None


def test_labels_are_explored(visit, world):
    page = visit("/labels")
    page.get_by_test_id("search").fill("river")
    expected = sum("river" in text for text in world.label_texts)
    playwright.expect(page.locator("[data-testid=listing] li")).to_have_count(expected)
    assert "q=river" in page.url and page.get_by_test_id("band-metrics").count() == 1
    page.locator('[data-testid="listing"] a').first.click()
    page.wait_for_selector('[data-testid="detail"]')
    assert "Test texts that missed it" in page.get_by_test_id("detail").inner_text()


def test_curves_follow_a_run(visit, run):
    page = visit("/training")
    assert page.get_by_test_id("chart").count() == 4
    ended = (run / "run.json").read_bytes()
    (run / "run.json").unlink()
    try:
        page.reload()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4321, "kind": "train", "epoch": 3.0, "loss": 0.1}) + "\n")
        page.wait_for_selector("text=step 4,321")
    finally:
        (run / "run.json").write_bytes(ended)
    page.wait_for_selector("text=Finished after")


def test_the_map_tells_texts(visit):
    page = visit("/map")
    point = page.locator("circle").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#tip:not([hidden])")
    assert page.get_by_test_id("tip").inner_text()
    page.locator("[data-band=tail]").uncheck()
    assert page.locator("circle.tail:not([hidden])").count() == 0


def test_a_file_is_labelled(visit, world, tmp_path):
    texts = [*world.test.texts[:40], 'two\nlines, "quoted"', ""]
    given = tmp_path / "given.csv"
    with given.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([row, text] for row, text in enumerate(texts))])
    page = visit("/batch")
    page.get_by_test_id("file").set_input_files(given)
    playwright.expect(page.get_by_test_id("column")).to_have_value("1")
    page.get_by_test_id("start").click()
    with page.expect_download() as download:
        page.get_by_test_id("download").click()
    with open(download.value.path(), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == texts
    assert all(row["label_1"] and float(row["score_1"]) >= float(row["score_2"]) for row in rows[:-1])
    assert rows[-1]["label_1"] == ""


@pytest.mark.parametrize("path", ["/", "/labels?label=L0", "/map", "/training", "/batch"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_need_no_sideways_scrolling(visit, world, path, scheme):
    page = visit(path, viewport={"width": 320, "height": 640}, color_scheme=scheme)
    if path == "/":
        page.get_by_test_id("compare").check()
        type_text(page, "W" * 200 + " " + world.test.texts[0])
        page.locator(".label").first.click()
        page.wait_for_selector('[data-testid="why"]')
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_everything_is_reached_by_keyboard_and_named(visit, world):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    type_text(page, world.test.texts[0])
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input:not([type=hidden]), select, textarea')].filter(
            (each) => !each.labels?.length && !each.ariaLabel).length"""
    )
    assert unnamed == 0
    assert page.locator("main, nav, header, footer").count() >= 4 and page.locator("h1").count() == 1


def test_without_scripts_forms_do_the_same(visit, world):
    page = visit(java_script_enabled=False)
    page.get_by_test_id("text").fill(world.test.texts[0])
    page.get_by_test_id("new-label").fill("copper lantern in a meadow")
    page.get_by_role("button", name="Look").click()
    assert page.locator(".labels > li").count() == 10 and page.get_by_test_id("proposal").count() == 1
    page.locator(".label").nth(2).click()
    assert page.get_by_test_id("why").count() == 1
    page.get_by_test_id("add").click()
    assert page.get_by_test_id("added").count() == 1
    page.get_by_test_id("example").first.click()
    assert page.locator(".labels > li").count() == 10
