"""A hook of MkDocs: links of a page to files of the repository that are no pages become their names.

Pages are read in the repository, too, where such links lead somewhere. One that leads nowhere is an error here.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.docs_links")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text with links out of the site replaced."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_path).parent

    def plain(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s: %s leads to no file of the repository", page.file.src_path, link[2])
        words, name = link[1], target.relative_to(docs.parent).as_posix()
        return words if words.strip("`") == name else f"{words} (`{name}`)"

    return _LINK.sub(plain, markdown)
