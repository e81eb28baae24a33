"""An extension of griffe, which reads docstrings for the API reference: doctests become blocks of code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class FenceDoctests(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Put fences around the doctests of a docstring. Markdown would take `>>>` for a quotation."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\1\n```", obj.docstring.value)
