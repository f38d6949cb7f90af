"""The `tensorize` command, as a process: exit codes, messages, JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.table import Table

from tensorize_assets import cli_common
from tensorize_assets.core import build_keys, channel, evidence, layout, manifest, signing
from tensorize_assets.core.compare import CHECKS
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.store import open_store
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import REGION, LocalS3

MODEL = "org/tiny"
SUFFIX = "v1"
DAGSTER_YAML = Path(__file__).parent.parent / "dagster_home" / "dagster.yaml"
CATALOG = """
root: artifacts
models:
  org/tiny:
    profiles:
      v1: {reload_device: cpu}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A Dagster home with one model in its catalog."""
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(DAGSTER_YAML, folder)
    (folder / "models.yaml").write_text(CATALOG)
    return folder


def tensorize(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `home`."""
    return subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", *arguments],
        env={**os.environ, "DAGSTER_HOME": str(home), "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def publish(home: Path, commit: str, *, suffix: str = SUFFIX) -> manifest.Manifest:
    """Put a complete, reloaded and published build into the store, as the chain would."""
    from tensorize_assets.core.build import BuildInputs, build_id
    from tensorize_assets.core.publish import publish as move

    store = open_store(str(home / "artifacts"))
    key = signing.load_or_create_signing_key(home / "keys" / "signing.key")
    inputs = BuildInputs(
        model=MODEL, commit=commit, profile={}, vllm="0.31.0", torch="2.13.0", tensorizer="2.10.1"
    )
    directory = layout.artifact_dir(MODEL, suffix, build_id(inputs))
    shard = home / "model.tensors"
    shard.write_bytes(commit.encode() * 10)
    digest = store.put_file(f"{directory}/model.tensors", shard)
    file = manifest.FileEntry(path="model.tensors", size=digest.size, sha256=digest.sha256)
    built = manifest.Manifest(
        model=MODEL,
        suffix=suffix,
        build_id=build_id(inputs),
        inputs=inputs,
        snapshot=manifest.SnapshotEntry(
            revision="main", commit=commit, files=(), weights_format="safetensors"
        ),
        profile={},
        sharding="virtual",
        tensor_parallel_size=1,
        dtype="bfloat16",
        architecture="LlamaForCausalLM",
        dtype_census=manifest.DtypeCensus(by_dtype={}, model_dtype="bfloat16"),
        stock_vllm=manifest.StockVllm(loadable=True),
        versions={
            "vllm": "0.31.0",
            "torch": "2.13.0",
            "tensorizer": "2.10.1",
            "tensorize_assets": "0.1.0",
            "python": "3.11",
        },
        files=(file,),
        shards=(manifest.ShardEntry(rank=0, file="model.tensors", tensors=()),),
    )
    data = manifest.encode(built, key)
    store.put_bytes(layout.manifest_key(directory), data)
    proof = evidence.Evidence.model_validate(
        {
            "model": MODEL,
            "suffix": suffix,
            "build_id": built.build_id,
            "manifest_sha256": manifest.manifest_sha256(data),
            "device": "cpu",
            "device_name": "a CPU",
            "vllm_version": "0.31.0",
            "tensor_parallel_size": 1,
            "dtype": "bfloat16",
            "passed": True,
            "checks": [
                {"name": name, "passed": True, "description": "as it should be"} for name in CHECKS
            ],
            "perplexity": 20.0,
            "load": {
                "bytes": 10,
                "seconds": 0.5,
                "bytes_per_second": 20.0,
                "host_memory_before": 1,
                "host_memory_after": 2,
            },
            "default_load_seconds": 1.0,
            "prompts_digest": "0" * 12,
            "when": "2026-11-29T12:00:00Z",
        }
    )
    evidence.write_evidence(store, key, proof)
    move(
        store,
        key,
        (key.public_key,),
        model=MODEL,
        suffix=suffix,
        build_id=built.build_id,
        directory=directory,
        device="cpu",
    )
    return built


def test_help_names_every_command_and_the_exit_codes(home: Path) -> None:
    """The first thing a newcomer reads."""
    shown = tensorize(home, "--help").stdout

    for word in ("demo", "build", "verify", "show", "rollback", "catalog", "Exit codes"):
        assert word in shown


def test_catalog_check_passes_a_good_file(home: Path) -> None:
    """Zero means that a build can start from it."""
    done = tensorize(home, "catalog", "check")

    assert 0 == done.returncode
    assert "no mistakes" in done.stdout


def test_catalog_check_names_all_mistakes_at_once(home: Path) -> None:
    """One round for the editor, not one a mistake; with file and line for the shell to jump to."""
    (home / "models.yaml").write_text(CATALOG.replace("reload_device: cpu", "dtype: int3"))

    done = tensorize(home, "catalog", "check")

    assert 1 == done.returncode
    assert f"{home}/models.yaml:6:" in done.stderr
    assert "reload_device" in done.stderr
    assert "dtype" in done.stderr


def test_catalog_check_json_is_one_document(home: Path) -> None:
    """For a CI job that reads it."""
    (home / "models.yaml").write_text(CATALOG.replace("v1:", "'v 1':"))

    done = tensorize(home, "catalog", "check", "--json")

    (problem,) = json.loads(done.stdout)["problems"]
    assert 6 == problem["line"]


def test_commands_refuse_a_catalog_with_mistakes(home: Path) -> None:
    """A half-understood catalog must not build something else than was meant."""
    (home / "models.yaml").write_text("models: 3\n")

    done = tensorize(home, "show", MODEL)

    assert 2 == done.returncode
    assert "models.yaml:1" in done.stderr


def test_no_dagster_home_says_where_it_looked(tmp_path: Path) -> None:
    """Run in the wrong folder is the commonest mistake."""
    done = tensorize(tmp_path / "nowhere", "build", MODEL)

    assert 2 == done.returncode
    assert "nowhere" in done.stderr


def test_show_lists_what_is_published_and_what_is_not(home: Path) -> None:
    """Who is paged asks first: which build is current?"""
    built = publish(home, "a" * 40)

    done = tensorize(home, "show", MODEL)

    assert 0 == done.returncode
    assert built.build_id in done.stdout
    assert f"{len(CHECKS)}/{len(CHECKS)} passed" in done.stdout


def test_show_json_has_the_directory(home: Path) -> None:
    """A deploy script takes the folder from here."""
    built = publish(home, "a" * 40)

    (row,) = json.loads(tensorize(home, "show", MODEL, "--json").stdout)["suffixes"]

    assert row["directory"].endswith(f"vllm/org/tiny/v1-{built.build_id}")


def test_show_of_an_unknown_model_is_asked_wrongly(home: Path) -> None:
    """A typo must not look like an empty result."""
    done = tensorize(home, "show", "org/tinny")

    assert 2 == done.returncode
    assert "org/tinny" in done.stderr


def test_verify_passes_an_untouched_directory(home: Path) -> None:
    """Hashes alone: no vLLM, so it runs on any host that has the files."""
    built = publish(home, "a" * 40)

    done = tensorize(home, "verify", str(home / f"artifacts/vllm/org/tiny/v1-{built.build_id}"))

    assert 0 == done.returncode, done.stderr
    assert "all as the manifest says" in done.stdout


def test_verify_names_the_changed_file(home: Path) -> None:
    """One flipped byte of the same size is what a size check would miss."""
    built = publish(home, "a" * 40)
    folder = home / f"artifacts/vllm/org/tiny/v1-{built.build_id}"
    data = bytearray((folder / "model.tensors").read_bytes())
    data[7] ^= 1
    (folder / "model.tensors").write_bytes(data)

    done = tensorize(home, "verify", str(folder))

    assert 1 == done.returncode
    assert "model.tensors" in done.stderr


def test_verify_of_a_plain_folder_says_that_it_is_no_artifact(tmp_path: Path) -> None:
    """Without a manifest a directory does not exist for any reader."""
    done = tensorize(tmp_path, "verify", str(tmp_path))

    assert 1 == done.returncode
    assert "manifest.json" in done.stderr


def test_rollback_makes_the_build_before_current(home: Path) -> None:
    """The one command of a bad night."""
    first, second = publish(home, "a" * 40), publish(home, "b" * 40)

    done = tensorize(home, "rollback", MODEL, SUFFIX)

    assert 0 == done.returncode, done.stderr
    assert first.build_id in done.stdout
    store = open_store(str(home / "artifacts"))
    found = channel.read_channel(store, MODEL, SUFFIX, None)
    assert found is not None
    assert [first.build_id, second.build_id, first.build_id] == [
        entry.build_id for entry in found.channel.entries
    ]


def test_rollback_refuses_a_build_that_has_lost_a_file(home: Path) -> None:
    """Rolling back onto a broken build would be the second outage."""
    first = publish(home, "a" * 40)
    publish(home, "b" * 40)
    (home / f"artifacts/vllm/org/tiny/v1-{first.build_id}/model.tensors").unlink()

    done = tensorize(home, "rollback", MODEL, SUFFIX)

    assert 1 == done.returncode
    assert "model.tensors is gone" in done.stderr


def test_rollback_without_an_earlier_build_shows_the_history(home: Path) -> None:
    """So that one can name a build with --to."""
    publish(home, "a" * 40)

    done = tensorize(home, "rollback", MODEL, SUFFIX)

    assert 1 == done.returncode
    assert "no earlier build" in done.stderr


def test_build_refuses_options_that_contradict_the_catalog(home: Path) -> None:
    """The catalog says what v1 means; a flag must not make it mean something else once."""
    done = tensorize(home, "build", MODEL, "--suffix", SUFFIX, "--tp", "2")

    assert 2 == done.returncode
    assert "another --suffix" in done.stderr


def test_build_names_the_wrong_option(home: Path) -> None:
    """In the option's own spelling."""
    done = tensorize(home, "build", "org/other", "--tp", "0", "--dtype", "int3")

    assert 2 == done.returncode
    assert "--tp:" in done.stderr
    assert "--dtype:" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--serialization-kwargs", "[1]"), "--serialization-kwargs: wants a JSON object"),
        (("--serialization-kwargs", "{"), "--serialization-kwargs: is not JSON"),
        (
            ("--serialization-kwargs", '{"limit_cpu_concurency": 1}'),
            "--serialization-kwargs limit_cpu_concurency: tensorizer 2.10.1 has no such argument; "
            "did you mean limit_cpu_concurrency?",
        ),
        (
            ("--serialization-kwargs", '{"file_obj": "x"}'),
            "--serialization-kwargs file_obj: the builder names the file itself",
        ),
        (("--format", "gguf"), "--format: "),
        (("--format", "hf", "--tensor-parallel-size", "2"), "--tp: format hf is one file"),
        (("--pp", "2"), "--pipeline-parallel-size: a file of tensors is named by its tensor-par"),
        (("--lora-path", "a/b/c"), "--lora-path: "),
        (("--keyfile", "s3://bucket/key"), "give a file in a folder that exists on this disk"),
        (("--keyfile", "no/such/folder/key"), "give a file in a folder that exists on this disk"),
        (("--keyfile", "/dev/null"), "no key is overwritten"),
        (("--s3-access-key-id", "half"), "are a pair: give both"),
        (("--s3-endpoint", "http://key@host"), "--s3-endpoint is no URL of a server"),
    ],
)
def test_build_refuses_options_with_the_reason(
    home: Path, options: tuple[str, ...], says: str
) -> None:
    """Before a run is begun, in the option's own name."""
    done = tensorize(home, "build", "org/other", *options)

    assert 2 == done.returncode
    assert says in done.stderr
    assert not (home / "keys").exists()


def test_build_takes_no_folder_that_is_no_adapter(home: Path, tmp_path: Path) -> None:
    """A typing mistake in the path is commoner than an adapter without weights."""
    done = tensorize(home, "build", "org/other", "--lora-path", str(tmp_path))

    assert 1 == done.returncode
    assert "is no LoRA adapter of PEFT" in done.stderr


def test_s3_options_go_before_the_catalog_and_the_environment(
    home: Path, hub: LocalHub, s3: LocalS3, s3_root: str
) -> None:
    """As in vLLM's script; the session token of the environment is of another pair."""
    config = {"num_attention_heads": 9, "architectures": ["LlamaForCausalLM"]}
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}
    hub.commit("org/nine", files)
    (home / "models.yaml").write_text(CATALOG + "s3: {endpoint_url: 'http://127.0.0.1:9'}")
    wrong = {
        "S3_ACCESS_KEY_ID": "nobody",
        "S3_SECRET_ACCESS_KEY": "knows",
        "S3_SESSION_TOKEN": "of-nobody",
        "AWS_REGION": REGION,
        "HF_ENDPOINT": hub.endpoint,
    }
    given = ("--s3-access-key-id", s3.access_key, "--s3-secret-access-key", s3.secret_key)
    done = tensorize(
        home,
        *("build", "org/nine", "--tp", "2", "--serialized-directory", s3_root),
        *(*given, "--s3-endpoint", s3.endpoint),
        **wrong,
    )

    # Where the store was not reached, it would have failed before it came to look at the model.
    assert 1 == done.returncode
    assert "does not divide the model's 9 attention heads" in done.stderr
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert not any(s3.secret_key.encode() in path.read_bytes() for path in kept)
    assert s3.secret_key not in done.stderr + done.stdout


def test_build_of_a_missing_repo_fails_with_the_hubs_reason(home: Path, hub: LocalHub) -> None:
    """And not with a traceback, nor after minutes of retries."""
    done = tensorize(home, "build", "org/absent", "--suffix", "x", HF_ENDPOINT=hub.endpoint)

    assert 1 == done.returncode
    assert "org/absent" in done.stderr
    assert "Traceback" not in done.stderr


def test_build_json_reports_a_failure_too(home: Path, hub: LocalHub) -> None:
    """stdout stays one JSON document, whatever happened."""
    done = tensorize(home, "build", "org/absent", "--json", HF_ENDPOINT=hub.endpoint)

    report = json.loads(done.stdout)
    assert not report["success"]
    assert "hf_snapshot" in report["errors"][0]


def test_catalog_sync_adds_partitions_that_dagster_keeps(home: Path) -> None:
    """The UI offers a pair only once it is a partition."""
    done = tensorize(home, "catalog", "sync", "--json")

    assert [[MODEL, SUFFIX]] == json.loads(done.stdout)["pairs"]
    listed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import dagster as dg; print(dg.DagsterInstance.get()"
            ".get_dynamic_partitions('tensorize_model'))",
        ],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "org--tiny" in listed.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "gs://bucket/x"),
        ("store", "check", "s3:/bucket/x"),
        ("keys", "list", "--root", "S3://bucket"),
        ("copy", "x", "gs://bucket"),
        ("copy", "S3://bucket/x", "y"),
    ],
)
def test_a_url_that_no_store_has_is_asked_wrongly(tmp_path: Path, arguments: tuple[str, ...]):
    """It would be a folder of that name, and a check or a copy there a success."""
    done = tensorize(tmp_path, *arguments)
    assert 2 == done.returncode
    assert "this is another URL" in done.stderr
    assert [] == list(tmp_path.iterdir())


# Whose signature counts

STRANGER = signing.SecretKey(bytes(range(32))).public_key


def own(home: Path) -> str:
    """The public signing key of a home."""
    return signing.load_or_create_signing_key(home / "keys" / "signing.key").public_key


def trust(home: Path, *keys: str) -> None:
    (home / "models.yaml").write_text(f"trust: [{', '.join(keys)}]{CATALOG}")


def directory_of(home: Path, built: manifest.Manifest) -> str:
    return str(home / f"artifacts/vllm/org/tiny/v1-{built.build_id}")


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A home that built nothing, with a catalog and a key of its own."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "models.yaml").write_text(CATALOG)
    own(folder)
    return folder


def test_verify_says_whose_signature_it_is(home: Path, stranger: Path, tmp_path: Path) -> None:
    """Hashes that fit say nothing about who made them, and must not be taken to."""
    directory = directory_of(home, publish(home, "a" * 40))
    nobody = tmp_path / "nobody"

    def verified(at: Path, *options: str) -> tuple[int, bool, bool | None]:
        done = tensorize(at, "verify", directory, *options, "--json")
        said = json.loads(done.stdout)
        return done.returncode, said["trusted"], said["signed_by_this_home"]

    assert (0, True, True) == verified(home)
    assert (0, False, False) == verified(stranger)
    said = tensorize(nobody, "verify", directory).stdout
    assert "not checked against a trusted key" in said
    assert (0, True, None) == verified(nobody, "--public-key", own(home))
    assert (1, False, None) == verified(home, "--public-key", STRANGER)
    # The option goes before the list, and the list before the home's own key.
    trust(stranger, own(home))
    assert (0, True, None) == verified(stranger)
    trust(home, STRANGER)
    assert (1, False, None) == verified(home)
    assert (0, True, None) == verified(home, "--public-key", own(home))
    assert not nobody.exists()


def test_copy_says_whose_signature_it_is(home: Path, stranger: Path, tmp_path: Path) -> None:
    """What is copied is published elsewhere."""
    directory = directory_of(home, publish(home, "a" * 40))
    target = tmp_path / "target"

    refused = tensorize(stranger, "copy", directory, str(target), "--public-key", STRANGER)
    assert 1 == refused.returncode
    assert "not trusted here" in refused.stderr
    assert not target.exists()
    done = tensorize(stranger, "copy", directory, str(target))
    assert 0 == done.returncode, done.stderr
    assert "NOT this home's, not checked against a trusted key" in done.stdout
    assert not json.loads(tensorize(stranger, "copy", directory, str(target), "--json").stdout)[
        "trusted"
    ]
    trust(stranger, own(home))
    assert json.loads(tensorize(stranger, "copy", directory, str(target), "--json").stdout)[
        "trusted"
    ]
    trust(stranger, STRANGER)
    assert 1 == tensorize(stranger, "copy", directory, str(tmp_path / "other")).returncode


def test_show_and_rollback_believe_the_list_and_make_no_key(home: Path) -> None:
    """A key that was made by looking would be one that has signed nothing."""
    first = publish(home, "a" * 40)
    publish(home, "b" * 40)
    signer = own(home)
    key = home / "keys" / "signing.key"
    text = key.read_text()
    key.unlink()

    for command in (("show", MODEL), ("rollback", MODEL, SUFFIX)):
        done = tensorize(home, *command)
        assert 0 != done.returncode
        assert not key.exists()
    assert "not trusted here (trusted: none)" in tensorize(home, "show", MODEL).stderr
    assert 0 == tensorize(home, "show", MODEL, "--public-key", signer).returncode
    trust(home, signer)
    assert 0 == tensorize(home, "show", MODEL).returncode
    done = tensorize(home, "rollback", MODEL, SUFFIX)
    assert 2 == done.returncode
    assert f"there is no signing key at {key}" in done.stderr
    own(home)
    done = tensorize(home, "rollback", MODEL, SUFFIX)
    assert 1 == done.returncode
    assert "nobody would believe" in done.stderr
    key.write_text(text)
    done = tensorize(home, "rollback", MODEL, SUFFIX)
    assert 0 == done.returncode, done.stderr
    assert first.build_id in done.stdout


def test_show_of_what_was_never_built_needs_no_key(home: Path) -> None:
    """The first command of a newcomer leaves no trace."""
    done = tensorize(home, "show", MODEL)
    assert 0 == done.returncode, done.stderr
    assert "nothing published" in done.stdout
    assert not (home / "keys").exists()


def test_an_old_channel_is_refused_until_it_is_accepted(home: Path) -> None:
    """Signed and valid, it would make servers load what was replaced for a reason."""
    first = publish(home, "a" * 40)
    place = home / "artifacts/vllm/org/tiny/v1.json"
    old = place.read_bytes()
    publish(home, "b" * 40)
    assert 0 == tensorize(home, "show", MODEL).returncode
    place.write_bytes(old)

    for command in (("show", MODEL), ("rollback", MODEL, SUFFIX)):
        done = tensorize(home, *command)
        assert 1 == done.returncode
        assert "ends at entry 1, but entry 2 was seen here on " in done.stderr
        assert f"`tensorize channel accept {MODEL} {SUFFIX}`" in done.stderr
    assert (
        1
        == tensorize(home, "channel", "accept", MODEL, SUFFIX, "--public-key", STRANGER).returncode
    )
    accepted = tensorize(home, "channel", "accept", MODEL, SUFFIX, "--json")
    said = {"channel": str(place), "entry": 1, "seen": 2, "data_keys": []}
    assert said == json.loads(accepted.stdout)
    assert first.build_id in tensorize(home, "show", MODEL).stdout

    place.unlink()
    assert "is gone" in tensorize(home, "show", MODEL).stderr
    accepted = tensorize(home, "channel", "accept", MODEL, SUFFIX)
    assert "no channel is believed from now on; entry 1 was seen before" in accepted.stdout
    assert "nothing published" in tensorize(home, "show", MODEL).stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("verify", "http://user:hunter2@[::1"), "is no http(s) URL"),
        (("verify", "http://user:hunter2@127.0.0.1:1/d"), "user or password before the host"),
        (("verify", "a" * 5000), "File name too long"),
        (("keys", "list", "--root", "a" * 5000), "File name too long"),
    ],
)
def test_what_cannot_be_opened_is_one_line(home: Path, command: tuple[str, ...], said: str) -> None:
    """A traceback says neither what is wrong nor what to do."""
    signing.load_or_create_signing_key(home / "keys" / "signing.key")
    done = tensorize(home, *command)
    assert 1 == done.returncode
    assert done.stderr.startswith("error: ")
    assert 1 == done.stderr.count("\n")
    assert said in done.stderr
    assert "hunter2" not in done.stderr + done.stdout


def test_a_home_that_cannot_be_read_is_not_taken_for_none(home: Path, tmp_path: Path) -> None:
    """What its trust list keeps out would be believed."""
    directory = directory_of(home, publish(home, "a" * 40))
    unreadable = tensorize(tmp_path / ("a" * 5000), "verify", directory)
    (home / "models.yaml").unlink()
    (home / "models.yaml").mkdir()
    for done, said in (
        (unreadable, "cannot be read: File name too long"),
        (tensorize(home, "verify", directory), "models.yaml is no file"),
    ):
        assert 2 == done.returncode
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


def test_errors_of_the_file_system_and_escapes_are_one_printable_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever file it is, and whatever a store calls its files."""
    raised: list[Exception] = [
        PermissionError(13, "Permission denied", "/a\x1b[2Jb"),
        StoreError("/a\x1b[2Jb\nerror: Permission denied"),
    ]
    for error in raised:
        with pytest.raises(typer.Exit), cli_common.errors():
            raise error
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert r"/a\x1b[2Jb" in said
        assert said.removesuffix("\n").isprintable()


@pytest.mark.parametrize("as_table", [False, True])
def test_no_escape_of_a_store_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str], as_table: bool
) -> None:
    """It could write over what was said."""
    shown: Any = "a\x1b]0;x\udcffb"
    if as_table:
        table = Table("name")
        table.add_row(shown)
        shown = table
    cli_common.err.print(shown, markup=False)
    # A table cuts what has become wider.
    said = capsys.readouterr().err
    assert r"a\x1b]0" in said
    assert "\x1b" not in said


def test_help_says_which_key_is_believed(home: Path) -> None:
    """Without a list `verify` and `copy` believe any, and `show` this home's own."""
    texts = {
        name: " ".join(tensorize(home, name, "--help", COLUMNS="400").stdout.split())
        for name in ("verify", "copy", "show")
    }
    assert ["verify", "copy"] == [name for name in texts if "without one any key" in texts[name]]
    assert ["show"] == [name for name in texts if "home's own key" in texts[name]]


def test_a_damaged_mark_is_accepted_at_once(home: Path) -> None:
    """It was removed already when the error came."""
    publish(home, "a" * 40)
    assert 0 == tensorize(home, "show", MODEL).returncode
    (mark,) = (home / "seen").glob("*.json")
    mark.write_bytes(b"\xff")
    (home / "seen" / "another.json").write_bytes(b"\xff")
    accepted = tensorize(home, "channel", "accept", MODEL, SUFFIX, "--json")
    assert 0 == accepted.returncode, accepted.stderr
    assert 1 == json.loads(accepted.stdout)["entry"]


def test_accepting_a_channel_believes_its_builds_data_keys_too(home: Path) -> None:
    """A backup that was restored has old ones of both."""
    built = publish(home, "a" * 40)
    store = open_store(str(home / "artifacts"))
    key = signing.load_or_create_signing_key(home / "keys" / "signing.key")
    place = layout.build_key_key(MODEL, SUFFIX, built.build_id)
    build = (MODEL, SUFFIX, built.build_id)
    build_keys.assign(store, *build, lambda: "0" * 16, key, None, home / "seen")
    store.delete(place)
    accepted = tensorize(home, "channel", "accept", MODEL, SUFFIX)
    assert 0 == accepted.returncode, accepted.stderr
    assert f"so is {store.uri(place)}; entry 1 was seen before" in accepted.stdout
    assert build_keys.read_keys(store, *build, None, home / "seen") is None


def test_accepting_a_channel_that_never_was_is_asked_wrongly(home: Path) -> None:
    """A typo must not look like an answer."""
    publish(home, "a" * 40)
    done = tensorize(home, "channel", "accept", MODEL, "v2")
    assert 2 == done.returncode
    assert "v2.json does not exist, and was never seen here" in done.stderr


def test_show_refuses_another_manifest_than_the_published_one(home: Path) -> None:
    """What it shows of the build must be what was published."""
    built = publish(home, "a" * 40)
    other = built.model_copy(update={"profile": {"revision": "other"}})
    key = signing.load_or_create_signing_key(home / "keys" / "signing.key")
    (Path(directory_of(home, built)) / "manifest.json").write_bytes(manifest.encode(other, key))

    done = tensorize(home, "show", MODEL)

    assert 1 == done.returncode
    assert "another manifest than the one that was published" in done.stderr


def test_verify_takes_the_options_of_s3(home: Path, s3_root: str, s3: LocalS3) -> None:
    """On a host that has nothing but the keys to the bucket and a public key."""
    directory = directory_of(home, publish(home, "a" * 40))
    keys = {"S3_ACCESS_KEY_ID": s3.access_key, "S3_SECRET_ACCESS_KEY": s3.secret_key}
    there = {**keys, "S3_ENDPOINT_URL": s3.endpoint}
    assert 0 == tensorize(home, "copy", directory, s3_root, **there).returncode
    place = directory.replace(str(home / "artifacts"), s3_root)

    done = tensorize(
        home / "nowhere",
        *("verify", place, "--public-key", own(home)),
        *("--endpoint-url", s3.endpoint, "--region", "us-east-1"),
        **keys,
    )

    assert 0 == done.returncode, done.stderr
    assert "which is trusted" in done.stdout
    assert "there is no provenance.dsse.json" in done.stderr
