"""docs/security.md names a test for each promise, and each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_the_page_names_exists(test: str) -> None:
    """A promise whose test was renamed would be held by nobody."""
    file, _, name = test.partition("::")
    tree = ast.parse((REPO / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test() -> None:
    """The last column of the table below `Promises`."""
    section = PAGE.partition("\n## Promises\n")[2].partition("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert [] == [row for row in rows if "`tests/" not in row.split("|")[-2]]


def test_the_page_is_found() -> None:
    """From where people start, and its links lead on."""
    assert "(docs/security.md)" in (REPO / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (REPO / "docs" / link).exists(), link


@pytest.mark.fault(
    "Secrets", "installing another file under a pinned version", "refused: hashes are pinned"
)
@pytest.mark.parametrize(
    "file", sorted((REPO / "requirements").glob("*.txt")), ids=lambda p: p.name
)
def test_every_pin_has_its_hashes(file: Path) -> None:
    """One without would have pip refuse them all; without any, it would ask for none.

    torch is installed apart (scripts/setup.sh): copies of PyTorch's index have files of their own.
    """
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    pins = [line for line in lines if not re.fullmatch(r"torch==\S+", line)]
    pinned = re.compile(r"[a-z0-9.-]+==\S+( --hash=sha256:[0-9a-f]{64})+")
    assert [] == [line for line in pins if not pinned.fullmatch(line)]
