"""A new data key, with real engines: of a build that is encrypted only, and of one that is both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chain_home import MODEL, Home
from typer.testing import CliRunner

from tensorize_assets import cli
from tensorize_assets.core import layout, rotation, sealing
from tensorize_assets.core.channel import ChannelEntry
from tensorize_assets.core.evidence import read_evidence
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.rotation import Published
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3

pytestmark = pytest.mark.engine

DAGSTER_YAML = Path(__file__).parents[2] / "dagster_home" / "dagster.yaml"
TINY_ADAPTERS = Path(__file__).parents[1] / "worker" / "scripts" / "tiny_adapters.py"
POET = {"name": "poet", "repo": "org/poet", "revision": "main"}
TENSOR_FILES = {"model.tensors", "adapter_model.tensors"}


class Rotated(NamedTuple):
    """A home whose build got a new data key: what stood before, what the command said, and now.

    `stored` are all files of the store before, by key. `scratch` holds what lay in scratch.
    """

    home: Home
    old: Published
    stored: Mapping[str, bytes]
    report: Mapping[str, Any]
    log: str
    new: Published
    scratch: Path

    @property
    def entries(self) -> tuple[ChannelEntry, ...]:
        return self.home.channel()

    def manifest(self, directory: str) -> Manifest:
        found = read_manifest(self.home.store, directory, self.home.trusted)
        assert found is not None
        return found.manifest


class Sources(NamedTuple):
    """A Hub with the model and its adapter, and their files of tensors."""

    hub: LocalHub
    files: tuple[Path, Path]


@pytest.fixture(scope="module")
def sources(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    adapters = tmp_path_factory.mktemp("adapters")
    # In a process of its own: torch stays out of pytest's.
    command = [sys.executable, str(TINY_ADAPTERS), str(tiny_models), str(adapters)]
    subprocess.run(command, check=True, capture_output=True)
    model, poet = tiny_models / "llama", adapters / "poet"
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(model))
        hub.commit(POET["repo"], folder_files(poet))
        yield Sources(hub, (model / "model.safetensors", poet / "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def only(
    sources: Sources, s3: LocalS3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rotated]:
    """Of a build that is encrypted only, its root in S3."""
    bucket = "rotated"
    s3.create_bucket(bucket)
    settings = S3Settings(endpoint_url=s3.endpoint, region=REGION)
    folder = tmp_path_factory.mktemp("only")
    home = Home(folder / "home", sources.hub.endpoint, f"s3://{bucket}/some/prefix", settings)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("S3_ACCESS_KEY_ID", s3.access_key)
        environment.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
        yield rotated(home, "only", folder / "kept")
    s3.client().delete_bucket(Bucket=bucket)


@pytest.fixture(scope="module")
def both(sources: Sources, only: Rotated, tmp_path_factory: pytest.TempPathFactory) -> Rotated:
    """Of a build that is both, on this disk."""
    folder = tmp_path_factory.mktemp("both")
    home = Home(folder / "home", sources.hub.endpoint)
    # The source's answers are the same ones: an engine less.
    for key, data in only.stored.items():
        if key.startswith("references/"):
            home.store.put_bytes(key, data)
    return rotated(home, "both", folder / "kept")


@pytest.fixture(params=["only", "both"])
def each(request: pytest.FixtureRequest) -> Rotated:
    return request.getfixturevalue(request.param)


def rotated(home: Home, encryption: str, kept: Path) -> Rotated:
    """Build and publish in `home`, and give the build a new data key by the command."""
    own = sealing.generate_private_key(home.folder / "keys" / "private.key")
    profile = {"adapters": [POET], "encryption": encryption}
    home.write_catalog({MODEL: {"v1": profile}}, recipients={"home": own.public_key})
    shutil.copy(DAGSTER_YAML, home.folder)
    scratch = home.folder / "scratch" if home.settings else home.store.root / ".scratch"
    with pytest.MonkeyPatch.context() as environment, Kept(scratch, kept):
        built = home.run()
        assert {} == built.failures
        old = published(home)
        stored = contents(home)
        environment.setenv("DAGSTER_HOME", str(home.folder))
        environment.setenv("HF_ENDPOINT", home.endpoint)
        for name in (sealing.PRIVATE_KEY_VARIABLE, "TENSORIZE_ASSETS_SIGNING_KEY"):
            environment.delenv(name, raising=False)
        done = CliRunner().invoke(cli.app, ["keys", "rotate", MODEL, "v1", "--json"])
    assert 0 == done.exit_code, done.output
    report = json.loads(done.stdout)
    return Rotated(home, old, stored, report, done.stderr, published(home), kept)


class Kept:
    """Keeps in `kept` whatever lies in scratch for a moment: as links, so as it was at the end."""

    def __init__(self, scratch: Path, kept: Path) -> None:
        self._scratch = scratch
        self._kept = kept
        self._ended = threading.Event()

    def __enter__(self) -> None:
        self._kept.mkdir()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            # Files and their folders may be gone meanwhile.
            with suppress(FileNotFoundError):
                for path in self._scratch.rglob("*.tensors*"):
                    place = self._kept / f"{path.stat().st_ino}-{path.name}"
                    if not place.exists():
                        os.link(path, place)


def published(home: Home) -> Published:
    return rotation.published(home.store, MODEL, "v1", home.trusted)


def contents(home: Home) -> dict[str, bytes]:
    store = home.store  # once: it makes a client of S3
    return {key: store.get_bytes(key).data for key in store.list("")}


def below(stored: Mapping[str, bytes], directory: str) -> dict[str, bytes]:
    return {key: data for key, data in stored.items() if key.startswith(f"{directory}/")}


def values(path: Path) -> dict[str, bytes]:
    """The first bytes of every tensor of a safetensors file, by its name.

    They stand in a row in any file that holds the tensor in the clear, also fused with others.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found: dict[str, bytes] = {}
    for name, entry in header.items():
        first = start + entry["data_offsets"][0]
        found[name] = data[first : first + 64]
    # Zeros or ones would be found anywhere.
    assert all(len(set(piece)) > 8 for piece in found.values())
    return found


def shown(sources: Sources, texts: Iterable[bytes]) -> set[str]:
    """Which tensors of the sources show in any of `texts`."""
    wanted = {name: piece for path in sources.files for name, piece in values(path).items()}
    return {name for text in texts for name, piece in wanted.items() if piece in text}


def bytes_below(*folders: Path) -> Iterator[bytes]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                yield path.read_bytes()


def test_the_new_key_has_a_build_of_its_own_that_is_published(each: Rotated) -> None:
    """Another key, another build, another directory, sealed and whole; the base is the same."""
    old, new = each.old, each.new
    assert (old.base_id, old.only) == (new.base_id, new.only)
    assert 3 == len({old.base_id, old.build_id, new.build_id})
    assert old.key_id != new.key_id == each.report["new_key"]
    assert (True, True) == (each.report["success"], each.report["moved"])
    assert layout.encrypted_dir(MODEL, "v1", new.build_id) == new.directory != old.directory
    assert verify_directory(each.home.store, new.directory, each.home.trusted).ok
    encryption = each.manifest(new.directory).encryption
    assert encryption is not None
    assert new.key_id == encryption.key_id
    assert [1, 2] == [entry.number for entry in each.entries]


def test_the_new_build_was_reloaded(each: Rotated) -> None:
    """It answers as its source does, with the adapter too, and loads with no other key."""
    for *_, sha256 in each.entries[-1].manifests():
        version = each.entries[-1].vllm_version
        evidence = read_evidence(each.home.store, sha256, "cpu", version, each.home.trusted)
        assert evidence is not None
        assert evidence.passed
        assert ("s3" if each.home.settings else "disk") == (evidence.load and evidence.load.source)
    said = {check["check"]: check["description"] for check in each.report["checks"]}
    assert "8 ways to load it wrongly were refused" in said["encryption_holds"]
    assert "each of 1 adapters changes them" in said["adapters_change_answers"]


def test_every_tensor_is_the_same_in_other_bytes(each: Rotated) -> None:
    """Names, shapes and dtypes of shard and adapter; no block of ciphertext is the old one."""
    now = below(contents(each.home), each.new.directory)
    before = below(each.stored, each.old.directory)
    for file in TENSOR_FILES:
        old, new = before[f"{each.old.directory}/{file}"], now[f"{each.new.directory}/{file}"]
        assert len(old) == len(new)
        assert old[-4096:] != new[-4096:]
    for one, other in zip(tensors(each, each.old), tensors(each, each.new), strict=True):
        assert one.model_copy(update={"sha256": ""}) == other.model_copy(update={"sha256": ""})


def tensors(done: Rotated, build: Published) -> list[Any]:
    manifest = done.manifest(build.directory)
    return [tensor for one in (*manifest.shards, *manifest.adapters) for tensor in one.tensors]


def test_the_old_build_stays_as_it_was(each: Rotated) -> None:
    """Whoever serves it goes on to, with the old key; it is there to go back to."""
    before = below(each.stored, each.old.directory)
    assert TENSOR_FILES < {key.rpartition("/")[2] for key in before}
    assert before == below(contents(each.home), each.old.directory)
    assert verify_directory(each.home.store, each.old.directory, each.home.trusted).ok
    own = sealing.load_private_key(each.home.folder / "keys" / "private.key")
    for key_id in (each.old.key_id, each.new.key_id):
        sealing.unseal(each.home.store, key_id, own, trusted=each.home.trusted).wipe()


def test_what_is_encrypted_only_is_not_sharded_again(only: Rotated) -> None:
    """Nor are its adapters converted again: the new files are made of the old ones."""
    for asset in ("tensorized_shards", "lora_adapters"):
        said = only.report[asset]
        assert only.old.directory == said["encrypted_anew_from"]
        assert said["seconds_encrypt"] > 0
        assert "seconds_load" not in said
    (first, second) = only.entries
    assert (only.old.build_id, None) == (first.build_id, first.encrypted)
    assert (only.new.build_id, None) == (second.build_id, second.encrypted)


def test_nothing_that_is_encrypted_only_shows_a_tensor(
    only: Rotated, both: Rotated, sources: Sources, s3: LocalS3
) -> None:
    """Not in the bucket, not in scratch meanwhile, nor elsewhere in the home but the Hub's cache.

    The same search finds all of them where there is plaintext.
    """
    home = only.home
    client = s3.client()
    found = client.list_objects_v2(Bucket="rotated")
    assert not found["IsTruncated"]
    bucket = [
        client.get_object(Bucket="rotated", Key=one["Key"])["Body"].read()
        for one in found["Contents"]
    ]
    assert len(bucket) > 20
    assert set() == shown(sources, bucket)
    assert TENSOR_FILES <= {path.name.partition("-")[2] for path in only.scratch.iterdir()}
    elsewhere = [path for path in home.folder.iterdir() if path.is_dir() and path.name != "hub"]
    assert set() == shown(sources, bytes_below(only.scratch, *elsewhere))
    assert [] == list((home.folder / "scratch").iterdir())
    every = {name for path in sources.files for name in values(path)}
    assert every == shown(sources, below(both.stored, both.entries[0].directory).values())
    assert every == shown(sources, bytes_below(both.scratch))
    assert set() == shown(sources, below(contents(both.home), both.new.directory).values())


def test_the_plaintext_of_both_is_neither_built_nor_loaded_again(both: Rotated) -> None:
    """Its files and its evidence are the ones of the first run; one entry names both variants."""
    first, second = both.entries
    plain = (both.old.base_id, first.directory, first.manifest_sha256, first.evidence_key)
    assert plain == (
        second.build_id,
        second.directory,
        second.manifest_sha256,
        second.evidence_key,
    )
    assert first.encrypted is not None
    assert second.encrypted is not None
    assert (both.old.build_id, both.new.build_id) == (
        first.encrypted.build_id,
        second.encrypted.build_id,
    )
    now = contents(both.home)
    assert below(both.stored, first.directory) == below(now, first.directory)
    assert both.stored[first.evidence_key] == now[first.evidence_key]
    loaded = {line.split()[1] for line in both.log.splitlines() if "artifact: reloaded on" in line}
    assert {"encrypted"} == loaded
    for asset in ("tensorized_shards", "lora_adapters"):
        assert "worker_seconds" not in both.report[asset]
    assert both.report["encrypted_shards"]["seconds_encrypt"] > 0
    encryption = both.manifest(both.new.directory).encryption
    assert encryption is not None
    assert first.manifest_sha256 == encryption.plaintext
