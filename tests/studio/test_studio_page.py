"""The studio's page in a browser: what a person does with it, and what they then see."""

import threading
import time

import pytest

from browser import console_errors, set_viewport
from namm.studio import answers

PATIENCE = 120
SHOWN = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)"
# How many colours a canvas has: more than one in a picture of something
COLOURS = """const c = document.querySelector(arguments[0]);
const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);
return new Set(d).size"""


@pytest.fixture
def page(browser, server):
    """The page, open and ready."""
    browser.get(server.url)
    wait_for(lambda: browser.find_element("css selector", ".tabs").is_displayed())
    return browser


def wait_for(condition, what="the page"):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.05)
    return found


def find(page, selector):
    return page.find_element("css selector", selector)


def texts(page, selector):
    return page.execute_script(SHOWN, selector)


def slide(page, selector, value):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    page.execute_script(script, find(page, selector), value)


def distances(page, selector):
    """What stands behind ℓ in the cards, the last of it where it was polished."""
    lines = [line for line in texts(page, selector) if line.startswith("ℓ")]
    return [line.removeprefix("ℓ ").split(" → ")[-1] for line in lines]


def assert_fits(page):
    over = page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert over <= 0, f"{over} pixels beyond the page"


def test_samples_are_drawn_and_polished(page, server):
    assert find(page, "h1").text == server.studio.run.name
    assert texts(page, "#verdict") != [""]
    slide(page, "#draw [name=steps]", 4)
    slide(page, "#draw [name=n]", 3)
    find(page, "#draw button.main").click()
    wait_for(lambda: len(texts(page, "#draw .card")) == 6, "samples")
    before = distances(page, "#draw .ours .value")
    assert len(before) == len(distances(page, "#draw .baseline .value")) == 3
    assert page.execute_script(COLOURS, "#draw .ours .card canvas") > 10
    for size in ((1280, 900), (390, 844)):
        set_viewport(page, *size)
        assert_fits(page)
    set_viewport(page, 1280, 900)
    find(page, "#draw [name=polish]").click()
    wait_for(lambda: "→" in "".join(texts(page, "#draw .value")), "polished samples")
    after = distances(page, "#draw .ours .value")
    assert all("10⁻" in each for each in after)  # below a thousandth, where the samples' are about 0.1
    assert not any("10⁻" in each for each in before)
    assert_fits(page)
    wait_for(lambda: find(page, "#draw [name=polish]").is_enabled())
    find(page, "#draw [name=polish]").click()
    wait_for(lambda: distances(page, "#draw .ours .value") == before, "the samples as they were")
    assert console_errors(page) == []


def test_images_polished_too_late_do_not_replace_newer_ones(page, monkeypatch):
    slide(page, "#draw [name=steps]", 4)
    slide(page, "#draw [name=seed]", 1)
    find(page, "#draw button.main").click()
    wait_for(lambda: find(page, "#draw [name=polish]").is_enabled(), "samples of seed 1")
    first, answered = distances(page, "#draw .ours .value"), page.execute_script("return watched")
    held, draw = threading.Event(), answers.QUESTIONS["draw"]
    later = draw._replace(method=lambda studio, **how: held.wait(PATIENCE) and draw.method(studio, **how))
    monkeypatch.setitem(answers.QUESTIONS, "draw", later)
    slide(page, "#draw [name=seed]", 2)
    find(page, "#draw button.main").click()
    find(page, "#draw [name=polish]").click()
    held.set()
    wait_for(lambda: page.execute_script("return watched") == answered + 3, "samples, and both polished")
    found = wait_for(lambda: distances(page, "#draw .ours .value"))
    assert found != first
    assert "→" not in "".join(texts(page, "#draw .value"))
    assert find(page, "#draw [name=polish]").is_enabled()
    assert not find(page, "#draw [name=polish]").is_selected()
    assert console_errors(page) == []


def test_an_image_is_moved_and_brought_back(page):
    find(page, "#tab-perturb").click()
    cards = wait_for(lambda: texts(page, "#perturb .card"))
    assert cards[0].startswith("x, held out")
    found = []
    for share in (0, 0.25, 1):
        before = texts(page, "#perturb .value")
        end = float(find(page, "#perturb [name=sigma]").get_attribute("max"))
        slide(page, "#perturb [name=sigma]", share * end)
        wait_for(lambda: texts(page, "#perturb .value") != before, "another σ")  # noqa: B023
        found.append(distances(page, "#perturb .value"))
    original, returned, untouched = zip(*found, strict=True)
    assert len(set(original)) == 1
    assert len(set(returned)) == len(set(untouched)) == 3
    assert page.execute_script("return document.querySelectorAll('#perturb .chart path').length") == 2
    wait_for(lambda: page.execute_script("return charts.size") == 1, "an end of the charts that are gone")
    find(page, "#perturb .next").click()
    wait_for(lambda: distances(page, "#perturb .value")[0] != original[0], "the next image")
    for size in ((1280, 900), (390, 844)):
        set_viewport(page, *size)
        assert_fits(page)
    assert console_errors(page) == []


def test_observations_are_painted_and_answered(page):
    from selenium.webdriver import ActionChains

    find(page, "#tab-posterior").click()
    wait_for(lambda: texts(page, "#observed") == ["16 of 64 pixels are observed"])
    find(page, "#posterior .clear").click()
    assert texts(page, "#observed") == ["0 of 64 pixels are observed"]
    find(page, "#posterior button.main").click()
    wait_for(lambda: "Nothing is observed" in texts(page, "#message")[0], "a sentence")
    console_errors(page)  # the browser itself notes the status of that answer
    slide(page, "#posterior [name=brush]", 1)
    canvas = find(page, "#paint")
    step = canvas.size["width"] / 8
    start = ActionChains(page).move_to_element_with_offset(canvas, -3.5 * step, -0.5 * step)
    start.click_and_hold().move_by_offset(4 * step, 0).release().perform()
    assert texts(page, "#observed") == ["5 of 64 pixels are observed"]  # a stroke over five pixels of a row
    find(page, "#posterior .random").click()
    assert texts(page, "#observed") == ["16 of 64 pixels are observed"]
    slide(page, "#posterior [name=steps]", 4)
    slide(page, "#posterior [name=n]", 2)
    find(page, "#posterior button.main").click()
    wait_for(lambda: len(texts(page, "#posterior .found .card")) == 6, "posterior samples")
    assert "16 values" in "".join(texts(page, "#posterior .found .card"))
    assert len([line for line in texts(page, "#posterior .ours .value") if line.startswith("χ²")]) == 2
    for size in ((1280, 900), (390, 844)):
        set_viewport(page, *size)
        assert_fits(page)
    assert console_errors(page) == []


def test_tabs_wait_for_another_window(page, server):
    with server.studio.work.doing("painting"):
        find(page, "#tab-posterior").click()
        wait_for(lambda: "painting" in find(page, "#message").text, "why nothing is shown")
        find(page, "#posterior .random").click()
    wait_for(lambda: texts(page, "#observed") == ["16 of 64 pixels are observed"])
    with server.studio.work.doing("painting"):
        find(page, "#tab-perturb").click()
        wait_for(lambda: "painting" in find(page, "#message").text, "why nothing is shown")
    wait_for(lambda: texts(page, "#perturb .card"))
    assert not find(page, "#message").is_displayed()
    assert all("409" in error for error in console_errors(page))  # which the browser itself notes


def test_without_the_token_the_page_says_where_it_is(browser, server):
    browser.get(server.url.partition("#")[0])
    wait_for(lambda: "The address lacks its token" in find(browser, "#message").text)
    assert not find(browser, ".tabs").is_displayed()
    assert console_errors(browser) == []


def test_what_a_run_lacks_is_hidden_in_a_sentence(browser, server, monkeypatch):
    monkeypatch.setattr(server.studio, "lacking", lambda stage: "the stage is not there." if stage == "mdm" else "")
    browser.get(server.url)
    wait_for(lambda: find(browser, ".tabs").is_displayed())
    assert find(browser, "#tab-perturb").get_attribute("aria-selected") == "true"
    find(browser, "#tab-draw").click()
    assert find(browser, "#draw").text == "This needs more of the run: the stage is not there."
    assert console_errors(browser) == []
