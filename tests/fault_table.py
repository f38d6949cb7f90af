"""A pytest plugin: the table of faults, phases and outcomes that docs/faults.md shows.

A test that holds a cell of it is marked `@pytest.mark.fault(fault, phase, outcome)`, a parameter of
a test by `pytest.param(..., marks=...)`. `--fault-cells FILE` adds the cells of what ran to a file,
a line of JSON each; `python tests/fault_table.py CELLS PAGE` writes the table of them to a page.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

_BEGIN = "<!-- begin: written by `make faults` -->"
_END = "<!-- end -->"


class Cell(NamedTuple):
    """One fault at one phase, what comes of it, and the test that tried it."""

    fault: str
    phase: str
    outcome: str
    test: str
    held: bool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-cells", type=Path, help="add the cells of the tests marked `fault` to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(config.getoption("--fault-cells")), "fault-table")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What pytest-xdist brings to the process that writes the table."""
    report = yield
    if call.when == "setup":
        for mark in item.iter_markers("fault"):
            report.user_properties.append(("fault", _arguments(*mark.args, **mark.kwargs)))
    return report


def _arguments(fault: str, phase: str, outcome: str) -> tuple[str, str, str]:
    return fault, phase, outcome


class _Table:
    """Collects the cells of a session."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._marks: dict[str, list[tuple[str, str, str]]] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "fault" and report.when == "setup":
                fault, phase, outcome = map(str, value)  # pyright: ignore[reportArgumentType]
                self._marks.setdefault(report.nodeid, []).append((fault, phase, outcome))
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.skipped:
            self._marks.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        if self._file is None:
            return
        with self._file.open("a") as file:
            for test, marks in self._marks.items():
                for mark in marks:
                    cell = Cell(*mark, test.partition("[")[0], test not in self._failed)
                    file.write(json.dumps(cell) + "\n")


def render(cells: Iterable[Cell]) -> str:
    """The table as Markdown: a section a kind of fault, a row a cell."""
    # Of a cell that was tried again the last time counts.
    last = {cell[:-1]: cell for cell in cells}.values()
    by_fault = defaultdict[str, list[Cell]](list)
    for cell in last:
        by_fault[cell.fault].append(cell)
    lines = [f"{len(last)} cells tried, {sum(not cell.held for cell in last)} lost."]
    for fault, its in sorted(by_fault.items()):
        lines += ["", f"### {fault}", "", "| Phase | Outcome | Test |", "| --- | --- | --- |"]
        for cell in sorted(its, key=lambda cell: (cell.phase, cell.outcome, cell.test)):
            outcome = cell.outcome if cell.held else f"**LOST**: {cell.outcome} is not what came"
            name = cell.test.removeprefix("tests/")
            lines.append(f"| {_cell(cell.phase)} | {_cell(outcome)} | `{name}` |")
    return "\n".join(lines)


def main(cells: Path, page: Path) -> None:
    """Write the table between the marks of the page."""
    found = [Cell(*json.loads(line)) for line in cells.read_text().splitlines()]
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n{render(found)}\n{_END}{after}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
