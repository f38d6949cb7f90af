"""Text of others as a terminal may have it: names and fields of a store are anybody's."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` with what is not printable, but for `keep`, written as Python escapes.

    Escape sequences would move the cursor and write over what was said, and line ends begin lines
    that nobody said.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def quoted(text: str, most: int = 80) -> str:
    """Return `text` in quotes, printable, of at most about `most` characters."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}…"
