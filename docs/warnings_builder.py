"""A builder of Sphinx that finds the warnings of the manual and writes no page: ``make check``."""

from __future__ import annotations

from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder


class Warnings(StandaloneHTMLBuilder):
    """A builder that reads, resolves and translates all pages, with the same warnings as for ``make docs``.

    The theme's navigation and the search index, which take half of the time, are left out.
    """

    name = "warnings"
    search = False

    def handle_page(self, *_given: object, **_named: object) -> None:
        """Drop a translated page."""


def setup(app: Sphinx) -> None:
    """Sphinx's hook."""
    app.add_builder(Warnings)
