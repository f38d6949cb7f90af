"""Snapshots from a real server through the real client: what is taken, checked and refused."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.utils import WeakFileLock
from pydantic import SecretStr, ValidationError

import tensorize_assets
from tensorize_assets.core.errors import HubError, HubUnavailableError
from tensorize_assets.core.hub import download, ensure_local, local_path, resolve, resolve_adapter
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_config import read_config
from tensorize_assets.core.hub_files import RevisionListing, Snapshot, SnapshotFile
from tensorize_assets.demo.hub_server import LocalHub

MODEL = "org/model"
TOKEN = "hf_abcdefghijklmnop"
WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b'{"hidden_size": 64}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"version": "1.0"}',
}
REPO_FOLDER = "models--org--model"


@pytest.fixture
def access(hub: LocalHub, tmp_path: Path) -> HubAccess:
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache")


@pytest.fixture
def fetch(access: HubAccess) -> Callable[..., tuple[Snapshot, Path]]:
    def resolve_and_download(revision: str = "main") -> tuple[Snapshot, Path]:
        return download(access, MODEL, resolve(access, MODEL, revision))

    return resolve_and_download


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def paths(listing: RevisionListing) -> list[str]:
    return [file.path for file in listing.files]


def is_retryable(error: HubError) -> bool:
    return error.retryable


def shards(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"layer.{name}": name for name in names}}).encode()


# Resolving


def test_a_revision_is_resolved_once(hub: LocalHub, access: HubAccess) -> None:
    """Two requests could see two commits of a branch that moves between them."""
    commit = hub.commit(MODEL, FILES)
    listing = resolve(access, MODEL, "main")
    assert commit == listing.commit
    assert "safetensors" == listing.weights_format
    assert sum(map(len, FILES.values())) == listing.size
    assert [(file, len(FILES[file])) for file in sorted(FILES)] == [
        (file.path, file.size) for file in listing.files
    ]
    assert [f"/api/models/{MODEL}/revision/main"] == [request.path for request in hub.requests]


def test_branches_tags_and_commits_are_revisions(hub: LocalHub, access: HubAccess) -> None:
    """A catalog may name any of them, also with a slash."""
    old = hub.commit(MODEL, FILES)
    hub.tag(MODEL, "v1")
    new = hub.commit(MODEL, FILES | {"config.json": b"{}"}, branch="refs/pr/1")
    expected = {"main": old, "v1": old, old: old, "refs/pr/1": new}
    assert expected == {name: resolve(access, MODEL, name).commit for name in expected}


CHOSEN = [
    "LICENSE",
    "README.md",
    "added_tokens.json",
    "additional_chat_templates/tool.jinja",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "qwen.tiktoken",
    "tokenizer.model",
    "tokenizer.model.v3",
    "vocab.json",
]
LEFT_OUT = [
    ".gitattributes",
    "checkpoint-500/config.json",
    "checkpoint-500/model.safetensors",
    "configuration_custom.py",
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
    "model.gguf",
    "model.onnx",
    "modeling_custom.py",
    "nested/model.safetensors",
    "onnx/config.json",
    "original/consolidated.00.pth",
    "original/params.json",
    "original/tokenizer.model",
    "picture.png",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "runs/events.out.tfevents",
    "tf_model.h5",
    "training_args.bin",
]


def test_weights_and_text_files_are_chosen(hub: LocalHub, access: HubAccess) -> None:
    """Every other format holds the same weights again; Python code would run."""
    hub.commit(MODEL, dict.fromkeys([*CHOSEN, *LEFT_OUT], b"{}"))
    assert CHOSEN == paths(resolve(access, MODEL, "main"))


def test_bin_weights_are_the_fallback(hub: LocalHub, access: HubAccess) -> None:
    """Pickled optimizer states and arguments are no weights, and larger than them."""
    chosen = [
        "config.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]
    left_out = ["optimizer.bin", "scheduler.bin", "training_args.bin", "rng_state.pth"]
    hub.commit(MODEL, {path: path.encode() for path in [*chosen, *left_out]})
    listing = resolve(access, MODEL, "main")
    assert (chosen, "bin") == (paths(listing), listing.weights_format)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("readme.txt", "no weights at all"),
        ("model.gguf", "only model.gguf"),
        ("original/consolidated.00.pth", "only original/consolidated.00.pth"),
        ("nested/model.safetensors", "only nested/model.safetensors"),
        ("training_args.bin", "only training_args.bin"),
    ],
)
def test_a_repo_without_weights_is_refused(
    hub: LocalHub, access: HubAccess, path: str, found: str
) -> None:
    """Said before anything is downloaded, and with what there is instead."""
    hub.commit(MODEL, {"config.json": b"{}", path: b"x"})
    with pytest.raises(HubError, match=found) as caught:
        resolve(access, MODEL, "main")
    assert not is_retryable(caught.value)


@pytest.mark.parametrize(
    "path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\..\\b"]
)
@pytest.mark.fault(
    "Bad Hub",
    "resolve: a name with `../`, or an absolute one",
    "refused: the file is named, nothing is downloaded",
)
def test_a_path_that_leaves_the_folder_is_refused(
    hub: LocalHub, access: HubAccess, path: str
) -> None:
    """A hostile endpoint must not write over files of the host."""
    hub.commit(MODEL, FILES | {path: b"{}"})
    with pytest.raises(HubError, match="outside its folder"):
        resolve(access, MODEL, "main")


@pytest.mark.parametrize("path", ["a\\b.json", "a\nb.json", "a//b.json", f"{'x' * 300}.json"])
@pytest.mark.fault(
    "Bad Hub",
    "resolve: a name with backslashes, line ends, empty parts or 300 letters",
    "refused: the file is named, nothing is downloaded",
)
def test_a_path_the_store_cannot_hold_is_refused(
    hub: LocalHub, access: HubAccess, path: str
) -> None:
    """The files go into the artifact under their names; better refused now than after a build."""
    hub.commit(MODEL, FILES | {path: b"{}"})
    with pytest.raises(HubError, match="cannot be used"):
        resolve(access, MODEL, "main")


def test_odd_names_of_files_nobody_needs_do_not_matter(hub: LocalHub, access: HubAccess) -> None:
    """A picture with a bad name is no reason to refuse a model."""
    hub.commit(MODEL, FILES | {"a\\b.png": b""})
    assert sorted(FILES) == paths(resolve(access, MODEL, "main"))


# Adapters

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"A and B"}


@pytest.mark.parametrize(
    ("weights", "chosen"),
    [
        (["adapter_model.safetensors", "adapter_model.bin"], "safetensors"),
        (["adapter_model.safetensors"], "safetensors"),
        (["adapter_model.bin"], "bin"),
    ],
)
def test_an_adapter_is_its_weights_and_its_config(
    hub: LocalHub, access: HubAccess, weights: list[str], chosen: str
) -> None:
    """Beside them a repo may hold a base model, checkpoints, and its own copy of a tokenizer."""
    others = [*FILES, "README.md", "training_args.bin", "checkpoint-9/adapter_model.safetensors"]
    commit = hub.commit(MODEL, dict.fromkeys([*others, *weights, "adapter_config.json"], b"{}"))
    listing = resolve_adapter(access, MODEL, "main")
    assert (commit, chosen) == (listing.commit, listing.weights_format)
    assert ["adapter_config.json", f"adapter_model.{chosen}"] == paths(listing)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["config.json", "model.safetensors"], "neither"),
        (["adapter_config.json"], "only adapter_config.json"),
        (["adapter_model.safetensors"], "only adapter_model.safetensors"),
        (["adapter_config.json", "adapter_model.pt"], "only adapter_config.json, adapter_model.pt"),
        (["lora/adapter_model.bin", "lora/adapter_config.json"], "only lora/adapter_config.json, "),
    ],
)
def test_a_repo_that_is_no_adapter_is_refused(
    hub: LocalHub, access: HubAccess, files: list[str], found: str
) -> None:
    """The likeliest mistake is the base model's own repo."""
    hub.commit(MODEL, dict.fromkeys(files, b"{}"))
    with pytest.raises(HubError, match=f"is no LoRA adapter of PEFT: .* and has {found}") as caught:
        resolve_adapter(access, MODEL, "main")
    assert not is_retryable(caught.value)


def test_an_adapters_repo_is_missed_as_a_models_is(hub: LocalHub, access: HubAccess) -> None:
    """Missing, of another name, or without the revision."""
    hub.commit(MODEL, ADAPTER)
    with pytest.raises(HubError, match="org/nothing does not exist"):
        resolve_adapter(access, "org/nothing", "main")
    with pytest.raises(HubError, match="has no revision 'v9'"):
        resolve_adapter(access, MODEL, "v9")
    hub.rename(MODEL, "org/new")
    with pytest.raises(HubError, match="was renamed to org/new"):
        resolve_adapter(access, MODEL, "main")


def test_an_adapter_that_is_gone_from_the_cache_comes_again(
    hub: LocalHub, access: HubAccess
) -> None:
    """Caches are cleaned; a build goes on with the commit that it is of."""
    hub.commit(MODEL, ADAPTER)
    snapshot, folder = download(access, MODEL, resolve_adapter(access, MODEL, "main"))
    assert ["adapter_config.json", "adapter_model.safetensors"] == [f.path for f in snapshot.files]
    hub.commit(MODEL, {"adapter_config.json": b"[]", "adapter_model.safetensors": b"other"})
    asked = len(hub.requests)
    assert folder == ensure_local(access, snapshot, adapter=True)
    assert asked == len(hub.requests)
    shutil.rmtree(access.cache_dir)
    assert folder == ensure_local(access, snapshot, adapter=True)
    assert ADAPTER == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_that_is_gone_from_the_cache_comes_again(hub: LocalHub, access: HubAccess) -> None:
    """As its adapters do; and an adapter is not to be had in its place."""
    hub.commit(MODEL, FILES | ADAPTER)
    snapshot, folder = download(access, MODEL, resolve(access, MODEL, "main"))
    shutil.rmtree(access.cache_dir)
    with pytest.raises(HubError, match=r"has other files on .* than when it was resolved"):
        ensure_local(access, snapshot, adapter=True)
    assert folder == ensure_local(access, snapshot)
    assert set(FILES) <= {path.name for path in folder.iterdir()}


# Refusals, each final


def test_missing_repo(access: HubAccess) -> None:
    """Typing errors are the most frequent failure of all."""
    with pytest.raises(HubError, match=r"no/such does not exist on .* none was sent") as caught:
        resolve(access, "no/such", "main")
    assert not is_retryable(caught.value)


def test_private_repo_with_another_token(hub: LocalHub, access: HubAccess) -> None:
    """The Hub calls it missing; the message must say what else it may be."""
    hub.add_repo(MODEL, private=True, token="hf_owner")
    hub.commit(MODEL, FILES)
    hub.add_token(TOKEN)
    mine = access.model_copy(update={"token": SecretStr(TOKEN)})
    with pytest.raises(HubError, match="private and the token has no access to it") as caught:
        resolve(mine, MODEL, "main")
    assert not is_retryable(caught.value)


def test_missing_revision(hub: LocalHub, access: HubAccess) -> None:
    """The repo is right, so the message is about the revision alone."""
    hub.commit(MODEL, FILES)
    with pytest.raises(HubError, match=r"org/model on .* has no revision 'v9'") as caught:
        resolve(access, MODEL, "v9")
    assert not is_retryable(caught.value)


def test_renamed_repo(hub: LocalHub, access: HubAccess) -> None:
    """Followed in silence, one model would be built under two names."""
    hub.commit(MODEL, FILES)
    hub.rename(MODEL, "neworg/newname")
    with pytest.raises(HubError, match="renamed to neworg/newname") as caught:
        resolve(access, MODEL, "main")
    assert not is_retryable(caught.value)


@pytest.mark.parametrize(
    ("token", "said"), [(None, "no token was sent"), (TOKEN, "account has no access yet")]
)
def test_gated_repo(hub: LocalHub, access: HubAccess, token: str | None, said: str) -> None:
    """The user has to do something on the website; the message says where."""
    hub.add_repo(MODEL, gated=True, token="hf_granted")
    hub.commit(MODEL, FILES)
    hub.add_token(TOKEN)
    mine = access.model_copy(update={"token": SecretStr(token) if token else None})
    listing = resolve(mine, MODEL, "main")
    with pytest.raises(HubError, match=said) as caught:
        download(mine, MODEL, listing)
    assert f"request access at {hub.endpoint}/{MODEL}" in str(caught.value)
    assert not is_retryable(caught.value)
    granted = access.model_copy(update={"token": SecretStr("hf_granted")})
    assert download(granted, MODEL, listing)[1].is_dir()


def test_refused_token(hub: LocalHub, access: HubAccess) -> None:
    """An expired token fails on public repos too, and that is not the repo's fault."""
    hub.commit(MODEL, FILES)
    mine = access.model_copy(update={"token": SecretStr(TOKEN)})
    with pytest.raises(HubError, match="refuses the token") as caught:
        resolve(mine, MODEL, "main")
    assert not is_retryable(caught.value)


@pytest.mark.parametrize("model", ["a/b/c", "org--name", "../etc", "org/na me", ""])
def test_names_that_no_model_has(access: HubAccess, model: str) -> None:
    """Refused here: such a name must reach neither a URL nor a folder."""
    with pytest.raises(HubError) as caught:
        resolve(access, model, "main")
    assert not is_retryable(caught.value)


def test_an_endpoint_that_is_no_hub(hub: LocalHub, access: HubAccess) -> None:
    """A proxy's login page answers 200 to everything."""
    hub.fail_next("/api/models", status=200)
    with pytest.raises(HubError, match="does not answer as the Hub does"):
        resolve(access, MODEL, "main")


def test_an_endpoint_that_is_no_url(access: HubAccess) -> None:
    """Retrying would not make it one."""
    mine = access.model_copy(update={"endpoint": "huggingface.co"})
    with pytest.raises(HubError, match="not a URL") as caught:
        resolve(mine, MODEL, "main")
    assert not is_retryable(caught.value)


def test_offline_mode_is_named(hub: LocalHub, tmp_path: Path) -> None:
    """Set once in a profile and forgotten, it looks like a broken network."""
    hub.commit(MODEL, FILES)
    script = f"""
from pathlib import Path
from tensorize_assets.core.errors import HubError
from tensorize_assets.core.hub import resolve
from tensorize_assets.core.hub_access import HubAccess
try:
    access = HubAccess(endpoint={hub.endpoint!r}, cache_dir=Path({str(tmp_path)!r}))
    resolve(access, {MODEL!r}, "main")
except HubError as error:
    print(error.retryable, error)
"""
    result = run_python(script, HF_HUB_OFFLINE="1")
    assert result.startswith("False ")
    assert "HF_HUB_OFFLINE is set" in result


def test_a_cache_that_is_no_folder(hub: LocalHub, access: HubAccess) -> None:
    """The disk refuses, not the network: a retry would not help."""
    hub.commit(MODEL, FILES)
    access.cache_dir.write_text("a file")
    with pytest.raises(HubError, match="use another cache folder") as caught:
        download(access, MODEL, resolve(access, MODEL, "main"))
    assert not is_retryable(caught.value)


def test_a_listing_of_another_model(hub: LocalHub, access: HubAccess) -> None:
    """Mixed up, the files of one model would be recorded under the name of another."""
    hub.commit(MODEL, FILES)
    with pytest.raises(HubError, match="listing is of org/model, not of org/other"):
        download(access, "org/other", resolve(access, MODEL, "main"))


# Trouble that may pass


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_busy_hub_is_worth_a_retry(hub: LocalHub, access: HubAccess, status: int) -> None:
    """And the message says when, if the Hub does."""
    hub.commit(MODEL, FILES)
    hub.fail_next("/api/models", status=status, headers={"Retry-After": "7"})
    with pytest.raises(HubUnavailableError, match=f"answered {status}.* after 7 s") as caught:
        resolve(access, MODEL, "main")
    assert is_retryable(caught.value)
    assert resolve(access, MODEL, "main").files


def test_a_hub_that_is_down(hub: LocalHub, access: HubAccess) -> None:
    """No answer at all."""
    hub.stop()
    with pytest.raises(HubUnavailableError, match="ConnectError"):
        resolve(access, MODEL, "main")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=3;t=55'}, None),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_when_a_busy_hub_wants_to_be_asked_again(
    hub: LocalHub, access: HubAccess, headers: dict[str, str], seconds: float | None
) -> None:
    """Asked sooner it only says no again; the Hub itself uses a header of its own."""
    hub.commit(MODEL, FILES)
    hub.fail_next("/api/models", status=429, headers=headers)
    with pytest.raises(HubUnavailableError) as caught:
        resolve(access, MODEL, "main")
    assert seconds == caught.value.retry_after_s


def test_a_hub_that_does_not_answer_in_time(hub: LocalHub, access: HubAccess) -> None:
    """The client itself would wait for ever."""
    hub.commit(MODEL, FILES)
    hub.latency_s = 0.5
    with pytest.raises(HubUnavailableError, match="ReadTimeout"):
        resolve(access, MODEL, "main", timeout_s=0.1)


@pytest.mark.fault(
    "Bad Hub",
    "download: 429 that does not end",
    "the client gives up; worth a retry",
)
def test_a_hub_that_stays_busy_during_a_download(hub: LocalHub, access: HubAccess) -> None:
    """The client waits as it is told, gives up in the end, and says only "no local file"."""
    hub.commit(MODEL, FILES)
    listing = resolve(access, MODEL, "main")
    fault = hub.fail_next(
        "tokenizer.json", status=429, headers={"Retry-After": "0"}, times=99, method="HEAD"
    )
    with pytest.raises(HubUnavailableError, match=r"answered 429.* after 0 s"):
        download(access, MODEL, listing)
    assert fault.hits > 1


# Downloading


def test_every_file_is_there_with_its_hash(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """The record of the snapshot is what every later step believes."""
    commit = hub.commit(MODEL, FILES)
    snapshot, folder = fetch()
    expected = tuple(
        SnapshotFile(path=path, size=len(data), sha256=sha256(data))
        for path, data in sorted(FILES.items())
    )
    assert expected == snapshot.files
    assert (MODEL, "main", commit) == (snapshot.model, snapshot.revision, snapshot.commit)
    assert FILES == {path: (folder / path).read_bytes() for path in FILES}


def test_only_the_chosen_files_come(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """Names that are patterns too must match nothing but themselves."""
    files = FILES | {"[ab]*.json": b"{}", "model.gguf": b"x" * 1000, "a.py": b"", "b.png": b""}
    hub.commit(MODEL, files)
    _, folder = fetch()
    assert ["[ab]*.json", *sorted(FILES)] == sorted(os.listdir(folder))
    assert 0 == len(hub.requests_for("gguf"))


def test_unusual_names_and_subfolders(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """Each is legal in Git, and wrong quoting somewhere would lose it."""
    odd = {
        name: name.encode()
        for name in [
            "1_Pooling/config.json",
            "a b/c d.json",
            "percent%20.json",
            "plus+hash#question?.json",
            "ünïcode/模型.json",
            "'quotes\"{braces}.txt",
            "deep/er/and/deeper.jinja",
            ".hidden.json",
            "models/refs/main.json",
        ]
    }
    hub.commit(MODEL, FILES | odd)
    snapshot, folder = fetch()
    assert sorted(FILES | odd) == [file.path for file in snapshot.files]
    assert odd == {path: (folder / path).read_bytes() for path in odd}


def test_empty_files_and_equal_files(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """Equal content is one blob in the cache, an empty one is never asked for."""
    extra = {"empty.txt": b"", "a.json": b"{}", "b.json": b"{}"}
    hub.commit(MODEL, FILES | extra)
    _, folder = fetch()
    assert extra == {path: (folder / path).read_bytes() for path in extra}


def test_a_second_call_asks_and_hashes_nothing(
    hub: LocalHub, access: HubAccess, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished chain is run again in seconds, with 140 GB of weights too."""
    hub.commit(MODEL, FILES)
    listing = resolve(access, MODEL, "main")
    first = download(access, MODEL, listing)
    hub.stop()
    with caplog.at_level(logging.INFO, "tensorize_assets"):
        assert first == download(access, MODEL, listing)
    assert [] == [record.getMessage() for record in caplog.records if record.name != "httpx"]


def test_commits_share_the_files_they_have_in_common(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """A new README must not cost the weights again."""
    hub.commit(MODEL, FILES)
    fetch()
    hub.commit(MODEL, FILES | {"README.md": b"new"})
    _, folder = fetch()
    assert WEIGHTS == (folder / "model.safetensors").read_bytes()
    assert len(WEIGHTS) == hub.bytes_sent("model.safetensors")


def test_progress_grows_to_the_whole(hub: LocalHub, access: HubAccess) -> None:
    """Hours of download must show that they advance."""
    hub.commit(MODEL, FILES | {"model.safetensors": bytes(24 * 1024 * 1024)})
    hub.bytes_per_s = 12 * 1024 * 1024
    listing = resolve(access, MODEL, "main")
    calls: list[tuple[int, int]] = []
    download(access, MODEL, listing, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert {listing.size} == {total for _, total in calls}
    assert listing.size == calls[-1][0]
    assert [done for done, _ in calls if 0 < done < listing.size]


def test_an_interrupt_ends_the_download(hub: LocalHub, access: HubAccess) -> None:
    """A cancelled run must not go on for the rest of 140 GB."""
    size = 64 * 1024 * 1024
    hub.commit(MODEL, FILES | {"model.safetensors": bytes(size)})
    hub.bytes_per_s = 16 * 1024 * 1024
    listing = resolve(access, MODEL, "main")

    def cancel(done: int, total: int) -> None:
        if done > total // 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(access, MODEL, listing, cancel)
    assert hub.bytes_sent("model.safetensors") < size
    assert [] == list((access.cache_dir / REPO_FOLDER / "blobs").glob("*.incomplete"))


@pytest.mark.fault(
    "Bad Hub",
    "download: a connection that is cut",
    "success by retry: what came is not sent again",
)
def test_a_cut_connection_is_taken_up_where_it_broke(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """The client writes pieces of 10 MiB: what came before the cut is not sent again."""
    mebibyte = 1024 * 1024
    weights = os.urandom(13 * mebibyte)
    hub.commit(MODEL, FILES | {"model.safetensors": weights})
    fault = hub.cut_after("model.safetensors", 11 * mebibyte)
    _, folder = fetch()
    assert weights == (folder / "model.safetensors").read_bytes()
    requests = hub.requests_for("model.safetensors", "GET")
    assert 1 == fault.hits
    assert [None, f"bytes={10 * mebibyte}-"] == [request.range for request in requests]
    assert [11 * mebibyte, 3 * mebibyte] == [request.bytes_sent for request in requests]


@pytest.mark.fault(
    "Bad Hub",
    "download: one of two files fails",
    "worth a retry: the rest is downloaded then",
)
def test_a_partial_snapshot_is_never_taken_for_one(
    hub: LocalHub, access: HubAccess, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """Whatever was complete stays, and only the rest is downloaded by the next call."""
    files = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": WEIGHTS,
        "model-00002-of-00002.safetensors": WEIGHTS[1:],
    }
    commit = hub.commit(MODEL, files)
    hub.fail_next("00002-of-00002", status=503, method="GET")
    with pytest.raises(HubUnavailableError, match="answered 503"):
        fetch()
    assert not (
        access.cache_dir / REPO_FOLDER / "snapshots" / commit / "model-00002-of-00002.safetensors"
    ).exists()
    snapshot, folder = fetch()
    assert files == {path: (folder / path).read_bytes() for path in files}
    assert folder == local_path(access, snapshot)
    assert len(WEIGHTS) == hub.bytes_sent("00001-of-00002")


def test_a_hub_that_hangs_up_is_worth_a_retry(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """The client raises a bare transport error here, outside its own hierarchy."""
    hub.commit(MODEL, FILES)
    hub.cut_after("config.json", 0, method="HEAD")
    with pytest.raises(HubUnavailableError, match="RemoteProtocolError"):
        fetch()
    fetch()


@pytest.mark.fault(
    "Bad Hub",
    "download: a repo that is renamed after it was resolved",
    "success: the commit that was resolved",
)
def test_a_repo_renamed_meanwhile_still_gives_its_commit(hub: LocalHub, access: HubAccess) -> None:
    """The commit is what was asked for, and its hashes are checked, whatever its name is now."""
    hub.commit(MODEL, FILES)
    listing = resolve(access, MODEL, "main")
    hub.rename(MODEL, "neworg/newname")
    snapshot, folder = download(access, MODEL, listing)
    assert folder == local_path(access, snapshot)


def test_an_error_of_the_caller_stays_its_own(hub: LocalHub, access: HubAccess) -> None:
    """A broken progress function must not be reported as trouble with the Hub."""
    hub.commit(MODEL, FILES)

    def broken(done: int, total: int) -> None:
        raise RuntimeError("from the caller")

    with pytest.raises(RuntimeError, match="from the caller"):
        download(access, MODEL, resolve(access, MODEL, "main"), broken)


def test_the_cache_stays_one_that_other_tools_read(
    hub: LocalHub, access: HubAccess, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """Users share it with vLLM and clean it with `hf cache`."""
    commit = hub.commit(MODEL, FILES)
    _, folder = fetch()
    scanned = scan_cache_dir(access.cache_dir)
    (repo,) = scanned.repos
    assert ([], MODEL) == (scanned.warnings, repo.repo_id)
    assert str(folder) == snapshot_download(
        MODEL, revision=commit, cache_dir=access.cache_dir, local_files_only=True
    )


def test_threads_share_one_download(hub: LocalHub, access: HubAccess) -> None:
    """Two suffixes of one model materialize at the same time."""
    hub.commit(MODEL, FILES)
    hub.latency_s = 0.1
    listing = resolve(access, MODEL, "main")
    together = threading.Barrier(4)

    def run(_: int) -> tuple[Snapshot, Path]:
        together.wait()
        return download(access, MODEL, listing)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    assert [results[0]] * 4 == results
    assert len(WEIGHTS) == hub.bytes_sent("model.safetensors")


def test_processes_share_one_download(hub: LocalHub, access: HubAccess) -> None:
    """Dagster runs each step in its own process."""
    hub.commit(MODEL, FILES)
    hub.latency_s = 0.3
    script = f"""
from pathlib import Path
from tensorize_assets.core.hub import download, resolve
from tensorize_assets.core.hub_access import HubAccess
access = HubAccess(endpoint={hub.endpoint!r}, cache_dir=Path({str(access.cache_dir)!r}))
print(download(access, {MODEL!r}, resolve(access, {MODEL!r}, "main"))[0].model_dump_json())
"""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run_python, [script, script])
    assert first == second
    assert Snapshot.model_validate_json(first).files
    assert len(WEIGHTS) == hub.bytes_sent("model.safetensors")
    assert len(FILES["config.json"]) == hub.bytes_sent("config.json")


# Disk


def test_a_disk_too_small_is_said_before_the_download(hub: LocalHub, access: HubAccess) -> None:
    """Found out by a full disk, it would take other runs down with it."""
    hub.commit(MODEL, FILES)
    listing = with_size(resolve(access, MODEL, "main"), "model.safetensors", 10**17)
    with pytest.raises(HubError, match="does not fit on the disk") as caught:
        download(access, MODEL, listing)
    needed = 10**17 + sum(len(FILES[path]) for path in FILES if path != "model.safetensors")
    assert f"{needed:,} bytes" in str(caught.value)
    assert f"free in {access.cache_dir}" in str(caught.value)
    assert not is_retryable(caught.value)
    assert () == hub.requests_for("/resolve/")


def test_what_another_run_has_already_is_not_needed_twice(hub: LocalHub, access: HubAccess) -> None:
    """Halfway through a large download, half of it must be enough for the second run."""
    hub.commit(MODEL, FILES)
    listing = resolve(access, MODEL, "main")
    blob = next(file.blob for file in listing.files if file.path == "model.safetensors")
    beyond = 10**9
    claimed = shutil.disk_usage(access.cache_dir.parent).free + beyond
    partial = access.cache_dir / REPO_FOLDER / "blobs" / f"{blob}.0a1b2c3d.incomplete"
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as file:
        file.truncate(3 * beyond)
    lock = access.cache_dir / ".locks" / REPO_FOLDER / f"{blob}.lock"
    lock.parent.mkdir(parents=True)
    locked = threading.Event()

    def other_run() -> None:
        with WeakFileLock(lock):
            locked.set()
            time.sleep(0.5)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(other_run)
        locked.wait()
        # Past the check of the disk, the claimed size turns out not to be the real one.
        with pytest.raises(HubError, match=f"expected {claimed} bytes"):
            download(access, MODEL, with_size(listing, "model.safetensors", claimed))


def test_leftovers_of_killed_runs_are_swept(
    hub: LocalHub, access: HubAccess, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """A killed client leaves its partial files, gigabytes each, and nobody else removes them."""
    hub.commit(MODEL, FILES)
    blobs = access.cache_dir / REPO_FOLDER / "blobs"
    blobs.mkdir(parents=True)
    for name in ("old", "new"):
        (blobs / f"{name}.0a1b2c3d.incomplete").write_bytes(b"x" * 100)
    long_ago = time.time() - 3600
    os.utime(blobs / "old.0a1b2c3d.incomplete", (long_ago, long_ago))
    fetch()
    assert ["new.0a1b2c3d.incomplete"] == [path.name for path in blobs.glob("*.incomplete")]


# Damage


@pytest.mark.parametrize(
    ("path", "kind"), [("model.safetensors", "SHA-256"), ("config.json", "Git blob")]
)
@pytest.mark.fault(
    "Bad Hub",
    "download: a wrong SHA-256, a wrong Git hash",
    "refused: both hashes are named, the copy is removed",
)
def test_a_download_that_is_not_what_the_hub_declares(
    hub: LocalHub,
    access: HubAccess,
    fetch: Callable[..., tuple[Snapshot, Path]],
    tmp_path: Path,
    path: str,
    kind: str,
) -> None:
    """A broken mirror or proxy: same size, other bytes. Nothing of it may stay in the cache."""
    source = tmp_path / "source"
    source.write_bytes(FILES[path])
    commit = hub.commit(MODEL, FILES | {path: source})
    source.write_bytes(FILES[path][::-1])
    with pytest.raises(HubError, match=f"{path}: expected {kind} [0-9a-f]+, found") as caught:
        fetch()
    assert not is_retryable(caught.value)
    if kind == "SHA-256":
        assert sha256(FILES[path]) in str(caught.value)
        assert sha256(FILES[path][::-1]) in str(caught.value)
    assert not os.path.lexists(access.cache_dir / REPO_FOLDER / "snapshots" / commit / path)
    blobs = (access.cache_dir / REPO_FOLDER / "blobs").iterdir()
    assert FILES[path][::-1] not in [blob.read_bytes() for blob in blobs]
    source.write_bytes(FILES[path])
    _, folder = fetch()
    assert FILES[path] == (folder / path).read_bytes()


@pytest.mark.parametrize("change", ["other bytes and time", "other size only"])
def test_a_cached_file_that_changed(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]], change: str
) -> None:
    """Checked once is not checked for ever: another size or time means another hash."""
    hub.commit(MODEL, FILES)
    _, folder = fetch()
    blob = (folder / "model.safetensors").resolve()
    before = blob.stat()
    if change == "other size only":
        blob.write_bytes(WEIGHTS[:-1])
        os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        blob.write_bytes(WEIGHTS[:-1] + b"\0")
        os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(HubError, match=r"model\.safetensors: expected .*, found"):
        fetch()
    _, folder = fetch()
    assert WEIGHTS == (folder / "model.safetensors").read_bytes()
    assert 2 * len(WEIGHTS) == hub.bytes_sent("model.safetensors")


def test_a_touched_file_is_hashed_again_and_kept(
    hub: LocalHub,
    fetch: Callable[..., tuple[Snapshot, Path]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A copied cache has new times but the same bytes."""
    hub.commit(MODEL, FILES)
    first, folder = fetch()
    (folder / "model.safetensors").resolve().touch()
    with caplog.at_level(logging.INFO, "tensorize_assets"):
        assert first == fetch()[0]
    hashed = [record.args for record in caplog.records if record.msg.startswith("hashed")]
    assert ["model.safetensors"] == [args[0] for args in hashed if isinstance(args, tuple)]
    assert len(WEIGHTS) == hub.bytes_sent("model.safetensors")


@pytest.mark.parametrize("content", [b"", b"{", b'{"files": {"config.json": {"size": 1}}}'])
def test_a_broken_memory_of_checks_only_costs_time(
    hub: LocalHub,
    access: HubAccess,
    fetch: Callable[..., tuple[Snapshot, Path]],
    content: bytes,
) -> None:
    """It is written by us, but on a disk."""
    commit = hub.commit(MODEL, FILES)
    first = fetch()
    (access.cache_dir / REPO_FOLDER / ".tensorize_assets" / f"{commit}.json").write_bytes(content)
    assert first == fetch()


def test_only_the_damaged_file_is_removed(
    hub: LocalHub, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """One flipped bit must not cost the other shards."""
    hub.commit(MODEL, FILES)
    _, folder = fetch()
    blob = (folder / "tokenizer.json").resolve()
    blob.write_bytes(b"damaged")
    with pytest.raises(HubError, match=r"tokenizer\.json"):
        fetch()
    fetch()
    assert len(WEIGHTS) == hub.bytes_sent("model.safetensors")


def test_files_outside_the_cache_are_never_removed(
    hub: LocalHub, access: HubAccess, tmp_path: Path
) -> None:
    """A cache that links to a shared disk owns the link, not what it points to."""
    commit = hub.commit(MODEL, FILES)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not the weights")
    pointer = access.cache_dir / REPO_FOLDER / "snapshots" / commit / "model.safetensors"
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to(elsewhere)
    with pytest.raises(HubError, match=r"model\.safetensors"):
        download(access, MODEL, resolve(access, MODEL, "main"))
    assert (True, False) == (elsewhere.exists(), os.path.lexists(pointer))


@pytest.mark.parametrize(
    ("index", "names"),
    [
        ("model.safetensors.index.json", ("a-1.safetensors", "a-2.safetensors")),
        ("pytorch_model.bin.index.json", ("pytorch_model-1.bin", "pytorch_model-2.bin")),
    ],
)
@pytest.mark.fault(
    "Bad Hub",
    "download: an index that names shards that are not there",
    "refused: the shard is named",
)
def test_shards_and_their_index(
    hub: LocalHub,
    fetch: Callable[..., tuple[Snapshot, Path]],
    index: str,
    names: tuple[str, str],
) -> None:
    """An upload that broke off lacks shards that its index names; vLLM would say it obscurely."""
    whole = {"config.json": b"{}", index: shards(*names)} | dict.fromkeys(names, b"x")
    hub.commit(MODEL, whole)
    snapshot, _ = fetch()
    assert sorted(whole) == [file.path for file in snapshot.files]
    hub.commit(MODEL, {path: data for path, data in whole.items() if path != names[1]})
    with pytest.raises(HubError, match=f"incomplete on the Hub: .* names {names[1]}"):
        fetch()


# Reading what is there


def test_local_path_needs_every_file_with_its_size(
    hub: LocalHub, access: HubAccess, fetch: Callable[..., tuple[Snapshot, Path]]
) -> None:
    """Later steps start from it without a network."""
    hub.commit(MODEL, FILES)
    snapshot, folder = fetch()
    hub.stop()
    assert folder == local_path(access, snapshot)
    (folder / "config.json").resolve().write_bytes(b"longer than it was before")
    assert local_path(access, snapshot) is None
    (folder / "config.json").unlink()
    assert local_path(access, snapshot) is None


def test_read_config(tmp_path: Path) -> None:
    """From the folder or the file; Infinity is no JSON, but some models have it."""
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 64, "time_step_limit": [0.0, Infinity]}')
    expected = {"hidden_size": 64, "time_step_limit": [0.0, float("inf")]}
    assert expected == read_config(tmp_path)
    assert expected == read_config(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"{", "not valid JSON"), (b"[]", "not a JSON object")],
)
def test_read_config_refuses(tmp_path: Path, content: bytes | None, said: str) -> None:
    """Everything later is decided from this file."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(HubError, match=said):
        read_config(tmp_path)


# Secrets


@pytest.fixture
def with_token(hub: LocalHub, access: HubAccess) -> HubAccess:
    """A valid token, which has no access to the files of the gated MODEL."""
    hub.add_repo(MODEL, gated=True)
    hub.commit(MODEL, FILES)
    hub.add_token(TOKEN)
    return access.model_copy(update={"token": SecretStr(TOKEN)})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
@pytest.mark.parametrize("padding", [0, 385])
def test_no_error_shows_the_token(
    hub: LocalHub, with_token: HubAccess, status: int, padding: int
) -> None:
    """Not even where the server repeats it, or where the message is cut within it."""
    echo = {"X-Error-Message": "x" * padding + TOKEN}
    hub.fail_next("/api/models", status=status, headers=echo)
    with pytest.raises(HubError) as caught:
        resolve(with_token, MODEL, "main")
    assert TOKEN[:6] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_no_log_and_no_repr_shows_the_token(
    with_token: HubAccess, caplog: pytest.LogCaptureFixture
) -> None:
    """Debug logs of the client and its libraries are turned on when something fails."""
    with caplog.at_level(logging.DEBUG):
        listing = resolve(with_token, MODEL, "main")
        with pytest.raises(HubError) as caught:
            download(with_token, MODEL, listing)
    assert TOKEN not in f"{caplog.text}{caught.value}{with_token!r}{with_token.model_dump_json()}"


@pytest.mark.parametrize("token", [f"{TOKEN}\nX: y", f"{TOKEN} x", f"{TOKEN}é", f"{TOKEN}\0"])
def test_a_token_that_cannot_be_sent(tmp_path: Path, token: str) -> None:
    """The HTTP client would quote it in its complaint."""
    with pytest.raises(ValidationError, match="characters that no token has") as caught:
        HubAccess(token=SecretStr(token), cache_dir=tmp_path)
    assert TOKEN not in str(caught.value)


def test_a_token_from_a_file_keeps_working(hub: LocalHub, tmp_path: Path) -> None:
    """Files end with a newline."""
    hub.add_repo(MODEL, private=True, token=TOKEN)
    hub.commit(MODEL, FILES)
    mine = HubAccess(endpoint=f"{hub.endpoint}/", token=SecretStr(f"{TOKEN}\n"), cache_dir=tmp_path)
    assert MODEL == resolve(mine, MODEL, "main").model


def test_the_login_of_the_user_stays_at_home(hub: LocalHub, tmp_path: Path) -> None:
    """A token for huggingface.co must not be sent to another endpoint that was named."""
    commit = hub.commit(MODEL, FILES)
    script = f"""
from pathlib import Path
from tensorize_assets.core.hub import resolve
from tensorize_assets.core.hub_access import HubAccess
# Sent, this unknown token would be refused.
access = HubAccess(endpoint={hub.endpoint!r}, cache_dir=Path({str(tmp_path)!r}))
print(resolve(access, {MODEL!r}, "main").commit)
"""
    assert f"{commit}\n" == run_python(script, HF_TOKEN=TOKEN)


def test_urls_in_messages_have_no_query(hub: LocalHub, access: HubAccess) -> None:
    """The query of a download link is its signature."""
    hub.fail_next(
        "/api/models",
        status=500,
        headers={"X-Error-Message": "see https://user:pass@cdn.example/x?Signature=abc&Id=1 now"},
    )
    with pytest.raises(HubUnavailableError) as caught:
        resolve(access, MODEL, "main")
    assert "https://cdn.example/x now" in str(caught.value)


# Helpers


def with_size(listing: RevisionListing, path: str, size: int) -> RevisionListing:
    files = tuple(
        file.model_copy(update={"size": size}) if file.path == path else file
        for file in listing.files
    )
    return listing.model_copy(update={"files": files})


def run_python(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(tensorize_assets.__file__).parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert 0 == result.returncode, result.stderr
    return result.stdout
