"""The page in a browser: values under the pointer, zoom, slider, states in time, files; and nothing of others runs."""

import base64
import csv
import io
import json
import re
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import yaml

from browser import chromium, console_errors, set_viewport
from namm.experiments.engine.stages.report import collect
from namm.report import page as page_module
from namm.report.contents import Contents, StageLine
from namm.report.coordinates import Axis, Coordinates
from namm.report.figures import View, png
from namm.report.figures.samples import Method
from namm.report.page import render_page

ATTACK = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">\'"`${window.hacked = 1}'
PICTURES = ("samples", "grids", "worst", "mirror")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Still pictures are small: they take long to draw, and nobody looks at these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "png", lambda draw, theme: png(draw, theme, dpi=30))
        yield


@pytest.fixture(scope="module")
def browser():
    """One for all tests, since it takes long to begin."""
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def contents(whole_run):
    return collect(whole_run)


@pytest.fixture(scope="module")
def report(contents, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(contents))
    return path.as_uri()


@pytest.fixture
def page(browser, report):
    set_viewport(browser, 1280, 900)
    browser.get(report)
    return browser


def point(page, canvas, row, column, kind="pointermove", **event):
    """Put the pointer on the middle of a pixel of a canvas that shows a picture so many pixels wide and high."""
    script = """
      const [canvas, row, column, height, width, kind, event] = arguments, box = canvas.getBoundingClientRect();
      const place = { clientX: box.left + (column + 0.5) / width * box.width, bubbles: true, cancelable: true,
                      clientY: box.top + (row + 0.5) / height * box.height, pointerType: "mouse", ...event };
      canvas.dispatchEvent(kind === "wheel" ? new WheelEvent(kind, place) : new PointerEvent(kind, place));
    """
    height, width = event.pop("shape")
    page.execute_script(script, canvas, row, column, height, width, kind, event)


def canvases(page, figure):
    return page.find_elements("css selector", f"figure[data-figure={figure}] canvas.picture")


def tip(page, figure):
    """What stands beside the pointer: the value, the coordinates, the picture's name."""
    script = (
        "return [...document.querySelectorAll(`figure[data-figure=${arguments[0]}] .tip > *`)].map(e => e.textContent)"
    )
    return page.execute_script(script, figure)


def number(text):
    """A number as the page writes it."""
    plain = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")).replace("·10", "e")
    return float(plain.split("= ")[1])


def pixels(page, canvas):
    uri = page.execute_script("return arguments[0].toDataURL()", canvas)
    return base64.b64decode(uri.split(",", 1)[1])


def saved(page, figure, text):
    """What a click on a figure's link would save."""
    script = """
      const [figure, text, done] = arguments;
      const links = document.querySelectorAll(`figure[data-figure=${figure}] .file`);
      const link = [...links].filter((each) => each.textContent === text).pop();
      link.addEventListener("click", (event) => event.preventDefault());  // no dialogue, and the page stays
      const blobs = [], make = URL.createObjectURL;
      URL.createObjectURL = (blob) => { blobs.push(blob); return make(blob); };
      link.click();
      URL.createObjectURL = make;
      if (blobs.length) blobs[0].text().then((content) => done([link.download, content]));
      else done([link.download, link.href]);
    """
    return page.execute_async_script(script, figure, text)


def test_the_pointer_tells_value_and_coordinates_of_a_pixel(page, contents):
    rule = contents.methods[0]
    for k, (method, values) in enumerate([(m, v) for v in ("images", "residuals") for m in contents.methods]):
        canvas = canvases(page, "samples")[4 * k + 1]  # the second of four
        array = getattr(method, values)[1, 0]
        for row, column in ((0, 0), (3, 5), (7, array.shape[1] - 1)):
            point(page, canvas, row, column, shape=array.shape)
            value, places, name = tip(page, "samples")
            assert number(value) == pytest.approx(array[row, column], rel=6e-3)
            assert value.startswith("u = " if values == "images" else "residual = ")
            assert name == f"{method.name} 2"
            x, t = (number(place) for place in places.split(", "))
            assert x == pytest.approx(10 * (1 - row / 7), rel=6e-3)
            assert t == pytest.approx(0.25 * (column + 1 + (values == "residuals")), rel=6e-3)  # 5 steps of 0.05
    assert rule.residuals.shape[-1] == 7
    assert not console_errors(page)


def test_a_click_and_the_wheel_look_closer_and_buttons_go_back(page, contents):
    canvas = canvases(page, "samples")[0]
    image = contents.methods[0].images[0, 0]
    figure = page.find_element("css selector", "figure[data-figure=samples]")
    before = pixels(page, canvas)
    point(page, canvas, 0, 0, "wheel", shape=(8, 8), deltaY=-400)
    assert figure.get_attribute("data-zoom") in (None, "1")  # the page scrolls
    point(page, canvas, 1, 1, "click", shape=(8, 8))
    assert figure.get_attribute("data-zoom") == "2"
    assert pixels(page, canvas) != before
    point(page, canvas, 0, 0, shape=(4, 4))  # rows and columns 0 to 3 are seen
    assert number(tip(page, "samples")[0]) == pytest.approx(image[0, 0], rel=6e-3)
    point(page, canvas, 3, 3, shape=(4, 4))
    assert number(tip(page, "samples")[0]) == pytest.approx(image[3, 3], rel=6e-3)
    point(page, canvas, 3, 3, "wheel", shape=(4, 4), deltaY=-400)
    assert figure.get_attribute("data-zoom") == "4"
    point(page, canvas, 3, 3, "pointermove", shape=(4, 4))
    assert number(tip(page, "samples")[0]) == pytest.approx(image[3, 3], rel=6e-3)  # it stays under the pointer
    for _ in range(2):
        figure.find_element("css selector", "button[aria-label='zoom out']").click()
    point(page, canvas, 0, 0, "pointerleave", shape=(8, 8))
    assert figure.get_attribute("data-zoom") == "1"
    assert pixels(page, canvas) == before
    canvas.send_keys("\ue015")  # arrow down, by keyboard
    assert number(tip(page, "samples")[0]) == pytest.approx(image[0, 0], rel=6e-3)
    assert not console_errors(page)


def test_the_slider_wipes_between_ours_and_the_baseline(page, contents):
    canvas = canvases(page, "compare")[0]
    slide = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    slider = page.find_element("css selector", "figure[data-figure=compare] input[type=range]")
    drawn = {}
    for where, method in ((1, contents.methods[0]), (0, contents.methods[1])):
        page.execute_script(slide, slider, where)
        point(page, canvas, 2, 4, shape=(8, 8))
        assert number(tip(page, "compare")[0]) == pytest.approx(method.images[0, 0, 2, 4], rel=6e-3)
        assert tip(page, "compare")[2] == f"{method.name} 1"
        drawn[where] = pixels(page, canvas)
    assert drawn[0] != drawn[1]
    page.find_element("css selector", "figure[data-figure=compare] button[aria-label='sample 3']").click()
    point(page, canvases(page, "compare")[0], 2, 4, shape=(8, 8))
    assert number(tip(page, "compare")[0]) == pytest.approx(contents.methods[1].images[2, 0, 2, 4], rel=6e-3)
    assert not console_errors(page)


def playing(page):
    figure = page.find_element("css selector", "figure[data-figure=time]")
    return figure, figure.find_element("xpath", ".//button[text()='Play' or text()='Pause']")


def frame(figure):
    return int(figure.get_attribute("data-frame"))


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def test_states_play_in_time_and_stop(page):
    figure, button = playing(page)
    curve = figure.find_element("css selector", "canvas.curve.ours")
    first, before = frame(figure), pixels(page, curve)
    button.click()
    wait_for(lambda: frame(figure) not in (first, first + 1))
    button.click()
    stopped = frame(figure)
    time.sleep(1.5)  # two frames at this pace
    assert frame(figure) == stopped
    scrubber = figure.find_element("css selector", "input[type=range]")
    page.execute_script("arguments[0].value = 7; arguments[0].dispatchEvent(new Event('input'))", scrubber)
    assert frame(figure) == 7
    assert "t = 2.00 (8 of 8)" in figure.text
    assert pixels(page, curve) != before
    assert not console_errors(page)


def test_states_that_are_laid_out_play_row_by_row(browser, tmp_path):
    def method(name):
        return Method(name, RNG.normal(size=(2, 1, 8, 16)), np.ones(2), RNG.random(9), RNG.normal(size=(2, 1, 8, 16)))

    h = 0.5
    coordinates = Coordinates(Axis("x", h, h), Axis("y", h, h), state=4, time=Axis("t", 3, 0.2))
    methods = [method("ours"), method("baseline")]
    set_viewport(browser, 1280, 900)
    view = View(symbol="ω", signed=True, coordinates=coordinates)
    (tmp_path / "flow.html").write_text(render_page(Contents("a", "b", "c", "d", methods=methods, view=view)))
    browser.get((tmp_path / "flow.html").as_uri())
    figure, button = playing(browser)
    button.click()
    wait_for(lambda: frame(figure) == 5)
    button.click()
    scrubber = figure.find_element("css selector", "input[type=range]")
    browser.execute_script("arguments[0].value = 6; arguments[0].dispatchEvent(new Event('input'))", scrubber)
    assert "t = 4.20 (7 of 8)" in figure.text
    point(browser, canvases(browser, "time")[1], 1, 3, shape=(4, 4))  # in the second row of states, the third
    value, places, name = tip(browser, "time")
    assert number(value) == pytest.approx(methods[1].images[0, 0, 4 + 1, 8 + 3], rel=6e-3)
    assert [number(place) for place in places.split(", ")] == pytest.approx([1.0, 2.0, 4.2])
    assert name == "baseline 1"
    assert not console_errors(browser)


def test_mirror_space_shows_each_image_beside_its_other(page, contents):
    names = [e.text for e in page.find_elements("css selector", "figure[data-figure=mirror] .name")]
    assert names == ["x", "→ g(x)", "ŷ", "→ f(ŷ)"]
    order = (contents.mirror.data, contents.mirror.mirror, contents.mirror.sampled, contents.mirror.made)
    page.find_element("css selector", "figure[data-figure=mirror] button[aria-label='number 2']").click()
    shown = canvases(page, "mirror")
    assert len(shown) == 8
    for k, method in enumerate(order):
        for canvas, array in ((shown[2 * k], method.images[1, 0]), (shown[2 * k + 1], method.residuals[1, 0])):
            point(page, canvas, 3, 4, shape=array.shape)
            assert number(tip(page, "mirror")[0]) == pytest.approx(array[3, 4], rel=6e-3)


def test_files_hold_the_numbers(page, contents):
    name, text = saved(page, "samples", "CSV")
    assert name == "burgers-samples.csv"
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    ours, baseline = contents.methods
    values = {
        quantity: np.array([float(row["value"]) for row in rows if row["quantity"] == quantity])
        for quantity in ("u", "residual")
    }
    np.testing.assert_allclose(values["u"], np.concatenate([ours.images, baseline.images]).ravel(), rtol=6e-4)
    np.testing.assert_allclose(
        values["residual"], np.concatenate([ours.residuals, baseline.residuals]).ravel(), rtol=6e-4
    )
    last = next(row for row in reversed(rows) if row["quantity"] == "u")
    assert (last["of"], last["number"], float(last["x"]), float(last["t"])) == ("baseline", "4", 0, 2)
    for figure in ("samples", "compare"):
        name, uri = saved(page, figure, "PNG")
        assert (name, uri[:22]) == (f"burgers-{figure}.png", "data:image/png;base64,")
    link = page.find_element("css selector", "#numbers a[download='burgers-numbers.csv']").get_attribute("href")
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(link.split(",", 1)[1]).decode(), newline="")))
    assert {row["name"]: float(row["distance"]) for row in rows} == {row.name: row.distance for row in contents.rows}
    assert not console_errors(page)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window_and_tables_say_that_they_go_on(browser, report, width, dark):
    set_viewport(browser, width, 800, dark=dark)
    browser.get(report)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 24, 29)" if dark else "rgb(251, 251, 249)"
    )
    for figure in PICTURES:
        assert browser.find_element("css selector", f"figure[data-figure={figure}] .panel").is_displayed()
        assert not browser.find_element("css selector", f"figure[data-figure={figure}] picture").is_displayed()
    table = browser.find_element("css selector", "#numbers .scroll")
    hidden = browser.execute_script("return arguments[0].scrollWidth - arguments[0].clientWidth", table)
    assert (hidden > 0) == (width == 390)
    if hidden:
        first, edge = shadow(browser, table, 0), shadow(browser, table, hidden)
        assert first < edge - 10  # darker while there is more
        head = "return arguments[0].querySelector('tbody th').getBoundingClientRect().left"
        assert browser.execute_script(head, table) == pytest.approx(
            browser.execute_script("return arguments[0].getBoundingClientRect().left", table), abs=2
        )  # it has been scrolled to its end, and the first column is still there
    assert not console_errors(browser)


def shadow(browser, table, left):
    """Brightness of the right edge of a table that is scrolled so far."""
    from PIL import Image

    browser.execute_script("arguments[0].scrollLeft = arguments[1]; arguments[0].scrollIntoView()", table, left)
    browser.execute_script("document.querySelector('nav').style.display = 'none'")
    image = np.asarray(Image.open(io.BytesIO(table.screenshot_as_png)).convert("L")).astype(float)
    return np.median(image[10:-20, -5:-2])


def test_contents_lead_to_their_sections(page):
    page.find_element("css selector", "nav a[href='#mirror']").click()
    wait_for(
        lambda: abs(page.execute_script("return document.getElementById('mirror').getBoundingClientRect().top")) < 120
    )
    assert page.current_url.endswith("#mirror")


def test_without_scripts_there_are_the_still_pictures(browser, report):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(report)
        for figure in (*PICTURES, "distances", "efficiency", "training"):
            assert browser.find_element("css selector", f"figure[data-figure={figure}] img").is_displayed()
        for figure in ("compare", "time"):
            assert not browser.find_element("css selector", f"figure[data-figure={figure}]").is_displayed()
        assert not browser.find_elements("css selector", "canvas")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


# A run that came from somebody else


def test_names_and_settings_of_others_run_nothing(browser, contents, tmp_path):
    evil = replace(
        contents,
        **dict.fromkeys(("name", "experiment", "preset", "rule", "settings"), ATTACK),
        changed=[(ATTACK, ATTACK, ATTACK)],
        stages=[StageLine(ATTACK, "complete", 1.0, ATTACK, ATTACK, ATTACK)],
        methods=[replace(method, name=ATTACK) for method in contents.methods],
        grids={ATTACK: contents.grids["data"]},
        trainings={ATTACK: contents.trainings["map"]},
        view=View(label=ATTACK, symbol=ATTACK, coordinates=Coordinates(Axis(ATTACK), Axis("t"), time=Axis(ATTACK))),
        made={ATTACK: ATTACK},
        problems=[ATTACK],
    )
    (tmp_path / "evil.html").write_text(render_page(evil))
    browser.get((tmp_path / "evil.html").as_uri())
    point(browser, canvases(browser, "samples")[0], 1, 1, shape=(8, 8))
    assert tip(browser, "samples")[2] == f"{ATTACK} 1"
    for figure in ("samples", "time", "grids"):
        _, text = saved(browser, figure, "CSV")
        assert "window.hacked" in text
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements("css selector", "img[src='x']")
    assert not console_errors(browser)


def test_a_run_whose_files_hold_markup_runs_nothing(browser, whole_run, tmp_path):
    run = shutil.copytree(whole_run, tmp_path / re.sub("/", "∕", ATTACK)[:200])
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    (run / "settings.yaml").write_text(f"# {ATTACK}\n" + yaml.safe_dump(settings))
    log = run / "map" / "training" / "metrics.jsonl"
    log.write_text(log.read_text() + json.dumps({"step": 7, "loss": 1.0, ATTACK: 1.0}) + "\n")
    (tmp_path / "evil.html").write_text(render_page(collect(run)))
    browser.get((tmp_path / "evil.html").as_uri())
    assert browser.execute_script("return window.hacked") is None
    assert "window.hacked" in browser.find_element("css selector", "h1").text
    assert browser.find_element("css selector", "figure[data-figure=samples] .panel").is_displayed()
    assert not console_errors(browser)


def test_a_script_that_somebody_adds_is_refused_by_the_pages_policy(browser, report, tmp_path):
    with open(report.removeprefix("file://")) as file:
        text = file.read()
    (tmp_path / "added.html").write_text(text.replace("</main>", "<script>window.hacked = 1</script></main>"))
    browser.get((tmp_path / "added.html").as_uri())
    assert browser.execute_script("return window.hacked") is None
    assert any("Content Security Policy" in message for message in console_errors(browser))
