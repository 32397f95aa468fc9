"""What a page must keep, whatever is on it: asked of the browser that shows it."""

from __future__ import annotations

from pathlib import Path

from tests.chromium import Page

PHONE, DESK = 390, 1280

# Contrast of each element's own text with what is behind it, by the WCAG formula; `[ratio, text]` of the lowest.
_LOWEST_CONTRAST = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || ['SCRIPT', 'STYLE'].includes(e.tagName) || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), ink = e.ownerSVGElement ? style.fill : style.color;
    const [a, b] = [light(rgb(ink).slice(0, 3)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.textContent.slice(0, 40)];
  }
  return worst; })()"""

_SMALLEST_TEXT = """(() => Math.min(...[...document.querySelectorAll('body *')].filter(
    e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && !['SCRIPT', 'STYLE'].includes(e.tagName)
      && e.getClientRects().length).map(
    e => e.ownerSVGElement ? parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getBoundingClientRect().width
      / e.ownerSVGElement.viewBox.baseVal.width : parseFloat(getComputedStyle(e).fontSize))))()"""

# Numbers that lie outside the window and cannot be reached without scrolling sideways.
_HIDDEN_NUMBERS = """[...document.querySelectorAll('.stack td.num')].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1).length"""


def assert_readable(browser: Page, file: Path) -> None:
    """Light and dark, desk and phone: text that can be read, nothing cut off, nothing loaded, no error."""
    for width in (DESK, PHONE):
        for dark in (False, True):
            browser.open(file, width=width, dark=dark)
            where = f"{file.name} at {width} px, {'dark' if dark else 'light'}"
            assert browser.messages == [], where
            assert browser.requests == [file.resolve().as_uri()], where
            assert browser.evaluate("document.documentElement.scrollWidth") == width, f"{where}: scrolls sideways"
            assert browser.evaluate(_HIDDEN_NUMBERS) == 0, f"{where}: numbers outside the window"
            ratio, text = browser.evaluate(_LOWEST_CONTRAST)
            assert ratio >= 4.5, f"{where}: contrast {ratio:.2f} of {text!r}"
            assert browser.evaluate(_SMALLEST_TEXT) >= 9.5, f"{where}: text too small"
            paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") != dark, where
