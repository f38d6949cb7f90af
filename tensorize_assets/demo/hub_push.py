"""Pushes to the local Hub by its own client: `hf upload`, with HF_HUB_DISABLE_XET set.

Large files come first, over Git LFS's basic transfer, and then the commit that names them. What was
pushed is kept in a folder, and is there again when the Hub is started anew.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from tensorize_assets.demo.hub_server import LocalHub

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PREUPLOAD = re.compile(r"/api/models/(?P<repo>.+?)/preupload/(?P<revision>.+)")
_COMMIT = re.compile(r"/api/models/(?P<repo>.+?)/commit/(?P<revision>.+)")
_BATCH = re.compile(r"/(?P<repo>.+)\.git/info/lfs/objects/batch")
_UPLOAD = re.compile(r"/lfs-uploads/(?P<oid>[0-9a-f]{64})")
_CHUNK = 1024 * 1024
# Small files come inside the commit; a demo's are far below.
_MAX_COMMIT_BYTES = 64 * 1024 * 1024


class Answer(NamedTuple):
    """A status and the JSON that goes with it."""

    status: int
    body: Any


class _RefusedError(Exception):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Pushes:
    """Takes pushes of whoever has `token` into `folder`."""

    def __init__(self, hub: LocalHub, folder: Path, token: str) -> None:
        self._hub = hub
        self._folder = folder
        self._token = token

    def replay(self) -> None:
        """Make the commits again that were pushed before the Hub was stopped."""
        log = self._folder / "commits.jsonl"
        for line in log.read_text().splitlines() if log.exists() else ():
            pushed = json.loads(line)
            files = self._hub.files(pushed["repo"], pushed["branch"]) or {}
            known = {file.sha256: file.source for file in files.values()}
            self._hub.commit(
                pushed["repo"],
                {
                    path: self._kept(sha256) or known[sha256]
                    for path, sha256 in pushed["files"].items()
                },
                pushed["branch"],
            )

    def answer(
        self, method: str, path: str, authorization: str | None, body: BufferedIOBase, length: int
    ) -> Answer:
        """Answer one POST or PUT; `body` holds `length` bytes."""
        try:
            if match := _UPLOAD.fullmatch(path):
                # Its own URL is the permission, as with the Hub's signed ones.
                return self._upload(match["oid"], body, length)
            given = (authorization or "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                raise _RefusedError(401, "pushing needs the token that this Hub was started with")
            if length > _MAX_COMMIT_BYTES:
                raise _RefusedError(413, f"a request has at most {_MAX_COMMIT_BYTES} bytes")
            return self._api(method, unquote(path), body.read(length))
        except _RefusedError as error:
            return Answer(error.status, {"error": str(error)})

    def _api(self, method: str, path: str, data: bytes) -> Answer:
        if method != "POST":
            raise _RefusedError(405, f"{method} is not for {path}")
        if path == "/api/validate-yaml":
            return Answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = _object(data)
            name = "/".join(filter(None, (asked.get("organization"), asked.get("name"))))
            return Answer(200, {"url": f"{self._hub.endpoint}/{name}", "id": name, "name": name})
        if match := _PREUPLOAD.fullmatch(path):
            return self._preupload(match["repo"], match["revision"], _object(data))
        if match := _BATCH.fullmatch(path):
            return self._batch(_object(data))
        if match := _COMMIT.fullmatch(path):
            return self._commit(match["repo"], match["revision"], data)
        raise _RefusedError(404, f"nothing is pushed to {path}")

    def _preupload(self, repo: str, branch: str, asked: Mapping[str, Any]) -> Answer:
        there = self._hub.files(repo, branch) or {}
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if self._hub.is_large(file["path"], file["size"])
                else "regular",
                "shouldIgnore": False,
                "oid": there[file["path"]].etag if file["path"] in there else None,
            }
            for file in asked["files"]
        ]
        return Answer(200, {"files": files})

    def _batch(self, asked: Mapping[str, Any]) -> Answer:
        objects: list[dict[str, Any]] = []
        for wanted in asked["objects"]:
            entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if self._kept(wanted["oid"]) is None:
                href = f"{self._hub.endpoint}/lfs-uploads/{wanted['oid']}"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _upload(self, oid: str, body: BufferedIOBase, length: int) -> Answer:
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{oid}.partial"
        hasher = hashlib.sha256()
        with partial.open("wb") as file:
            while length and (chunk := body.read(min(_CHUNK, length))):
                length -= len(chunk)
                hasher.update(chunk)
                file.write(chunk)
        if hasher.hexdigest() != oid:
            partial.unlink()
            raise _RefusedError(400, f"what came has another SHA-256 than {oid}")
        partial.rename(self._folder / oid)
        return Answer(200, {})

    def _commit(self, repo: str, branch: str, data: bytes) -> Answer:
        before = self._hub.files(repo, branch) or {}
        files = {path: file.source for path, file in before.items()}
        for key, value in _operations(data):
            if key == "file":
                files[value["path"]] = self._keep(_decoded(value["content"]))
            elif key == "lfsFile":
                kept = self._kept(value["oid"])
                if kept is None:
                    raise _RefusedError(400, f"{value['path']} was not uploaded before the commit")
                files[value["path"]] = kept
            elif key == "deletedFile":
                files.pop(value["path"], None)
            elif key == "deletedFolder":
                files = {
                    path: file for path, file in files.items() if not path.startswith(value["path"])
                }
            elif key != "header":
                raise _RefusedError(400, f"this Hub takes no {key} in a commit")
        commit = self._hub.commit(repo, files, branch)
        after = self._hub.files(repo, branch) or {}
        line = {
            "repo": repo,
            "branch": branch,
            "files": {path: file.sha256 for path, file in after.items()},
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "commits.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        return Answer(
            200, {"commitOid": commit, "commitUrl": f"{self._hub.endpoint}/{repo}/commit/{commit}"}
        )

    def _keep(self, content: bytes) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / hashlib.sha256(content).hexdigest()
        path.write_bytes(content)
        return path

    def _kept(self, sha256: str) -> Path | None:
        path = self._folder / sha256
        return path if _SHA256.fullmatch(sha256) and path.is_file() else None


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _RefusedError(400, "the body is not a JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]


def _operations(data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in data.splitlines():
        operation = _object(line)
        yield str(operation.get("key")), operation.get("value") or {}


def _decoded(content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error:
        raise _RefusedError(400, "a file's content is not base64") from None
