"""Every defence that is written down is still there; `make faults` takes each out."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("defences", REPO / "scripts" / "defences.py")
assert _SPEC is not None
assert _SPEC.loader is not None
defences = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(defences)


@pytest.mark.parametrize("defence", defences.defences(), ids=lambda one: one.what)
def test_a_defence_is_where_it_is_said_to_be(defence: Any) -> None:
    """Its source can be taken out, and its test exists."""
    compile(defences.without_text(defence), defence.file, "exec")
    file, _, name = defence.test.partition("::")
    tree = ast.parse((REPO / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name.partition("[")[0] in functions
