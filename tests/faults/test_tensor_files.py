"""A bad .tensors file: whatever it says of itself is bounded before tensorizer makes room for it.

tensorizer makes room for whatever length a file gives for its index and for each tensor's header
(coreweave/tensorizer#208). A file's hash is in the signed manifest, but not everybody has read the
whole file before: the loader streams it, and `tensorize reload` takes files that vLLM's own script
wrote, without any manifest. So our own bounds stand before every reader, signed or not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorize_assets

_SCRIPT = Path(__file__).parent / "scripts" / "tensor_file_cases.py"
_PACKAGE = Path(tensorize_assets.__file__).parent
MEMORY = 256 << 20

READERS = {
    "shard: load": "loader, reload, self-check",
    "shard: load in place": "loader on the CPU",
    "shard: read back": "what was written, both formats",
    "shard: encrypt": "encrypt",
    "encrypted shard: load": "loader with a key",
    "encrypted shard: read back": "what was written encrypted",
    "encrypted shard: encrypt": "encrypt with another key",
    "adapter: load": "adapters of the server",
    "adapter: read back": "adapters that were written",
    "adapter: encrypt": "encrypt adapters",
}


def found(run_script: Callable[..., None], folder: Path, changes: int) -> dict[str, Any]:
    """What tensor_file_cases.py found, with so many changes at random of each file."""
    run_script(_SCRIPT, folder / "files", folder / "cases.json", changes)
    return json.loads((folder / "cases.json").read_text())


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> dict[str, Any]:
    """Every lie, and some changes at random."""
    return found(run_script, tmp_path_factory.mktemp("files"), 100)


def require_refused(cases: dict[str, Any]) -> None:
    assert {} == cases["crashes"]
    assert [] == cases["others"]
    assert all(grown <= MEMORY for grown in cases["grown"].values())


@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(
            reader,
            marks=pytest.mark.fault(
                "Bad artifact",
                f".tensors header, index or tensor, read by: {who}",
                "refused, in 256 MiB, or the same tensors",
            ),
        )
        for reader, who in READERS.items()
    ],
)
def test_a_reader_refuses_a_bad_file_or_reads_the_same(cases: dict[str, Any], reader: str) -> None:
    """`same`: bits that mean nothing, such as those of a CRC, beside which there is a SHA-256."""
    own = [said for said in cases["others"] if said.startswith(f"{reader},")]
    crashes = {what: said for what, said in cases["crashes"].items() if what.startswith(reader)}
    assert ([], {}) == (own, crashes)
    assert cases["grown"][reader] <= MEMORY
    assert sum(cases["outcomes"][reader].values()) > 100
    assert cases["outcomes"][reader].get("same", 0) < 20


def test_every_reader_is_tried(cases: dict[str, Any]) -> None:
    """Those that the table names."""
    assert READERS.keys() == cases["outcomes"].keys()


@pytest.mark.long
def test_no_change_of_many_crashes_a_reader(
    tmp_path: Path, run_script: Callable[..., None]
) -> None:
    """The same, of more."""
    require_refused(found(run_script, tmp_path, 2000))


@pytest.mark.fault(
    "Bad artifact",
    "tensorizer's unbounded header, in any process of ours",
    "cannot be reached: two modules open files with tensorizer, and both look first",
)
def test_only_bounded_readers_open_a_file_with_tensorizer() -> None:
    """Everything else that opens one goes through these two, or through our own parser."""
    openers: set[str] = set()
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = isinstance(node, ast.Call) and "TensorDeserializer" in ast.unparse(node.func)
            extends = isinstance(node, ast.ClassDef) and any(
                "Deserializer" in ast.unparse(base) for base in node.bases
            )
            if calls or extends or _parses(node):
                openers.add(str(path.relative_to(_PACKAGE)))
    assert {"vllm_plugin/streams.py", "worker/read_back.py"} == openers


def _parses(node: ast.AST) -> bool:
    """Whether tensorizer's parser of headers or of indexes is called."""
    return isinstance(node, ast.Call) and any(
        name in ast.unparse(node.func)
        for name in ("_TensorHeaderDeserializer", "_MetadataDeserializer", "_FileHeader.from_io")
    )
