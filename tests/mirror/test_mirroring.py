"""From the Hub into the mirror: once a commit, whoever asks at the same time."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chain_home import weights

from tensorize_assets.core import hub, layout, lease, local_adapter, mirror, mirroring
from tensorize_assets.core.errors import HubError, StoreError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.mirroring import Mirrored, Work, bring
from tensorize_assets.core.store import Store
from tensorize_assets.demo.hub_server import LocalHub

MODEL = "tiny/llama"


class Host(NamedTuple):
    """A machine with a Hub cache of its own."""

    work: Work
    log: list[str]

    def bring(self, check: mirroring.Check | None = None) -> Mirrored:
        return bring(self.work, hub.resolve(self.work.access, MODEL, "main"), check)


def host(store: Store, model_hub: LocalHub, cache: Path, **settings: Any) -> Host:
    log: list[str] = []
    access = HubAccess(endpoint=model_hub.endpoint, cache_dir=cache)
    return Host(Work(store, access, log.append, lambda *_: lambda *_: None, **settings), log)


def downloads(model_hub: LocalHub) -> Counter[str]:
    """How often each file's content was sent."""
    asked = model_hub.requests_for("/resolve/", "GET")
    return Counter(request.path.partition("/resolve/")[2].partition("/")[2] for request in asked)


def file_key(files: dict[str, bytes], path: str) -> str:
    return layout.snapshot_file_key(MODEL, hashlib.sha256(files[path]).hexdigest())


def test_hosts_that_want_one_commit_at_once_download_it_once(
    store: Store,
    model_hub: LocalHub,
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share nothing but the store; those who wait say for whom."""
    hosts = [host(store, model_hub, tmp_path / name) for name in "abc"]
    download = hub.download

    def waiting() -> int:
        return sum(any("waiting for it" in line for line in one.log) for one in hosts)

    def when_all_are_there(*asked: Any) -> Any:
        deadline = time.monotonic() + 30
        while waiting() < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        return download(*asked)

    monkeypatch.setattr(hub, "download", when_all_are_there)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(Host.bring, hosts))

    # Of two files with one content the cache asks for one.
    assert {1} == set(downloads(model_hub).values())
    assert downloads(model_hub).keys() >= {"config.json", "model-00001-of-00002.safetensors"}
    assert [False, False, True] == sorted(one.downloaded for one in found)
    assert found[0].snapshot == found[1].snapshot == found[2].snapshot
    assert 2 == waiting()
    total = sum({content: len(content) for content in files.values()}.values())
    assert [0, 0, total] == sorted(one.sent_bytes for one in found)


def test_what_is_mirrored_is_only_resolved(
    store: Store, model_hub: LocalHub, tmp_path: Path
) -> None:
    """The Hub says what the files are, and the mirror has them; the small ones are read."""
    first = host(store, model_hub, tmp_path / "a").bring()
    before = len(model_hub.requests_for("/resolve/"))
    configs: list[Any] = []

    again = host(store, model_hub, tmp_path / "b").bring(configs.append)

    assert first.snapshot == again.snapshot
    assert not again.downloaded
    assert [{"num_attention_heads": 4, "num_key_value_heads": 4}] == configs
    assert before == len(model_hub.requests_for("/resolve/"))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_model_that_does_not_fit_costs_no_download(
    store: Store, model_hub: LocalHub, tmp_path: Path, mirrored: bool
) -> None:
    """What is wrong shows in config.json; the next run is not kept waiting."""
    if mirrored:
        host(store, model_hub, tmp_path / "a").bring()
    before = downloads(model_hub)

    def refuse(config: dict[str, Any]) -> None:
        raise HubError(f"{config['num_attention_heads']} heads")

    with pytest.raises(HubError, match="4 heads"):
        host(store, model_hub, tmp_path / "b").bring(refuse)

    assert set(downloads(model_hub) - before) <= {"config.json"}
    commit = hub.resolve(host(store, model_hub, tmp_path).work.access, MODEL, "main").commit
    found = lease.read(store, layout.snapshot_lease_key(MODEL, commit))
    assert found is not None
    assert found.free


@pytest.mark.parametrize("what", ["small", "large", "gone"])
def test_a_mirror_that_lost_something_is_mended(
    store: Store, model_hub: LocalHub, files: dict[str, bytes], tmp_path: Path, what: str
) -> None:
    """By what it lacks alone; of large files a reader finds out that they are others."""
    host(store, model_hub, tmp_path / "a").bring()
    path = "tokenizer.json" if what == "small" else "model-00001-of-00002.safetensors"
    key, size = file_key(files, path), len(files[path])
    if what == "gone":
        store.delete(key)
    else:
        store.put_bytes(key, bytes(size - (what == "large")))
    mending = host(store, model_hub, tmp_path / "b")

    found = mending.bring()

    assert (True, size) == (found.downloaded, found.sent_bytes)
    said = "is not special/tokenizer.json" if what == "small" else "has lost 1 files"
    assert any(said in line for line in mending.log)
    stored = store.get_bytes(key)
    assert stored is not None
    assert files[path] == stored.data


def test_a_list_that_names_other_files_is_not_believed(
    store: Store, model_hub: LocalHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Who writes to the store may put a file there, and a list that fits it, but not the Hub's."""
    host(store, model_hub, tmp_path / "a").bring()
    listing = hub.resolve(host(store, model_hub, tmp_path).work.access, MODEL, "main")
    key = layout.snapshot_key(MODEL, listing.commit)
    stored = store.get_bytes(key)
    assert stored is not None
    for path in ("config.json", "model-00001-of-00002.safetensors"):
        other = bytes(len(files[path]))
        was, sha256 = (hashlib.sha256(one).hexdigest() for one in (files[path], other))
        store.put_bytes(layout.snapshot_file_key(MODEL, sha256), other)
        store.put_bytes(key, stored.data.replace(was.encode(), sha256.encode()))
        before = len(model_hub.requests_for("/resolve/", "GET"))

        found = host(store, model_hub, tmp_path / path).bring()

        assert found.downloaded, path
        assert before < len(model_hub.requests_for("/resolve/", "GET"))
        wanted = {file.path: file.sha256 for file in found.snapshot.files}
        assert was == wanted[path]
        known = mirror.read_list(store, MODEL, listing.commit)
        assert known is not None
        assert mirroring.entries_of(found.snapshot) == known.files


def test_a_host_that_died_is_followed_by_another(
    store: Store, model_hub: LocalHub, tmp_path: Path
) -> None:
    """Its lease expires, and what it had sent stays."""
    second = host(store, model_hub, tmp_path / "b", lease_expiry_s=0.3)
    commit = hub.resolve(second.work.access, MODEL, "main").commit
    dead = lease.Lease(owner="host-a, process 7", token="x", beat=3)
    data = json.dumps(dead.model_dump()).encode()
    store.put_bytes(layout.snapshot_lease_key(MODEL, commit), data)

    assert second.bring().downloaded

    assert any("host-a, process 7 has not been heard of" in line for line in second.log)


def test_a_local_adapter_is_found_where_only_the_mirror_has_it(
    store: Store, model_hub: LocalHub, tmp_path: Path
) -> None:
    """Its folder is on the machine of who gave it; its commit vouches for its files."""
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights(b"matrices"))
    here = host(store, model_hub, tmp_path / "a")
    repo, commit = local_adapter.take(here.work.access, folder)
    bring(here.work, mirroring.resolve_adapter(here.work, repo, commit))
    there = host(store, model_hub, tmp_path / "b")

    listing = mirroring.resolve_adapter(there.work, repo, commit)
    found = bring(there.work, listing)

    assert not found.downloaded
    assert ["adapter_config.json", "adapter_model.safetensors"] == [
        file.path for file in found.snapshot.files
    ]
    key = layout.snapshot_key(repo, commit)
    stored = store.get_bytes(key)
    assert stored is not None
    sha256 = hashlib.sha256(weights(b"matrices")).hexdigest()
    store.put_bytes(key, stored.data.replace(sha256.encode(), b"0" * 64))
    with pytest.raises(HubError, match="is gone from the cache"):
        mirroring.resolve_adapter(there.work, repo, commit)


def test_a_config_that_was_changed_since_is_not_read(
    store: Store, model_hub: LocalHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """It decides what is built."""
    found = host(store, model_hub, tmp_path / "a").bring().snapshot
    store.put_bytes(file_key(files, "config.json"), b"{}")
    with pytest.raises(StoreError, match="is damaged; remove it"):
        mirroring.read_config(store, found)
