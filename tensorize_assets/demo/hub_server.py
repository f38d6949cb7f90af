"""A Hub on this machine: the part of the Hugging Face Hub's HTTP API that its client reads.

For the demo and for tests. Real HTTP on 127.0.0.1, so that the client runs unpatched: model info,
file tree, files with their Git and LFS identities, gated, private and renamed repos. Xet is left
out: without its headers the client downloads over plain HTTP. Faults come on demand, and every
request is logged, without its headers, since those hold tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tensorize_assets.demo.hub_push import Pushes

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
LFS_SIZE = 10 * 1024 * 1024
"""Files of this size in bytes or more are LFS files whatever their name, as on the Hub."""

_CHUNK = 1024 * 1024
_API_WORDS = ("revision", "tree")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_EPOCH = datetime(2024, 1, 1, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class Request:
    """One answered request. `bytes_sent` counts the body only."""

    method: str
    path: str
    status: int
    bytes_sent: int = 0
    range: str | None = None


@dataclasses.dataclass
class Fault:
    """An error to answer with; `hits` counts how often it was."""

    path_substring: str
    times: int
    method: str | None = None
    status: int | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    cut_after: int | None = None
    hits: int = 0


@dataclasses.dataclass(frozen=True)
class _File:
    source: bytes | Path
    size: int
    sha256: str
    git_id: str
    pointer_size: int | None

    @property
    def is_lfs(self) -> bool:
        return self.pointer_size is not None

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.git_id


@dataclasses.dataclass(frozen=True)
class _Commit:
    id: str
    date: datetime
    files: Mapping[str, _File]


@dataclasses.dataclass
class _Repo:
    name: str
    gated: bool
    private: bool
    tokens: set[str]
    commits: dict[str, _Commit] = dataclasses.field(default_factory=dict[str, _Commit])
    refs: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def at(self, revision: str) -> _Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


class _State:
    """What the hub and the threads of its server share."""

    def __init__(self) -> None:
        self.repos: dict[str, _Repo] = {}
        self.renamed: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.lock = threading.Lock()
        self.pushes: Pushes | None = None

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if (
                    fault.hits < fault.times
                    and fault.path_substring in path
                    and fault.method in (None, method)
                ):
                    fault.hits += 1
                    return fault
        return None

    def record(self, request: Request) -> int:
        with self.lock:
            self.log.append(request)
            return len(self.log) - 1

    def count_sent(self, entry: int, sent: int) -> None:
        with self.lock:
            self.log[entry] = dataclasses.replace(self.log[entry], bytes_sent=sent)


class LocalHub:
    """A Hub that serves what it is given; usable as a context manager.

    `latency_s` is waited before every answer; `bytes_per_s` bounds how fast each body goes out.
    `page_size` is the number of entries in one page of a file tree. `port` 0 is any free one.
    """

    def __init__(self, *, page_size: int = 1000, port: int = 0) -> None:
        self.port = port
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.page_size = page_size
        self._state = _State()
        self._server: _Server | None = None

    # Content

    def add_repo(
        self,
        repo_id: str,
        *,
        gated: bool = False,
        private: bool = False,
        token: str | None = None,
    ) -> None:
        """Add an empty repo. `token` is the one that may read it where it is gated or private."""
        tokens = set[str]() if token is None else {token}
        self._state.repos[repo_id] = _Repo(repo_id, gated, private, tokens)
        self._state.tokens |= tokens

    def add_token(self, token: str) -> None:
        """Make `token` a valid one that has access to nothing gated or private."""
        self._state.tokens.add(token)

    def commit(self, repo_id: str, files: Mapping[str, bytes | Path], branch: str = "main") -> str:
        """Add a commit that holds exactly `files` and let `branch` point to it.

        A path is read when it is asked for, in pieces: changed on the disk after the commit it no
        longer is what the Hub says it is, like a broken mirror's. Returns the commit id, which is
        the same for the same content, repo and history.
        """
        repo = self._state.repos.setdefault(repo_id, _Repo(repo_id, False, False, set()))
        content = {path: _identify(path, source) for path, source in sorted(files.items())}
        parent = repo.refs.get(branch, "")
        digest = hashlib.sha1(f"{repo_id}\0{parent}\0".encode())
        for path, file in content.items():
            digest.update(f"{path}\0{file.git_id}\0".encode("utf-8", "surrogatepass"))
        commit = _Commit(digest.hexdigest(), _EPOCH + timedelta(minutes=len(repo.commits)), content)
        repo.commits[commit.id] = commit
        repo.refs[branch] = commit.id
        return commit.id

    def tag(self, repo_id: str, name: str, revision: str = "main") -> None:
        """Let the tag `name` point to what `revision` is now."""
        repo = self._state.repos[repo_id]
        repo.refs[name] = repo.refs.get(revision, revision)

    def move(self, repo_id: str, branch: str, commit: str) -> None:
        """Let `branch` point to another commit of the repo, as a force-push would."""
        self._state.repos[repo_id].refs[branch] = self._state.repos[repo_id].commits[commit].id

    def rename(self, old: str, new: str) -> None:
        """Rename a repo; the old name redirects from now on."""
        repo = self._state.repos.pop(old)
        repo.name = new
        self._state.repos[new] = repo
        self._state.renamed[old] = new

    # Pushes

    def accept_pushes(self, folder: Path, token: str) -> None:
        """Let whoever has `token` push, and make again what was pushed into `folder` before."""
        self._state.tokens.add(token)
        self._state.pushes = Pushes(self, folder, token)
        self._state.pushes.replay()

    def files(self, repo_id: str, branch: str) -> Mapping[str, _File] | None:
        """What a branch holds now; None where there is none."""
        repo = self._state.repos.get(repo_id)
        commit = repo.at(branch) if repo else None
        return commit and commit.files

    def is_large(self, path: str, size: int) -> bool:
        """Whether such a file is kept by Git LFS."""
        return _is_large(path, size)

    # Faults

    def fail_next(
        self,
        path_substring: str,
        *,
        status: int,
        headers: Mapping[str, str] | None = None,
        times: int = 1,
        method: str | None = None,
    ) -> Fault:
        """Answer the next `times` requests whose path holds the text with this status."""
        return self._add_fault(
            Fault(path_substring, times, method, status=status, headers=dict(headers or {}))
        )

    def cut_after(
        self, path_substring: str, n_bytes: int, *, times: int = 1, method: str = "GET"
    ) -> Fault:
        """Close the connection of the next `times` matching requests after `n_bytes` of body.

        With method HEAD, which has no body, the connection closes without an answer.
        """
        return self._add_fault(Fault(path_substring, times, method, cut_after=n_bytes))

    def _add_fault(self, fault: Fault) -> Fault:
        with self._state.lock:
            self._state.faults.append(fault)
        return fault

    # What was asked

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request so far, in the order of their answers' beginnings."""
        with self._state.lock:
            return tuple(self._state.log)

    def requests_for(self, path_substring: str, method: str | None = None) -> tuple[Request, ...]:
        """The requests whose path, percent-decoded, holds the text."""
        return tuple(
            request
            for request in self.requests
            if path_substring in request.path and method in (None, request.method)
        )

    def bytes_sent(self, path_substring: str) -> int:
        """How many bytes of bodies went out for the paths that hold the text."""
        return sum(request.bytes_sent for request in self.requests_for(path_substring))

    # Server

    @property
    def endpoint(self) -> str:
        """The URL to give to the Hub's client."""
        if self._server is None:
            raise RuntimeError("this hub does not run; call start() or use it in a with statement")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> Self:
        """Listen on 127.0.0.1."""
        self._server = _Server(
            ("127.0.0.1", self.port), lambda *args: _Handler(self, self._state, *args)
        )
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.close_connections()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def folder_files(folder: Path) -> dict[str, bytes | Path]:
    """Every file of a folder by its relative posix path, for `LocalHub.commit`."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]
    ) -> None:
        super().__init__(address, handler)
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up is everyday life for a server, not something to print.
        pass

    def close_connections(self) -> None:
        # Kept-alive connections would go on being served by their threads.
        with self._open_lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Small answers would otherwise wait for the peer's delayed acknowledgement, 40 ms each.
    disable_nagle_algorithm = True

    def __init__(self, hub: LocalHub, state: _State, *args: Any) -> None:
        self._hub = hub
        self._state = state
        self._fault: Fault | None = None
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._push()

    def do_PUT(self) -> None:
        self._push()

    def _push(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        # What of a refused push is not read would be taken for the next request.
        closing = {"Connection": "close"}
        if self._state.pushes is None:
            self._error(403, None, "nobody may push to this Hub", closing)
            return
        path = urlsplit(self.path).path
        authorization = self.headers.get("Authorization")
        answer = self._state.pushes.answer(self.command, path, authorization, self.rfile, length)
        self._json(answer.status, answer.body, closing)

    def _answer(self) -> None:
        if self._hub.latency_s:
            time.sleep(self._hub.latency_s)
        url = urlsplit(self.path)
        self._fault = self._state.take_fault(self.command, unquote(url.path))
        if self._fault is not None and self._fault.status is not None:
            status = self._fault.status
            self._json(status, {"error": f"asked to fail with {status}"}, self._fault.headers)
            return
        parts = url.path.removeprefix("/").split("/")
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if parts[:2] == ["api", "models"]:
            self._api(parts[2:], query)
        elif "resolve" in parts[1:3]:
            self._resolve(parts)
        else:
            self._error(404, None, "Not Found")

    # Routes

    def _api(self, parts: list[str], query: dict[str, str]) -> None:
        word = next((at for at, part in enumerate(parts) if at and part in _API_WORDS), len(parts))
        repo = self._readable("/".join(parts[:word]), "/api/models/{repo}", parts[word:])
        if repo is None:
            return
        route = parts[word] if word < len(parts) else "revision"
        revision = unquote(parts[word + 1]) if word + 1 < len(parts) else "main"
        commit = repo.at(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif route == "tree":
            self._tree(repo, commit, unquote("/".join(parts[word + 2 :])), query)
        else:
            self._info(repo, commit, with_blobs=query.get("blobs") in ("true", "True", "1"))

    def _info(self, repo: _Repo, commit: _Commit, *, with_blobs: bool) -> None:
        siblings = [
            {"rfilename": path} | (_sibling(file) if with_blobs else {})
            for path, file in commit.files.items()
        ]
        info = {
            "_id": hashlib.sha256(repo.name.encode()).hexdigest()[:24],
            "id": repo.name,
            "modelId": repo.name,
            "author": repo.name.split("/")[0] if "/" in repo.name else None,
            "sha": commit.id,
            "lastModified": _iso(commit.date),
            "createdAt": _iso(_EPOCH),
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }
        self._json(200, info)

    def _tree(self, repo: _Repo, commit: _Commit, folder: str, query: dict[str, str]) -> None:
        recursive = query.get("recursive", "false").lower() == "true"
        expand = query.get("expand", "false").lower() == "true"
        entries = list(_tree_entries(commit, folder.strip("/"), recursive, expand))
        if folder.strip("/") and not entries:
            self._error(404, "EntryNotFound", f"{folder} does not exist on {commit.id}")
            return
        start = int(query.get("cursor", "0"))
        end = start + min(self._hub.page_size, int(query.get("limit", self._hub.page_size)))
        headers: dict[str, str] = {}
        if end < len(entries):
            base = f"{self._hub.endpoint}/api/models/{repo.name}/tree/{commit.id}"
            inside = f"/{quote(folder)}" if folder else ""
            flags = f"recursive={str(recursive).lower()}&expand={str(expand).lower()}"
            headers["Link"] = f'<{base}{inside}?{flags}&cursor={end}>; rel="next"'
        self._json(200, entries[start:end], headers)

    def _resolve(self, parts: list[str]) -> None:
        at = parts.index("resolve", 1)
        repo = self._readable("/".join(parts[:at]), "/{repo}", parts[at:])
        if repo is None:
            return
        if repo.gated and self._token() not in repo.tokens:
            said = (
                ". You must have access to it and be authenticated to access it. Please log in."
                if self._token() is None
                else " and you are not in the authorized list."
            )
            self._error(
                401 if self._token() is None else 403,
                "GatedRepo",
                f"Access to model {repo.name} is restricted{said}",
            )
            return
        revision = unquote(parts[at + 1]) if at + 1 < len(parts) else ""
        path = unquote("/".join(parts[at + 2 :]))
        commit = repo.at(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif path not in commit.files:
            self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit.id})
        else:
            self._file(commit, path, commit.files[path])

    def _file(self, commit: _Commit, path: str, file: _File) -> None:
        name = path.rsplit("/", 1)[-1]
        headers = {
            "X-Repo-Commit": commit.id,
            "ETag": f'"{file.etag}"',
            "Accept-Ranges": "bytes",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(name)}",
            "Content-Type": "application/octet-stream",
            "Last-Modified": format_datetime(commit.date, usegmt=True),
        }
        if file.is_lfs:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
        wanted = self.headers.get("Range")
        span = _parse_range(wanted, file.size) if wanted else None
        if span is None:
            self._send(200, file.size, _read(file.source, 0, file.size), headers)
        elif span[0] >= span[1]:
            headers["Content-Range"] = f"bytes */{file.size}"
            self._send(416, 0, iter(()), headers)
        else:
            start, end = span
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
            self._send(206, end - start, _read(file.source, start, end), headers)

    # Access

    def _readable(self, repo_id: str, base: str, rest: list[str]) -> _Repo | None:
        """Return the repo if this request may know of it; otherwise answer and return None."""
        name = unquote(repo_id)
        token = self._token()
        if token is not None and token not in self._state.tokens:
            self._error(401, None, "Invalid credentials in Authorization header")
            return None
        renamed = self._state.renamed.get(name)
        if renamed is not None:
            query = urlsplit(self.path).query
            target = "/".join([base.format(repo=renamed), *rest]) + (f"?{query}" if query else "")
            self._json(307, {"error": f"Moved to {target}"}, {"Location": target})
            return None
        repo = self._state.repos.get(name)
        if repo is not None and (not repo.private or token in repo.tokens):
            return repo
        # The Hub does not tell strangers apart from what does not exist. Without a code its
        # client would see a missing repo only behind https, so the code is always there.
        if token is None:
            self._error(401, "RepoNotFound", "Invalid username or password.")
        else:
            self._error(404, "RepoNotFound", "Repository not found")
        return None

    def _token(self) -> str | None:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if kind == "Bearer" else None

    # Answers

    def _error(
        self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        told = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._json(status, {"error": message}, told | dict(headers or {}))

    def _json(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        told = {"Content-Type": "application/json; charset=utf-8"} | dict(headers or {})
        self._send(status, len(body), iter((body,)), told)

    def _send(
        self, status: int, length: int, body: Iterator[bytes], headers: Mapping[str, str]
    ) -> None:
        cut = None if self._fault is None else self._fault.cut_after
        path = unquote(urlsplit(self.path).path)
        entry = self._state.record(
            Request(self.command, path, status, range=self.headers.get("Range"))
        )
        if cut is not None and self.command == "HEAD":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        for chunk in body:
            piece = chunk if cut is None else chunk[: cut - sent]
            # Counted before it goes, so that whoever has read a body also sees it counted.
            self._state.count_sent(entry, sent + len(piece))
            try:
                self.wfile.write(piece)
            except OSError:
                self._state.count_sent(entry, sent)
                self.close_connection = True
                return
            sent += len(piece)
            if self._hub.bytes_per_s:
                time.sleep(len(piece) / self._hub.bytes_per_s)
            if cut is not None and sent >= cut:
                break
        if sent < length:
            # Cut on demand, or the file on the disk became shorter than was announced.
            self.close_connection = True


def _is_large(path: str, size: int) -> bool:
    return size >= LFS_SIZE or path.endswith(LFS_SUFFIXES)


def _identify(path: str, source: bytes | Path) -> _File:
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    sha256 = hashlib.sha256()
    git = hashlib.sha1(f"blob {size}\0".encode())
    for chunk in _read(source, 0, size):
        sha256.update(chunk)
        git.update(chunk)
    if not _is_large(path, size):
        return _File(source, size, sha256.hexdigest(), git.hexdigest(), None)
    pointer = (
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{sha256.hexdigest()}\nsize {size}\n"
    ).encode()
    git_id = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
    return _File(source, size, sha256.hexdigest(), git_id, len(pointer))


def _read(source: bytes | Path, start: int, end: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        for at in range(start, end, _CHUNK):
            yield source[at : min(at + _CHUNK, end)]
        return
    with source.open("rb") as file:
        file.seek(start)
        while start < end and (chunk := file.read(min(_CHUNK, end - start))):
            start += len(chunk)
            yield chunk


def _parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Return the half-open span asked for, clipped to the file; None for what may be ignored."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.group(1) == match.group(2) == "":
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    end = min(int(last) + 1, size) if last else size
    # "bytes=5-2" is no range at all, and such a header is to be ignored.
    return None if last and int(last) < int(first) else (int(first), end)


def _sibling(file: _File) -> dict[str, object]:
    entry: dict[str, object] = {"blobId": file.git_id, "size": file.size}
    if file.is_lfs:
        entry["lfs"] = {
            "sha256": file.sha256,
            "size": file.size,
            "pointerSize": file.pointer_size,
        }
    return entry


def _tree_entries(
    commit: _Commit, folder: str, recursive: bool, expand: bool
) -> Iterator[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    last_commit = {"id": commit.id, "title": "Upload", "date": _iso(commit.date)}
    extra: dict[str, object] = {"lastCommit": last_commit} if expand else {}
    folders: set[str] = set()
    for path, file in commit.files.items():
        if not path.startswith(prefix):
            continue
        *parents, _ = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parents) + 1 if recursive else min(2, len(parents) + 1)):
            inner = prefix + "/".join(parents[:depth])
            if inner not in folders:
                folders.add(inner)
                oid = hashlib.sha1(f"{commit.id}/{inner}".encode()).hexdigest()
                yield {"type": "directory", "oid": oid, "size": 0, "path": inner} | extra
        if recursive or not parents:
            entry: dict[str, object] = {
                "type": "file",
                "oid": file.git_id,
                "size": file.size,
                "path": path,
            }
            if file.is_lfs:
                entry["lfs"] = {
                    "oid": file.sha256,
                    "size": file.size,
                    "pointerSize": file.pointer_size,
                }
            yield entry | extra


def _iso(date: datetime) -> str:
    return date.strftime("%Y-%m-%dT%H:%M:%S.000Z")
