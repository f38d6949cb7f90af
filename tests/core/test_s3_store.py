"""What holds of S3 as a store, beyond what every store promises."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core import layout, ranged, s3_store
from tensorize_assets.core.errors import ConflictError, StoreError, StoreUnavailableError
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings, split_uri
from tensorize_assets.core.s3_store import S3Store
from tensorize_assets.core.store import digest, open_store
from tensorize_assets.demo.s3_server import REGION, LocalS3

FORK = multiprocessing.get_context("fork")
MiB = 1024 * 1024
KEY = "vllm/gpt2/v1/model.tensors"
LARGE = [bytes(6 * MiB)]

Prepare = Callable[..., S3Store]


@pytest.fixture
def store(s3_root: str, s3_access: S3Access) -> S3Store:
    return S3Store(s3_root, s3_access)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts as small as S3 takes them, so that small files have many."""
    monkeypatch.setattr(s3_store, "PART_BYTES", 5 * MiB)
    return 5 * MiB


@pytest.fixture
def through(s3_root: str, s3: LocalS3, proxy: Any) -> Prepare:
    """Makes a store that is reached through the proxy, with changed settings."""

    def prepare(**settings: Any) -> S3Store:
        values = {"endpoint_url": proxy.endpoint, "region": REGION, **settings}
        credentials = S3Credentials(s3.access_key, s3.secret_key)
        return S3Store(s3_root, S3Access(S3Settings(**values), credentials))

    return prepare


def in_bucket(store: S3Store, key: str) -> dict[str, str]:
    bucket, prefix = split_uri(store.root)
    return {"Bucket": bucket, "Key": f"{prefix}/{key}"}


def uploads(s3: LocalS3, store: S3Store) -> list[str]:
    """The keys of all unfinished uploads, with one entry for each."""
    bucket, prefix = split_uri(store.root)
    found = s3.client().list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    return sorted(entry["Key"].removeprefix(f"{prefix}/") for entry in found)


def everything(s3: LocalS3, store: S3Store) -> list[str]:
    """The keys of all objects, hidden ones too."""
    bucket, prefix = split_uri(store.root)
    found = s3.client().list_objects_v2(Bucket=bucket).get("Contents", ())
    return sorted(entry["Key"].removeprefix(f"{prefix}/") for entry in found)


def is_part(asked: Any) -> bool:
    return asked.method == "PUT" and "partNumber=" in asked.target


class FirstTime:
    """Says True to the first request that fits, to one thread."""

    def __init__(self, fits: Callable[[Any], bool], times: int = 1) -> None:
        self._fits = fits
        self._left = times
        self._lock = threading.Lock()

    def __call__(self, asked: Any) -> bool:
        with self._lock:
            if self._left and self._fits(asked):
                self._left -= 1
                return True
            return False


def start_put(store: S3Store, key: str, parts: int) -> int:
    """Fork a process that uploads `parts` parts and then waits; return its pid when it waits."""
    arrived, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def chunks() -> Iterator[bytes]:
            for _ in range(parts):
                yield bytes(5 * MiB)
            os.write(tell, b"x")
            time.sleep(600)

        try:
            store.put_stream(key, chunks(), size=10 * parts * MiB)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(1)
    assert b"x" == os.read(arrived, 1)
    os.close(arrived)
    os.close(tell)
    return child


# Uploads


@pytest.mark.parametrize("size", [5 * MiB, 5 * MiB + 1, 15 * MiB, 62 * MiB + 5])
def test_every_byte_arrives_whatever_the_number_of_parts(
    store: S3Store, s3: LocalS3, small_parts: int, size: int
) -> None:
    """The last part is shorter, or just as long, or the only one."""
    data = os.urandom(size)
    # Chunks that neither divide a part nor are smaller than one.
    step = 7_500_007
    chunks = (data[start : start + step] for start in range(0, size, step))
    found = store.put_stream(KEY, chunks, size=size)
    with store.open_read(KEY) as stream:
        assert data == stream.read()
    assert (size, found) == (found.size, digest(store, KEY))
    etag = s3.client().head_object(**in_bucket(store, KEY))["ETag"]
    assert (f'-{-(-size // small_parts)}"' in etag) == (size > small_parts)
    assert [] == uploads(s3, store)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_upload_is_aborted_whatever_stops_it(
    store: S3Store, s3: LocalS3, small_parts: int, error: type[BaseException]
) -> None:
    """Parts of an upload that nobody completes are paid for, and in no listing."""

    def chunks() -> Iterator[bytes]:
        yield bytes(5 * small_parts)
        raise error("stop")

    with pytest.raises(error, match="stop"):
        store.put_stream(KEY, chunks(), size=9 * small_parts)
    assert ([], []) == (uploads(s3, store), everything(s3, store))


def test_what_differs_from_its_hash_is_aborted(
    store: S3Store, s3: LocalS3, small_parts: int, tmp_path: Path
) -> None:
    """Every part was good then; only the whole is not what it should be."""
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * small_parts))
    with pytest.raises(StoreError, match="nothing was written there"):
        store.put_file(KEY, path, sha256="0" * 64, move=True)
    assert ([], [], True) == (uploads(s3, store), everything(s3, store), path.exists())


@pytest.mark.fault(
    "Bad network",
    "upload: the fifth part is refused (AccessDenied)",
    "one error; the others stop, no upload stays",
)
def test_a_part_that_is_refused_stops_and_aborts_the_upload(
    through: Prepare, proxy: Any, refusal: Any, s3: LocalS3, small_parts: int
) -> None:
    """Rights may end in the middle; the other parts must not keep the reader waiting."""
    store = through()
    fifth = FirstTime(lambda asked: bool(re.search(r"partNumber=5(&|$)", asked.target)))
    proxy.before = lambda asked: refusal(403, "AccessDenied") if fifth(asked) else None
    passed = 0

    def chunks() -> Iterator[bytes]:
        nonlocal passed
        for _ in range(60):
            passed += 1
            yield bytes(small_parts)

    with pytest.raises(StoreError, match=r"cannot put .*AccessDenied.*s3:PutObject") as caught:
        store.put_stream(KEY, chunks(), size=60 * small_parts)
    assert not caught.value.retryable
    assert passed < 40
    assert ([], []) == (uploads(s3, store), everything(s3, store))


def test_an_interrupted_process_aborts_its_upload(
    store: S3Store, s3: LocalS3, small_parts: int
) -> None:
    """Ctrl-C, or Dagster's cancel, in the middle of a shard."""
    child = start_put(store, KEY, 4)
    assert [KEY] == uploads(s3, store)
    os.kill(child, signal.SIGINT)
    assert 7 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ([], []) == (uploads(s3, store), everything(s3, store))


@pytest.mark.fault(
    "Bad network", "upload: parts without an answer, and told to stop", "aborted within seconds"
)
def test_an_upload_is_aborted_while_its_parts_are_stuck(
    through: Prepare, proxy: Any, s3: LocalS3, small_parts: int
) -> None:
    """A worker is killed 10 s after it was told to stop; a part may wait for minutes."""
    store = through()
    stuck, free = threading.Semaphore(0), threading.Event()

    def before(asked: Any) -> None:
        if is_part(asked):
            stuck.release()
            free.wait()

    def chunks() -> Iterator[bytes]:
        yield bytes(3 * small_parts)
        for _ in range(3):
            stuck.acquire()
        raise KeyboardInterrupt

    proxy.before = before
    try:
        with pytest.raises(KeyboardInterrupt):
            store.put_stream(KEY, chunks(), size=9 * small_parts)
        # Nothing was let go yet.
        assert [] == uploads(s3, store)
        assert "DELETE" == proxy.asked[-1].method
    finally:
        free.set()


def test_a_part_that_nobody_wants_any_more_goes_no_further(
    through: Prepare, proxy: Any, refusal: Any, small_parts: int
) -> None:
    """boto3 would send it again, for as long as the server asks for patience."""
    store = through(max_attempts=20)
    refused = threading.Event()

    def before(asked: Any) -> Any:
        if not is_part(asked):
            return None
        refused.set()
        return refusal(503, "SlowDown")

    def chunks() -> Iterator[bytes]:
        yield bytes(small_parts)
        refused.wait()
        raise KeyboardInterrupt

    proxy.before = before
    with pytest.raises(KeyboardInterrupt):
        store.put_stream(KEY, chunks(), size=2 * small_parts)
    for thread in threading.enumerate():
        if thread.name.startswith("put_"):
            thread.join()
    assert sum(map(is_part, proxy.asked)) < 20


@pytest.mark.fault(
    "Bad network", "abort an upload: no answer", "given up after two tries; the next put aborts it"
)
def test_a_server_that_does_not_answer_an_abort_is_not_waited_for(
    through: Prepare, proxy: Any, small_parts: int
) -> None:
    """Two tries; the next put of the object aborts it."""
    store = through()
    free = threading.Event()
    proxy.before = lambda asked: free.wait() and None if asked.method == "DELETE" else None

    def chunks() -> Iterator[bytes]:
        yield bytes(small_parts)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            store.put_stream(KEY, chunks(), size=2 * small_parts)
        assert 2 == sum(asked.method == "DELETE" for asked in proxy.asked)
    finally:
        free.set()


def test_what_a_killed_process_left_is_aborted_by_the_next_put_of_the_same_object(
    store: S3Store, s3: LocalS3, small_parts: int
) -> None:
    """Nobody else knows that those parts are of no use; parts of other objects may be."""
    for key in (KEY, KEY, f"{KEY}.other"):
        child = start_put(store, key, 4)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [KEY, KEY, f"{KEY}.other"] == uploads(s3, store)
    assert (None, ()) == (store.stat(KEY), store.list(""))
    store.put_stream(KEY, [bytes(3 * small_parts)], size=3 * small_parts)
    assert [f"{KEY}.other"] == uploads(s3, store)
    assert 3 * small_parts == store.stat(KEY)


def test_an_upload_that_begins_later_is_left_alone(
    store: S3Store, s3: LocalS3, small_parts: int
) -> None:
    """It may be another machine's, alive; whoever completes last wins."""

    def chunks() -> Iterator[bytes]:
        s3.client().create_multipart_upload(**in_bucket(store, KEY))
        yield bytes(3 * small_parts)

    store.put_stream(KEY, chunks(), size=3 * small_parts)
    assert [KEY] == uploads(s3, store)


def test_sweeping_aborts_old_uploads_under_a_prefix(store: S3Store, s3: LocalS3) -> None:
    """Builds that never run again leave theirs for good."""
    client = s3.client()
    for key in ("a/1", "a/2", "b"):
        client.create_multipart_upload(**in_bucket(store, key))
    assert 0 == store.sweep("a/", 3600)
    # The server's clock counts whole seconds.
    assert 2 == store.sweep("a/", -2)
    assert ["b"] == uploads(s3, store)


def test_sweeping_removes_old_hidden_objects(store: S3Store, s3: LocalS3) -> None:
    """No listing shows them; a folder as a console makes it is not one."""
    client = s3.client()
    for key in ("a/.tmp-probe", "a/b/.tmp-check-1/large", "a/", "a/c", ".tmp-probe"):
        client.put_object(**in_bucket(store, key), Body=b"")
    assert 0 == store.sweep("a/", 3600)
    assert 2 == store.sweep("a/", -2)
    assert [".tmp-probe", "a/", "a/c"] == everything(s3, store)


@pytest.mark.fault(
    "Bad network",
    "upload: one bit of a part flips, the length is right",
    "one error; nothing is seen, no upload stays",
)
@pytest.mark.parametrize("checksums", [None, "when_required"])
def test_a_part_damaged_on_the_way_is_refused(
    through: Prepare, proxy: Any, s3: LocalS3, small_parts: int, checksums: str | None
) -> None:
    """Its checksum, not the signature, which only http endpoints and few others cover data by."""
    store = through(checksums=checksums)
    damaged = FirstTime(is_part)

    def flip(asked: Any) -> None:
        if damaged(asked):
            asked.body = bytes([asked.body[0] ^ 1]) + asked.body[1:]

    proxy.before = flip
    with pytest.raises(StoreError, match="when_required"):
        store.put_stream(KEY, [bytes(3 * small_parts)], size=3 * small_parts)
    assert ([], []) == (uploads(s3, store), everything(s3, store))
    name = "x-amz-checksum-crc32" if checksums is None else "content-md5"
    for asked in proxy.asked:
        if is_part(asked):
            sent = {header.lower() for header in asked.headers}
            assert name in sent
            assert len(sent & {"x-amz-checksum-crc32", "content-md5", "x-amz-trailer"}) == 1


@pytest.mark.fault(
    "Bad network", "complete an upload: done, and its answer is lost", "found by its mark, whole"
)
def test_an_upload_completed_by_a_request_whose_answer_was_lost_is_complete(
    through: Prepare, proxy: Any, s3: LocalS3, small_parts: int
) -> None:
    """The second request finds no upload any more."""
    store = through()
    lost = FirstTime(lambda asked: asked.method == "POST" and "uploadId=" in asked.target)
    proxy.after = lambda asked, answer: None if lost(asked) else answer
    data = os.urandom(3 * small_parts)
    found = store.put_stream(KEY, [data], size=len(data))
    assert found == digest(store, KEY)
    assert [] == uploads(s3, store)


@pytest.mark.fault(
    "Race",
    "an upload is aborted by a run that stored the same object",
    "told so, to be tried again",
)
def test_the_upload_of_another_is_not_taken_for_ours(
    through: Prepare, proxy: Any, s3: LocalS3, small_parts: int
) -> None:
    """The same bytes in as many parts, of a run that may yet remove them."""
    store = through()
    data = bytes(3 * small_parts)
    S3Store(
        store.root,
        S3Access(
            store.access.settings.model_copy(update={"endpoint_url": s3.endpoint}),
            store.access.credentials,
        ),
    ).put_stream(KEY, [data], size=len(data))
    ends = FirstTime(lambda asked: asked.method == "POST" and "uploadId=" in asked.target)

    def before(asked: Any) -> None:
        if ends(asked):
            for upload in s3.client().list_multipart_uploads(Bucket=split_uri(store.root)[0])[
                "Uploads"
            ]:
                s3.client().abort_multipart_upload(
                    **in_bucket(store, KEY), UploadId=upload["UploadId"]
                )

    proxy.before = before
    with pytest.raises(StoreUnavailableError, match="NoSuchUpload"):
        store.put_stream(KEY, [data], size=len(data))


@pytest.mark.fault(
    "Bad network",
    "download: one part is refused while another is on its way",
    "one error; nothing is written later",
)
def test_a_file_is_not_written_after_its_fetch_was_given_up(
    through: Prepare, proxy: Any, refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is another file's by then: somebody else's would be overwritten."""
    monkeypatch.setattr(ranged, "_CLOSE_WAIT_S", 0.1)
    store = through()
    # The second part is read in one step: it does not look in between whether it is wanted.
    size = ranged.PART_BYTES + MiB // 2
    store.put_stream(KEY, [b"x" * size], size=size)
    stalled, free = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        free.wait()

    def after(asked: Any, answer: Any) -> Any:
        wanted = asked.headers.get("Range", "bytes=0-0")
        if wanted.startswith("bytes=0-") and wanted != "bytes=0-0":
            stalled.wait()
            return refusal(403, "AccessDenied")
        if wanted != "bytes=0-0":
            answer.halfway = stall
        return answer

    proxy.after = after
    with pytest.raises(StoreError, match="AccessDenied"):
        store.get_file(KEY, tmp_path / "file")
    with ExitStack() as stack:
        for number in range(20):
            stack.enter_context((tmp_path / f"other-{number}").open("wb"))
        free.set()
        for thread in threading.enumerate():
            if thread.name.startswith("read "):
                thread.join()
        written = [path.stat().st_size for path in tmp_path.iterdir()]
    assert [0] * 20 == written


@pytest.mark.fault(
    "Bad network", "upload: parts get 503 SlowDown, and lose their answers", "sent again"
)
def test_parts_are_sent_again_when_the_server_is_busy(
    through: Prepare, proxy: Any, refusal: Any, small_parts: int
) -> None:
    """S3 asks for patience, and breaks connections, every day."""
    store = through()
    busy = FirstTime(is_part, times=2)
    lost = FirstTime(is_part, times=2)
    proxy.before = lambda asked: refusal(503, "SlowDown") if busy(asked) else None
    proxy.after = lambda asked, answer: None if lost(asked) else answer
    data = os.urandom(5 * small_parts)
    assert store.put_stream(KEY, [data], size=len(data)) == digest(store, KEY)


_MEMORY = """
import re, sys
from pathlib import Path
from tensorize_assets.core.s3 import from_environment
from tensorize_assets.core.store import open_store

store = open_store(sys.argv[1], from_environment())
size, chunk = 384 << 20, bytes(4 << 20)
store.put_stream("a", (chunk for _ in range(size // len(chunk))), size=size)
store.get_file("a", Path(sys.argv[2]))
# Not getrusage: its peak is that of the process before exec, too.
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024)
"""


def test_memory_does_not_grow_with_the_object(
    s3_root: str, s3_access: S3Access, tmp_path: Path
) -> None:
    """A worker holds a shard already when it uploads."""
    s3_access.write(tmp_path / "access")
    environ = {**os.environ, "TENSORIZE_ASSETS_S3_ACCESS": str(tmp_path / "access")}
    found = subprocess.run(
        [sys.executable, "-c", _MEMORY, s3_root, str(tmp_path / "file")],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(found.stdout) < 300


# Conditional writes


def is_put_of(name: str) -> Callable[[Any], bool]:
    return lambda asked: asked.method == "PUT" and asked.target.endswith(name)


@pytest.mark.fault(
    "Bad network",
    "put if absent, put if unchanged: done, and its answer is lost",
    "known by its bytes",
)
def test_a_write_whose_answer_was_lost_is_known_by_its_bytes(through: Prepare, proxy: Any) -> None:
    """boto3 sends it again, and the second is refused because the first was done."""
    store = through()
    lost = FirstTime(is_put_of("/a"))
    proxy.after = lambda asked, answer: None if lost(asked) else answer
    etag = store.put_bytes("a", b"mine", if_absent=True)
    found = store.get_bytes("a")
    assert found
    assert (b"mine", etag) == found
    lost = FirstTime(is_put_of("/a"))
    again = store.put_bytes("a", b"mine too", if_match=etag)
    found = store.get_bytes("a")
    assert found
    assert (b"mine too", again) == found
    lost = FirstTime(is_put_of("/a"))
    with pytest.raises(ConflictError, match="changed since"):
        store.put_bytes("a", b"too late", if_match=etag)


@pytest.mark.fault(
    "Race", "16 processes create one object, and half of the answers are lost", "one wins"
)
def test_of_16_processes_whose_answers_are_lost_exactly_one_wins(
    through: Prepare, proxy: Any, tmp_path: Path
) -> None:
    """A lost answer must not make two winners."""
    store = through()
    lost = FirstTime(is_put_of("/a"), times=8)
    proxy.after = lambda asked, answer: None if lost(asked) else answer
    barrier = FORK.Barrier(16)

    def create(number: int) -> None:
        barrier.wait()
        try:
            store.put_bytes("a", b"%d" % number, if_absent=True)
        except ConflictError:
            return
        (tmp_path / str(number)).touch()

    processes = [FORK.Process(target=create, args=(number,)) for number in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [0] * 16 == [process.exitcode for process in processes]
    found = store.get_bytes("a")
    assert found
    assert [found.data.decode()] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.fault(
    "Bad network",
    "put if absent, put if unchanged: the store ignores the condition",
    "refused before anything is written",
)
@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_conditions_is_found_out_and_refused(
    through: Prepare, proxy: Any, s3: LocalS3, header: str
) -> None:
    """It says 200 to everybody, and the last publisher wipes out the others."""
    proxy.before = lambda asked: asked.headers.pop(header, None) and None
    store = through()
    store.put_bytes("plain", b"")
    message = f"does not honour {header} .*unsafe_no_cas: true"
    with pytest.raises(StoreError, match=message):
        store.put_bytes("a", b"", if_absent=True)
    with pytest.raises(StoreError, match=message):
        store.put_bytes("a", b"", if_match='"x"')
    assert ["plain"] == everything(s3, store)


def test_a_server_that_refuses_conditions_is_refused(
    through: Prepare, proxy: Any, refusal: Any, s3: LocalS3
) -> None:
    """As older servers do: 501."""
    proxy.before = lambda asked: (
        refusal(501, "NotImplemented", "A header you provided implies functionality")
        if {"If-None-Match", "If-Match"} & set(asked.headers)
        else None
    )
    with pytest.raises(StoreError, match=r"refuses conditional writes \(NotImplemented\)"):
        through().put_bytes("a", b"", if_absent=True)
    store = through(unsafe_no_cas=True)
    etag = store.put_bytes("a", b"1", if_absent=True)
    with pytest.raises(ConflictError, match="exists already"):
        store.put_bytes("a", b"2", if_absent=True)
    store.put_bytes("a", b"2", if_match=etag)
    with pytest.raises(ConflictError, match="changed since"):
        store.put_bytes("a", b"3", if_match=etag)
    with pytest.raises(ConflictError, match="removed since"):
        store.put_bytes("b", b"3", if_match=etag)
    assert ["a"] == everything(s3, store)


def test_conditions_are_tried_once_a_process(through: Prepare, proxy: Any) -> None:
    """Three requests more for each manifest would be too many."""
    store = through()
    for name in ("a", "b", "c"):
        store.put_bytes(name, b"", if_absent=True)
    probes = [asked for asked in proxy.asked if asked.target.endswith("/.tmp-probe")]
    assert ["PUT", "PUT", "PUT", "DELETE"] == [asked.method for asked in probes]


def test_whoever_finds_the_trial_of_another_leaves_it(
    through: Prepare, proxy: Any, s3: LocalS3, store: S3Store
) -> None:
    """Removed under the eyes of who made it, the server would seem to ignore conditions."""
    s3.client().put_object(**in_bucket(store, ".tmp-probe"), Body=b"")
    through().put_bytes("a", b"", if_absent=True)
    probes = [asked for asked in proxy.asked if asked.target.endswith("/.tmp-probe")]
    assert ["PUT", "PUT"] == [asked.method for asked in probes]
    assert [".tmp-probe", "a"] == everything(s3, store)


def test_the_trial_leaves_no_version_in_a_versioned_bucket(
    s3: LocalS3, s3_access: S3Access
) -> None:
    """Every process tries, and no listing shows what would pile up."""
    s3.create_bucket("trial-versions", versioned=True)
    store = S3Store("s3://trial-versions/p", s3_access)
    s3_store._honour.clear()
    store.put_bytes("a", b"", if_absent=True)
    found = s3.client().list_object_versions(Bucket="trial-versions")
    entries = [*found.get("Versions", ()), *found.get("DeleteMarkers", ())]
    assert ["p/a"] == [entry["Key"] for entry in entries]


@pytest.mark.fault(
    "Race",
    "a conditional write meets another of the same moment (409)",
    "made again, or lost to it",
)
def test_a_write_that_meets_another_comes_again(through: Prepare, proxy: Any, refusal: Any) -> None:
    """AWS answers 409 when two writes to one key run at the same moment."""
    store = through()
    met = FirstTime(is_put_of("/a"), times=2)
    proxy.before = lambda asked: refusal(409, "ConditionalRequestConflict") if met(asked) else None
    store.put_bytes("a", b"mine", if_absent=True)
    met = FirstTime(is_put_of("/a"), times=99)
    with pytest.raises(ConflictError, match="exists already"):
        store.put_bytes("a", b"other", if_absent=True)


# Bad cases


def restricted(store: S3Store, name: str) -> S3Store:
    credentials = S3Credentials(name, f"{name}-secret-key")
    return S3Store(store.root, S3Access(store.access.settings, credentials))


@pytest.fixture
def owned(s3_strict: LocalS3) -> Iterator[S3Store]:
    """The administrator's store in a bucket of its own, on the server that knows others too."""
    bucket = f"users-{uuid.uuid4().hex}"
    s3_strict.create_bucket(bucket)
    settings = S3Settings(
        endpoint_url=s3_strict.endpoint, region=REGION, ca_bundle=str(s3_strict.ca_bundle)
    )
    keys = S3Credentials(s3_strict.access_key, s3_strict.secret_key)
    yield S3Store(f"s3://{bucket}/p", S3Access(settings, keys))
    s3_strict.client().delete_bucket(Bucket=bucket)


@pytest.mark.fault(
    "Bad network", "users of a real server who lack one right", "one error that names the right"
)
@pytest.mark.parametrize(
    ("user", "verb", "action", "act"),
    [
        ("reader", "put", "s3:PutObject", lambda s: s.put_bytes("b", b"x")),
        ("reader", "put", "s3:PutObject", lambda s: s.put_bytes("b", b"x", if_absent=True)),
        (
            "reader",
            "put",
            "s3:PutObject",
            lambda s: s.put_stream("b", LARGE, size=6 * MiB),
        ),
        ("reader", "delete", "s3:DeleteObject", lambda s: s.delete("a")),
        ("writer", "get", "s3:GetObject", lambda s: s.get_bytes("a")),
        ("writer", "get", "s3:GetObject", lambda s: s.open_read("a")),
        ("writer", "get", "s3:GetObject", lambda s: s.stat("a")),
        ("writer", "list", "s3:ListBucket", lambda s: s.list("")),
        ("lister", "get", "s3:GetObject", lambda s: s.get_bytes("a")),
    ],
)
def test_a_missing_right_is_named(
    s3_strict: LocalS3,
    owned: S3Store,
    small_parts: int,
    user: str,
    verb: str,
    action: str,
    act: Callable[[S3Store], object],
) -> None:
    """Whoever administers the bucket must know which one to give."""
    owned.put_bytes("a", b"x")
    store = restricted(owned, user)
    message = rf"cannot {verb} .*(AccessDenied|403).*{action}"
    with pytest.raises(StoreError, match=message) as caught:
        act(store)
    assert not caught.value.retryable
    assert "secret-key" not in str(caught.value)
    assert (["a"], []) == (everything(s3_strict, owned), uploads(s3_strict, owned))


def test_whoever_may_write_can_put_without_listing_uploads(
    owned: S3Store, small_parts: int
) -> None:
    """Looking for orphans is an extra, and no reason to refuse a build."""
    store = restricted(owned, "writer")
    store.put_stream("a", LARGE, size=6 * MiB)
    assert 0 == store.sweep("", 0)


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.put_bytes("a", b""),
        lambda s: s.put_bytes("a", b"", if_absent=True),
        lambda s: s.put_stream("a", LARGE, size=6 * MiB),
        lambda s: s.get_bytes("a"),
        lambda s: s.open_read("a"),
        lambda s: s.stat("a"),
        lambda s: s.list(""),
        lambda s: s.delete("a"),
        lambda s: s.copy("a", "b"),
        lambda s: s.sweep("", 0),
    ],
)
def test_a_bucket_that_does_not_exist_is_named(
    s3_access: S3Access, small_parts: int, act: Callable[[S3Store], object]
) -> None:
    """Not an empty store: a mistyped bucket would look like one."""
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/p.*NoSuchBucket.*make the bucket"):
        act(S3Store("s3://no-such-bucket/p", s3_access))


@pytest.mark.fault(
    "Bad network", "upload: the server dies", "one error; the next run leaves nothing of it"
)
def test_a_server_that_dies_in_the_middle_leaves_nothing_that_stays(
    tmp_path: Path, small_parts: int
) -> None:
    """The next run finds the store as if the one before had not been."""
    with LocalS3(tmp_path / "s3") as s3:
        s3.create_bucket("dies")
        settings = S3Settings(endpoint_url=s3.endpoint, region=REGION, max_attempts=2)
        store = S3Store(
            "s3://dies/p", S3Access(settings, S3Credentials(s3.access_key, s3.secret_key))
        )

        def chunks() -> Iterator[bytes]:
            yield bytes(6 * small_parts)
            s3.kill()
            for _ in range(100):
                yield bytes(small_parts)

        with pytest.raises(StoreUnavailableError, match="is the server up"):
            store.put_stream(KEY, chunks(), size=106 * small_parts)
        with pytest.raises(StoreUnavailableError, match="is the server up"):
            store.get_bytes(KEY)
        s3.restart()
        assert (None, ()) == (store.stat(KEY), store.list(""))
        store.put_stream(KEY, [bytes(5 * small_parts)], size=5 * small_parts)
        assert [] == uploads(s3, store)
        assert 5 * small_parts == digest(store, KEY).size


@pytest.mark.fault("Race", "an object is replaced while it is read", "refused, never mixed")
def test_an_object_replaced_while_it_is_read_is_refused(store: S3Store) -> None:
    """Half of one shard and half of another would load without a word."""
    size = 100 * MiB
    store.put_stream(KEY, (bytes(MiB) for _ in range(100)), size=size)
    with store.open_read(KEY) as stream:
        assert 1 == len(stream.read(1))
        store.put_stream(KEY, (b"x" * MiB for _ in range(100)), size=size)
        with pytest.raises(StoreError, match="replaced"):
            stream.read()


def test_a_bucket_with_object_lock_takes_what_others_take(
    s3: LocalS3, s3_access: S3Access, small_parts: int
) -> None:
    """It keeps every version; writing needs a checksum, and deleting leaves a marker."""
    s3.create_bucket("locked", object_lock=True)
    s3.client().put_object_lock_configuration(
        Bucket="locked",
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}},
        },
    )
    store = S3Store("s3://locked/p", s3_access)
    # As a process each: whatever the trial leaves, it leaves once.
    s3_store._honour.clear()
    etag = store.put_bytes("a", b"1", if_absent=True)
    s3_store._honour.clear()
    store.put_bytes("a", b"2", if_match=etag)
    store.put_stream("big", LARGE, size=6 * MiB)
    store.delete("big")
    assert ("a",) == store.list("")
    store.put_bytes("big", b"again", if_absent=True)
    found = store.get_bytes("big")
    assert found
    assert b"again" == found.data
    there = s3.client().list_object_versions(Bucket="locked")
    assert ["p/.tmp-probe", "p/a", "p/a", "p/big", "p/big"] == sorted(
        entry["Key"] for entry in there["Versions"]
    )
    assert ["p/big"] == [entry["Key"] for entry in there["DeleteMarkers"]]


# Listing and copying


def test_folder_markers_and_hidden_objects_are_not_listed(store: S3Store, s3: LocalS3) -> None:
    """Consoles make the first; the second are the store's own."""
    client = s3.client()
    for key in ("a/", "a/.tmp-probe-1", ".tmp-x/y", "a/b"):
        client.put_object(**in_bucket(store, key), Body=b"")
    assert ("a/b",) == store.list("")


def test_more_objects_than_a_page_holds_are_listed(store: S3Store, s3: LocalS3) -> None:
    """A page has 1000."""
    client = s3.client()
    keys = [f"a/{number:04}" for number in range(1005)]
    for key in keys:
        client.put_object(**in_bucket(store, key), Body=b"")
    assert tuple(keys) == store.list("a/")


def test_a_store_at_the_top_of_a_bucket_works(
    s3: LocalS3, s3_access: S3Access, small_parts: int
) -> None:
    """A prefix is a choice."""
    s3.create_bucket("top-level")
    for root in ("s3://top-level", "s3://top-level/"):
        store = open_store(root, s3_access)
        store.put_bytes("a/b", b"x")
        assert ("a/b",) == store.list("")
        assert "s3://top-level/a/b" == store.uri("a/b")


def test_large_objects_are_copied_in_parts(
    store: S3Store, s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request copies 5 GB at most."""
    monkeypatch.setattr(s3_store, "_MAX_COPY_BYTES", 5 * MiB)
    monkeypatch.setattr(s3_store, "_COPY_PART_BYTES", 5 * MiB)
    data = os.urandom(12 * MiB)
    found = store.put_stream("a", [data], size=len(data))
    assert store.copy("a", "b")
    assert found == digest(store, "b")
    assert re.search(r'-3"$', s3.client().head_object(**in_bucket(store, "b"))["ETag"])
    assert [] == uploads(s3, store)


def test_what_the_server_may_not_copy_is_left_to_the_caller(
    store: S3Store, through: Prepare, proxy: Any, refusal: Any
) -> None:
    """The right to read may be another account's, and the server another one."""
    store.put_bytes("a", b"x")
    assert not through().copy("a", "b", source=store)
    other = through()
    proxy.before = lambda asked: (
        refusal(403, "AccessDenied") if "X-Amz-Copy-Source" in asked.headers else None
    )
    assert not other.copy("a", "b")
    assert ("a",) == store.list("")


# Servers that are none


@pytest.mark.fault(
    "Bad network",
    "complete an upload: 200 with the page of something else",
    "one error; no upload stays",
)
@pytest.mark.parametrize("body", [b"", b"<html><body>hello</body></html>"])
def test_an_upload_that_something_else_says_is_complete_is_not(
    through: Prepare, proxy: Any, refusal: Any, small_parts: int, body: bytes
) -> None:
    """A proxy's own page for a long request is a 200, too."""
    answer = type(refusal(200, ""))
    proxy.before = lambda asked: (
        answer(200, {}, body) if asked.method == "POST" and "uploadId=" in asked.target else None
    )
    store = through(max_attempts=1)
    with pytest.raises(StoreError, match=r"does not answer as S3 does.*endpoint_url"):
        store.put_stream(KEY, LARGE, size=len(LARGE[0]))
    assert store.stat(KEY) is None
    assert any(asked.method == "DELETE" for asked in proxy.asked)


@pytest.mark.fault(
    "Bad network",
    "every verb: 200 from a server that is no S3",
    "one error that names the endpoint",
)
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b""),
        ({}, b"<html>hello</html>"),
        ({"Content-Length": "abc", "Connection": "close"}, b""),
    ],
)
@pytest.mark.parametrize("verb", ["stat", "get", "open", "put", "parts", "copy", "cas"])
def test_a_server_that_is_no_s3_is_named_as_such(
    through: Prepare,
    proxy: Any,
    refusal: Any,
    small_parts: int,
    headers: dict[str, str],
    body: bytes,
    verb: str,
) -> None:
    """A web server at a wrong port answers 200 to anything."""
    store = through(max_attempts=1, addressing="path")
    acts: dict[str, Callable[[], object]] = {
        "stat": lambda: store.stat(KEY),
        "get": lambda: store.get_bytes(KEY),
        "open": lambda: store.open_read(KEY),
        "put": lambda: store.put_bytes(KEY, b"x"),
        "parts": lambda: store.put_stream(KEY, LARGE, size=len(LARGE[0])),
        "copy": lambda: store.copy(KEY, f"{KEY}.2"),
        "cas": lambda: store.put_bytes(KEY, b"x", if_absent=True),
    }
    answer = type(refusal(200, ""))
    proxy.before = lambda asked: answer(200, headers, body)
    with pytest.raises(StoreError, match=r"does not answer as S3 does.*endpoint_url"):
        acts[verb]()


def test_a_listing_is_of_nothing_outside_its_prefix(
    through: Prepare, proxy: Any, s3: LocalS3
) -> None:
    """A server that ignores the prefix would have a sweep remove what is not the store's."""
    store = through()
    bucket, _ = split_uri(store.root)
    store.put_bytes("a.json", b"x")
    s3.client().put_object(Bucket=bucket, Key=f"else/where/{layout.HIDDEN_PREFIX}x", Body=b"x")
    s3.client().put_object(Bucket=bucket, Key="else/where/long/enough/a.json", Body=b"x")
    s3.client().create_multipart_upload(Bucket=bucket, Key="else/where/b")

    def lose_prefix(asked: Any) -> None:
        asked.target = re.sub(r"([?&])prefix=[^&]*", r"\1prefix=", asked.target)

    proxy.before = lose_prefix
    assert ("a.json",) == store.list("")
    assert 0 == store.sweep("", 0)
    assert 3 == len(s3.client().list_objects_v2(Bucket=bucket)["Contents"])
    assert 1 == len(s3.client().list_multipart_uploads(Bucket=bucket)["Uploads"])
