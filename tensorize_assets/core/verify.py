"""Whether an artifact directory is what its manifest says: hashes only, no vLLM."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from tensorize_assets.core import jsonio, layout, provenance
from tensorize_assets.core.errors import (
    ManifestError,
    SignatureError,
    StoreError,
    StoreUnavailableError,
)
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest, read_placed, read_unplaced
from tensorize_assets.core.printable import printable
from tensorize_assets.core.store import Reader, Store, digest, explained

# More streams do not read faster from one disk, and hashing takes a core each.
_MAX_THREADS = 8
# Of a store that is not on a disk each file is read by several requests at once, and 80 MiB of it
# are held.
_MAX_REMOTE_THREADS = 2


# Names of files and fields of documents are anybody's.
_Printable = Annotated[str, AfterValidator(printable)]


class Problem(jsonio.Record):
    """One thing that is wrong with a directory; `path` is relative to it."""

    kind: Literal[
        "manifest", "signature", "missing", "extra", "size", "hash", "unreadable", "provenance"
    ]
    path: _Printable
    message: _Printable


class VerifyReport(jsonio.Record):
    """What was found. Without a readable manifest nothing else is checked.

    `files` and `bytes` count what was read and found equal. `key_id` is of the key that signed.
    `notes` say what could not be looked at, or is not there, without being wrong.
    """

    where: str
    manifest: Manifest | None
    manifest_sha256: str | None
    key_id: str | None
    files: int
    bytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_directory(store: Store, directory: str, trusted: Collection[str] | None) -> VerifyReport:
    """Compare an artifact directory of the store with its manifest and report every problem.

    `trusted` are the public keys (base64) whose manifests are believed; None believes any.
    """
    return _verify(store, directory, trusted, listing=store, placed=True)


def verify_folder(path: Path, trusted: Collection[str] | None) -> VerifyReport:
    """Compare an artifact directory anywhere on disk with its manifest, as `verify_directory`.

    Raises StoreError when `path` is no folder.
    """
    with explained("look into", str(path)):
        there = path.is_dir()
    if not there:
        raise StoreError(f"{path} is no folder; give the folder that holds {layout.MANIFEST}")
    return verify_place(LocalStore(path.absolute()), trusted)


def verify_place(store: Store, trusted: Collection[str] | None) -> VerifyReport:
    """Compare the artifact directory that is the root of `store`, as `verify_folder`."""
    return _verify(store, "", trusted, listing=store, placed=False)


def verify_url(
    url: str, trusted: Collection[str] | None, *, ca_bundle: str | None = None
) -> VerifyReport:
    """Compare the artifact directory at an http(s) URL, as `verify_folder`.

    Files that the manifest does not name cannot be found there: HTTP has no listings.
    """
    folder = HttpFolder(url, ca_bundle=ca_bundle)
    return _verify(folder, "", trusted, listing=None, placed=False)


def _verify(
    store: Reader,
    directory: str,
    trusted: Collection[str] | None,
    *,
    listing: Store | None,
    placed: bool,
) -> VerifyReport:
    where = store.uri(directory)
    try:
        found = (read_placed if placed else read_unplaced)(store, directory, trusted)
    except SignatureError as error:
        return _unread(where, "signature", str(error))
    except StoreUnavailableError:
        raise  # says nothing about the artifact
    except (ManifestError, StoreError) as error:
        return _unread(where, "manifest", str(error))
    if found is None:
        return _unread(where, "missing", f"{where} has no {layout.MANIFEST}: it is no artifact")
    # A copy may have any name, but not that of another build.
    named = layout.build_in_name(where)
    if named not in (None, found.manifest.build_id):
        message = (
            f"{where} has the name of build {named}, but holds build {found.manifest.build_id}: it "
            "was moved or put back; restore it, or give it another name"
        )
        return _unread(where, "manifest", message)
    entries = found.manifest.files
    check = partial(_check, store, directory)
    on_disk = listing is not None and listing.local_path(layout.manifest_key(directory)) is not None
    most = _MAX_THREADS if on_disk else _MAX_REMOTE_THREADS
    with ThreadPoolExecutor(min(most, os.cpu_count() or 1)) as pool:
        findings = list(pool.map(check, entries))
    problems = [problem for problem in findings if problem]
    good = [entry for entry, problem in zip(entries, findings, strict=True) if not problem]
    notes: list[str] = []
    try:
        # Where any key is believed, it must at least be the manifest's.
        believed = (found.public_key,) if trusted is None else trusted
        if not provenance.check(store, directory, found, believed):
            notes.append(f"there is no {layout.PROVENANCE}")
    except StoreUnavailableError:
        raise
    except (SignatureError, ManifestError, StoreError) as error:
        problems.append(Problem(kind="provenance", path=layout.PROVENANCE, message=str(error)))
    if listing is None:
        notes.append("files that the manifest does not name cannot be looked for over HTTP")
    else:
        problems += [
            Problem(kind="extra", path=path, message=f"{path} is not in the manifest")
            for path in extra_files(listing, directory, found.manifest)
        ]
    return VerifyReport(
        where=where,
        manifest=found.manifest,
        manifest_sha256=found.sha256,
        key_id=found.key_id,
        files=len(good),
        bytes=sum(entry.size for entry in good),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _unread(
    where: str, kind: Literal["manifest", "signature", "missing"], message: str
) -> VerifyReport:
    problem = Problem(kind=kind, path=layout.MANIFEST, message=message)
    return VerifyReport(
        where=where,
        manifest=None,
        manifest_sha256=None,
        key_id=None,
        files=0,
        bytes=0,
        problems=(problem,),
    )


def _check(store: Reader, directory: str, entry: FileEntry) -> Problem | None:
    path = entry.path
    key = layout.file_key(directory, path)
    try:
        size = store.stat(key)
        if size is None:
            return Problem(kind="missing", path=path, message=f"{path} is missing")
        if size != entry.size:
            # Told apart by its size already: not read.
            return _differs("size", entry, f"{size} bytes", f"{entry.size}")
        found = digest(store, key)
        if found.sha256 != entry.sha256:
            # A bit may have flipped on the way here; what is damaged there is so again.
            found = digest(store, key)
    except StoreUnavailableError:
        raise
    except StoreError as error:
        return Problem(kind="unreadable", path=path, message=str(error))
    if found.sha256 != entry.sha256:
        return _differs("hash", entry, f"SHA-256 {found.sha256}", entry.sha256)
    return None


def _differs(kind: Literal["size", "hash"], entry: FileEntry, found: str, expected: str) -> Problem:
    message = f"{entry.path} has {found}, the manifest says {expected}"
    return Problem(kind=kind, path=entry.path, message=message)


def extra_files(store: Store, directory: str, manifest: Manifest) -> list[str]:
    """Return the paths of files in an artifact directory that its manifest does not name."""
    start = f"{directory}/" if directory else ""
    known = {layout.MANIFEST, layout.PROVENANCE, *(entry.path for entry in manifest.files)}
    paths = (key.removeprefix(start) for key in store.list(start))
    # A name that is not UTF-8 can be reported only with its odd bytes replaced.
    return [os.fsencode(path).decode(errors="replace") for path in paths if path not in known]
