"""The Hub's webhook: says within seconds which repo moved, and nothing that would be believed.

A delivery becomes an observation of `hf_snapshot` that names the repo. The revision sensor reads
those and asks the Hub itself, so that a forged or repeated delivery costs one question to the Hub.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tensorize_assets.core import jsonio, revisions
from tensorize_assets.core.catalog import Catalog, load_catalog
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.printable import printable

MAX_BODY = 64 * 1024
"""Bytes of a delivery that are read; the Hub's have about one thousand."""

MOST_CONNECTIONS = 64
CONNECTION_S = 15.0
"""Seconds that a connection has for its request and our answer; slow ones are cut."""

# Of one repo that moves again and again, the sensor is told this often.
_EVERY_S = 5.0
_SEEN_S = 10 * 60.0
_MOST_SEEN = 10_000
_COMMIT = re.compile(r"[0-9a-f]{40}")

Report = Callable[[str, "str | None"], None]
"""Tells the revision sensor that a repo moved, and to which commit, if the delivery says it."""

_logger = logging.getLogger(__name__)


class _Part(BaseModel):
    """What is read of a payload; the Hub adds fields as it goes."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


_Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40,64}$")]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=300)]


class _Event(_Part):
    action: _Name
    scope: _Name


class _Repo(_Part):
    type: _Name
    name: _Name
    head_sha: _Sha | None = Field(default=None, alias="headSha")


class _Ref(_Part):
    ref: _Name
    old_sha: _Sha | None = Field(default=None, alias="oldSha")
    new_sha: _Sha | None = Field(default=None, alias="newSha")


class Delivery(_Part):
    """A payload, version 3, as https://huggingface.co/docs/hub/webhooks describes it."""

    event: _Event
    repo: _Repo
    updated_refs: list[_Ref] | None = Field(default=None, alias="updatedRefs")


class _Moved(NamedTuple):
    """What of a delivery concerns the catalog. `same` is equal for the same delivery again."""

    repo: str
    commit: str | None
    same: tuple[str, ...]


@dataclass
class _State:
    """What this process remembers; when it ends, that costs a question to the Hub at most.

    Times are of the event loop's clock. `waiting` has the repos that are reported when their
    pause is over, each with the newest commit; `tasks` the one task of each that sees to it.
    """

    seen: OrderedDict[tuple[str, ...], float] = field(
        default_factory=OrderedDict[tuple[str, ...], float]
    )
    reported: dict[str, float] = field(default_factory=dict[str, float])
    waiting: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    catalog_stamp: tuple[int, ...] = ()
    followed: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])


def webhook_app(secret: str, catalog: Path, report: Report, every_s: float = _EVERY_S) -> Starlette:
    """The app: POST /hub for deliveries with this secret, and GET /health.

    Repos are those of the catalog file, which is read again when it changes. `report` is called
    in a thread, for one repo at most every `every_s` seconds; the last delivery is not lost.
    """
    state = _State()
    digest = _digest(secret.encode())

    async def hub(request: Request) -> Response:
        given = [value for name, value in request.scope["headers"] if name == b"x-webhook-secret"]
        # The length of a digest says nothing about that of the secret.
        right = hmac.compare_digest(_digest(given[0] if given else b""), digest)
        if not right or len(given) != 1:
            return _answer(401, "the header X-Webhook-Secret is missing or wrong")
        try:
            body = await _body(request)
        except ClientDisconnect:
            # Nobody reads it.
            return _answer(400, "the body is not complete")
        if body is None:
            return _answer(413, f"the body has more than {MAX_BODY} bytes")
        try:
            delivery = Delivery.model_validate_json(body)
        except ValidationError as error:
            return _answer(400, f"this is no delivery of the Hub: {jsonio.describe(error)}")
        try:
            followed = await _followed(state, catalog)
        except CatalogError as error:
            _logger.error("a delivery was refused, since the catalog is wrong: %s", error)
            return _answer(503, "the catalog cannot be read; the log of this server says why")
        moved = _moved(delivery, followed)
        if isinstance(moved, str):
            return _answer(200, moved, reported=False)
        return await _accept(state, moved, report, every_s)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        for task in state.tasks.values():
            task.cancel()
        await asyncio.gather(*state.tasks.values(), return_exceptions=True)
        for repo, commit in list(state.waiting.items()):
            await _reported(report, repo, commit)

    app = Starlette(
        routes=[Route("/hub", hub, methods=["POST"]), Route("/health", _health, methods=["GET"])],
        lifespan=lifespan,
    )
    # It would answer with a URL made of the client's own Host header.
    app.router.redirect_slashes = False
    return app


def webhook_server(app: Starlette) -> uvicorn.Server:
    """A server for the app that slow and many clients cannot hold up; `run` takes its sockets."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Bounded,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=10,
        )
    )


def followed_repos(catalog: Catalog) -> dict[str, frozenset[str]]:
    """The revisions that can move and start a build, by the repo of a model or an adapter."""
    found: dict[str, set[str]] = {}
    for one in revisions.followed(catalog).values():
        # A commit never moves.
        if not _COMMIT.fullmatch(one.revision):
            found.setdefault(one.repo, set()).add(one.revision)
    return {repo: frozenset(names) for repo, names in found.items()}


class _Bounded(H11Protocol):
    """uvicorn's own has no limit on how long a request may take to arrive."""

    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * MOST_CONNECTIONS:
            # Answers take memory too; up to here uvicorn says 503.
            transport.abort()
        else:
            self._cut = self.loop.call_later(CONNECTION_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._cut is not None:
            self._cut.cancel()


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _answer(status: int, said: str, **more: object) -> Response:
    key = "said" if status < 400 else "error"
    # A connection's time is limited, so that it has one request; but one that is closed on a body
    # that was not read loses the answer.
    headers = {} if status in (401, 413) else {"Connection": "close"}
    return JSONResponse({**more, key: printable(said)}, status, headers)


async def _body(request: Request) -> bytes | None:
    """The body, None for one that is too long, whatever its Content-Length says."""
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            return None
    return bytes(body)


async def _followed(state: _State, catalog: Path) -> Mapping[str, frozenset[str]]:
    async with state.lock:
        try:
            found = catalog.stat()
        except OSError as error:
            raise CatalogError(f"{catalog} cannot be read: {error.strerror}") from None
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp != state.catalog_stamp:
            # Thousands of models take a second.
            state.followed = followed_repos(await run_in_threadpool(load_catalog, catalog))
            state.catalog_stamp = stamp
        return state.followed


def _moved(delivery: Delivery, followed: Mapping[str, frozenset[str]]) -> _Moved | str:
    """What moved, or why nothing did that a build would follow."""
    event, repo = delivery.event, delivery.repo
    # A narrower scope that is unknown counts as the broader one, says the Hub.
    if event.scope != "repo" and not f"{event.scope}.".startswith("repo.content."):
        return f"events of scope {event.scope} start nothing"
    if repo.type != "model":
        return f"repos of type {repo.type} are not followed"
    names = followed.get(repo.name)
    if names is None:
        return f"{repo.name} is not followed by the catalog"
    if delivery.updated_refs is None:
        same = (repo.name, event.scope, event.action, repo.head_sha or "")
        return _Moved(repo.name, repo.head_sha, same)
    refs = [
        ref
        for ref in delivery.updated_refs
        if not names.isdisjoint(
            (ref.ref, ref.ref.removeprefix("refs/heads/"), ref.ref.removeprefix("refs/tags/"))
        )
    ]
    if not refs:
        return f"{repo.name}: no revision moved that the catalog follows"
    changes = sorted(f"{ref.ref} {ref.old_sha} {ref.new_sha}" for ref in refs)
    return _Moved(repo.name, refs[-1].new_sha, (repo.name, *changes))


async def _accept(state: _State, moved: _Moved, report: Report, every_s: float) -> Response:
    now = asyncio.get_running_loop().time()
    while state.seen and (
        len(state.seen) >= _MOST_SEEN or now - next(iter(state.seen.values())) > _SEEN_S
    ):
        state.seen.popitem(last=False)
    if moved.same in state.seen:
        return _answer(200, f"{moved.repo}: this was reported already", reported=False)
    state.seen[moved.same] = now
    last = state.reported.get(moved.repo)
    wait = 0.0 if last is None else last + every_s - now
    if moved.repo in state.tasks or wait > 0:
        # While its task reports, a repo waits no more, but the task goes on.
        if moved.repo not in state.tasks:
            state.tasks[moved.repo] = asyncio.create_task(
                _later(state, moved.repo, report, wait, every_s)
            )
        state.waiting[moved.repo] = moved.commit
        return _answer(202, f"{moved.repo}: will be reported within {every_s:.0f} s", reported=True)
    # Before it is done: what comes meanwhile waits its turn.
    state.reported[moved.repo] = now
    if await _reported(report, moved.repo, moved.commit):
        return _answer(202, f"{moved.repo}: reported, the Hub is asked at once", reported=True)
    state.seen.pop(moved.same, None)
    state.reported.pop(moved.repo, None)
    return _answer(503, "Dagster's storage does not answer; the log of this server says why")


async def _later(state: _State, repo: str, report: Report, wait: float, every_s: float) -> None:
    while repo in state.waiting:
        await asyncio.sleep(wait)
        commit = state.waiting.pop(repo)
        state.reported[repo] = asyncio.get_running_loop().time()
        if not await _reported(report, repo, commit):
            state.waiting.setdefault(repo, commit)
        wait = every_s
    del state.tasks[repo]


async def _reported(report: Report, repo: str, commit: str | None) -> bool:
    try:
        await run_in_threadpool(report, repo, commit)
    except Exception as error:  # noqa: BLE001 - whatever Dagster's storages raise
        # Without what it says, which may quote how the database is reached.
        _logger.error("%s could not be reported: %s", printable(repo), type(error).__name__)
        return False
    _logger.info("%s moved to %s: reported", printable(repo), commit or "an unknown commit")
    return True
