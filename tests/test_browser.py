"""The browser that other tests look at pages with sees what a page shows and says."""

from browser import console_errors, set_viewport

PAGE = "data:text/html,<h1>a page</h1><script>console.error('oh no')</script>"


def test_a_page_and_its_complaints_are_seen(browser):
    browser.get(PAGE)
    assert browser.find_element("tag name", "h1").text == "a page"
    assert "oh no" in console_errors(browser)[0]


def test_pages_are_laid_out_as_asked(browser):
    set_viewport(browser, 390, 800, dark=True)
    browser.get(PAGE)
    width = browser.execute_script("return window.innerWidth")
    dark = browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert width >= 390  # a page without a viewport of its own is laid out wider
    assert dark
