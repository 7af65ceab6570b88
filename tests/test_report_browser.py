"""The report's page in a real browser: it loads without a complaint, switches, sorts, zooms and opens runs."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

import aida_lab.report.build as build
from aida_lab.report.build import read, write
from browser import ADVICE, Browser, find_chromium
from odd_folders import CASES, make
from report_fixture import SHOWN, spec, write_showcase, write_stepsizes

CHROMIUM = find_chromium()
if CHROMIUM is None:
    # a user's machine may have none; where the checks run, a browser that is missing is a failure
    if os.environ.get("CI") == "true":
        pytest.fail(ADVICE, pytrace=False)
    pytest.skip(ADVICE, allow_module_level=True)

pytestmark = pytest.mark.slow

PANEL = "#table-III .panel"
CHART = f"{PANEL} .chart svg[role=img]"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    write_showcase(root / "runs")
    for optimizer in ("adam", "adabelief", "aida"):
        method = "aida-k2" if optimizer == "aida" else optimizer
        write_stepsizes(root / "runs" / spec(method, 0, epochs=40).key, optimizer)
    return write(read([root / "runs"], declared=SHOWN), root / "report").page


@pytest.fixture(scope="module")
def window():
    with Browser(CHROMIUM) as found:
        yield found


@pytest.fixture
def browser(window, page):
    """The page, fresh; after the test it must not have complained, nor asked for anything."""
    window.complaints.clear()
    window.requests.clear()
    window.open(page)
    yield window
    assert window.complaints == []
    assert [each for each in window.requests if not each.startswith("data:")] == [page.resolve().as_uri()]


def see(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")


def with_chart(browser: Browser) -> None:
    see(browser, PANEL)
    browser.until(f"document.querySelectorAll('{CHART} [data-series]').length")
    see(browser, CHART)


def lines(browser: Browser) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('{CHART} [data-series]')].map(g => g.dataset.series)")


def ticks(browser: Browser) -> str:
    return browser.run(f"[...document.querySelectorAll('{CHART} text')].map(t => t.textContent).join(' ')")


def place(browser: Browser, across: float, down: float) -> tuple[float, float]:
    x, y, width, height = browser.run(
        f"(() => {{ const r = document.querySelector('{CHART}').getBoundingClientRect();"
        " return [r.x, r.y, r.width, r.height]; })()"
    )
    return x + across * width, y + down * height


def test_every_part_is_drawn(browser):
    panels = browser.run("document.querySelectorAll('.panel').length")
    assert panels == 5  # the profile, two tables of the paper, the rest, the shortened
    for panel in range(panels):
        browser.until(f"document.querySelectorAll('.panel')[{panel}].querySelector('svg [data-series]') !== null")
    browser.run("document.querySelectorAll('img').forEach(each => each.scrollIntoView())")
    browser.until("[...document.images].every(image => image.complete)")
    assert browser.run("[...document.images].every(image => image.complete && image.naturalWidth > 100)")


def test_methods_are_switched_off_and_on_in_every_chart(browser):
    see(browser, "#table-II .panel")
    browser.until("document.querySelectorAll('#table-II .panel [data-series]').length")
    with_chart(browser)
    assert set(lines(browser)) == {"aida-k2", "aida-k1", "adabelief", "adam", "sgd"}
    switch = f"document.querySelector('{PANEL} [data-switch=adam]')"
    browser.run(f"{switch}.click()")
    assert set(lines(browser)) == {"aida-k2", "aida-k1", "adabelief", "sgd"}
    assert browser.run(f"{switch}.getAttribute('aria-pressed')") == "false"
    assert browser.run("document.querySelector('#table-II .panel [data-series=adam]')") is None
    assert browser.run(f"document.activeElement === {switch}")  # a keyboard stays where it was
    browser.press("Enter")
    browser.until(f"document.querySelector('{CHART} [data-series=adam]') !== null")
    browser.run(f"document.querySelector('{PANEL} [data-switch=None]').click()")
    assert lines(browser) == []
    assert "every method is switched off" in ticks(browser)
    browser.run(f"document.querySelector('{PANEL} [data-switch=All]').click()")
    assert len(lines(browser)) == 5


@pytest.mark.parametrize(
    ("view", "axis"),
    [("loss", "training loss, log scale"), ("time", "seconds per epoch"), ("search-eps", "eps, log scale")],
)
def test_a_panel_shows_other_views(browser, view, axis):
    with_chart(browser)
    browser.run(f"document.querySelector('{PANEL} [data-view={view}]').click()")
    assert axis in ticks(browser)
    assert lines(browser)


def test_a_band_that_reaches_below_a_log_axis_ends_at_its_foot(browser):
    see(browser, "#others .panel")
    browser.until("document.querySelectorAll('#others .panel [data-series]').length")
    browser.run("document.querySelector('#others .panel [data-view=loss]').click()")
    drawn = browser.run("[...document.querySelectorAll('#others .panel svg path')].map(p => p.getAttribute('d'))")
    assert len(drawn) > 10
    assert not [path for path in drawn if "NaN" in path]


def test_a_chart_is_zoomed_by_the_pointer_and_the_keys(browser):
    with_chart(browser)
    whole = ticks(browser)
    browser.drag(place(browser, 0.6, 0.3), place(browser, 0.95, 0.31))
    zoomed = ticks(browser)
    assert zoomed != whole
    assert zoomed.split()[0] not in ("0", "1")  # the first epochs are out of sight
    browser.run(f"document.querySelector('{CHART}').focus()")
    browser.press("0")
    assert ticks(browser) == whole
    browser.press("+")
    assert ticks(browser) != whole
    browser.press("-")
    browser.press("ArrowRight")
    assert ticks(browser) != whole
    browser.run(f"document.querySelector('{PANEL} [aria-label=\"Show everything\"]').click()")
    assert ticks(browser) == whole
    browser.run(f"document.querySelector('{PANEL} [aria-label=\"Show the last quarter\"]').click()")
    assert ticks(browser).split()[0] in ("30", "31", "32")


@pytest.mark.parametrize("view", ["metric", "loss", "time", "search-eps"])
@pytest.mark.parametrize(("key", "back"), [("+", "-"), ("-", "+")])
def test_zoom_stops_before_ticks_lose_their_meaning(browser, view, key, back):
    with_chart(browser)
    browser.run(f"document.querySelector('{PANEL} [data-view={view}]').click()")
    about = "Zoom in" if key == "+" else "Zoom out"
    browser.run(f"document.querySelector('{CHART}').focus()")
    seen = []
    for _ in range(150):
        browser.run(f"document.querySelector('{PANEL} [aria-label=\"{about}\"]').click()")
        seen.append(ticks(browser))
        axis = browser.run(
            f"[...document.querySelectorAll('{CHART} text')].map(t => [t.textContent, t.getAttribute('text-anchor')])"
        )
        for side in ("middle", "end"):
            labels = [text for text, anchor in axis if anchor == side]
            assert len(labels) == len(set(labels)) < 60, "no two ticks look alike, and they are few"
        assert "NaN" not in seen[-1]
        assert "Infinity" not in seen[-1]
    assert seen[-1] == seen[-10], "and at some time nothing more happens"
    browser.run(f"document.querySelector('{CHART}').focus()")
    browser.press(back)
    assert ticks(browser) != seen[-1], "from where there is a way back"


def test_the_pointer_reads_values_off_and_opens_the_runs(browser):
    with_chart(browser)
    tip = f"document.querySelector('{PANEL} .tip')"
    said, end = "", time.monotonic() + 10
    while not said and time.monotonic() < end:  # as a hand does: the page may still be laid out
        browser.move(place(browser, 0.9, 0.5))
        browser.move(place(browser, 0.91, 0.5))
        said = browser.run(f"!{tip}.hidden && {tip}.innerText")
    assert "Aida (K=2)" in said
    assert "±" in said
    line = browser.run(
        f"(() => {{ const p = document.querySelector('{CHART} [data-series=\"aida-k2\"] path.line');"
        " const at = p.getPointAtLength(p.getTotalLength() * .97); const r = p.ownerSVGElement.getBoundingClientRect();"
        " return [r.x + at.x, r.y + at.y]; })()"
    )
    browser.click(tuple(line))
    browser.until("document.querySelector('dialog').open")


def test_a_tap_reads_values_off_with_their_deviation_and_a_second_one_elsewhere_hides_them(page):
    with Browser(CHROMIUM, 390, 844) as browser:
        browser.resize(390, 844, phone=True)
        browser.open(page)
        with_chart(browser)
        assert "Tap to read" in browser.run(f"document.querySelector('{PANEL} .hint').textContent")
        tip = f"document.querySelector('{PANEL} .tip')"
        browser.tap(place(browser, 0.8, 0.4))
        browser.until(f"!{tip}.hidden && {tip}.innerText.includes('±')")
        browser.tap((20, 20))
        browser.until(f"{tip}.hidden")
        assert browser.complaints == []


def test_each_line_has_its_title_at_its_end_and_no_two_overlap(browser):
    with_chart(browser)
    found = browser.run(
        f"[...document.querySelectorAll('{CHART} [data-label] text')]"
        ".map(t => [t.textContent, Number(t.getAttribute('y'))])"
    )
    assert {text for text, _ in found} == {"Aida (K=2)", "Aida (K=1)", "AdaBelief", "Adam", "SGD"}
    heights = sorted(height for _, height in found)
    assert all(high - low >= 13.9 for low, high in pairwise(heights))


def test_an_entry_of_the_legend_highlights_its_line(browser):
    with_chart(browser)
    x, y = browser.run(
        f"(() => {{ const r = document.querySelector('{PANEL} [data-switch=adam]').getBoundingClientRect();"
        " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    browser.move((x, y))
    dim = f"[...document.querySelectorAll('{CHART} [data-series].dim')].map(g => g.dataset.series)"
    assert set(browser.until(f"{dim}.length && {dim}")) == {"aida-k2", "aida-k1", "adabelief", "sgd"}
    browser.move((x, y - 150))
    browser.until(f"{dim}.length === 0")


def test_lines_and_legend_have_the_same_marker_and_methods_differ_in_colour(browser):
    with_chart(browser)
    looks = browser.run("DATA.methods")
    assert len({(each["colour"], each["dash"]) for each in looks.values()}) == len(looks)
    assert looks["aida-k1"]["colour"] != looks["aida-k2"]["colour"]
    corners = "(d) => d.split('L').length"
    for method in ("aida-k2", "adam"):
        legend = f"document.querySelector('{PANEL} [data-switch=\"{method}\"] svg path').getAttribute('d')"
        line = f"document.querySelector('{CHART} [data-series=\"{method}\"] path:last-child').getAttribute('d')"
        assert browser.run(f"({corners})({legend}) === ({corners})({line})"), method


def test_smoothing_moves_the_line_and_not_the_values(browser):
    with_chart(browser)
    path = f"document.querySelector('{CHART} [data-series=adam] path.line').getAttribute('d')"
    before = browser.run(path)
    browser.run(
        f"(() => {{ const slider = document.querySelector('{PANEL} input[type=range]'); slider.value = 0.9;"
        " slider.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(path) != before
    flat = browser.run("smoothed([{y: 5}, {y: 5}, {y: 5}], 0.9).map(point => point.y)")
    assert flat == pytest.approx([5, 5, 5])
    assert browser.run("smoothed([{y: 0}, {y: 1}], 0.5)[1].y") == pytest.approx(2 / 3)


def test_bands_end_at_the_axes(browser):
    with_chart(browser)
    box, clip = browser.run(
        f"(() => {{ const r = document.querySelector('{CHART} clipPath rect');"
        f" const a = document.querySelector('{CHART} path.axis');"
        " const n = name => Number(r.getAttribute(name)), b = a.getBBox();"
        " return [[b.x, b.y, b.width, b.height], [n('x'), n('y'), n('width'), n('height')]]; })()"
    )
    assert box == clip


def test_a_drag_leaves_no_focus_frame_and_a_key_brings_it_back(browser):
    with_chart(browser)
    browser.drag(place(browser, 0.4, 0.3), place(browser, 0.6, 0.31))
    frame = f"getComputedStyle(document.querySelector('{CHART}')).outlineStyle"
    assert browser.run(f"document.activeElement === document.querySelector('{CHART}')")
    assert browser.run(frame) == "none"
    browser.press("+")
    assert browser.run(frame) == "solid"


def test_the_address_keeps_what_was_selected(window, page):
    window.open(page)
    with_chart(window)
    window.run(f"document.querySelector('{PANEL} [data-view=loss]').click()")
    window.run(f"document.querySelector('{PANEL} [data-switch=sgd]').click()")
    window.run(f"document.querySelector('{PANEL} [aria-label=\"Zoom in\"]').click()")
    shown, drawn, address = ticks(window), lines(window), window.run("location.href")
    assert "off=sgd" in address
    window.open(page)
    with_chart(window)
    assert ticks(window) != shown
    window.run(f"(() => {{ window.old = true; location.replace({address!r}); location.reload(); }})()")
    loaded = "document.readyState === 'complete' && typeof panels !== 'undefined' && panels.ready === true"
    window.until(f"typeof old === 'undefined' && {loaded}")  # not the page that is about to be reloaded
    with_chart(window)
    assert (ticks(window), lines(window)) == (shown, drawn)
    assert window.complaints == []


def test_the_page_opens_with_a_verdict_and_a_dot_for_every_method(browser):
    assert browser.run("document.querySelector('main section').id") == "verdict"
    sentences = browser.run("[...document.querySelectorAll('.verdict')].map(each => each.textContent)")
    assert len(sentences) == 3
    assert all("Aida (K=2)" in each for each in sentences)
    rows = browser.run(
        "[...document.querySelectorAll('.dots')]"
        ".map(each => [...each.querySelectorAll('.row .name')].map(n => n.textContent))"
    )
    for names in rows:  # a method with values that the paper did not try is named with them
        assert {"Aida (K=1)", "AdaBelief", "Adam", "SGD"} <= {name.partition(" with ")[0] for name in names}
    browser.run("document.querySelector('.dots .row button').click()")
    browser.until("document.querySelector('dialog').open")


def test_no_panel_promises_what_it_does_not_do(browser):
    hints = browser.run("[...document.querySelectorAll('.panel')].map(p => p.querySelector('.hint').textContent)")
    assert [("see its runs" in hint) for hint in hints] == [False, True, True, True, True]  # the profile has no runs


def test_tables_sort_by_their_heads_with_empty_fields_last(browser):
    table = "document.querySelector('#grid-vgg11-cifar10-fp32')"
    column = f"[...{table}.tBodies[0].rows].map(row => row.cells[1].innerText.split('\\n')[0])"

    def press(index: int) -> None:
        browser.run(f"{table}.tHead.rows[0].cells[{index}].querySelector('button').click()")

    press(1)
    values = browser.run(column)
    numbers = [float(value.split(" ")[0]) for value in values]
    assert numbers == sorted(numbers, reverse=True)
    assert browser.run(f"{table}.tHead.rows[0].cells[1].getAttribute('aria-sort')") == "descending"
    press(1)
    assert browser.run(column) == values[::-1]
    press(0)
    methods = browser.run(f"[...{table}.tBodies[0].rows].map(row => row.cells[0].innerText)")
    assert methods == sorted(methods, key=str.lower)
    # the reference has no p-value, and is the last either way
    for _ in range(2):
        press(9)
        assert browser.run(f"[...{table}.tBodies[0].rows].at(-1).cells[0].innerText") == "Aida (K=2)"


def test_a_number_is_one_click_from_its_spec(browser):
    button = "document.querySelector('#grid-vgg11-cifar10-fp32 tbody button.open')"
    browser.run(f"{button}.focus()")
    browser.press("Enter")
    browser.until("document.querySelector('dialog').open")
    assert browser.run("document.querySelector('dialog h2').textContent") == "Aida (K=2)"
    for seed in range(3):
        shown = browser.run("JSON.parse(document.querySelector('#dialog-spec').textContent)")
        assert shown == spec("aida-k2", seed, epochs=40).to_json()
        links = browser.run("[...document.querySelectorAll('dialog td a')].map(each => each.textContent)")
        assert links[seed] == spec("aida-k2", seed, epochs=40).key
        browser.run(
            "(() => { const pick = document.querySelector('dialog select'); "
            f"pick.selectedIndex = {(seed + 1) % 3};"
            " pick.dispatchEvent(new Event('change')); })()"
        )
    browser.press("Escape")
    browser.until("!document.querySelector('dialog').open")
    assert browser.run(f"document.activeElement === {button}")


def test_the_list_of_runs_is_filtered(browser):
    browser.run("document.querySelector('#runs details').open = true")
    browser.until("document.querySelector('#all-runs') !== null")
    browser.run(
        "(() => { const field = document.querySelector('#runs input'); field.value = 'sgd failed';"
        " field.dispatchEvent(new Event('input')); })()"
    )
    shown = "[...document.querySelectorAll('#all-runs tbody tr')].filter(row => !row.hidden).length"
    assert browser.run(shown) == 1
    assert "1 of 53 runs" in browser.run("document.querySelector('#runs [role=status]').textContent")
    for typed, count in (("eps 1e-2", 2), ("eps 0.01", 2), ("eps=1E-02", 2), ("eps 1", 0), ("lr 1e-3 eps 1e-4", 2)):
        browser.run(
            f"(() => {{ const field = document.querySelector('#runs input'); field.value = {typed!r};"
            " field.dispatchEvent(new Event('input')); })()"
        )
        assert browser.run(shown) == count, typed


def test_odd_runs_break_nothing_on_the_page(window, tmp_path, monkeypatch):
    """Hostile names, values at the ends of what a number can be: every view of every panel is drawn."""
    monkeypatch.setattr(build, "draw_all", lambda results, folder: [])
    for seed, case in enumerate(CASES):
        make(case, tmp_path / "runs", seed)
    page = write(read([tmp_path / "runs"]), tmp_path / "report").page
    window.complaints.clear()
    window.requests.clear()
    window.open(page)
    panels = window.run("document.querySelectorAll('.panel').length")
    drawn = 0
    for panel in range(panels):
        host = f"document.querySelectorAll('.panel')[{panel}]"
        window.run(f"{host}.scrollIntoView({{block: 'center'}})")
        window.until(f"{host}.querySelector('svg[role=img]') !== null")
        for column in range(window.run(f"{host}.querySelectorAll('select option').length") or 1):
            window.run(
                f"(() => {{ const pick = {host}.querySelector('select'); if (!pick) return; pick.value = {column};"
                " pick.dispatchEvent(new Event('change')); })()"
            )
            for view in window.run(f"[...{host}.querySelectorAll('[data-view]')].map(each => each.dataset.view)"):
                window.run(f"{host}.querySelector('[data-view=\"{view}\"]').click()")
                text = window.run(f"{host}.querySelector('svg[role=img]').innerHTML")
                assert "NaN" not in text
                assert "Infinity" not in text
                drawn += 1
    assert drawn > 50
    assert window.complaints == []
    assert [each for each in window.requests if not each.startswith("data:")] == [page.resolve().as_uri()]


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1400, False), ("dark", 1100, True), ("phone", 390, False)]
)
def test_it_is_readable_in_light_in_dark_and_on_a_phone(page, tmp_path, name, width, dark):
    with Browser(CHROMIUM, width, 900, dark) as browser:
        if name == "phone":
            browser.resize(width, 844, phone=True)
        browser.open(page)
        with_chart(browser)
        # only tables, figures and the bar of links may be wider than the window; they scroll and show it
        assert browser.run("document.documentElement.scrollWidth") == width
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        frames = (
            "[...document.querySelectorAll('main .scroll')].map(each => "
            "[each.scrollWidth > each.clientWidth + 2, each.parentElement.classList.contains('more-right')])"
        )
        browser.until(f"{frames}.every(([wide, shown]) => wide === shown)")
        frames = browser.run(frames)
        assert len(frames) > 8
        assert any(wide for wide, _ in frames) or name != "phone"
        for text, ground in (
            ("ink", "paper"),
            ("soft", "paper"),
            ("soft", "raised"),
            ("accent", "paper"),
            ("ink", "mark"),
        ):
            assert contrast(browser, text, ground) >= 4.5, (text, ground)
        for colour in range(10):
            assert contrast(browser, f"c{colour}", "paper") >= 3, colour
        target = Path(os.environ.get("AIDA_SCREENSHOTS", tmp_path)) / f"report-{name}.png"
        assert browser.screenshot(target).stat().st_size > 20_000
        assert browser.complaints == []


def contrast(browser: Browser, one: str, other: str) -> float:
    """Of two of the page's colours, by the WCAG's formula."""

    def luminance(name: str) -> float:
        text = browser.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        parts = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
