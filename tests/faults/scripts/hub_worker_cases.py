"""Snapshots whose configuration asks for code of a repo, as the worker configures them.

    python hub_worker_cases.py SNAPSHOT OUT

What came of each goes to OUT/cases.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorize_assets.worker import environment

environment.prepare()

from transformers import AutoTokenizer  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

from tensorize_assets.worker import model_builder  # noqa: E402

# In this process: in one of its own each architecture takes 10 s the first time on a machine.
registry._run_in_subprocess = lambda inspect: inspect()

UNKNOWN = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"]}


def tried(source: Path, folder: Path, do: Callable[[Path], object], **files: Any) -> dict[str, Any]:
    """What doing it with a copy of the snapshot gives, and whether code in it ran."""
    shutil.copytree(source, folder)
    for name, fields in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: ...\n")
    try:
        do(folder)
    except Exception as error:  # noqa: BLE001 - a test reads which it was
        return {"ran": ran.exists(), "error": type(error).__name__, "message": str(error)}
    return {"ran": ran.exists(), "error": None, "message": ""}


def configure(folder: Path) -> object:
    return model_builder.configure(str(folder), 1, "bfloat16")


def main(source: Path, out: Path) -> None:
    code = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    others = {"AutoConfig": "org/evil--evil.Evil"}
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    found = {
        "known": tried(source, out / "known", configure, config={"auto_map": code}),
        "own code": tried(source, out / "own", configure, config={**UNKNOWN, "auto_map": code}),
        "code of others": tried(
            source, out / "others", configure, config={**UNKNOWN, "auto_map": others}
        ),
        "tokenizer": tried(
            source,
            out / "tokenizer",
            lambda folder: AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
            tokenizer_config=tokenizer,
        ),
    }
    (out / "cases.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
