"""Commands, options and links that the README and docs/ name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tensorize_assets.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# From a line's start, or in quotes; one that ends with a backslash goes on in the next line.
_COMMAND = re.compile(r"(?:^ {4,}|`)(?:\$ )?tensorize ((?:\\\n|[^`\n#])+)", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def _named() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found in _COMMAND.finditer(page.read_text()):
            # What stands behind `--` is vLLM's.
            yield page.name, re.sub(r"\\\n\s*", "", found[1]).split(" -- ")[0].strip()


@pytest.mark.parametrize(("page", "said"), sorted(set(_named())))
def test_a_command_in_the_documents_exists_with_its_options(page: str, said: str) -> None:
    """What is typed from there works."""
    # Of the click that typer brings along.
    command: Any = typer.main.get_command(app)
    words = said.split()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"{page}: tensorize {said}"
    options = {
        name
        for parameter in command.params
        for name in [*parameter.opts, *parameter.secondary_opts]
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(words))) <= options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    missing = [to for to in _LINK.findall(page.read_text()) if not (page.parent / to).exists()]
    assert missing == []
