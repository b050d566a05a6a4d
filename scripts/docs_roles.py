"""A hook of MkDocs: docstrings' roles of Sphinx, and the ``::`` before their examples, become plain text."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):<code>~?([^<]*)</code>")
_EXAMPLE = re.compile(r"<p>::</p>")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page's HTML without the markup of Sphinx."""
    return _ROLE.sub(r"<code>\1</code>", _EXAMPLE.sub("", html))
