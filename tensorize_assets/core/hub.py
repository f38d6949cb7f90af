"""A model's files at one commit: found on the Hub, downloaded once, every byte checked.

The cache folder has the layout of huggingface_hub, whose file locks let concurrent runs share one
download. What was checked is remembered beside it, so that no file is hashed twice.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
import unicodedata
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self, cast

import httpx
from huggingface_hub import (
    HfApi,
    constants,
    # Its parameter user_agent is typed as a plain dict.
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    set_client_factory,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import WeakFileLock, parse_ratelimit_headers

# It has no public name for the client that somebody has set before.
from huggingface_hub.utils._http import (
    _GLOBAL_CLIENT_FACTORY as _client_before,  # pyright: ignore[reportPrivateUsage]
)
from pydantic import ConfigDict, Field, JsonValue, SecretStr, ValidationError, field_validator

from tensorize_assets.core import hub_contents, jsonio, layout
from tensorize_assets.core.errors import HubError, HubUnavailableError, StoreError
from tensorize_assets.core.jsonio import Commit, Record, RelativePath, Sha256
from tensorize_assets.core.printable import printable
from tensorize_assets.core.retry_after import retry_after

WeightsFormat = Literal["safetensors", "bin"]
Progress = Callable[[int, int], None]
"""Called with the bytes of the snapshot that are on the disk, and how many there are in all."""

_RESOLVE_TIMEOUT_S = 30.0
_PROGRESS_S = 1.0
_DOWNLOADS_AT_ONCE = 8
_HASHES_AT_ONCE = 4
_CHUNK = 4 * 1024 * 1024
# By this the requests of this module are told from those of others in the process.
_LIBRARY = "tensorize_assets"
# Asked to wait for longer the client would sleep that long, where nobody can stop it.
_LONGEST_WAIT_S = 60.0
# A lock that nobody holds says that a partial file is left over from a killed run; the age is for
# file systems on which locks are not kept.
_ABANDONED_S = 60.0

# What vLLM reads of a model beside its weights. Python code is left out: it would run.
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".spm", ".vocab", ".bpe")
# Mistral numbers its tokenizers: tokenizer.model.v3.
_TEXT_PREFIXES = ("tokenizer.model.",)
_TEXT_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY")
# Tokenizers end at about 40 MB; a "text" larger than this is a data set.
_TEXT_MAX_BYTES = 256 * 1024 * 1024
# The largest models come as a thousand files. Each is a request or two, of a few thousand that the
# Hub allows in five minutes.
_MAX_FILES = 4096
# Files that are parsed as a whole, wherever they are read. Lists of modules make the largest real
# ones a megabyte; an index has 100 bytes a tensor.
_CONFIG_ENDING = "config.json"
_CONFIG_MAX_BYTES = 16 * 1024 * 1024
_INDEX_MAX_BYTES = 64 * 1024 * 1024
# Each value of a JSON text has a comma or a bracket before it; as an object it takes 100 bytes.
_JSON_MAX_VALUES = 2_000_000
_OTHER_FORMAT_FOLDERS = ("original", "onnx", "openvino", "coreml", "metal", "gguf")
_OTHER_FORMAT_PREFIXES = ("consolidated.", "flax_model", "tf_model")
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
)
_INDEXES: dict[WeightsFormat, str] = {
    "safetensors": "model.safetensors.index.json",
    "bin": "pytorch_model.bin.index.json",
}

_Choose = Callable[
    ["HubAccess", str, str, "Sequence[HubFile]"], "tuple[tuple[HubFile, ...], WeightsFormat]"
]

_logger = logging.getLogger(__name__)


class HubAccess(Record):
    """Which Hub, as whom, and where its files are kept.

    Without an endpoint it is the one that huggingface_hub is set to. Without a token the user's
    own login is used, but only there: it is never sent to another endpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint: str | None = None
    token: SecretStr | None = None
    cache_dir: Path

    @field_validator("endpoint")
    @classmethod
    def _without_slash(cls, endpoint: str | None) -> str | None:
        return endpoint.rstrip("/") if endpoint else None

    @field_validator("token")
    @classmethod
    def _sendable(cls, token: SecretStr | None) -> SecretStr | None:
        text = token.get_secret_value().strip() if token else ""
        # The HTTP client quotes a header that it refuses, and the token with it.
        if not (text.isascii() and text.isprintable()) or " " in text:
            raise ValueError("the token holds characters that no token has")
        return SecretStr(text) if text else None


class HubFile(Record):
    """One file as the Hub declares it. `size` in bytes; LFS files have `lfs_sha256`."""

    path: RelativePath
    size: int = Field(ge=0)
    lfs_sha256: Sha256 | None
    git_blob_id: Commit

    @property
    def blob(self) -> str:
        """The name of its content in the cache, which is the Hub's ETag."""
        return self.lfs_sha256 or self.git_blob_id


class RevisionListing(Record):
    """What a revision was when it was resolved: its commit, and the files chosen of it."""

    model: str
    revision: str
    commit: Commit
    files: tuple[HubFile, ...]
    weights_format: WeightsFormat

    @property
    def size(self) -> int:
        """Bytes of all chosen files."""
        return sum(file.size for file in self.files)


class SnapshotFile(Record):
    """One checked file. `size` in bytes."""

    path: RelativePath
    size: int = Field(ge=0)
    sha256: Sha256


class Snapshot(Record):
    """The files of one commit, each with the hash of what is on the disk; sorted by path."""

    model: str
    revision: str
    commit: Commit
    files: tuple[SnapshotFile, ...]
    weights_format: WeightsFormat


def resolve(
    access: HubAccess, model: str, revision: str, timeout_s: float = _RESOLVE_TIMEOUT_S
) -> RevisionListing:
    """Return the commit that `revision` (branch, tag or commit) is now, and its files to load.

    One request. Chosen are configuration, tokenizer and other small text files, and the weights at
    the top level, where vLLM looks for them: safetensors or, without any, pytorch_model*.bin.

    Raises HubError for a missing, renamed, private or gated repo, a missing revision, no weights,
    file names that leave the folder or that not every disk tells apart, too many files, and
    configurations that are too large to be one; HubUnavailableError for what may pass, also when
    nothing came for `timeout_s` seconds.
    """
    return _resolve(access, model, revision, _choose, timeout_s)


def resolve_adapter(
    access: HubAccess, repo: str, revision: str, timeout_s: float = _RESOLVE_TIMEOUT_S
) -> RevisionListing:
    """As `resolve`, of a LoRA adapter's repo.

    Chosen are adapter_model.safetensors or, without it, adapter_model.bin, with
    adapter_config.json. An adapter's tokenizer is the base model's, and left out.
    """
    return _resolve(access, repo, revision, _choose_adapter, timeout_s)


def _resolve(
    access: HubAccess, model: str, revision: str, choose: _Choose, timeout_s: float
) -> RevisionListing:
    with _hub_errors(access, model, revision):
        info = _model_info(access, model, revision, timeout_s)
        if info.id != model:
            raise HubError(
                f"{model} on {_endpoint(access)} was renamed to {printable(str(info.id))}: "
                "use the new name in the catalog"
            )
        files = [_declared(access, model, sibling) for sibling in info.siblings or ()]
        chosen, weights_format = choose(access, model, revision, files)
        _check_names(access, model, revision, chosen)
        return RevisionListing(
            model=model,
            revision=revision,
            commit=info.sha or "",
            files=chosen,
            weights_format=weights_format,
        )


def download(
    access: HubAccess, model: str, listing: RevisionListing, progress: Progress | None = None
) -> tuple[Snapshot, Path]:
    """Bring the files of `listing` into the cache, check each, and return them and their folder.

    Files already there are not downloaded again, those already checked and unchanged since (size
    and time) not hashed again. Concurrent calls share one download. A cut connection is taken up
    where it broke; after a killed run, files that were complete stay. `progress` is called about
    once a second, from this thread, also while another run downloads.

    Raises HubError for too little free disk (before anything is downloaded), a gated repo, and
    content that differs from what the Hub declares: that copy is removed from the cache, so that
    the next call downloads it again. Raises HubUnavailableError for network trouble, and a commit
    that is gone.
    """
    if model != listing.model:
        raise HubError(f"the listing is of {listing.model}, not of {model}: resolve {model} first")
    folder = snapshot_dir(access, model, listing.commit)
    missing = [file for file in listing.files if not (folder / file.path).exists()]
    if missing:
        with _hub_errors(access, model, listing.revision):
            _check_disk(access, listing, missing)
        _fetch(access, listing, missing, progress)
    if progress is not None:
        progress(listing.size, listing.size)
    with _hub_errors(access, model, listing.revision):
        files = _verify(access, listing, folder)
        _check_index(listing, folder)
    snapshot = Snapshot(
        model=model,
        revision=listing.revision,
        commit=listing.commit,
        files=files,
        weights_format=listing.weights_format,
    )
    return snapshot, folder


def check_contents(access: HubAccess, listing: RevisionListing, folder: Path) -> None:
    """Look whether the files of a download are what their names say, before anything reads them.

    Raises HubError, naming each file that is not: a Git LFS pointer, safetensors whose header lies,
    a pickle that takes more memory than its file has bytes, or one where a text belongs.
    """
    problems = [
        f"{file.path} {problem}"
        for file in listing.files
        if (problem := hub_contents.problem_of(folder / file.path))
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise HubError(
            f"{listing.model}@{listing.commit} on {_endpoint(access)} cannot be used: "
            f"{'; '.join(problems[:5])}{more}. Choose another revision or repo, or have its owner "
            "upload the files again"
        )


def local_path(access: HubAccess, snapshot: Snapshot) -> Path | None:
    """Return the snapshot's folder if every file is there with its size; no network, no hashing."""
    folder = snapshot_dir(access, snapshot.model, snapshot.commit)
    for file in snapshot.files:
        try:
            if (folder / file.path).stat().st_size != file.size:
                return None
        except OSError:
            return None
    return folder


def ensure_local(access: HubAccess, snapshot: Snapshot, *, adapter: bool = False) -> Path:
    """Return the folder of a snapshot that was verified before, downloaded again if it is gone.

    `adapter`: it is one of `resolve_adapter`.

    Raises HubError when the Hub's files are not those of the snapshot any more, and what `resolve`
    and `download` raise.
    """
    folder = local_path(access, snapshot)
    if folder is not None:
        return folder
    find = resolve_adapter if adapter else resolve
    listing = find(access, snapshot.model, snapshot.commit)
    again, folder = download(access, snapshot.model, listing)
    if again.files != snapshot.files:
        raise HubError(
            f"{snapshot.model}@{snapshot.commit} has other files on {_endpoint(access)} than when "
            "it was resolved; materialize hf_snapshot again"
        )
    return folder


def fetch_config(access: HubAccess, listing: RevisionListing) -> dict[str, JsonValue]:
    """Return config.json of a listing: a small file to judge by before the large ones come.

    Raises HubError when there is none, and what `download` raises.
    """
    files = tuple(file for file in listing.files if file.path == "config.json")
    if not files:
        raise HubError(
            f"{listing.model}@{listing.commit} has no config.json: the repo is not in the layout "
            "of transformers, and vLLM could not load it"
        )
    _, folder = download(access, listing.model, listing.model_copy(update={"files": files}))
    return read_config(folder)


def cached_config(cache_dir: Path, model: str, revision: str) -> dict[str, JsonValue] | None:
    """Return config.json of a revision that was downloaded before, or None; no network."""
    file = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    if not isinstance(file, str):
        return None
    try:
        return read_config(Path(file))
    except HubError:
        return None


def read_config(path: Path) -> dict[str, JsonValue]:
    """Return config.json as a dictionary; `path` is the file or the snapshot folder.

    Raises HubError when there is none or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    return _read_json(file)


def parse_config(data: bytes, where: str) -> dict[str, JsonValue]:
    """Return the JSON object in `data`.

    Raises HubError, naming `where`, when it is none, or fills the memory.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _JSON_MAX_VALUES:
        raise HubError(
            f"{where} holds more than {_JSON_MAX_VALUES:,} values: it is broken or hostile; choose "
            "another repo or revision"
        )
    try:
        # Not jsonio: model configurations hold Infinity, and that is theirs to hold.
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HubError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HubError(f"{where} is not a JSON object")
    return cast("dict[str, JsonValue]", value)


# Resolving


def _model_info(access: HubAccess, model: str, revision: str, timeout_s: float) -> Any:
    api = HfApi(endpoint=access.endpoint, token=_token(access), library_name=_LIBRARY)
    try:
        return api.model_info(model, revision=revision, files_metadata=True, timeout=timeout_s)
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_a_hub(access, error) from None


def _declared(access: HubAccess, model: str, sibling: RepoSibling) -> HubFile:
    path: Any = sibling.rfilename
    if not isinstance(path, str):
        raise _not_a_hub(access, TypeError(f"a file is named {path!r}"))
    if path.startswith("/") or ".." in path.replace("\\", "/").split("/"):
        raise HubError(
            f"{model} on {_endpoint(access)} lists the file {path!r}, which would be written "
            "outside its folder: this repo is broken or hostile, do not use it"
        )
    lfs = sibling.lfs
    size: object = lfs.size if lfs else sibling.size
    # Built without checks: names and sizes of files that are not chosen do not matter.
    return HubFile.model_construct(
        path=path,
        size=size if isinstance(size, int) else None,
        lfs_sha256=lfs.sha256 if lfs else None,
        git_blob_id=sibling.blob_id,
    )


def _choose(
    access: HubAccess, model: str, revision: str, files: Sequence[HubFile]
) -> tuple[tuple[HubFile, ...], WeightsFormat]:
    top_level = [file for file in files if "/" not in file.path and not _other_format(file.path)]
    safetensors = [file for file in top_level if file.path.endswith(".safetensors")]
    bins = [
        file
        for file in top_level
        if file.path.startswith("pytorch_model") and file.path.endswith(".bin")
    ]
    weights_format: WeightsFormat = "safetensors" if safetensors else "bin"
    weights = safetensors or bins
    if not weights:
        others = [file.path for file in files if file.path.endswith(_WEIGHT_SUFFIXES)]
        found = f"only {printable(', '.join(others[:5]))}" if others else "no weights at all"
        raise HubError(
            f"{model}@{revision} on {_endpoint(access)} has no weights to load: safetensors or "
            f"pytorch_model*.bin at its top level are needed, it has {found}; "
            "convert the model or choose another repo or revision"
        )
    texts = [file for file in files if _is_text(file) and not _other_index(file, weights_format)]
    texts = _without_twins(texts)
    if len(weights) + len(texts) > _MAX_FILES:
        # Results of evaluations, for instance: nothing below the top level is vLLM's to read.
        texts = [file for file in texts if "/" not in file.path]
    chosen = sorted([*weights, *texts], key=lambda file: file.path)
    return tuple(_checked(access, model, file) for file in chosen), weights_format


def _choose_adapter(
    access: HubAccess, model: str, revision: str, files: Sequence[HubFile]
) -> tuple[tuple[HubFile, ...], WeightsFormat]:
    by_path = {file.path: file for file in files}
    config = by_path.get(layout.ADAPTER_CONFIG)
    # As vLLM prefers them.
    formats: tuple[WeightsFormat, ...] = ("safetensors", "bin")
    for weights_format in formats:
        weights = by_path.get(f"adapter_model.{weights_format}")
        if config is not None and weights is not None:
            chosen = (config, weights)
            return tuple(_checked(access, model, file) for file in chosen), weights_format
    near = [path for path in by_path if path.rpartition("/")[2].startswith("adapter_")]
    found = f"only {printable(', '.join(sorted(near)[:5]))}" if near else "neither"
    raise HubError(
        f"{model}@{revision} on {_endpoint(access)} is no LoRA adapter of PEFT: it needs "
        "adapter_config.json and adapter_model.safetensors or .bin at its top level, and has "
        f"{found}; choose another repo or revision"
    )


def _checked(access: HubAccess, model: str, file: HubFile) -> HubFile:
    try:
        layout.check_key(file.path)
        checked = HubFile.model_validate(dict(file))
    except (StoreError, ValidationError) as error:
        said = jsonio.describe(error) if isinstance(error, ValidationError) else str(error)
        raise HubError(
            f"{model} on {_endpoint(access)} declares {file.path!r} in a way that cannot be used: "
            f"{said}; choose another repo or revision"
        ) from None
    most = _most_bytes(checked.path)
    if most is not None and checked.size > most:
        raise HubError(
            f"{checked.path} of {model} on {_endpoint(access)} has {_bytes(checked.size)}, and "
            f"files of that name end at {most:,}: it is broken or hostile; choose another repo or "
            "revision"
        )
    return checked


def _most_bytes(path: str) -> int | None:
    if path in _INDEXES.values():
        return _INDEX_MAX_BYTES
    return _CONFIG_MAX_BYTES if path.endswith(_CONFIG_ENDING) and "/" not in path else None


def _check_names(access: HubAccess, model: str, revision: str, files: Sequence[HubFile]) -> None:
    """Refuse what could not lie in one folder on every disk, and what is no model's by number."""
    where = f"{model}@{revision} on {_endpoint(access)}"
    if len(files) > _MAX_FILES:
        raise HubError(
            f"{where} has {len(files):,} files to load, from {files[0].path} to {files[-1].path}, "
            f"and models have {_MAX_FILES:,} at most: choose another repo or revision"
        )
    seen: dict[str, str] = {}
    for file in files:
        folded = _folded(file.path)
        if folded in seen:
            raise _same_place(where, seen[folded], file.path)
        seen[folded] = file.path
    for file in files:
        for folder in PurePosixPath(_folded(file.path)).parents:
            if str(folder) in seen:
                raise _same_place(where, seen[str(folder)], file.path)


def _without_twins(texts: Sequence[HubFile]) -> list[HubFile]:
    """Leave out prose that some disks would take for other prose: nobody parses it."""
    kept: list[HubFile] = []
    seen: set[str] = set()
    for file in sorted(texts, key=lambda file: file.path):
        prose = file.path.endswith(".md") or PurePosixPath(file.path).name in _TEXT_NAMES
        if not prose or _folded(file.path) not in seen:
            kept.append(file)
            seen.add(_folded(file.path))
    return kept


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path.casefold())


def _same_place(where: str, first: str, second: str) -> HubError:
    return HubError(
        f"{where} lists {first!r} and {second!r}, and one would take the other's place, at least "
        "on disks that do not tell large letters from small: choose another repo or revision"
    )


def _is_text(file: HubFile) -> bool:
    name = file.path.rsplit("/", 1)[-1]
    return (
        (name.endswith(_TEXT_SUFFIXES) or name.startswith(_TEXT_PREFIXES) or name in _TEXT_NAMES)
        and not _other_format(file.path)
        and ((file.size or 0) <= _TEXT_MAX_BYTES or _most_bytes(file.path) is not None)
    )


def _other_format(path: str) -> bool:
    *folders, name = path.split("/")
    return name.startswith(_OTHER_FORMAT_PREFIXES) or any(
        folder in _OTHER_FORMAT_FOLDERS or folder.startswith("checkpoint-") for folder in folders
    )


def _other_index(file: HubFile, weights_format: WeightsFormat) -> bool:
    return any(file.path == index for kind, index in _INDEXES.items() if kind != weights_format)


# Downloading


def _check_disk(access: HubAccess, listing: RevisionListing, missing: Sequence[HubFile]) -> None:
    blobs = _repo_dir(access, listing.model) / "blobs"
    # Keyed by content: files that are the same take their space once.
    needed = {file.blob: file.size for file in missing if not (blobs / file.blob).exists()}
    for blob, there in _bytes_of_other_runs(access, listing.model).items():
        if blob in needed:
            needed[blob] = max(0, needed[blob] - there)
    folder = _cache_dir(access)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    total = sum(needed.values())
    if total > free:
        raise HubError(
            f"{listing.model}@{listing.revision} does not fit on the disk: {_bytes(total)} needed, "
            f"{_bytes(free)} free in {folder}; free some space or use another cache folder"
        )


def _bytes_of_other_runs(access: HubAccess, model: str) -> dict[str, int]:
    """Return the bytes that running downloads have of each content; sweep what killed ones left."""
    found: dict[str, int] = {}
    locks = _cache_dir(access) / ".locks" / _repo_dir(access, model).name
    for partial in (_repo_dir(access, model) / "blobs").glob("*.incomplete"):
        blob = partial.name.partition(".")[0]
        with contextlib.suppress(FileNotFoundError):
            stat = partial.stat()
            try:
                locks.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(locks / f"{blob}.lock", timeout=0.1):
                    if time.time() - stat.st_mtime > _ABANDONED_S:
                        partial.unlink()
            except TimeoutError:
                found[blob] = max(found.get(blob, 0), stat.st_size)
    return found


def _fetch(
    access: HubAccess,
    listing: RevisionListing,
    missing: Sequence[HubFile],
    progress: Progress | None,
) -> None:
    # Not snapshot_download: it lists the tree once more, without a time limit, and would leave
    # out what that listing lacks.
    interrupted = threading.Event()

    def fetch(file: HubFile) -> None:
        what = f"{file.path} of {listing.model}@{listing.commit}"
        try:
            with _hub_errors(access, listing.model, listing.revision, gone=what):
                hf_hub_download(
                    listing.model,
                    file.path,
                    revision=listing.commit,
                    cache_dir=_cache_dir(access),
                    endpoint=access.endpoint,
                    token=_token(access),
                    library_name=_LIBRARY,
                    tqdm_class=_quiet_bar(interrupted, file.size),
                )
        except _TooLongError:
            raise HubError(
                f"{what}: {_endpoint(access)} sends more than the {_bytes(file.size)} that it "
                "declares, and was not read on; run again, and if it stays so choose another "
                "endpoint or revision"
            ) from None

    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        pending: set[Future[None]] = {pool.submit(fetch, file) for file in missing}
        failure: BaseException | None = None
        try:
            while pending:
                done, pending = wait(pending, timeout=_PROGRESS_S, return_when=FIRST_COMPLETED)
                for future in done:
                    if failure is None and not future.cancelled():
                        failure = future.exception()
                if failure is not None:
                    # What runs may end: a file that is complete is not downloaded again.
                    for future in pending:
                        future.cancel()
                if progress is not None:
                    progress(_bytes_on_disk(access, listing), listing.size)
        finally:
            interrupted.set()
            for future in pending:
                future.cancel()
    if failure is not None:
        raise failure


class _InterruptedError(Exception):
    """Ends the download threads of a call that was interrupted."""


class _TooLongError(Exception):
    """Ends a download that goes on behind the file's end, before the disk is full."""


def _quiet_bar(interrupted: threading.Event, size: int) -> Any:
    """Return what huggingface_hub takes for a progress bar class: it shows nothing.

    Its update is the one place where a running download can be stopped: when it is interrupted, and
    when more than `size` bytes came by HTTP. They are told before they are written. Xet, which
    holds a file's length itself, tells what moved on the network, which may be more.
    """

    class QuietBar:
        def __init__(self, *args: object, **kwargs: object) -> None:
            # What a download begins at stands in a bar of HTTP's alone.
            self._left = float(size) if "initial" in kwargs else math.inf

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            if interrupted.is_set():
                raise _InterruptedError
            self._left -= n or 0
            if self._left < 0:
                raise _TooLongError

        def set_postfix_str(self, *args: object, **kwargs: object) -> None:
            pass

    return QuietBar


def _bytes_on_disk(access: HubAccess, listing: RevisionListing) -> int:
    folder = snapshot_dir(access, listing.model, listing.commit)
    sizes: dict[str, int] = {}
    for path in (_repo_dir(access, listing.model) / "blobs").glob("*"):
        blob = path.name.partition(".")[0]
        with contextlib.suppress(OSError):
            sizes[blob] = max(sizes.get(blob, 0), path.stat().st_size)
    return sum(
        file.size if (folder / file.path).exists() else min(sizes.get(file.blob, 0), file.size)
        for file in listing.files
    )


# Checking


class _Measured(Record):
    """A file as it was hashed. Only files outside LFS have a Git id to compare."""

    size: int
    mtime_ns: int
    sha256: Sha256
    git_blob_id: Commit | None


class _Verified(Record):
    files: dict[str, _Measured]


def _verify(access: HubAccess, listing: RevisionListing, folder: Path) -> tuple[SnapshotFile, ...]:
    memory = _repo_dir(access, listing.model) / ".tensorize_assets"
    memory.mkdir(parents=True, exist_ok=True)
    sidecar = memory / f"{listing.commit}.json"
    # Concurrent runs wait for the first one's hashes instead of reading everything again.
    with WeakFileLock(memory / f"{listing.commit}.lock"):
        known = _read_verified(sidecar)

        def measure(file: HubFile) -> _Measured:
            return _measure(folder / file.path, file, known.get(file.path))

        with ThreadPoolExecutor(_HASHES_AT_ONCE) as pool:
            measured = list(pool.map(measure, listing.files))
        problems = {
            file.path: problem
            for file, found in zip(listing.files, measured, strict=True)
            if (problem := _mismatch(file, found))
        }
        good = {
            file.path: found
            for file, found in zip(listing.files, measured, strict=True)
            if file.path not in problems
        }
        if known | good != known:
            _write_verified(sidecar, known | good)
        for path in problems:
            _discard(_cache_dir(access), folder / path)
    if problems:
        raise HubError(
            f"{listing.model}@{listing.commit} from {_endpoint(access)} is damaged: "
            + "; ".join(problems.values())
            + ". The copy was removed from the cache; run again to download it anew"
        )
    return tuple(
        SnapshotFile(path=path, size=found.size, sha256=found.sha256)
        for path, found in sorted(good.items())
    )


def _measure(path: Path, file: HubFile, known: _Measured | None) -> _Measured:
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise HubUnavailableError(
            f"{path} is gone after its download: another run may have found it damaged, or the "
            "cache was cleaned meanwhile; run again"
        ) from None
    if (
        known is not None
        and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        and (file.lfs_sha256 or known.git_blob_id)
    ):
        return known
    started = time.monotonic()
    sha256, git_blob_id = _hash(path, None if file.lfs_sha256 else stat.st_size)
    _logger.info(
        "hashed %s: %d bytes in %.1f s", file.path, stat.st_size, time.monotonic() - started
    )
    return _Measured(
        size=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256, git_blob_id=git_blob_id
    )


def _hash(path: Path, git_size: int | None) -> tuple[str, str | None]:
    sha256 = hashlib.sha256()
    git = None if git_size is None else hashlib.sha1(b"blob %d\0" % git_size)
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha256.update(buffer[:count])
            if git is not None:
                git.update(buffer[:count])
    return sha256.hexdigest(), None if git is None else git.hexdigest()


def _mismatch(file: HubFile, found: _Measured) -> str | None:
    if found.size != file.size:
        return f"{file.path}: expected {file.size} bytes, found {found.size}"
    if file.lfs_sha256 is None:
        if found.git_blob_id != file.git_blob_id:
            return f"{file.path}: expected Git blob {file.git_blob_id}, found {found.git_blob_id}"
    elif found.sha256 != file.lfs_sha256:
        return f"{file.path}: expected SHA-256 {file.lfs_sha256}, found {found.sha256}"
    return None


def _read_verified(sidecar: Path) -> dict[str, _Measured]:
    try:
        return jsonio.load_record(_Verified, sidecar.read_bytes(), str(sidecar)).files
    except (OSError, StoreError):
        # It only saves time: without it every file is hashed.
        return {}


def _write_verified(sidecar: Path, files: dict[str, _Measured]) -> None:
    data = jsonio.canonical(jsonio.dump_record(_Verified(files=files)), str(sidecar))
    half_written = sidecar.with_name(f"{sidecar.name}.{uuid.uuid4().hex}.tmp")
    half_written.write_bytes(data)
    half_written.replace(sidecar)


def _discard(cache_dir: Path, pointer: Path) -> None:
    """Remove a snapshot's file with all that it links to inside the cache."""
    path = Path(os.path.abspath(pointer))
    while path.is_relative_to(cache_dir):
        target = path.parent / path.readlink() if path.is_symlink() else None
        path.unlink(missing_ok=True)
        if target is None:
            return
        path = Path(os.path.abspath(target))


def _check_index(listing: RevisionListing, folder: Path) -> None:
    index = _INDEXES[listing.weights_format]
    paths = {file.path for file in listing.files}
    if index not in paths:
        return
    weight_map = _read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise HubError(f"{index} of {listing.model}@{listing.commit} has no weight_map")
    absent = sorted({printable(str(name)[:_SAID_CHARS]) for name in weight_map.values()} - paths)
    if absent:
        raise HubError(
            f"{listing.model}@{listing.commit} is incomplete on the Hub: {index} names "
            f"{', '.join(absent[:5])}, which the commit does not have; choose another revision"
        )


def _read_json(file: Path) -> dict[str, JsonValue]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise HubError(
            f"{file} does not exist: the repo is not in the layout of transformers"
        ) from None
    return parse_config(data, str(file))


# Places


def _cache_dir(access: HubAccess) -> Path:
    return access.cache_dir.expanduser().resolve()


def _repo_dir(access: HubAccess, model: str) -> Path:
    return _cache_dir(access) / repo_folder_name(repo_id=model, repo_type="model")


def snapshot_dir(access: HubAccess, model: str, commit: str) -> Path:
    """Return the folder of a model's files at a commit, whether they are there or not."""
    return _repo_dir(access, model) / "snapshots" / commit


def _endpoint(access: HubAccess) -> str:
    return _shown(access, access.endpoint or constants.ENDPOINT)


def _token(access: HubAccess) -> str | bool | None:
    if access.token is not None:
        return access.token.get_secret_value()
    return None if access.endpoint in (None, constants.ENDPOINT) else False


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({count / 1e9:.1f} GB)"


# Errors

_CLIENT_ERRORS = (
    EntryNotFoundError,
    httpx.HTTPError,
    httpx.InvalidURL,
    httpx.StreamError,
    OSError,
    # The client's and the HTTP library's word for wrong input, and for broken state.
    ValueError,
    RuntimeError,
)
_SAID_CHARS = 400
_BUSY = (408, 429, 500, 502, 503, 504)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_REFUSES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EEXIST,
)


@contextlib.contextmanager
def _hub_errors(
    access: HubAccess, model: str, revision: str, *, gone: str | None = None
) -> Generator[None]:
    """Say in our words what goes wrong. `gone`: what was there when the revision was resolved."""
    try:
        yield
    except _CLIENT_ERRORS as error:
        if gone and isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
            raise HubUnavailableError(
                f"{gone} is gone from {_endpoint(access)} since {revision} was resolved: a "
                "force-push, or a repo that was made anew; run again"
            ) from None
        # Without its cause: that one's text is the server's, and may quote the request.
        raise _explain(error, access, model, revision) from None


def _check_answer(answer: httpx.Response) -> None:
    """Refuse what the client would do as the Hub says: write elsewhere, or sleep for hours."""
    asked = answer.request
    if _LIBRARY not in asked.headers.get("User-Agent", ""):
        return
    after = _retry_after(answer.headers) if answer.status_code in _BUSY else None
    if after is not None and after > _LONGEST_WAIT_S:
        raise HfHubHTTPError("it wants to be left alone for long", response=answer)
    if asked.method != "HEAD":
        return
    # The client names the file in the cache by the one, and its folder by the other.
    etag = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag")
    name = None if etag is None else etag.lstrip("W/").strip('"')
    commit = answer.headers.get("X-Repo-Commit")
    wanted = re.search("/resolve/([0-9a-f]{40})/", asked.url.path)
    if name is not None and (not name.strip(".") or re.search(r"[/\\\0]", name)):
        said = f"ETag {name[:80]!r}, by which it would be written elsewhere than in the cache"
    elif wanted and commit and commit != wanted[1]:
        said = f"commit {commit[:80]!r}, which is not the one that was asked for"
    else:
        return
    where = str(asked.url.copy_with(query=None, userinfo=b""))
    raise HubError(
        f"{where} is answered with {said}: this Hub, or a proxy before it, is broken or hostile; "
        "check the endpoint"
    )


def _checking_client() -> httpx.Client:
    client = _client_before()
    client.event_hooks["response"].append(_check_answer)
    return client


# The one place in which each answer is seen before the client does anything with it.
set_client_factory(_checking_client)


def _explain(error: BaseException, access: HubAccess, model: str, revision: str) -> HubError:
    what = f"{model}@{revision} on {_endpoint(access)}"
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and cause is not None:
        return _explain(cause, access, model, revision)
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(
            f"{what} cannot be asked for: HF_HUB_OFFLINE is set; unset it, or run where it is unset"
        )
    if isinstance(error, HfHubHTTPError):
        return _explain_answer(error, access, model, revision)
    if isinstance(error, HFValidationError):
        return HubError(f"{model!r} is no model of the Hub: {_said(error, access)}")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return HubError(f"the endpoint {_endpoint(access)} is not a URL: {_said(error, access)}")
    if isinstance(error, ValueError | FileMetadataError | httpx.TooManyRedirects):
        return _not_a_hub(access, error)
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return HubError(
            f"the disk became full while downloading {what} to {_cache_dir(access)}; "
            "free some space or use another cache folder"
        )
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return HubError(
            f"{what} cannot be kept in {_cache_dir(access)}: {_said(error, access)}; "
            "use another cache folder"
        )
    return HubUnavailableError(
        f"{what} could not be read: {_said(error, access)}; check the network and run again"
    )


def _explain_answer(
    error: HfHubHTTPError, access: HubAccess, model: str, revision: str
) -> HubError:
    what = f"{model}@{revision} on {_endpoint(access)}"
    status = error.response.status_code
    with_token = "authorization" in error.response.request.headers
    if isinstance(error, GatedRepoError):
        account = "the token's account has no access yet" if with_token else "no token was sent"
        return HubError(
            f"{what} is gated and {account}: request access at {_endpoint(access)}/{model}, then "
            "set a token of the account that has it (HF_TOKEN, or `hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"{model} on {_endpoint(access)} has no revision {revision!r}: "
            "name a branch, a tag or a commit that it has"
        )
    if isinstance(error, RepositoryNotFoundError):
        hidden = "the token has no access to it" if with_token else "needs a token, none was sent"
        return HubError(
            f"{model} does not exist on {_endpoint(access)}, or is private and {hidden}: "
            "check the name, or set a token (HF_TOKEN, or `hf auth login`)"
        )
    if status == 401:
        return HubError(
            f"{_endpoint(access)} refuses the token (401) for {model}: it is wrong or has expired; "
            "set a valid one (HF_TOKEN, or `hf auth login`)"
        )
    if status in (408, 429) or status >= 500:
        after = _retry_after(error.response.headers)
        when = "try again later" if after is None else f"try again after {after:.0f} s"
        return HubUnavailableError(
            f"{what} answered {status}: {_said(error, access)}; {when}", after
        )
    return HubError(f"{what} answered {status}: {_said(error, access)}")


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds until the server wants to be asked again; None where it does not say."""
    after = retry_after(headers.get("Retry-After"))
    if after is not None:
        return after
    # The Hub's own word for it, which stands in every answer.
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and not limit.remaining else None


def _not_a_hub(access: HubAccess, error: BaseException) -> HubError:
    return HubError(
        f"{_endpoint(access)} does not answer as the Hub does: {_said(error, access)}; "
        "check the endpoint, and whether a proxy stands in between"
    )


def _said(error: BaseException, access: HubAccess) -> str:
    text = _shown(access, " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:_SAID_CHARS]


def _shown(access: HubAccess, text: str) -> str:
    """Return `text` without tokens, and URLs without user, password and query (signatures)."""
    if access.token is not None:
        text = text.replace(access.token.get_secret_value(), "***")
    text = re.sub(r"\bhf_\w{6,}", "***", text)
    text = re.sub(r"(https?://)[^/\s@]+@", r"\1", text)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
