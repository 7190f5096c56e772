"""The documentation site: built strictly, complete, legible on a telephone and in the dark; no request leaves it."""

import base64
import json
import logging
import os
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from matplotlib import pyplot as plt
from matplotlib.image import imread

import namm
import namm.datasets
import namm.evaluation
import namm.exact
import namm.generative
import namm.inverse
import namm.maps
import namm.rivals
from browser import chromium, console_errors, set_viewport

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("material", reason="the site's tools (the extra docs) are not installed here")
pytestmark = pytest.mark.skipif(not (ROOT / "RESULTS.md").exists(), reason="no site in a source distribution")

WIDTHS, SCHEMES = (1280, 390), ("default", "slate")
SHOWN = """
const [scheme, done] = arguments
const look = () => document.body.dataset.mdColorScheme === scheme
    ? done(document.scrollingElement.scrollWidth) : setTimeout(look, 10)
look()
"""
"""The page's width, once it has the system's colours; the driver gives up waiting for them after a while."""
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="


def build_site(config_file, folder):
    """Build strictly, in this process."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    config = load_config(str(config_file), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site, one for all processes of the tests."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "built").exists():
            build_site(ROOT / "mkdocs.yml", folder)
            (folder / "built").touch()
    return folder


def pages(site):
    """Every page, but the one for what is not found, whose links are absolute."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


class Resources(HTMLParser):
    """What a page loads: scripts, pictures, styles, frames; and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note an element."""
        values = dict(attrs)
        self.anchors.add(values.get("id"))
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.loaded.append(values.get("src") or "")
        if tag == "link" and values.get("rel") not in ("prev", "next", "canonical", "alternate"):
            self.loaded.append(values.get("href") or "")


def test_no_page_loads_anything_from_another_host(site):
    foreign = {
        (str(page.relative_to(site)), place)
        for page in [*pages(site), site / "404.html"]
        for place in Resources(page.read_text(encoding="utf-8")).loaded
        if re.match(r"(https?:)?//", place)
    }
    assert not foreign
    styles = [path for path in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", path.read_text())]
    assert not styles


def test_the_reference_has_every_public_name(site):
    documented = set().union(
        *(Resources(page.read_text(encoding="utf-8")).anchors for page in (site / "reference").glob("*.html"))
    )
    parts = (namm, namm.maps, namm.generative, namm.inverse, namm.evaluation, namm.exact, namm.rivals)
    public = {f"{part.__name__}.{name}" for part in parts for name in part.__all__ if not name.startswith("__")}
    homes = {name: f"{thing.__module__}.{thing.__qualname__}" for name in public if (thing := thing_called(name))}
    assert not {name for name, home in homes.items() if not {name, home, f"namm.{name.split('.')[-1]}"} & documented}
    assert {
        f"namm.simulators.{path.stem}" for path in (ROOT / "src/namm/simulators").glob("[a-z]*.py")
    } - documented == {
        "namm.simulators.burgers_kernels"  # how a step of burgers runs on a GPU
    }


def thing_called(name):
    """The object behind a dotted name."""
    part, _, last = name.rpartition(".")
    found = namm if part == "namm" else getattr(namm, part.removeprefix("namm."))
    return getattr(found, last)


def test_pages_show_well_in_both_widths_and_schemes(site):
    """No error in the console, nothing wider than the page, the system's colours, nothing loaded from elsewhere.

    Every page is seen in both widths and in both schemes; which goes with which alternates from page to page.
    """
    complaints = []
    with chromium() as browser:
        browser.set_script_timeout(120)
        for number, page in enumerate(pages(site)):
            name, schemes = str(page.relative_to(site)), SCHEMES[:: (-1) ** number]
            set_viewport(browser, WIDTHS[0], 600, dark=schemes[0] == "slate")
            browser.get(page.as_uri())
            for width, scheme in zip(WIDTHS, schemes, strict=True):
                set_viewport(browser, width, 600, dark=scheme == "slate")
                wide = browser.execute_async_script(SHOWN, scheme)
                if wide > width:
                    complaints.append(f"{name} at {width}: {wide} pixels wide, {scheme}")
            loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
            complaints += [
                f"{name} loads {each}" for each in loaded if not each.startswith(("file:", "data:", "blob:"))
            ]
            complaints += [f"{name}: {error}" for error in console_errors(browser)]
    assert not complaints


def test_the_search_works_from_disk(site):
    with chromium() as browser:
        browser.get((site / "index.html").as_uri() + "?q=certificate")
        found = (
            "return [...document.querySelectorAll('.md-search-result__link')].map(each => each.getAttribute('href'))"
        )
        from selenium.webdriver.support.ui import WebDriverWait

        results = WebDriverWait(browser, 60).until(lambda _: browser.execute_script(found))
        assert any("guides/exact.html" in link for link in results)
        assert not console_errors(browser)


# Parts of it


def a_small_project(folder, *notebooks):
    """A project with a page that leaves docs/, and these notebooks."""
    settings = {
        "site_name": "small",
        "theme": "mkdocs",
        "plugins": [],
        "use_directory_urls": False,
        "hooks": [str(ROOT / "docs/hooks" / name) for name in ("repository.py", "notebooks.py")],
        "nav": [{"Home": "index.md"}, {"Reference": "other.md"}],
        "not_in_nav": "repository/*",
        "validation": {"omitted_files": "warn", "unrecognized_links": "warn", "anchors": "warn"},
    }
    for path, content in {
        "mkdocs.yml": yaml.safe_dump(settings),
        "docs/index.md": "[example](../examples/one.py), [results](../RESULTS.md#found), [other](other.md)",
        "docs/other.md": "# Other",
        "RESULTS.md": "# Found\n\n[page](docs/other.md)",
        "examples/one.py": "print(1)",
        **{f"examples/{name}.ipynb": json.dumps(content) for name, content in notebooks},
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    build_site(folder / "mkdocs.yml", folder / "site")
    return folder / "site"


def test_links_between_pages_and_the_rest_of_the_repository(tmp_path):
    built = a_small_project(tmp_path)
    links = re.findall(r'href="([^"]+)">(?:example|results|other)<', (built / "index.html").read_text())
    assert links == ["repository/examples/one.py", "repository/RESULTS.html#found", "other.html"]
    assert '<a href="../other.html">page</a>' in (built / "repository/RESULTS.html").read_text()
    assert (built / "repository/examples/one.py").read_text() == "print(1)"
    assert not (built / "notebooks").exists()
    assert "Notebooks" not in (built / "index.html").read_text()


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["two <b>\n", "lines\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["tensor(4)"]}, "metadata": {}, "execution_count": 1},
        {"output_type": "display_data", "data": {"image/png": PIXEL, "text/plain": "<Figure>"}, "metadata": {}},
    ]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# First *steps*\n", "\n", "See [it](one.py)."]},
        {"cell_type": "code", "metadata": {}, "source": "x = 2\nx + x", "outputs": outputs, "execution_count": 1},
        {"cell_type": "code", "metadata": {}, "source": [], "outputs": [], "execution_count": None},
    ]
    built = a_small_project(tmp_path, ("first", {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    page = (built / "notebooks/first.html").read_text()
    assert '<h1 id="first-steps">First <em>steps</em></h1>' in page
    assert 'href="../repository/examples/one.py"' in page
    assert re.search(r'<code class="language-python">x = 2\nx \+ x\n?</code>', page)
    assert "two &lt;b&gt;\nlines" in page
    assert "tensor(4)" in page
    assert "&lt;Figure&gt;" not in page
    assert 'src="first-0.png"' in page
    assert (built / "notebooks/first-0.png").read_bytes() == base64.b64decode(PIXEL)
    home = (built / "index.html").read_text()
    assert home.index("Notebooks") < home.index("Reference")


def test_the_pictures_are_those_that_the_script_draws(tmp_path):
    torch.manual_seed(0)
    drawn = runpy.run_path(str(ROOT / "docs/pictures.py"))["main"](tmp_path, steps=2)
    plt.close("all")
    kept = ROOT / "docs/images/concepts"
    assert sorted(path.name for path in drawn) == sorted(path.name for path in kept.iterdir())
    assert [imread(path).shape for path in drawn] == [imread(kept / path.name).shape for path in drawn]
    text = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    assert all(f"images/concepts/{path.name}" in text for path in drawn)
