"""The live view: what is happening now, samples, all metrics, and the end of the log."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from nemo_rl_moe.compare.samples import read_samples, sampled_steps
from nemo_rl_moe.compare.watch import views
from nemo_rl_moe.compare.watch.feed import Feed
from nemo_rl_moe.limits import WATCH_POLL_S

_TABS = ("overview", "samples", "metrics", "log")


class WatchApp(App[None]):
    """The view of a feed. Files are read in a thread of their own, so that keys are answered meanwhile."""

    TITLE = "nemo-rl-moe watch"
    CSS = """
    Screen { overflow: hidden; }
    #head { height: auto; padding: 0 1; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; padding: 0; }
    VerticalScroll { padding: 1 1 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        *(Binding(str(i), f"tab('{name}')", name) for i, name in enumerate(_TABS, 1)),
        Binding("p", "sample(-1)", "earlier samples"),
        Binding("n", "sample(1)", "later samples"),
        Binding("l", "newest", "newest samples"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        # The step whose samples are shown; None follows the newest.
        self._step: int | None = None

    def compose(self) -> ComposeResult:
        """The head, four tabs and the keys."""
        yield Static(id="head")
        with TabbedContent(initial=_TABS[0]):
            for name in _TABS:
                with TabPane(name, id=name), VerticalScroll(id=f"{name}-scroll"):
                    yield Static(id=f"{name}-text")
        yield Footer()

    def on_mount(self) -> None:
        """Draws, and looks for changes once a second."""
        self._draw()
        self.set_interval(WATCH_POLL_S, self._poll)

    def on_resize(self) -> None:
        """Draws to the new width."""
        self._draw()

    def on_tabbed_content_tab_activated(self) -> None:
        """Draws the tab that is shown now; the others wait."""
        self._draw()

    def action_tab(self, name: str) -> None:
        """Shows a tab."""
        self.query_one(TabbedContent).active = name

    def action_sample(self, by: int) -> None:
        """Shows the samples of the step so many further on."""
        steps = sampled_steps(self._feed.run.samples)
        if not steps:
            return
        at = steps.index(self._step) if self._step in steps else len(steps) - 1
        at = max(0, min(len(steps) - 1, at + by))
        self._step = None if at == len(steps) - 1 else steps[at]
        self.action_tab("samples")
        self._draw()

    def action_newest(self) -> None:
        """Follows the newest samples again."""
        self._step = None
        self.action_tab("samples")
        self._draw()

    @work(thread=True, exclusive=True, group="poll")
    def _poll(self) -> None:
        if self._feed.poll():
            self.call_from_thread(self._draw)

    def _draw(self) -> None:
        if not self.query("#head"):
            # A size or a change that was told before the first drawing, or after the last.
            return
        run, width = self._feed.run, max(20, self.size.width - 6)
        self.query_one("#head", Static).update(views.head(run, self._feed.error, width))
        name = self.query_one(TabbedContent).active or _TABS[0]
        shown = self.query_one(f"#{name}-text", Static)
        if name == "overview":
            shown.update(views.overview(run, width))
        elif name == "metrics":
            shown.update(views.all_metrics(run, width))
        elif name == "samples":
            shown.update(self._samples())
        else:
            # Follows the log's end, unless the user has scrolled up to read.
            pane = self.query_one("#log-scroll", VerticalScroll)
            follow = pane.max_scroll_y - pane.scroll_y <= 1
            shown.update(Text(views.plain(self._feed.log_tail()) or "no run.log"))
            if follow:
                pane.scroll_end(animate=False)

    def _samples(self) -> Text:
        folder = self._feed.run.samples
        steps = sampled_steps(folder)
        if folder is None or not steps:
            return Text("no samples")
        step = self._step if self._step in steps else steps[-1]
        return views.samples(step, steps, *read_samples(folder, step))
