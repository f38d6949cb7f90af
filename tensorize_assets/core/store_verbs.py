"""What a check of a store tries, and how it went."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import StoreError

LARGE_BYTES = 64 * 1024 * 1024
"""Size of the object or file whose transfer is timed."""

PART_BYTES = 16 * 1024 * 1024
"""Size of the parts that it goes up and comes down in."""

SMALL = b"tensorize store check"
STREAMS = "then `tensorize copy` moves the bytes through this machine"


def large_content() -> bytes:
    """Return LARGE_BYTES that do not compress below a part."""
    return os.urandom(PART_BYTES) * (LARGE_BYTES // PART_BYTES)


class Verb(jsonio.Record):
    """One verb as it was tried.

    `tolerated`: it does not work, and the product does without. `skipped`: not tried, since what
    it builds on does not work. Rates count bytes of the object's content, in MB/s (10^6 bytes).
    """

    name: str
    needs: str
    status: Literal["works", "fails", "tolerated", "skipped"]
    reason: str = ""
    milliseconds: float | None = None
    mb_per_s: float | None = None


class StoreReport(jsonio.Record):
    """What a store can do. `left` names what could not be removed again."""

    root: str
    facts: dict[str, str]
    verbs: tuple[Verb, ...]
    left: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether the product can work on this store."""
        return all(verb.status in ("works", "tolerated") for verb in self.verbs)


class Wrong(Exception):
    """The store answered, and not as it has to."""


@dataclass
class Tried:
    """The verbs so far; `explain` gives a verb's errors the product's words."""

    explain: Callable[[str, Callable[[], Any]], Any]
    verbs: list[Verb] = field(default_factory=list[Verb])

    def try_(
        self,
        name: str,
        needs: str,
        call: Callable[[], int | None],
        *,
        after: str = "",
        verb: str = "",
        otherwise: str = "",
    ) -> bool:
        """Run `call`, which returns how many bytes it moved, and note how it went.

        `after` names the verb that it builds on. `otherwise` says how the product does without.
        """
        if after and not self.works(after):
            skipped = Verb(name=name, needs=needs, status="skipped", reason=f"needs `{after}`")
            self.verbs.append(skipped)
            return False
        began = time.perf_counter()
        reason = ""
        moved: int | None = None
        try:
            moved = self.explain(verb or name, call)
        except (StoreError, Wrong) as error:
            reason = f"{error}; {otherwise}" if otherwise else str(error)
        seconds = time.perf_counter() - began
        status = "works" if not reason else "tolerated" if otherwise else "fails"
        self.verbs.append(
            Verb(
                name=name,
                needs=needs,
                status=status,
                reason=reason,
                milliseconds=round(seconds * 1e3, 1),
                mb_per_s=round(moved / seconds / 1e6, 1) if moved and not reason else None,
            )
        )
        return not reason

    def works(self, name: str) -> bool:
        return any(verb.name == name and verb.status == "works" for verb in self.verbs)

    def skip_rest(self, names: dict[str, str], reason: str) -> None:
        done = {verb.name for verb in self.verbs}
        self.verbs += [
            Verb(name=name, needs=needs, status="skipped", reason=reason)
            for name, needs in names.items()
            if name not in done
        ]
