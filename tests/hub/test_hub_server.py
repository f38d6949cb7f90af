"""The local Hub answers as the real one does, to plain HTTP and to the unpatched client."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tensorize_assets.demo.hub_server import LFS_SIZE, LocalHub, folder_files

MODEL = "org/model"
WEIGHTS = bytes(range(256)) * 40
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/folder/notes.txt": b"notes"}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def commit(hub: LocalHub) -> str:
    return hub.commit(MODEL, FILES)


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=False)


# Identities


def test_blob_ids_are_those_git_computes(hub: LocalHub, commit: str, tmp_path: Path) -> None:
    """Our download compares them, so a made-up id would test nothing."""
    file = tmp_path / "config.json"
    file.write_bytes(FILES["config.json"])
    expected = subprocess.run(
        ["git", "hash-object", "--no-filters", file], capture_output=True, text=True, check=True
    ).stdout.strip()
    info = httpx.get(f"{hub.endpoint}/api/models/{MODEL}?blobs=true").json()
    (sibling,) = [entry for entry in info["siblings"] if entry["rfilename"] == "config.json"]
    assert {"rfilename": "config.json", "blobId": expected, "size": 2} == sibling


def test_large_files_are_lfs_whatever_their_name(hub: LocalHub, api: HfApi) -> None:
    """The Hub moves any file over its limit to LFS, tokenizers included."""
    hub.commit(MODEL, {"tokenizer.json": b"x" * LFS_SIZE, "vocab.json": b"x" * (LFS_SIZE - 1)})
    siblings = api.model_info(MODEL, files_metadata=True).siblings or []
    assert {"tokenizer.json": True, "vocab.json": False} == {
        sibling.rfilename: sibling.lfs is not None for sibling in siblings
    }


def test_commit_ids_are_a_function_of_content_and_history() -> None:
    """Recorded expectations would break if they changed from run to run."""
    first, second = LocalHub(), LocalHub()
    assert first.commit(MODEL, FILES) == second.commit(MODEL, FILES)
    assert first.commit(MODEL, FILES) != first.commit(MODEL, FILES | {"config.json": b"[]"})


# Model info


def test_model_info_gives_commit_sizes_and_lfs_hashes(api: HfApi, commit: str) -> None:
    """This one answer is all that a snapshot is resolved from."""
    info = api.model_info(MODEL, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    weights = siblings["model.safetensors"]
    assert (MODEL, commit, False) == (info.id, info.sha, info.gated)
    assert sorted(FILES) == sorted(siblings)
    assert weights.lfs is not None
    assert (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest()) == (weights.size, weights.lfs.sha256)
    assert siblings["config.json"].lfs is None


def test_model_info_without_blobs_gives_names_only(api: HfApi, commit: str) -> None:
    """Sizes that the real Hub leaves out must be missed here too."""
    info = api.model_info(MODEL)
    assert {None} == {sibling.size for sibling in info.siblings or []}


def test_revisions_are_branches_tags_and_commits(hub: LocalHub, api: HfApi) -> None:
    """Catalogs name any of the three, and pull request refs hold slashes."""
    old = hub.commit(MODEL, FILES)
    hub.tag(MODEL, "v1")
    new = hub.commit(MODEL, FILES | {"config.json": b"[]"})
    pull = hub.commit(MODEL, {"a.json": b"{}"}, branch="refs/pr/1")
    revisions = {"main": new, "v1": old, old: old, "refs/pr/1": pull}
    assert revisions == {name: api.model_info(MODEL, revision=name).sha for name in revisions}


def test_a_branch_moves_back(hub: LocalHub, api: HfApi, commit: str) -> None:
    """A force-push to a known commit must not look like a new one."""
    hub.commit(MODEL, {})
    hub.move(MODEL, "main", commit)
    assert commit == api.model_info(MODEL).sha


def test_repos_without_an_organisation_are_found(hub: LocalHub, tmp_path: Path) -> None:
    """`gpt2` has one path segment where others have two."""
    hub.commit("gpt2", FILES)
    path = snapshot_download(
        "gpt2", endpoint=hub.endpoint, token=False, cache_dir=tmp_path, revision="main"
    )
    assert WEIGHTS == (Path(path) / "model.safetensors").read_bytes()


# Tree


@pytest.mark.parametrize("expand", [False, True])
def test_tree_is_paged_and_complete(api: HfApi, hub: LocalHub, expand: bool) -> None:
    """A listing cut at the first page would be a partial snapshot."""
    hub.page_size = 7
    files = {f"part/{number:03d}.json": b"{}" for number in range(30)} | {"a.bin": b"weights"}
    hub.commit(MODEL, files)
    entries = list(api.list_repo_tree(MODEL, recursive=True, expand=expand))
    assert sorted([*files, "part"]) == sorted(entry.path for entry in entries)
    assert 5 == len(hub.requests_for("/tree/"))


def test_tree_of_one_folder(api: HfApi, commit: str) -> None:
    """Not recursive, it names the folders instead of their files."""
    assert ["config.json", "model.safetensors", "sub"] == sorted(
        entry.path for entry in api.list_repo_tree(MODEL)
    )
    assert ["sub/folder/notes.txt"] == [
        entry.path for entry in api.list_repo_tree(MODEL, "sub/folder")
    ]


# Files


def test_head_of_an_lfs_file_has_the_headers_the_client_reads(hub: LocalHub, commit: str) -> None:
    """Name and size of the cached blob come from these headers."""
    answer = httpx.head(f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors")
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    expected = {
        "x-repo-commit": commit,
        "etag": f'"{sha256}"',
        "x-linked-etag": f'"{sha256}"',
        "x-linked-size": str(len(WEIGHTS)),
        "content-length": str(len(WEIGHTS)),
        "accept-ranges": "bytes",
    }
    assert 200 == answer.status_code
    assert expected == {name: answer.headers[name] for name in expected}
    assert not [name for name in answer.headers if "xet" in name]


def test_head_of_a_small_file_has_its_git_id(hub: LocalHub, commit: str) -> None:
    """Outside LFS there is no SHA-256, and no linked headers either."""
    answer = httpx.head(f"{hub.endpoint}/{MODEL}/resolve/{commit}/config.json")
    assert f'"{hashlib.sha1(b"blob 2" + bytes(1) + b"{}").hexdigest()}"' == answer.headers["etag"]
    assert "x-linked-etag" not in answer.headers


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        ("bytes=0-99", 206, 0, 100),
        ("bytes=10000-", 206, 10000, 10240),
        ("bytes=-40", 206, 10200, 10240),
        ("bytes=10239-99999", 206, 10239, 10240),
        ("bytes=5-2", 200, 0, 10240),
        ("lines=1-2", 200, 0, 10240),
    ],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_ranges(
    hub: LocalHub, tmp_path: Path, asked: str, status: int, start: int, end: int, on_disk: bool
) -> None:
    """Resuming a download needs exact ranges; what is no range is ignored, as HTTP says."""
    path = tmp_path / "weights"
    path.write_bytes(WEIGHTS)
    hub.commit(MODEL, {"model.safetensors": path if on_disk else WEIGHTS})
    answer = httpx.get(
        f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors", headers={"Range": asked}
    )
    assert (status, WEIGHTS[start:end]) == (answer.status_code, answer.content)
    if status == 206:
        assert f"bytes {start}-{end - 1}/10240" == answer.headers["content-range"]


def test_range_behind_the_end_is_refused(hub: LocalHub, commit: str) -> None:
    """The client takes 416 for a partial file that does not belong to this one."""
    answer = httpx.get(
        f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors", headers={"Range": "bytes=10240-"}
    )
    assert (416, "bytes */10240") == (answer.status_code, answer.headers["content-range"])


def test_files_come_from_disk_in_pieces(hub: LocalHub, tmp_path: Path) -> None:
    """The demo serves models that do not fit into the server's share of memory."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS * 300)
    (folder / "sub" / "config.json").write_bytes(b"{}")
    files = folder_files(folder)
    hub.commit(MODEL, files)
    assert ["model.safetensors", "sub/config.json"] == sorted(files)
    with httpx.stream("GET", f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors") as answer:
        assert hashlib.sha256(WEIGHTS * 300).digest() == hashlib.sha256(answer.read()).digest()


def test_connections_are_kept_alive(hub: LocalHub, commit: str) -> None:
    """The client reuses its connections; a server that closes each would hide its bugs there."""
    with httpx.Client() as client:
        streams = {
            client.get(f"{hub.endpoint}/{MODEL}/resolve/main/{name}")
            .extensions["network_stream"]
            .get_extra_info("client_addr")
            for name in FILES
        }
    assert 1 == len(streams)


def test_whole_snapshot_through_the_client(hub: LocalHub, commit: str, tmp_path: Path) -> None:
    """The proof that nothing the client asks for is missing."""
    path = snapshot_download(MODEL, endpoint=hub.endpoint, token=False, cache_dir=tmp_path)
    assert FILES == {name: (Path(path) / name).read_bytes() for name in FILES}


# Refusals


def test_missing_revision_and_file(hub: LocalHub, api: HfApi, commit: str, tmp_path: Path) -> None:
    """The client tells these apart by the error code alone."""
    with pytest.raises(RevisionNotFoundError):
        api.model_info(MODEL, revision="nope")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(MODEL, "nope.json", endpoint=hub.endpoint, token=False, cache_dir=tmp_path)


def test_missing_repo_is_401_to_strangers_and_404_to_users(hub: LocalHub, api: HfApi) -> None:
    """The Hub does not tell strangers which private repos exist."""
    hub.add_token("hf_user")
    with pytest.raises(RepositoryNotFoundError) as caught:
        api.model_info("no/such")
    assert 401 == caught.value.response.status_code
    with pytest.raises(RepositoryNotFoundError) as caught:
        HfApi(endpoint=hub.endpoint, token="hf_user").model_info("no/such")
    assert 404 == caught.value.response.status_code


def test_private_repo_looks_missing_without_its_token(hub: LocalHub, api: HfApi) -> None:
    """Only the token that may read it sees that it is there."""
    hub.add_repo("org/secret", private=True, token="hf_owner")
    commit = hub.commit("org/secret", FILES)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/secret")
    info = HfApi(endpoint=hub.endpoint, token="hf_owner").model_info("org/secret")
    assert (commit, True) == (info.sha, info.private)


def test_gated_repo_shows_its_info_but_not_its_files(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    """As on the Hub, the refusal comes with the first file, not with the model's page."""
    hub.add_repo("org/gated", gated=True, token="hf_granted")
    hub.add_token("hf_other")
    hub.commit("org/gated", FILES)
    assert "manual" == api.model_info("org/gated").gated
    statuses: dict[str, int] = {}
    for token in (False, "hf_other"):
        with pytest.raises(GatedRepoError) as caught:
            hf_hub_download(
                "org/gated", "config.json", endpoint=hub.endpoint, token=token, cache_dir=tmp_path
            )
        statuses[str(token)] = caught.value.response.status_code
    assert {"False": 401, "hf_other": 403} == statuses
    path = hf_hub_download(
        "org/gated", "config.json", endpoint=hub.endpoint, token="hf_granted", cache_dir=tmp_path
    )
    assert b"{}" == Path(path).read_bytes()


def test_unknown_token_is_refused_everywhere(hub: LocalHub, commit: str) -> None:
    """An expired token fails on public repos too."""
    with pytest.raises(HfHubHTTPError) as caught:
        HfApi(endpoint=hub.endpoint, token="hf_expired").model_info(MODEL)
    assert not isinstance(caught.value, RepositoryNotFoundError)
    assert 401 == caught.value.response.status_code


def test_renamed_repo_redirects(hub: LocalHub, api: HfApi, commit: str) -> None:
    """The client follows in silence; the new name shows only in the answer."""
    hub.rename(MODEL, "org/renamed")
    answer = httpx.get(f"{hub.endpoint}/api/models/{MODEL}/revision/main?blobs=true")
    assert (307, "/api/models/org/renamed/revision/main?blobs=true") == (
        answer.status_code,
        answer.headers["location"],
    )
    assert "org/renamed" == api.model_info(MODEL).id
    head = httpx.head(f"{hub.endpoint}/{MODEL}/resolve/main/config.json")
    assert "/org/renamed/resolve/main/config.json" == head.headers["location"]


def test_other_paths_are_not_found(hub: LocalHub) -> None:
    """A client that asks for more than is served must notice."""
    assert 404 == httpx.get(f"{hub.endpoint}/api/datasets/org/data").status_code


# Faults and the log


def test_faults_are_counted_and_end(hub: LocalHub, commit: str) -> None:
    """A test has to know that its fault was met, and how often."""
    url = f"{hub.endpoint}/{MODEL}/resolve/main/config.json"
    fault = hub.fail_next("config.json", status=429, headers={"Retry-After": "1"}, times=2)
    answers = [httpx.get(url) for _ in range(3)]
    assert [429, 429, 200] == [answer.status_code for answer in answers]
    assert "1" == answers[0].headers["retry-after"]
    assert 2 == fault.hits


def test_cut_connection_ends_the_body_early(hub: LocalHub, commit: str) -> None:
    """The announced length stays, so that the client can tell."""
    fault = hub.cut_after("model.safetensors", 100)
    url = f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors"
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url)
    assert (1, 100) == (fault.hits, hub.bytes_sent("model.safetensors"))
    assert WEIGHTS == httpx.get(url).content


def test_cut_connection_before_any_answer(hub: LocalHub, commit: str) -> None:
    """HEAD has no body to cut, so that the answer itself is missing."""
    hub.cut_after("config.json", 0, method="HEAD")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.head(f"{hub.endpoint}/{MODEL}/resolve/main/config.json")


def test_log_holds_requests_and_no_tokens(hub: LocalHub, commit: str) -> None:
    """Assertions print the log when they fail, on public CI too."""
    hub.add_token("hf_secret")
    httpx.get(
        f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors",
        headers=bearer("hf_secret") | {"Range": "bytes=0-9"},
    )
    (request,) = hub.requests
    assert ("GET", "/org/model/resolve/main/model.safetensors", 206, 10, "bytes=0-9") == (
        request.method,
        request.path,
        request.status,
        request.bytes_sent,
        request.range,
    )
    assert "hf_secret" not in repr(hub.requests)


def test_a_stopped_hub_drops_its_connections() -> None:
    """A kept-alive connection would go on being answered, and hide that the Hub is down."""
    hub = LocalHub()
    hub.commit(MODEL, FILES)
    hub.start()
    url = f"{hub.endpoint}/{MODEL}/resolve/main/config.json"
    with httpx.Client() as client:
        assert 200 == client.get(url).status_code
        hub.stop()
        with pytest.raises(httpx.TransportError):
            client.get(url)
