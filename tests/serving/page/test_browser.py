"""The page in a real browser: what it does, what it never does, and how it looks on a narrow screen."""

import csv
import json
import os
import re
import shlex
import shutil
import threading
import time
from itertools import pairwise
from urllib.request import Request, urlopen

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
    pytest.mark.slow(minutes=0.2),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: install it, or set DEXTER_CHROMIUM to its path"),
]
HOSTILE = '<script>window.hacked=1</script><img src=x onerror="window.hacked=2">\'"><b>bold'
PATHS = ["/", "/labels?label=L0", "/map", "/training", "/batch", "/annotate", "/labels?label=nobody"]
TIMEOUT = 120_000
"""Milliseconds: the machine may be busy, and nothing here measures speed."""


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
    """Open a page; at the end nothing may have been complained of, but that a page asked for is not there."""
    contexts, complaints = [], []

    def go(path="/", **options):
        context = browser.new_context(base_url=address, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        playwright.expect.set_options(timeout=TIMEOUT)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path)
        return page

    yield go
    for context in contexts:
        context.close()
    assert [text for text in complaints if "status of 404" not in text] == []


@pytest.fixture
def ask(address):
    """The labels that the service gives a text."""

    def post(text, **choices):
        return send(f"{address}/v1/predict", {"inputs": text, "k": 10, **choices})["results"][0]["labels"]

    return post


def send(address, body):
    request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)


def type_text(page, text):
    page.get_by_test_id("text").fill(text)
    page.wait_for_selector(".labels li")


def names(page):
    return page.locator(".labels .name").all_inner_texts()


def expect_names(page, labels):
    playwright.expect(page.locator(".labels .name")).to_have_text([label["text"] for label in labels])


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


def test_the_dial_turns_the_ranking_at_once_and_back(visit, world, ask):
    page, text = visit(), world.test.texts[2]
    type_text(page, text)
    tuned = names(page)
    dial = page.get_by_test_id("dial")
    turned = 0.0 if float(dial.input_value()) > 0.5 else 1.0
    dial.focus()
    page.keyboard.press("Home" if turned == 0.0 else "End")
    page.wait_for_selector('[data-testid="reset"]')
    expect_names(page, ask(text, dial=turned))
    assert "Scores" in page.get_by_test_id("caption").inner_text() and names(page) != tuned
    page.get_by_test_id("reset").click()
    page.wait_for_selector('[data-testid="reset"]', state="detached")
    assert names(page) == tuned and float(dial.input_value()) != turned


def test_why_explains_the_ranking_that_is_shown(visit, world, ask):
    page, text = visit(), world.test.texts[2]
    type_text(page, text)
    page.get_by_test_id("head").select_option("classifier")
    page.get_by_test_id("neighbours").select_option(index=1)
    page.get_by_test_id("dial").fill("0.5")
    neighbours = page.get_by_test_id("neighbours").input_value() == "on"
    asked = ask(text, head="classifier", neighbours=neighbours, dial=0.5)
    expect_names(page, asked)
    page.locator(".label").nth(1).click()
    page.wait_for_selector('[data-testid="parts"]')
    rows = page.locator('[data-testid="parts"] tr').all_inner_texts()
    parts = {title.strip(): float(value) for title, _, value in (row.partition("\t") for row in rows)}
    score = parts.pop("Score")
    assert score == pytest.approx(asked[1]["score"], abs=6e-4) and ("Neighbours" in parts) == neighbours
    assert sum(parts.values()) == pytest.approx(score, abs=1e-3 * len(parts)) and "Dual encoder" not in parts
    assert page.locator('[data-testid="words"] mark').count() and page.get_by_test_id("neighbours").count()


def test_heads_side_by_side_show_what_moved(visit, world, ask):
    page, text = visit(), world.test.texts[1]
    type_text(page, text)
    page.get_by_test_id("compare").check()
    page.wait_for_selector('[data-testid="columns"]')
    columns = page.locator('[data-testid="columns"] > section')
    titles = [column.get_attribute("aria-label") for column in columns.all()]
    assert titles[0] == page.get_by_test_id("head").input_value() and "neighbours" in titles[3]
    assert set(titles[:3]) == {"unified", "encoder", "classifier"}
    first = [label["text"] for label in ask(text, k=50)]
    for column, head in zip((columns.nth(1), columns.nth(2)), titles[1:3], strict=True):
        labels = [label["text"] for label in ask(text, head=head)]
        assert column.locator(".name").all_inner_texts() == labels
        moves = [first.index(label) - place if label in first else None for place, label in enumerate(labels)]
        shown = ["new" if m is None else f"▲ {m}" if m > 0 else f"▼ {-m}" if m else "=" for m in moves]
        assert column.locator(".move [aria-hidden]").all_inner_texts() == shown
    page.get_by_test_id("head").select_option(titles[1])
    page.wait_for_selector(f'[data-testid="columns"] > section:first-child[aria-label="{titles[1]}"]')


def copy(page, what, beginning):
    """Press a button that copies, and wait for what it is known to begin with."""
    page.locator(f'[data-copy="{what}"]').click()
    found = "(beginning) => navigator.clipboard.readText().then((text) => text.startsWith(beginning) && text)"
    return page.wait_for_function(found, arg=beginning).json_value()


def test_what_is_copied_asks_the_same_again(visit, world):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    type_text(page, f'it\'s {world.test.texts[1]} "$HOME"')
    page.get_by_test_id("head").select_option("classifier")
    page.wait_for_selector('[data-testid="reset"]')
    page.locator(".share summary").click()
    command = shlex.split(copy(page, "curl", "curl "))
    body = json.loads(command[command.index("-d") + 1])
    copied = json.loads(copy(page, "json", "{"))
    again = send(command[2], body)
    assert body["head"] == "classifier" and [label["id"] for label in copied["results"][0]["labels"]] == [
        label["id"] for label in again["results"][0]["labels"]
    ]


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
    page.get_by_test_id("compare").check()
    page.locator(".label").nth(rank - 1).click()
    page.wait_for_selector('[data-testid="why"]')
    for path in ("/labels?q=script", "/map"):
        page.goto(path)
        assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0
    page.get_by_test_id("find").fill("<script>")
    assert HOSTILE[:20] in page.get_by_test_id("tip").inner_text()
    assert page.evaluate("window.hacked") is None


def test_the_policy_lets_no_inline_script_run(browser, address):
    context = browser.new_context(base_url=address)
    page = context.new_page()
    answer = page.goto("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hacked = 3";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", '<img src="x:" onerror="window.hacked = 4">');
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    context.close()


def test_labels_are_explored(visit, world):
    page = visit("/labels")
    page.get_by_test_id("search").fill("river")
    expected = sum("river" in text for text in world.label_texts)
    playwright.expect(page.locator("[data-testid=listing] li")).to_have_count(expected)
    playwright.expect(page).to_have_url(re.compile("q=river"))
    assert page.get_by_test_id("band-metrics").count() == 1
    page.locator('[data-testid="listing"] a').first.click()
    page.wait_for_selector('[data-testid="detail"]')
    assert "Test texts that missed it" in page.get_by_test_id("detail").inner_text()
    playwright.expect(page.locator("#detail-title")).to_be_focused()
    assert "label=" in page.url
    page.go_back()
    page.wait_for_selector('[data-testid="detail"]', state="detached")
    page.get_by_role("link", name="torso").click()
    page.wait_for_selector('.filter [aria-current]:text("torso")')
    page.get_by_test_id("search").fill("zzz")
    page.wait_for_selector("text=No label has this")
    assert "band=torso" in page.url


def test_a_missing_label_is_an_error_in_words(visit):
    page = visit("/labels?label=nobody")
    assert page.get_by_role("alert").inner_text() == "No label has this id."
    page.get_by_role("navigation").get_by_role("link", name="Labels").click()
    page.wait_for_selector('[data-testid="listing"]')


def test_curves_follow_a_run(visit, run):
    page = visit("/training")
    assert page.get_by_test_id("chart").count() == 6
    page.locator(".plot").first.hover()
    assert page.locator(".plot .tip").first.inner_text().startswith("step ")
    page.get_by_role("heading", level=1).hover()
    ended = (run / "run.json").read_bytes()
    (run / "run.json").unlink()
    try:
        page.reload()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4321, "kind": "train", "epoch": 1.5, "loss": 0.1, "seconds": 6.0}) + "\n")
        page.wait_for_selector("text=step 4,321, epoch 1.50 of 2, about 2 s left")
    finally:
        (run / "run.json").write_bytes(ended)
    page.wait_for_selector("text=Finished after")


def test_the_map_shows_the_texts_of_points(visit, world):
    page = visit("/map")
    point = page.locator("circle").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#tip:not([hidden])")
    assert page.get_by_test_id("tip").inner_text()
    page.locator("[data-band=tail]").uncheck()
    assert page.locator("circle.tail:not([hidden])").count() == 0


def test_the_map_is_walked_by_keyboard(visit):
    page = visit("/map")
    page.get_by_test_id("map").focus()
    seen = []
    for key in ("ArrowRight", "ArrowLeft", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
        seen.append(page.get_by_test_id("tip").inner_text())
        assert page.get_by_test_id("hits").inner_text() == seen[-1]
    assert len(set(seen)) >= 2
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-testid="detail"]')
    assert page.locator("#detail-title").inner_text() == seen[-1]


def test_a_file_is_labelled(visit, world, tmp_path):
    texts = [*world.test.texts[:40], 'two\nlines, "quoted"', "", "naïve café"]
    given = tmp_path / "given.csv"
    with given.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["id", "text"], [], *([row, text] for row, text in enumerate(texts)), []])
    page = visit("/batch")
    page.get_by_test_id("file").set_input_files(given)
    playwright.expect(page.get_by_test_id("column")).to_have_value("1")
    page.get_by_test_id("start").click()
    page.wait_for_selector("#download:not([hidden])")
    assert page.get_by_test_id("state").inner_text() == "42 rows labelled, 1 without a text."
    with page.expect_download() as download:
        page.get_by_test_id("download").click()
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == texts and [row["id"] for row in rows] == [str(n) for n in range(len(texts))]
    labelled = [row for row in rows if row["text"]]
    assert all(row["text_1"] in world.label_texts for row in labelled[:40])
    assert all(float(row["score_1"]) >= float(row["score_2"]) for row in labelled)
    assert rows[-2]["label_1"] == "" and rows[-1]["label_1"]


WRONG = {
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not a table in text form"),
    "empty.csv": (b"", "The file is empty"),
    "names.csv": (b"id,text\r\n", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_reported(visit, tmp_path, name):
    content, complaint = WRONG[name]
    (tmp_path / name).write_bytes(content)
    page = visit("/batch")
    page.get_by_test_id("file").set_input_files(tmp_path / name)
    if complaint is None:  # One row: a text rather than the names of columns.
        playwright.expect(page.get_by_test_id("named")).not_to_be_checked()
        page.get_by_test_id("named").check()
        complaint = "no rows below"
    playwright.expect(page.get_by_test_id("state")).to_contain_text(complaint)
    assert page.get_by_test_id("start").is_disabled()


def test_other_encodings_are_read(visit, tmp_path):
    page = visit("/batch")
    for name, encoding in (("latin.csv", "windows-1252"), ("wide.csv", "utf-16")):
        (tmp_path / name).write_bytes("text;id\r\nnaïve café;1\r\n".encode(encoding))
        page.get_by_test_id("file").set_input_files(tmp_path / name)
        playwright.expect(page.locator("#sample td").first).to_have_text("naïve café")


def open_everything(page, path, text):
    """The page in its largest form."""
    if path != "/":
        return
    page.get_by_test_id("compare").check()
    type_text(page, text)
    page.get_by_test_id("dial").fill("0.5")
    page.wait_for_selector('[data-testid="reset"]')
    page.get_by_test_id("new-label").fill("a.very_long.dotted_name.of_a_label.that_hardly.ever_ends and more")
    page.wait_for_selector('[data-testid="proposal"]')
    page.locator(".label").first.click()
    page.wait_for_selector('[data-testid="why"]')
    page.locator(".share summary").click()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_all_of_it_readably(visit, world, path, scheme):
    page = visit(path, viewport={"width": 320, "height": 640}, color_scheme=scheme, reduced_motion="reduce")
    open_everything(page, path, "W" * 200 + " " + world.test.texts[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.evaluate(CONTRAST) == []


CONTRAST = """() => {
    const parse = (color) => {
        const [r, g, b, a = 1] = color.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
        return color.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
    };
    const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
    const light = (color) => {
        const [r, g, b] = color.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        const base = element.parentElement ? behind(element.parentElement) : [255, 255, 255];
        return over(parse(getComputedStyle(element).backgroundColor), base);
    };
    const weak = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || element.closest("svg, :disabled, .skip, .default, .reader")) continue;
        const style = getComputedStyle(element);
        const back = behind(element);
        const [a, b] = [light(over(parse(style.color), back)), light(back)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        if (ratio < (large ? 3 : 4.5)) weak.push(`${element.className} ${element.textContent.slice(0, 30)} ${ratio}`);
    }
    return weak;
}"""
"""Texts whose contrast with what is behind them is below WCAG's level AA."""

UNNAMED = """() => [...document.querySelectorAll(
    "button, a, input:not([type=hidden]), select, textarea, [role=img]")].filter(
    (each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.outerHTML)"""
HEADINGS = """() => [...document.querySelectorAll("h1, h2, h3, h4")].map((each) => Number(each.tagName[1]))"""
TWICE = """() => { const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
    return ids.filter((id, at) => ids.indexOf(id) !== at); }"""


@pytest.mark.parametrize("path", PATHS)
def test_a_screen_reader_finds_its_way(visit, world, path):
    page = visit(path)
    open_everything(page, path, world.test.texts[0])
    for landmark in ("main", "navigation", "banner", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1
    assert page.evaluate(UNNAMED) == [] and page.evaluate(TWICE) == []
    levels = page.evaluate(HEADINGS)
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    assert page.title().endswith("· dexter") and page.locator("html").get_attribute("lang") == "en"
    live = page.locator("[role=status], [role=alert], [aria-live]")
    assert live.count() or path == "/training"


def test_everything_is_done_by_keyboard(visit, world):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")

    def tab_to(selector):
        for _ in range(40):
            if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                # What has the focus shows it.
                style = "getComputedStyle(document.activeElement).outlineStyle"
                assert page.evaluate(style) != "none"
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} is not reached")

    tab_to("#text")
    page.keyboard.type(world.test.texts[0][:40])
    page.wait_for_selector(".labels li")
    tab_to("#dial")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector('[data-testid="reset"]')
    tab_to("[name=compare]")
    page.keyboard.press("Space")
    page.wait_for_selector('[data-testid="columns"]')
    tab_to("[name=reset]")
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-testid="reset"]', state="detached")
    playwright.expect(page.get_by_test_id("dial")).to_be_focused()
    tab_to(".label")
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-testid="why"]')
    tab_to("#label")
    page.keyboard.type("copper lantern")
    page.wait_for_selector('[data-testid="proposal"]')
    tab_to("summary")
    page.keyboard.press("Enter")
    tab_to("[data-copy=curl]")


def test_without_scripts_forms_do_the_same(visit, world, ask):
    page, text = visit(java_script_enabled=False), world.test.texts[0]
    page.get_by_test_id("text").fill(text)
    page.get_by_test_id("new-label").fill("copper lantern in a meadow")
    page.get_by_role("button", name="Look").click()
    assert page.locator(".labels > li").count() == 10 and page.get_by_test_id("proposal").count() == 1
    page.locator(".label").nth(2).click()
    assert page.get_by_test_id("why").count() == 1
    page.get_by_test_id("add").click()
    assert page.get_by_test_id("added").count() == 1
    page.get_by_test_id("dial").focus()
    page.keyboard.press("Home")
    page.get_by_test_id("compare").check()
    page.locator(".actions .primary").click()
    expect_names(page, ask(text, dial=0.0))
    assert page.get_by_test_id("columns").count() == 1 and float(page.get_by_test_id("dial").input_value()) == 0.0
    page.get_by_test_id("reset").click()
    expect_names(page, ask(text))
    page.get_by_test_id("example").first.click()
    assert page.locator(".labels > li").count() == 10


@pytest.mark.parametrize("scripts", [True, False])
def test_labels_are_corrected_with_the_keyboard_alone_with_scripts_and_without(visit, scripts):
    page = visit("/annotate", java_script_enabled=scripts)
    page.get_by_test_id("texts").fill(f"{HOSTILE} {scripts}")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=save]")
    page.locator("[data-testid=item] input[type=checkbox]:not(:checked)").first.focus()
    page.keyboard.press("Space")
    page.get_by_test_id("save").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=saved]")
    with page.expect_download() as started:
        page.get_by_test_id("download").click()
    lines = [json.loads(line) for line in started.value.path().read_text().splitlines()]
    assert f"{HOSTILE} {scripts}" in [line["text"] for line in lines] and all(line["labels"] for line in lines)
