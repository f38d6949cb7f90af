"""Leases: one at a time, for as long as somebody is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from wrapped_store import wrapped

from tensorize_assets.core import lease
from tensorize_assets.core.errors import StoreUnavailableError
from tensorize_assets.core.store import Store

KEY = "snapshots/org/m/lease.json"


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.fault("Race", "several hold one lease in turn", "one works at a time")
def test_work_is_done_by_one_at_a_time(store: Store) -> None:
    """Whoever waits says for whom, and goes on as soon as it may."""
    active: list[int] = []
    most: list[int] = []
    said: list[str] = []

    def work(number: int) -> None:
        with lease.held(store, KEY, "mirroring org/m", said.append, look_s=0.02):
            active.append(number)
            most.append(len(active))
            # Until somebody waits; whoever is last has nobody to wait for.
            until(lambda: said or len(most) == 4)
            active.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    assert [1, 1, 1, 1] == most
    assert any(line.startswith("mirroring org/m is being done by ") for line in said)
    found = lease.read(store, KEY)
    assert found is not None
    assert found.free


def test_who_works_for_long_keeps_its_lease(store: Store) -> None:
    """It is written anew while the work lasts, however long that is."""
    order: list[str] = []
    begun = threading.Event()

    def first() -> None:
        with lease.held(store, KEY, "work", order.append, beat_s=0.05, expiry_s=0.6):
            begun.set()
            time.sleep(1.5)
            order.append("first")

    def second() -> None:
        begun.wait()
        with lease.held(store, KEY, "work", lambda _: None, expiry_s=0.6, look_s=0.02):
            order.append("second")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()
    assert ["first", "second"] == order


@pytest.mark.fault("Race", "the holder of a lease dies", "another takes it over")
def test_the_lease_of_one_that_died_is_taken_over(store: Store) -> None:
    """After some time in which nothing was heard; and it says whose it was."""
    dead = lease.Lease(owner="host-a, process 7", token="x", beat=3)
    store.put_bytes(KEY, lease._encode(dead))  # pyright: ignore[reportPrivateUsage]
    said: list[str] = []
    began = time.monotonic()
    with lease.held(store, KEY, "mirroring org/m", said.append, expiry_s=0.4, look_s=0.02):
        took = time.monotonic() - began
        found = lease.read(store, KEY)
        assert found is not None
        assert found.owner != dead.owner
    assert took >= 0.4
    assert [
        "mirroring org/m is being done by host-a, process 7: waiting for it",
        "host-a, process 7 has not been heard of for 0 s: mirroring org/m goes on",
    ] == said


@pytest.mark.fault(
    "Race", "a holder that was only slow comes back", "it leaves the other its lease"
)
def test_one_that_was_only_slow_leaves_the_other_its_lease(store: Store) -> None:
    """It finds out at its next writing, goes on, and frees nothing that is not its own."""
    said: list[str] = []
    with lease.held(store, KEY, "work", said.append, beat_s=0.3):
        mine = lease.read(store, KEY)
        with lease.held(store, KEY, "work", lambda _: None, expiry_s=0.05, look_s=0.02):
            until(lambda: said)
            other = lease.read(store, KEY)
            assert mine is not None
            assert other is not None
            assert mine.token != other.token
    assert ["another run took over work, which was not heard of here for a time"] == said
    found = lease.read(store, KEY)
    assert found is not None
    assert (other.token, True) == (found.token, found.free)


def test_a_lease_that_nobody_can_read_is_somebodys_until_it_expires(store: Store) -> None:
    """Another release may have written it."""
    store.put_bytes(KEY, b"?")
    said: list[str] = []
    with lease.held(store, KEY, "work", said.append, expiry_s=0.1, look_s=0.02):
        pass
    assert "work is being done by somebody: waiting for it" == said[0]


@pytest.mark.parametrize("written", [True, False])
def test_trouble_on_the_way_loses_no_lease(store: Store, written: bool) -> None:
    """Whether the writing that failed had arrived or not."""
    troubled: list[str] = []
    said: list[str] = []

    def fails(method: str, key: str) -> None:
        if method == "put_bytes" and len(troubled) < 3 and lease.read(store, KEY) is not None:
            troubled.append(key)
            raise StoreUnavailableError("no route")

    if written:
        # The first writing is that which takes the lease; `after` follows it too.
        began = threading.Event()
        flaky = wrapped(store, after=lambda m, k: fails(m, k) if began.is_set() else None)
    else:
        began = threading.Event()
        flaky = wrapped(store, before=lambda m, k: fails(m, k) if began.is_set() else None)
    with lease.held(flaky, KEY, "work", said.append, beat_s=0.05):
        began.set()
        until(lambda: len(troubled) == 3)
        held = lease.read(store, KEY)
        assert held is not None
        until(lambda: (now := lease.read(store, KEY)) and now.beat > held.beat)
    assert [] == said
    freed = lease.read(store, KEY)
    assert freed is not None
    assert freed.free
