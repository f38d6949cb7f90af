"""Faults at named points of the product's processes, without a hook in the product.

The environment of a process carries rules; `inject/sitecustomize.py` wraps the functions that they
name, in it and in every process that it starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_INJECT = Path(__file__).parent / "inject"

What = Literal["kill", "kill-launcher", "error", "hold", "tell"]


@dataclass(frozen=True)
class Rule:
    """Something done before or after a call of a function.

    at: `package.module:function` or `package.module:Class.method`.
    when: `before` or `after` the call.
    do: `kill`, a SIGKILL to the process that calls; `kill-launcher`, one to the Dagster step that
        waits for this worker, which goes no further; `error`, OSError `number`; `hold`, wait for
        the file `fired` + ".go"; `tell`, write a line for every call to the file `fired`.
    match: a regular expression that is found in the arguments, as text.
    fired: a file that is made when it is done, with the number of the process: it is done once,
        whatever runs again.
    """

    at: str
    when: Literal["before", "after"]
    do: What
    fired: str
    match: str = ""
    number: int = 0


def environment(rules: Sequence[Rule], *folders: Path) -> dict[str, str]:
    """The variables of a process to which `rules` apply; `folders` are on its path too."""
    path = [str(_INJECT), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "FAULT_RULES": json.dumps([asdict(rule) for rule in rules]),
        "PYTHONPATH": os.pathsep.join(path),
    }
