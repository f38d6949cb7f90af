"""A Hub that is broken or hostile: one clear error, or success by retry, and nothing is stored."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from chain_home import MODEL, Home, Run, weights
from lying_hub import Answer, LyingHub

import tensorize_assets
from tensorize_assets.assets import target
from tensorize_assets.core import hub, hub_access, hub_config, hub_download, mirroring
from tensorize_assets.core.errors import HubError, HubUnavailableError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_files import RevisionListing
from tensorize_assets.core.local_store import LocalStore

CONFIG = b'{"num_attention_heads": 4, "architectures": ["LlamaForCausalLM"]}'
GOOD = weights(b"weights")
FILES: Mapping[str, bytes | Path] = {"config.json": CONFIG, "model.safetensors": GOOD}
MEBIBYTE = 1024 * 1024
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:" + hashlib.sha256(GOOD).hexdigest().encode() + b"\nsize %d\n" % len(GOOD)
)
NOTHING_STORED = "refused: the file is named, nothing is stored"


def bad_hub(phase: str, outcome: str = NOTHING_STORED) -> pytest.MarkDecorator:
    return pytest.mark.fault("Bad Hub", phase, outcome)


def case(phase: str, *values: object, outcome: str = NOTHING_STORED) -> Any:
    return pytest.param(*values, id=phase, marks=bad_hub(phase, outcome))


class Build:
    """What brings a model from a Hub into a root: by `core`, and by the chain."""

    def __init__(self, bad: LyingHub, folder: Path) -> None:
        self.hub = bad
        self.folder = folder
        self.root = folder / "home" / "artifacts"
        self.access = HubAccess(endpoint=bad.endpoint, cache_dir=folder / "cache")

    def bring(self, listing: RevisionListing | None = None) -> mirroring.Mirrored:
        """Have the Hub's files in the mirror of the root."""
        work = mirroring.Work(
            LocalStore(self.root), self.access, lambda _: None, lambda *_: lambda *_: None
        )
        return mirroring.bring(work, listing or hub.resolve(self.access, MODEL, "main"))

    def refused(self, listing: RevisionListing | None = None) -> str:
        """Why nothing was brought."""
        with pytest.raises(HubError) as caught:
            self.bring(listing)
        assert not caught.value.retryable
        assert self.stored == []
        # A terminal and a database take it as it is.
        assert str(caught.value).isprintable()
        str(caught.value).encode()
        return str(caught.value)

    @property
    def stored(self) -> list[str]:
        """What is in the root. A lease only says who is at work."""
        keys = LocalStore(self.root).list("")
        return [key for key in keys if not key.endswith("/lease.json")]

    def run(self, mirror: str = "always") -> Run:
        """The chain's step, in a home that keeps what it takes in the mirror, or in the cache."""
        home = Home(self.folder / "home", self.hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}}}, snapshots={"mirror": mirror})
        return home.run(selection=["hf_snapshot"])


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """A Hub that has the model, and lies when a test says so."""
    monkeypatch.setattr(target, "_FIRST_WAIT_S", 0.01)
    with LyingHub() as running:
        running.commit(MODEL, FILES)
        yield Build(running, tmp_path)


def test_a_hub_that_does_not_lie_is_believed(bad: Build) -> None:
    """Else all below would be refused for another reason."""
    assert len(bad.bring().snapshot.files) == 2
    assert bad.stored


# What it lists


@pytest.mark.parametrize(
    ("files", "says"),
    [
        case(
            "resolve: a name that is no UTF-8",
            {"vocab-\udcff.json": b"{}"},
            r"declares 'vocab-\udcff.json' in a way that cannot be used",
        ),
        case(
            "resolve: a name that no terminal should see",
            {"vocab\x1b[2J.json": b"{}"},
            r"declares 'vocab\x1b[2J.json' in a way that cannot be used",
        ),
        case(
            "resolve: two names that differ in case",
            {"Config.json": CONFIG},
            "lists 'Config.json' and 'config.json', and one would take the other's place",
        ),
        case(
            "resolve: two spellings of one accented name",
            {"voc\u00e9.json": b"{}", "voce\u0301.json": b"[]"},
            "and one would take the other's place",
        ),
        case(
            "resolve: a file where another one needs a folder",
            {"config.json/more.json": b"{}"},
            "lists 'config.json' and 'config.json/more.json'",
        ),
        case(
            "resolve: more files to load than a model has",
            {f"part-{number:05d}.json": b"{}" for number in range(10_000)},
            "has 10,002 files to load, from config.json to part-09999.json, and models have 4,096",
        ),
    ],
)
def test_names_that_cannot_be_kept_are_refused(
    bad: Build, files: dict[str, bytes | Path], says: str
) -> None:
    """By one request: nothing of the repo is downloaded."""
    bad.hub.commit(MODEL, {**FILES, **files})
    assert says in bad.refused()
    assert bad.hub.requests_for("/resolve/") == ()


@bad_hub("resolve: weights with a name that is no UTF-8", NOTHING_STORED)
def test_names_of_what_is_not_loaded_are_shown_so_that_they_can_be(bad: Build) -> None:
    """A message that no database takes would be lost."""
    bad.hub.commit(MODEL, {"config.json": CONFIG, "\udcff.gguf": b""})
    assert r"it has only \udcff.gguf" in bad.refused()


@bad_hub("resolve: 10,000 files that nobody loads", "success: one request, only the model's files")
def test_a_large_repo_costs_what_its_model_costs(bad: Build) -> None:
    """Checkpoints, pictures and logs lie beside many a model."""
    others = {f"checkpoint-{number}/optimizer.pt": b"" for number in range(5_000)}
    results = {f"results/{number}.json": b"{}" for number in range(5_000)}
    bad.hub.commit(MODEL, {**FILES, **others, **results})
    assert len(bad.bring().snapshot.files) == 2
    assert len(bad.hub.requests) == 1 + 2 * 2


@bad_hub("resolve: two notes whose names differ in case", "success: one of them is left out")
def test_what_nobody_parses_refuses_no_model(bad: Build) -> None:
    """Whoever takes the repo cannot change it."""
    bad.hub.commit(MODEL, {**FILES, "README.md": b"#", "Readme.md": b"##"})
    names = [file.path for file in bad.bring().snapshot.files]
    assert names == ["README.md", "config.json", "model.safetensors"]


@bad_hub("resolve: a config.json of 200 MB", "refused: the file is named, nothing is downloaded")
def test_a_configuration_that_is_none_by_its_size(bad: Build, tmp_path: Path) -> None:
    """It would be parsed here, and by everyone who loads the artifact."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(200_000_000)
    bad.hub.commit(MODEL, {**FILES, "config.json": large})
    says = f"config.json of {MODEL} on {bad.hub.endpoint} has 200,000,000 bytes"
    assert says in bad.refused()
    assert bad.hub.requests_for("/resolve/") == ()


def _info(change: Callable[[dict[str, Any]], object]) -> Callable[[Answer], Answer]:
    """A lie in what the Hub says of the repo."""

    def lie(answer: Answer) -> Answer:
        if not answer.path.startswith("/api/models/"):
            return answer
        found = json.loads(b"".join(answer.body))
        change(found)
        body = json.dumps(found).encode()
        return answer._replace(length=len(body), body=iter((body,)))

    return lie


def _of_all(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda info: [file.update(fields) for file in info["siblings"]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        case("resolve: a file without a name", _of_all(rfilename=None), "a file is named None"),
        case("resolve: a size that is text", _of_all(size="7", lfs=None), "declares 'config.json'"),
        case("resolve: a size below zero", _of_all(size=-1, lfs=None), "declares 'config.json'"),
        case("resolve: a hash that is none", _of_all(blobId="../x"), "declares 'config.json'"),
        case("resolve: a commit that is none", lambda info: info.update(sha="../x"), "commit"),
        case(
            "resolve: one file twice",
            lambda info: info["siblings"].append(dict(info["siblings"][0], blobId="0" * 40)),
            "lists 'config.json' and 'config.json'",
        ),
        case("resolve: files that are no list", lambda info: info.update(siblings=7), "as the Hub"),
        case(
            "resolve: another name that moves the cursor",
            lambda info: info.update(id="org/\x1b[2J"),
            r"was renamed to org/\x1b[2J",
        ),
        case(
            "resolve: a config.json larger than any text",
            lambda info: info["siblings"][0].update(size=300_000_000),
            "config.json of tiny/llama on",
        ),
        case(
            "resolve: more bytes than there are disks",
            lambda info: info["siblings"][1]["lfs"].update(size=10**30),
            "does not fit on the disk",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(
    bad: Build, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    """By whatever is wrong in it, and never by an error that nobody foresaw."""
    bad.hub.lie = _info(change)
    assert says in bad.refused()


# What it answers for a file


def _of_file(name: str, change: Callable[[Answer], Answer]) -> Callable[[Answer], Answer]:
    """A lie in the answers for one file."""
    return lambda answer: change(answer) if answer.path.endswith(name) else answer


@pytest.mark.parametrize(
    "etag",
    [
        '"../../../../../outside"',
        '"/{root}/outside"',
        '"W/../../../../../outside"',
        '".."',
        '""',
        "W.",
        "W..",
    ],
)
@bad_hub("download: an ETag that is a path", "refused: the file is named, nothing is written")
def test_the_hub_does_not_say_where_files_are_written(
    bad: Build, tmp_path: Path, etag: str
) -> None:
    """Its own client keeps a file under the name that the answer gives it."""
    said = etag.format(root=tmp_path)
    bad.hub.lie = _of_file("config.json", lambda answer: answer.with_header("ETag", said))
    assert "by which it would be written elsewhere than in the cache" in bad.refused()
    assert [*tmp_path.rglob("outside*"), *tmp_path.parent.glob("outside*")] == []


@bad_hub("download: the file of another commit", NOTHING_STORED)
def test_a_hub_that_answers_with_another_commit_is_refused(bad: Build) -> None:
    """As a mirror does that has one revision alone."""
    bad.hub.lie = _of_file(
        "config.json", lambda answer: answer.with_header("X-Repo-Commit", "b" * 40)
    )
    assert f"is answered with commit '{'b' * 40}'" in bad.refused()


def _served(data: bytes) -> Callable[[Answer], Answer]:
    """These bytes in the place of a file's own, honestly announced."""

    def change(answer: Answer) -> Answer:
        sized = answer.with_header("X-Linked-Size", str(len(data)))
        return sized._replace(length=len(data), body=iter((data,)))

    return change


@pytest.mark.parametrize(
    ("data", "says"),
    [
        case("download: a file that grew by a byte", GOOD + b"x", "sends more than the"),
        case("download: a file that lost a byte", GOOD[:-1], f"bytes, found {len(GOOD) - 1}"),
        case("download: an empty file", b"", f"expected {len(GOOD)} bytes, found 0"),
        case("download: an LFS pointer in the file's place", POINTER, "sends more than the"),
        case("download: other bytes of the same size", GOOD[::-1], "expected SHA-256"),
    ],
)
def test_a_file_that_is_not_the_one_that_was_listed(bad: Build, data: bytes, says: str) -> None:
    """And when the Hub has mended it, the same call succeeds."""
    bad.hub.lie = _of_file("model.safetensors", _served(data))
    found = bad.refused()
    assert "model.safetensors" in found
    assert says in found
    bad.hub.lie = lambda answer: answer
    assert bad.bring().downloaded


@bad_hub("download: a file without an end", "refused behind its last byte; the disk stays free")
def test_a_file_that_never_ends_is_not_read_to_the_end_of_the_disk(bad: Build) -> None:
    """Without a length nothing else would stop it. (Here it ends, when it was not stopped.)"""
    sent = iter(range(128))

    def endless(answer: Answer) -> Answer:
        chunks = (bytes(MEBIBYTE) for _ in sent)
        kept = {k: v for k, v in answer.headers.items() if k != "X-Linked-Size"}
        return answer._replace(length=None, body=chunks, headers=kept)

    bad.hub.lie = _of_file("model.safetensors", endless)
    assert "sends more than the" in bad.refused()
    assert next(sent) < 127
    assert [*bad.folder.rglob("*.incomplete")] == []


def test_xet_may_move_more_bytes_than_a_file_has() -> None:
    """Its chunks are shared with other files; it holds the length of what it writes itself."""
    bar = hub_download._quiet_bar(threading.Event(), 10)
    bar(total=10, position=1).update(100)
    with pytest.raises(hub_download._TooLongError):
        bar(total=10, initial=0).update(11)


@bad_hub("download: a small answer that unpacks to gigabytes", "refused behind its last byte")
def test_a_packed_answer_is_unpacked_no_further_than_the_file_goes(bad: Build) -> None:
    """The client unpacks whatever says that it is packed."""
    packed = gzip.compress(bytes(64 * MEBIBYTE))

    def bomb(answer: Answer) -> Answer:
        if answer.method == "HEAD":
            return answer
        pressed = answer.with_header("Content-Encoding", "gzip")
        return pressed._replace(length=len(packed), body=iter((packed,)))

    bad.hub.lie = _of_file("config.json", bomb)
    assert "config.json" in bad.refused()


# What its files hold


def _safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _tensor(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def _archive(packed: int, *, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("model/data.pkl", bytes(packed))
    return file.getvalue()


def _overlapping() -> bytes:
    """An archive whose directory has one file twice."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", bytes(MEBIBYTE))
        archive.filelist *= 2
    return file.getvalue()


LYING = "is no safetensors file, or damaged: "


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        case(
            "download: safetensors that overlap",
            "model.safetensors",
            _safetensors({"a": _tensor(0, 4), "b": _tensor(2, 6)}, bytes(6)),
            f"{LYING}tensor 'b' of shape [4] lies at bytes",
        ),
        case(
            "download: safetensors with a header of exabytes",
            "model.safetensors",
            _safetensors({}, length=1 << 62),
            f"{LYING}its header would have {1 << 62} bytes",
        ),
        case(
            "download: safetensors with a name twice",
            "model.safetensors",
            _safetensors(
                b'{"a":%b,"a":%b}' % ((json.dumps(_tensor(0, 4)).encode(),) * 2), bytes(4)
            ),
            "key 'a' is given twice",
        ),
        case(
            "download: safetensors that end before their tensors",
            "model.safetensors",
            _safetensors({"a": _tensor(0, 1 << 40)}, bytes(4)),
            f"{LYING}its tensors end at byte",
        ),
        case(
            "download: a pickle called safetensors",
            "model.safetensors",
            b"\x80\x04cos\nsystem\n(S'id'\ntR.",
            LYING,
        ),
        case(
            "download: an LFS pointer that was committed as weights",
            "model.safetensors",
            POINTER,
            "is a Git LFS pointer and not the file",
        ),
        case(
            "download: an LFS pointer that was committed as a tokenizer",
            "tokenizer.json",
            POINTER,
            "is a Git LFS pointer and not the file",
        ),
        case(
            "download: a pickle called tokenizer.model",
            "tokenizer.model",
            b"\x80\x04cos\nsystem\n(S'id'\ntR.",
            "is a pickle or an archive, where a text belongs",
        ),
        case(
            "download: an archive called tokenizer.json",
            "tokenizer.json",
            _archive(10),
            "is a pickle or an archive, where a text belongs",
        ),
    ],
)
def test_a_file_that_is_not_what_its_name_says(
    bad: Build, name: str, data: bytes, says: str
) -> None:
    """Its hash is right, and so it would only be noticed by whoever loads it, or not at all."""
    bad.hub.commit(MODEL, {**FILES, name: data})
    found = bad.refused()
    assert f"{name} {says}" in found or (name in found and says in found)
    assert "Choose another revision or repo" in found


@pytest.mark.parametrize(
    ("data", "says"),
    [
        case(
            "download: a .bin of a megabyte that fills gigabytes",
            _archive(64 * MEBIBYTE),
            f"holds 'model/data.pkl' packed, {64 * MEBIBYTE:,} bytes of memory",
        ),
        case(
            "download: a .bin that is half an archive", _archive(10)[:-9], "is no file of torch's"
        ),
        case("download: a .bin whose files lie over one another", _overlapping(), "holds files of"),
    ],
)
def test_a_bin_that_is_no_file_of_torchs(bad: Build, data: bytes, says: str) -> None:
    """torch.load reads it without running it, and without looking at its size."""
    bad.hub.commit(MODEL, {"config.json": CONFIG, "pytorch_model.bin": data})
    assert f"pytorch_model.bin {says}" in bad.refused()


def test_a_bin_as_torch_writes_it_is_taken(bad: Build) -> None:
    """Nothing in it is packed. Older ones are no archives."""
    for number, data in enumerate((_archive(10, method=zipfile.ZIP_STORED), b"\x80\x02\x8a\n")):
        bad.hub.commit(MODEL, {"config.json": CONFIG, "pytorch_model.bin": data})
        assert bad.bring().downloaded, number


@bad_hub("download: pickles and code beside the tokenizer", "success: neither is downloaded")
def test_what_could_run_is_never_downloaded(bad: Build) -> None:
    """Of a tokenizer that wants them the worker says so."""
    runs = dict.fromkeys(
        ["tokenizer.pkl", "vocab.pickle", "tokenization_x.py", "modeling_x.py", "custom/x.py"],
        b"raise SystemExit",
    )
    bad.hub.commit(MODEL, {**FILES, **runs})
    assert [file.path for file in bad.bring().snapshot.files] == sorted(FILES)


_MEASURED = """
import resource, sys
from pathlib import Path
from tensorize_assets.core import hub
from tensorize_assets.core.errors import HubError
from tensorize_assets.core.hub_access import HubAccess

access = HubAccess(endpoint=sys.argv[1], cache_dir=Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
listing = hub.resolve(access, "tiny/llama", "main")
try:
    hub.fetch_config(access, listing)
    hub.check_contents(access, listing, hub.download(access, "tiny/llama", listing)[1])
except HubError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("files", "says"),
    [
        case(
            "download: a config.json that fills gigabytes as objects",
            {"config.json": b'{"a":[' + b"[]," * 5_000_000 + b"0]}"},
            "config.json holds more than 2,000,000 values",
            outcome="refused: the file is named, memory is bounded",
        ),
        case(
            "download: safetensors whose header fills gigabytes as objects",
            {"model.safetensors": _safetensors(b'{"a":[' + b"[]," * 8_000_000 + b"0]}")},
            "model.safetensors is no safetensors file, or damaged: its header holds more than",
            outcome="refused: the file is named, memory is bounded",
        ),
        case(
            "download: safetensors with a header of 34 MB",
            {"model.safetensors": _safetensors(b" " * 34_000_000)},
            "model.safetensors is no safetensors file, or damaged: its header would have",
            outcome="refused: the file is named, memory is bounded",
        ),
    ],
)
def test_what_would_fill_the_memory_is_refused(
    bad: Build, files: dict[str, bytes | Path], says: str
) -> None:
    """In a process of its own, whose peak is its own."""
    bad.hub.commit(MODEL, {**FILES, **files})
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, bad.hub.endpoint, str(bad.access.cache_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, kibibytes = done.stdout.splitlines()
    assert says in said
    assert int(kibibytes) < 256 * 1024


# What it does meanwhile, through the whole step


@bad_hub(
    "hf_snapshot: a branch is pushed over after it was resolved",
    "success: the commit that was resolved",
)
def test_a_branch_that_moves_between_resolve_and_download(bad: Build) -> None:
    """One run is of one commit, whatever its branch is by now."""
    listing = hub.resolve(bad.access, MODEL, "main")
    bad.hub.commit(MODEL, {**FILES, "config.json": b'{"other": 1}'})
    found = bad.bring(listing)
    assert found.snapshot.commit == listing.commit
    assert hub_config.read_config(hub_access.snapshot_dir(bad.access, MODEL, listing.commit))[
        "architectures"
    ]


@bad_hub(
    "hf_snapshot: the commit is gone when its files are asked for",
    "success by retry: the new commit",
)
def test_a_commit_that_is_gone_after_a_force_push(bad: Build) -> None:
    """The step resolves anew; nothing of the two commits is mixed."""
    gone = hub.resolve(bad.access, MODEL, "main").commit

    def push(answer: Answer) -> Answer:
        if answer.path.endswith("/resolve/" + gone + "/model.safetensors"):
            bad.hub.lie = lambda answer: answer
            bad.hub.commit(MODEL, {**FILES, "README.md": b"new"})
            bad.hub.forget(MODEL, gone)
            return answer._replace(status=404).with_header("X-Error-Code", "RevisionNotFound")
        return answer

    bad.hub.lie = push
    run = bad.run()
    assert run.failures == {}
    assert run.retried == ["hf_snapshot"]
    assert run.data_version("hf_snapshot") != gone


@bad_hub("hf_snapshot: 429 for a while", "success by retry")
def test_a_storm_of_429_passes(bad: Build) -> None:
    """The client waits as it is told; then the step does."""
    storm = bad.hub.fail_next("/", status=429, headers={"Retry-After": "0"}, times=3)
    run = bad.run()
    assert run.failures == {}
    assert storm.hits == 3
    assert run.retried == ["hf_snapshot"] * len(run.retried)


@pytest.mark.parametrize(
    ("asked", "headers"),
    [
        ("/api/", {"Retry-After": "86400"}),
        ("config.json", {"Retry-After": "86400"}),
        ("config.json", {"RateLimit": '"resolvers";r=0;t=86400'}),
    ],
)
@pytest.mark.parametrize("method", ["HEAD", "GET"])
@bad_hub("hf_snapshot: 429 that says to wait for a day", "one error that says so, at once")
def test_a_wait_of_a_day_is_not_slept_through(
    bad: Build,
    asked: str,
    headers: dict[str, str],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client would sleep where nobody can stop it; the step knows how long it may wait."""

    def sleep(seconds: float) -> None:
        assert seconds < 3600, "the client sleeps"

    monkeypatch.setattr(time, "sleep", sleep)
    if asked == "/api/" and method == "HEAD":
        method = "GET"
    bad.hub.fail_next(asked, status=429, headers=headers, times=99, method=method)
    says = r"answered 429.*; try again after 86400 s"
    with pytest.raises(HubUnavailableError, match=says) as got:
        bad.bring()
    assert got.value.retry_after_s == 86_400
    assert bad.stored == []


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (_of_file("config.json", lambda a: a.with_header("ETag", '"../../../x"')), "an ETag"),
        (_of_file("model.safetensors", _served(GOOD[::-1])), "expected SHA-256"),
        (_info(_of_all(rfilename="../x")), "outside its folder"),
    ],
)
@bad_hub("hf_snapshot: any of these lies", "the step fails once, with its message")
def test_the_step_fails_once_and_says_why(
    bad: Build, lie: Callable[[Answer], Answer], says: str
) -> None:
    """A retry would only delay the message."""
    bad.hub.lie = lie
    run = bad.run()
    assert says.removeprefix("an ") in run.failures["hf_snapshot"]
    assert run.retried == []
    assert bad.stored == []


@bad_hub(
    "hf_snapshot: weights that are none, kept in the cache alone", "refused: the file is named"
)
def test_without_a_mirror_the_files_are_looked_at_too(bad: Build) -> None:
    """Workers of this machine read them where they were downloaded to."""
    bad.hub.commit(MODEL, {**FILES, "model.safetensors": POINTER})
    run = bad.run(mirror="auto")
    assert "model.safetensors is a Git LFS pointer" in run.failures["hf_snapshot"]
    assert run.retried == []


# What only the worker sees


@pytest.fixture(scope="session")
def workers(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> dict[str, dict[str, Any]]:
    """What hub_worker_cases.py found."""
    out = tmp_path_factory.mktemp("hub-workers")
    script = Path(__file__).parent / "scripts" / "hub_worker_cases.py"
    # The package that is tested here, whichever is installed.
    package = str(Path(tensorize_assets.__file__).parents[1])
    run_script(script, tiny_models / "llama", out, PYTHONPATH=package)
    return json.loads((out / "cases.json").read_text())


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        case("shard: code of the repo itself (auto_map)", "own code"),
        case("shard: code of another repo (auto_map)", "code of others"),
    ],
)
def test_code_of_a_repo_is_never_run(workers: dict[str, dict[str, Any]], name: str) -> None:
    """And what vLLM advises, to allow it, is not passed on."""
    found = workers[name]
    assert not found["ran"]
    assert found["error"] == "PreflightError"
    assert "config.json asks for Python code of a repo (auto_map)" in found["message"]
    assert "never run" in found["message"]
    assert "trust_remote_code" not in found["message"]


@pytest.mark.engine
@bad_hub("shard: auto_map of a model that vLLM has itself", "success: vLLM's own code is taken")
def test_code_that_nobody_needs_is_no_reason_to_refuse(workers: dict[str, dict[str, Any]]) -> None:
    """Most models that came before their support have it."""
    assert workers["known"] == {"ran": False, "error": None, "message": ""}


@pytest.mark.engine
@bad_hub("shard: a tokenizer that wants code (auto_map)", "refused: it is not run")
def test_code_of_a_tokenizer_is_not_run(workers: dict[str, dict[str, Any]]) -> None:
    """Without it transformers loads none."""
    found = workers["tokenizer"]
    assert (found["ran"], found["error"]) == (False, "ValueError")
