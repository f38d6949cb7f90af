"""A store in which something happens at a given call: trouble, another writer, a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from tensorize_assets.core.store import Store


class Killed(BaseException):
    """Stands in for a process that is gone: nothing of it goes on."""


class Wrapped:
    """Calls `before(method, key)` and `after(method, key)` around each call of a real store."""

    def __init__(
        self,
        store: Store,
        before: Callable[[str, str], object] = lambda method, key: None,
        after: Callable[[str, str], object] = lambda method, key: None,
    ) -> None:
        self._store = store
        self._before = before
        self._after = after
        self.calls: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._store, method)

        def wrapped(key: str, *args: Any, **kwargs: Any) -> Any:
            self.calls[method] += 1
            self._before(method, key)
            result = call(key, *args, **kwargs)
            self._after(method, key)
            return result

        return wrapped


def wrapped(
    store: Store,
    before: Callable[[str, str], object] = lambda method, key: None,
    after: Callable[[str, str], object] = lambda method, key: None,
) -> Any:
    """A `Wrapped`, as code takes it that wants a store."""
    return cast("Any", Wrapped(store, before, after))
