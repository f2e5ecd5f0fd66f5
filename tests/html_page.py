"""What a rendered page consists of: its text in order, and everything it would load from elsewhere."""

import re
from collections import defaultdict
from html.parser import HTMLParser

_URL_IN_CSS = re.compile(r"@import|url\(\s*['\"]?(?!data:)", re.IGNORECASE)
_LOADING = {"src", "srcset", "data", "poster", "background", "action", "formaction"}


class Page(HTMLParser):
    """A page's visible `lines`, first bold text, figures' texts, scripts by id, and what it would load (`external`)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.external: list[str] = []
        self.images: list[str] = []
        self.scripts: defaultdict[str, list[str]] = defaultdict(list)
        self.first_bold = ""
        self._hidden = 0
        self._bold = 0
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "title", "noscript")
        self._bold += tag == "strong"
        given = dict(attrs)
        self._script = (given.get("id") or "") if tag == "script" else None
        if given.get("class") == "plot" or (tag == "svg" and given.get("role") == "img"):
            self.images.append(given.get("aria-label") or "")
        for name, value in attrs:
            value = value or ""
            if (name in _LOADING and not value.startswith("data:")) or (name == "style" and _URL_IN_CSS.search(value)):
                self.external.append(f"<{tag} {name}={value}>")
        if tag in ("link", "iframe", "object", "embed", "base"):
            self.external.append(f"<{tag} {attrs}>")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "title", "noscript")
        self._bold -= tag == "strong"

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style" and _URL_IN_CSS.search(data):
            self.external.append(data[:200])
        if self._script is not None and self.lasttag == "script" and self._hidden:
            self.scripts[self._script].append(data)
        if self._hidden or not data.strip():
            return
        self.lines.append(" ".join(data.split()))
        if self._bold and not self.first_bold:
            self.first_bold = self.lines[-1]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)
