"""Extension of Griffe, which reads the docstrings for the API pages.

- `>>>` examples become code blocks. Markdown would take them for quotations.
- The comment behind a field of a class becomes its description: `epochs: int  # planned; None: unknown`.
"""

from __future__ import annotations

from typing import Any

import griffe


class EsperDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring is None and obj.is_attribute and obj.parent is not None and obj.parent.is_class:
            comment = "" if obj.lineno is None else trailing_comment(obj.lines_collection[obj.filepath][obj.lineno - 1])
            if not comment and str(obj.value) == f"{obj.annotation}()":  # a config inside a config
                comment = f"See `{obj.annotation}`."
            obj.docstring = griffe.Docstring(comment, parent=obj) if comment else None
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def trailing_comment(line: str) -> str:
    """Return the comment at the end of a line as a sentence; empty where there is none."""
    comment = line.rpartition("  # ")[2] if "  # " in line else ""
    return f"{comment[0].upper()}{comment[1:].strip()}." if comment else ""


def fenced(text: str) -> str:
    """Put every paragraph that begins with `>>>` into a fenced code block."""
    lines: list[str] = []
    is_inside = False
    for line in text.splitlines():
        if line.startswith(">>> ") and not is_inside:
            lines += ["", "```pycon"] if lines and lines[-1] else ["```pycon"]
            is_inside = True
        elif is_inside and not line.strip():
            lines.append("```")
            is_inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if is_inside else lines)
