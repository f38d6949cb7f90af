from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import trustme

from tensorize_assets.core import http_folder, jsonio, layout, provenance, signing, verify
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.s3_store import S3Store
from tensorize_assets.core.store import FileDigest, digest, open_store
from tensorize_assets.core.verify import (
    VerifyReport,
    verify_directory,
    verify_folder,
    verify_url,
)

KEY = signing.SecretKey(bytes(range(32)))
TRUSTED = {KEY.public_key}
GOLDEN = Path(__file__).parent / "golden" / "manifest.json"
CONTENT = {
    "model-rank-000.tensors": b"rank 0" * 1000,
    "model-rank-001.tensors": b"rank 1" * 1000,
    "config.json": b"{}",
    "1_Pooling/config.json": b"[]",
}
EXTRA = {"path": "../outside", "size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}


def built(content: dict[str, bytes]) -> Manifest:
    """The golden manifest with the files of this test."""
    golden = manifests.decode(GOLDEN.read_bytes(), TRUSTED)
    files = [
        FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in content.items()
    ]
    return Manifest.model_validate({**golden.model_dump(), "files": files})


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def directory(store: LocalStore) -> str:
    """A complete artifact directory."""
    manifest = built(CONTENT)
    directory = layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)
    for path, data in CONTENT.items():
        store.put_bytes(layout.file_key(directory, path), data)
    store.put_bytes(layout.manifest_key(directory), manifests.encode(manifest, KEY))
    return directory


@pytest.fixture
def folder(store: LocalStore, directory: str) -> Path:
    return store.root / directory


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(problem.kind, problem.path) for problem in report.problems]


def test_a_complete_directory_is_fine(store: LocalStore, directory: str, folder: Path) -> None:
    """In its store, and copied anywhere under any name."""
    report = verify_directory(store, directory, TRUSTED)
    assert report.ok
    assert () == report.problems
    assert (4, 12_004, KEY.key_id) == (report.files, report.bytes, report.key_id)
    data = (folder / "manifest.json").read_bytes()
    assert manifests.manifest_sha256(data) == report.manifest_sha256
    elsewhere = store.root.parent / "elsewhere"
    shutil.copytree(folder, elsewhere)
    copied = verify_folder(elsewhere, TRUSTED)
    assert copied.ok
    assert str(elsewhere) == copied.where
    assert report.manifest == copied.manifest


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def exchange(folder: Path) -> None:
    first, second = folder / "model-rank-000.tensors", folder / "model-rank-001.tensors"
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: flip(d / "model-rank-001.tensors"), [("hash", "model-rank-001.tensors")]),
        (
            lambda d: os.truncate(d / "model-rank-000.tensors", 5999),
            [("size", "model-rank-000.tensors")],
        ),
        (lambda d: (d / "config.json").unlink(), [("missing", "config.json")]),
        (lambda d: (d / "modeling.py").write_bytes(b""), [("extra", "modeling.py")]),
        (
            lambda d: os.rename(d / "1_Pooling", d / "2_Pooling"),
            [("missing", "1_Pooling/config.json"), ("extra", "2_Pooling/config.json")],
        ),
        (
            exchange,
            [("hash", "model-rank-000.tensors"), ("hash", "model-rank-001.tensors")],
        ),
        (lambda d: (d / "link").symlink_to("config.json"), [("extra", "link")]),
        (
            lambda d: Path(os.fsdecode(os.fsencode(d) + b"/\xff")).touch(),
            [("extra", "\ufffd")],
        ),
        (lambda d: flip(d / "manifest.json"), [("signature", "manifest.json")]),
        (lambda d: (d / "manifest.json").unlink(), [("missing", "manifest.json")]),
        (lambda d: (d / "manifest.json").write_bytes(b""), [("signature", "manifest.json")]),
    ],
)
def test_damage_is_found_in_the_store_and_in_a_folder(
    store: LocalStore,
    directory: str,
    folder: Path,
    damage: Callable[[Path], object],
    expected: list[tuple[str, str]],
) -> None:
    """tensorizer itself loads a flipped byte or a short file without a word."""
    damage(folder)
    assert expected == found(verify_directory(store, directory, TRUSTED))
    assert expected == found(verify_folder(folder, TRUSTED))


def test_all_problems_are_reported_at_once(store: LocalStore, directory: str, folder: Path) -> None:
    """Whoever repairs a directory wants the whole list."""
    flip(folder / "model-rank-000.tensors")
    (folder / "config.json").unlink()
    (folder / "extra").touch()
    report = verify_directory(store, directory, TRUSTED)
    expected = [("missing", "config.json"), ("hash", "model-rank-000.tensors"), ("extra", "extra")]
    assert expected == found(report)
    assert (2, 6002) == (report.files, report.bytes)
    assert "SHA-256" in report.problems[1].message


def test_a_file_that_cannot_be_believed_is_not_read(folder: Path, tmp_path: Path) -> None:
    """A link may lead to a file with the right content that its owner changes tomorrow."""
    outside = tmp_path / "outside"
    os.rename(folder / "config.json", outside)
    (folder / "config.json").symlink_to(outside)
    assert [("unreadable", "config.json")] == found(verify_folder(folder, TRUSTED))


def test_a_signed_manifest_that_names_a_file_outside_reads_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """Verifying a stranger's directory must not become a way to probe this machine."""
    (folder.parent / "outside").write_bytes(b"secret")
    payload = jsonio.dump_record(built(CONTENT))
    files = payload["files"]
    assert isinstance(files, list)
    payload["files"] = [*files, {**EXTRA}]
    (folder / "manifest.json").write_bytes(signing.sign("manifest", payload, KEY))
    report = verify_folder(folder, TRUSTED)
    assert [("manifest", "manifest.json")] == found(report)
    assert report.manifest is None
    assert "cannot be part of a path" in report.problems[0].message


def test_an_unknown_signer_is_a_problem_of_its_own(folder: Path) -> None:
    """Intact files say nothing about who made them."""
    assert [("signature", "manifest.json")] == found(verify_folder(folder, ()))
    assert verify_folder(folder, None).ok


def test_a_whole_old_build_put_in_a_new_ones_place_is_found(
    store: LocalStore, directory: str
) -> None:
    """Every file fits its manifest and the signature is good: only the place is wrong."""
    other = directory[:-12] + "0" * 12
    shutil.copytree(store.root / directory, store.root / other)
    report = verify_directory(store, other, TRUSTED)
    assert [("manifest", "manifest.json")] == found(report)
    assert "was moved or put back" in report.problems[0].message


def test_the_stores_own_leftovers_are_no_extra_files(folder: Path) -> None:
    """A writer killed in the middle leaves nothing that counts."""
    (folder / ".tmp-0123").write_bytes(b"half")
    assert verify_folder(folder, TRUSTED).ok


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A shard given instead of its folder is a likely slip."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"give the folder that holds manifest\.json"):
        verify_folder(tmp_path / "file", TRUSTED)


def test_files_of_a_remote_store_are_read_two_at_a_time(
    s3_root: str, s3_access: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read by several requests at once, and holds their buffers."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    manifest = built(CONTENT)
    directory = layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)
    store = S3Store(s3_root, s3_access)
    for path, data in CONTENT.items():
        store.put_bytes(layout.file_key(directory, path), data)
    store.put_bytes(layout.manifest_key(directory), manifests.encode(manifest, KEY))
    third = threading.Barrier(3)
    met: list[bool] = []

    def waiting(self: S3Store, key: str) -> FileDigest:
        with suppress(threading.BrokenBarrierError):
            third.wait(0.2)
            met.append(True)
        return digest(self, key)

    monkeypatch.setattr(verify, "digest", waiting)
    report = verify_directory(store, directory, TRUSTED)
    assert (4, ()) == (report.files, report.problems)
    assert [] == met


def test_a_folder_with_another_builds_name_is_no_copy(folder: Path, tmp_path: Path) -> None:
    """Whoever verifies the path that they deploy must not be shown another build as fine."""
    for name in ("v1-tp2-000000000000", "v1-tp2-000000000000-encrypted"):
        other = tmp_path / name
        shutil.copytree(folder, other)
        report = verify_folder(other, TRUSTED)
        assert [("manifest", "manifest.json")] == found(report)
        assert "has the name of build 000000000000, but holds build" in report.problems[0].message
    assert verify_folder(folder, TRUSTED).ok


def sealed(folder: Path) -> manifests.StoredManifest:
    data = (folder / "manifest.json").read_bytes()
    stored = manifests.decode(data, TRUSTED)
    return manifests.StoredManifest(stored, manifests.manifest_sha256(data))


def test_provenance_is_verified_where_there_is_some(
    store: LocalStore, directory: str, folder: Path
) -> None:
    """It is not in the manifest, and none is no fault; a wrong one is."""
    assert ("there is no provenance.dsse.json",) == verify_folder(folder, TRUSTED).notes
    stored = sealed(folder)
    provenance.write(store, directory, stored, KEY, TRUSTED)
    for trusted in (TRUSTED, None):
        report = verify_directory(store, directory, trusted)
        assert ((), ()) == (report.problems, report.notes)
    data = (folder / "provenance.dsse.json").read_bytes()
    stranger = signing.SecretKey(bytes(32))
    for wrong, said in (
        (provenance.encode(stored.manifest, stored.sha256, stranger), "not signed by a key"),
        (provenance.encode(stored.manifest, "0" * 64, KEY), "provenance of other files"),
        (data[:-9] + b"0" + data[-8:], "provenance.dsse.json"),
    ):
        (folder / "provenance.dsse.json").write_bytes(wrong)
        for trusted in (TRUSTED, None):
            report = verify_folder(folder, trusted)
            assert [("provenance", "provenance.dsse.json")] == found(report)
            assert said in report.problems[0].message
    # By whichever trusted key: a home may add what another one left out.
    added = provenance.encode(stored.manifest, stored.sha256, stranger)
    (folder / "provenance.dsse.json").write_bytes(added)
    assert verify_folder(folder, {*TRUSTED, stranger.public_key}).ok


def test_provenance_that_cannot_be_read_is_one_problem_of_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes that were taken stand beside it."""
    flip(folder / "config.json")
    place = folder / "provenance.dsse.json"
    place.symlink_to(GOLDEN)
    expected = [("hash", "config.json"), ("provenance", place.name)]
    assert expected == found(verify_folder(folder, TRUSTED))
    place.unlink()
    monkeypatch.setattr("tensorize_assets.core.local_store.MAX_BYTES", 100_000)
    place.write_bytes(bytes(100_001))
    assert expected == found(verify_folder(folder, TRUSTED))


def test_no_name_reaches_the_terminal_as_it_is(folder: Path) -> None:
    """It could write over what was said, or say more."""
    name = "x\x1b[2J\r\n\u202eok: all as the manifest says"
    (folder / name).touch()
    (problem,) = verify_folder(folder, TRUSTED).problems
    assert problem.path == r"x\x1b[2J\r\n\u202eok: all as the manifest says"
    assert problem.message.isprintable()


def test_a_path_that_the_system_refuses_is_refused(tmp_path: Path) -> None:
    for use in (lambda p: verify_folder(p, None), lambda p: open_store(str(p))):
        with pytest.raises(StoreError, match="cannot look into"):
            use(tmp_path / ("a" * 5000))


# Over HTTP


class Served:
    """A web server of a folder, which knows ranges as nginx does; `manners` may answer instead."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        self.manners: Callable[[str], int | None] = lambda path: None
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                served.asked.append(self.path)
                path = folder / unquote(self.path).lstrip("/")
                status = served.manners(self.path) or (206 if path.is_file() else 404)
                data = path.read_bytes() if status == 206 else b""
                headers: dict[str, str] = {}
                if status == 206:
                    first, last = map(int, self.headers["Range"][6:].split("-"))
                    last = min(last, len(data) - 1)
                    status = 206 if first < len(data) else 416
                    of = f"{first}-{last}" if status == 206 else "*"
                    headers = {"Content-Range": f"bytes {of}/{len(data)}", "ETag": '"1"'}
                    data = data[first : last + 1]
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def served(store: LocalStore) -> Iterator[Served]:
    """The root that the artifact lies in, on the web."""
    running = Served(store.root)
    yield running
    running.close()


@pytest.mark.parametrize("end", ["", "/"])
def test_a_directory_on_a_web_server_is_verified(
    store: LocalStore, directory: str, folder: Path, served: Served, end: str
) -> None:
    """Every byte, by ranges; what cannot be looked for there is said."""
    store.put_bytes(f"{directory}/extra", b"")
    report = verify_url(f"{served.url}/{directory}{end}", TRUSTED)
    assert ((), 4, 12_004) == (report.problems, report.files, report.bytes)
    assert KEY.key_id == report.key_id
    expected = (
        "there is no provenance.dsse.json",
        "files that the manifest does not name cannot be looked for over HTTP",
    )
    assert expected == report.notes
    provenance.write(store, directory, sealed(folder), KEY, TRUSTED)
    assert expected[1:] == verify_url(f"{served.url}/{directory}{end}", TRUSTED).notes
    assert verify_url(f"{served.url}/{directory}{end}", None).ok


def test_names_are_quoted_in_urls(store: LocalStore, served: Served) -> None:
    """A file may be called as a query looks, or hold a percent sign."""
    content = {**CONTENT, "a b?c=%20#d.txt": b"x", "é": b""}
    manifest = built(content)
    for path, data in content.items():
        store.put_bytes(f"copy/{path}", data)
    store.put_bytes("copy/manifest.json", manifests.encode(manifest, KEY))
    report = verify_url(f"{served.url}/copy/", TRUSTED)
    assert ((), 6) == (report.problems, report.files)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: flip(d / "model-rank-001.tensors"), [("hash", "model-rank-001.tensors")]),
        (
            lambda d: os.truncate(d / "model-rank-000.tensors", 5999),
            [("size", "model-rank-000.tensors")],
        ),
        (lambda d: (d / "config.json").unlink(), [("missing", "config.json")]),
        (exchange, [("hash", "model-rank-000.tensors"), ("hash", "model-rank-001.tensors")]),
        (lambda d: flip(d / "manifest.json"), [("signature", "manifest.json")]),
        (lambda d: (d / "manifest.json").unlink(), [("missing", "manifest.json")]),
        (
            lambda d: (d / "provenance.dsse.json").write_bytes(b"{}"),
            [("provenance", "provenance.dsse.json")],
        ),
    ],
)
def test_damage_is_found_over_http(
    directory: str,
    folder: Path,
    served: Served,
    damage: Callable[[Path], object],
    expected: list[tuple[str, str]],
) -> None:
    """As on a disk."""
    damage(folder)
    assert expected == found(verify_url(f"{served.url}/{directory}", TRUSTED))


def test_a_web_server_that_is_in_trouble_says_nothing_about_the_artifact(
    directory: str, served: Served
) -> None:
    """A report of missing files would have people build again."""
    served.manners = lambda path: 503 if path.endswith("config.json") else None
    with pytest.raises(StoreUnavailableError, match="answered 503"):
        verify_url(f"{served.url}/{directory}", TRUSTED)
    served.manners = lambda path: 200 if path.endswith("0.tensors") else None
    report = verify_url(f"{served.url}/{directory}", TRUSTED)
    assert [("unreadable", "model-rank-000.tensors")] == found(report)
    assert "knows no ranges" in report.problems[0].message


def test_what_a_web_server_sends_is_bounded(
    directory: str, folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is read whole, so its size is; a file's is the manifest's, or it is not read."""
    monkeypatch.setattr(http_folder, "MAX_BYTES", 100)
    report = verify_url(f"{served.url}/{directory}", TRUSTED)
    assert [("manifest", "manifest.json")] == found(report)
    assert "documents end at 100" in report.problems[0].message
    monkeypatch.undo()
    (folder / "config.json").write_bytes(bytes(10**7))
    served.asked.clear()
    report = verify_url(f"{served.url}/{directory}", TRUSTED)
    assert [("size", "config.json")] == found(report)
    # Its size was asked for, and nothing of it was read.
    assert 1 == len([path for path in served.asked if path.endswith("-2bb6c81e582d/config.json")])


def test_https_is_verified_by_the_certificates_given(
    store: LocalStore, directory: str, tmp_path: Path
) -> None:
    """An internal server has an internal authority."""
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    running = Served(store.root, tls)
    try:
        assert verify_url(f"{running.url}/{directory}", TRUSTED, ca_bundle=str(bundle)).ok
        report = verify_url(f"{running.url}/{directory}", TRUSTED)
        assert "certificate is not trusted" in report.problems[0].message
    finally:
        running.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://h/a?token=hunter2",
        "http://u:hunter2@h/a#b",
        "http://u:hunter2@h/a",
        "http://u:hunter2@[::1",
        "http://h:99999999/a",
        "http:///a",
    ],
)
def test_a_url_that_names_no_directory_is_refused(url: str) -> None:
    """Its query may be a signature, which is not repeated."""
    try:
        said = str(verify_url(url, TRUSTED))
    except StoreError as error:
        said = str(error)
    assert "without one" in said or "is no http(s) URL" in said
    assert "hunter2" not in said


def test_the_command_needs_nothing_but_the_public_key(
    directory: str, served: Served, tmp_path: Path
) -> None:
    """No home, no catalog, no Dagster, no tensor library; nothing is made."""
    program = """
import sys
from tensorize_assets import cli
try:
    cli.main()
finally:
    heavy = {"dagster", "torch", "vllm", "tensorizer", "transformers"} & set(sys.modules)
    print(*heavy, file=sys.stderr)
"""
    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    (tmp_path / "key.pub").write_text(f"{KEY.public_key}\n")
    stranger = signing.SecretKey(bytes(32)).public_key
    ours = ("TENSORIZE", "DAGSTER")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def run(*keys: str) -> subprocess.CompletedProcess[str]:
        given = [part for key in keys for part in ("--public-key", key)]
        return subprocess.run(
            [sys.executable, "-c", program, "verify", f"{served.url}/{directory}", *given],
            cwd=elsewhere,
            env=bare,
            capture_output=True,
            text=True,
            timeout=120,
        )

    for keys in ((KEY.public_key,), (str(tmp_path / "key.pub"),), (stranger, KEY.public_key)):
        done = run(*keys)
        assert 0 == done.returncode, done.stderr
        assert "which is trusted" in done.stdout
        assert "cannot be looked for over HTTP" in done.stderr
        assert "" == done.stderr.splitlines()[-1]
    done = run(stranger)
    assert 1 == done.returncode
    assert "which is not trusted here" in done.stderr
    done = run("hello")
    assert 2 == done.returncode
    assert "it is not a public signing key" in done.stderr
    assert "hello" not in done.stderr
    assert [] == list(elsewhere.iterdir())
