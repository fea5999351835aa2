"""Hooks of MkDocs that change pages of the site (docs/mkdocs.yml)."""

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page without Sphinx's roles, such as ``:func:``, which docstrings use."""
    return _ROLE.sub("", html)
