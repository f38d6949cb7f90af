"""`tensorize build` as vLLM's `serialize`, and `tensorize reload`, as processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from tensorize_assets.core import layout, manifest, signing
from tensorize_assets.core.build import BuildInputs, build_id
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3

MODEL = "tiny/llama"
DAGSTER_YAML = Path(__file__).parent.parent / "dagster_home" / "dagster.yaml"
SCRIPT = Path(__file__).parent / "worker" / "scripts" / "self_check_cases.py"
STRANGER = signing.SecretKey(bytes(range(32))).public_key

Done = subprocess.CompletedProcess[str]


def tensorize(home: Path, *arguments: object, **environment: str) -> Done:
    """Run the command in `home`, without any S3 settings of the developer's own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3_"))}
    return subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", *map(str, arguments)],
        env={
            **inherited,
            "HOME": str(home),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": REGION,
            "DAGSTER_HOME": str(home),
            "NO_COLOR": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def new_home(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(DAGSTER_YAML, folder)
    (folder / "models.yaml").write_text("root: artifacts\nmodels: {}\n")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose catalog is empty."""
    return new_home(tmp_path / "home")


def ranks(folder: Path, *numbers: int) -> Path:
    """A directory of ranks' files that hold nothing, and of no config."""
    folder.mkdir()
    for number in numbers:
        (folder / f"model-rank-{number:03d}.tensors").write_bytes(b"")
    return folder


def sealed(folder: Path, key: signing.SecretKey, data_key: str | None = None) -> Path:
    """A directory with a signed manifest, whose tensors nothing could load."""
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.tensors").write_bytes(b"tensors")
    inputs = BuildInputs(
        model=MODEL,
        commit="a" * 40,
        profile={},
        vllm="0.31.0",
        torch="2.13.0",
        tensorizer="2.10.1",
        data_key=data_key,
    )
    built = manifest.Manifest.model_validate(
        {
            "model": MODEL,
            "suffix": "v1",
            "build_id": build_id(inputs),
            "inputs": inputs,
            "snapshot": {
                "revision": "main",
                "commit": "a" * 40,
                "files": (),
                "weights_format": "safetensors",
            },
            "profile": {},
            "sharding": "virtual",
            "tensor_parallel_size": 1,
            "dtype": "bfloat16",
            "architecture": "LlamaForCausalLM",
            "dtype_census": {"by_dtype": {}, "model_dtype": "bfloat16"},
            "stock_vllm": {"loadable": True},
            "versions": dict.fromkeys(
                ("vllm", "torch", "tensorizer", "tensorize_assets", "python"), "1"
            ),
            "files": tuple(
                {
                    "path": path.name,
                    "size": path.stat().st_size,
                    "sha256": manifest.manifest_sha256(path.read_bytes()),
                }
                for path in folder.iterdir()
            ),
            "shards": ({"rank": 0, "file": "model.tensors", "tensors": ()},),
            "encryption": {"key_id": data_key} if data_key else None,
        }
    )
    (folder / layout.MANIFEST).write_bytes(manifest.encode(built, key))
    return folder


# What is refused before vLLM is started


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--path-to-tensors", "a", "--serialized-directory", "b"),
        ("--tensorizer-uri", "a", "--serialized-directory", "b"),
    ],
)
def test_exactly_one_place_is_given(home: Path, arguments: tuple[str, ...]) -> None:
    """As in vLLM's script: with two, which one was loaded would be anybody's guess."""
    done = tensorize(home, "reload", *arguments)
    assert 2 == done.returncode
    assert "exactly one of --path-to-tensors" in done.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("[1]", "wants a JSON object, argument by argument"),
        ("7", "wants a JSON object, argument by argument"),
        ("{", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
        ('{"num_readers": NaN}', "NaN is not JSON"),
        ('{"num_readers": 1e999}', "is too large"),
        ('{"num_readers": 1, "num_readers": 2}', "is given twice"),
        ('{"num_raeders": 2}', "did you mean num_readers?"),
        ('{"device": "cuda"}', "vLLM decides this argument itself"),
        ('{"dtype": "float16"}', "vLLM decides this argument itself"),
        ('{"mode": "rb"}', "vLLM decides this argument itself"),
    ],
)
def test_arguments_are_refused_with_the_reason(home: Path, given: str, says: str) -> None:
    """vLLM would start an engine first, and then say no or nothing."""
    folder = ranks(home / "theirs", 0)
    place = ("--serialized-directory", folder)
    done = tensorize(home, "reload", *place, "--deserialization-kwargs", given)
    assert 2 == done.returncode
    assert says in done.stderr
    assert "--deserialization-kwargs" in done.stderr


def test_a_missing_rank_is_named(home: Path, tmp_path: Path) -> None:
    """Of ranks 0, 1 and 3 vLLM would start four processes, and one of them would die."""
    folder = ranks(tmp_path / "theirs", 0, 1, 3)
    done = tensorize(home, "reload", "--serialized-directory", folder)
    assert 1 == done.returncode
    assert "lacks model-rank-002.tensors: of 4 ranks, 1 are missing" in done.stderr
    template = folder / "model-rank-%03d.tensors"
    done = tensorize(home, "reload", "--path-to-tensors", template, "--tp", 5)
    assert "lacks model-rank-002.tensors, model-rank-004.tensors" in done.stderr


class _Ranges(SimpleHTTPRequestHandler):
    """Knows ranges, as the base class does not."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206 if part else 416)
        shown = f"{first}-{first + len(part) - 1}" if part else "*"
        self.send_header("Content-Range", f"bytes {shown}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The URL at which the test's folder is served."""
    handler = partial(_Ranges, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_rank_of_any_number_is_no_list_of_the_others(home: Path, tmp_path: Path) -> None:
    """A name may have any number, and memory ends."""
    folder = ranks(tmp_path / "theirs", 0, 10**15)
    done = tensorize(home, "reload", "--serialized-directory", folder)
    assert 1 == done.returncode
    assert "of 1000000000000001 ranks, 999999999999999 are missing" in done.stderr
    done = tensorize(home, "reload", "--serialized-directory", folder, "--tp", "0")
    assert 2 == done.returncode


def test_a_password_in_a_url_goes_nowhere(home: Path, tmp_path: Path) -> None:
    """A signed URL is handed on as it is; one with a password is refused before."""
    for url in ("http://u:sekret@127.0.0.1:1/x.tensors", "http://u:sekret@h/x.tensors?a=b"):
        done = tensorize(home, "reload", "--path-to-tensors", url, "--model", tmp_path)
        assert 1 == done.returncode
        assert "has a user or password before the host" in done.stderr
        assert "sekret" not in done.stdout + done.stderr


def test_a_missing_rank_is_named_where_nothing_is_listed(
    home: Path, tmp_path: Path, web: str
) -> None:
    """A web server answers for one name after another."""
    ranks(tmp_path / "theirs", 0, 1, 3)
    done = tensorize(home, "reload", "--serialized-directory", f"{web}/theirs")
    assert 1 == done.returncode
    assert "lacks model-rank-002.tensors: of 4 ranks, 1 are missing" in done.stderr


def test_another_number_of_ranks_than_there_are_is_asked_wrongly(
    home: Path, tmp_path: Path
) -> None:
    """Two of three ranks would load, and answer nonsense."""
    folder = ranks(tmp_path / "theirs", 0, 1, 2)
    done = tensorize(home, "reload", "--serialized-directory", folder, "--tp", 2)
    assert 2 == done.returncode
    assert "holds tensor_parallel_size 3, and 2 was asked for" in done.stderr


def test_tensors_without_config_want_a_model(home: Path, tmp_path: Path) -> None:
    """vLLM's script would take the default of --model: another model."""
    folder = ranks(tmp_path / "theirs", 0)
    done = tensorize(home, "reload", "--serialized-directory", folder)
    assert 2 == done.returncode
    assert "no config.json beside the tensors; give --model" in done.stderr


def test_an_empty_place_is_said_to_be(home: Path, tmp_path: Path) -> None:
    """A wrong path is the commonest mistake."""
    done = tensorize(home, "reload", "--serialized-directory", ranks(tmp_path / "empty"))
    assert 1 == done.returncode
    assert "holds neither model.tensors nor model-rank-000.tensors" in done.stderr


def test_a_manifest_is_held_before_anything_is_loaded(home: Path, tmp_path: Path) -> None:
    """Signature and sizes cost nothing; an engine takes half a minute."""
    key = signing.generate_signing_key()
    folder = sealed(tmp_path / "ours", key)
    place = ("--serialized-directory", folder)
    done = tensorize(home, "reload", *place, "--public-key", STRANGER)
    assert 1 == done.returncode
    assert "not trusted" in done.stderr
    done = tensorize(home, "reload", *place, "--dtype", "float32")
    assert 2 == done.returncode
    assert "the manifest says bfloat16" in done.stderr
    done = tensorize(home, "reload", *place, "--model", "tiny/other")
    assert 2 == done.returncode
    assert "the manifest is of tiny/llama" in done.stderr
    (folder / "config.json").write_bytes(b"[]")
    done = tensorize(home, "reload", *place, "--public-key", key.public_key)
    assert 1 == done.returncode
    assert "config.json is not what the manifest says" in done.stderr
    (folder / "model.tensors").write_bytes(b"more tensors")
    done = tensorize(home, "reload", *place, "--public-key", key.public_key)
    assert 1 == done.returncode
    assert "model.tensors has 12 bytes (the manifest says 7)" in done.stderr


def test_an_encrypted_build_says_which_key_it_wants(home: Path, tmp_path: Path) -> None:
    """Before vLLM finds out; and a file of another size holds no key."""
    folder = sealed(tmp_path / "ours", signing.generate_signing_key(), "ab" * 8)
    place = ("--serialized-directory", folder)
    done = tensorize(home, "reload", *place)
    assert 2 == done.returncode
    assert f"tensorize keys unseal {'ab' * 8}" in done.stderr
    short = tmp_path / "short"
    short.write_bytes(b"not a key")
    done = tensorize(home, "reload", *place, "--keyfile", short)
    assert 1 == done.returncode
    assert "has 9 bytes, and a key has 32" in done.stderr


# Real loads: files of vLLM's own function, and builds that start from the same options


class Made(NamedTuple):
    """What self_check_cases.py has written."""

    snapshot: Path
    adapter: Path
    theirs: Path
    keyfile: Path


@pytest.fixture(scope="session")
def made(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A snapshot, an adapter of it, and what vLLM's own function made of the snapshot."""
    out = tmp_path_factory.mktemp("self-check") / "out"
    subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny_models), str(out)], check=True, capture_output=True
    )
    return Made(out / "snapshot", out / "adapter", out / "theirs", out / "theirs.key")


class Oneshot(NamedTuple):
    """A one-shot build to S3 with every option of vLLM's `serialize`, and what came of it."""

    home: Path
    keyfile: Path
    root: str
    report: dict[str, Any]
    stderr: str

    @property
    def uri(self) -> str:
        return f"{self.root}/vllm/{MODEL}/v1"


def flags(s3: LocalS3) -> tuple[str, ...]:
    return (
        "--s3-access-key-id",
        s3.access_key,
        "--s3-secret-access-key",
        s3.secret_key,
        "--s3-endpoint",
        s3.endpoint,
    )


# Half a pair that opens nothing: flags go first.
WRONG_ENVIRONMENT = {
    "S3_ACCESS_KEY_ID": "nobody",
    "S3_SECRET_ACCESS_KEY": "knows",
    "S3_SESSION_TOKEN": "of-nobody",
    "S3_ENDPOINT_URL": "http://127.0.0.1:9",
}


@pytest.fixture(scope="session")
def oneshot(made: Made, s3: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> Oneshot:
    """Built by `tensorize build`, real engines and all."""
    folder = tmp_path_factory.mktemp("oneshot")
    home = new_home(folder / "home")
    s3.create_bucket("oneshot")
    root = "s3://oneshot/models"
    keyfile = folder / "data.key"
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(made.snapshot))
        done = tensorize(
            home,
            *("build", MODEL, "--suffix", "v1", "--serialized-directory", f"{root}/"),
            *("--lora-path", made.adapter, "--keyfile", keyfile, *flags(s3), "--json"),
            *("--serialization-kwargs", '{"limit_cpu_concurrency": 1}'),
            HF_ENDPOINT=hub.endpoint,
            **WRONG_ENVIRONMENT,
        )
    assert done.stdout, done.stderr
    return Oneshot(home, keyfile, root, json.loads(done.stdout), done.stderr)


@pytest.mark.engine
def test_a_oneshot_lies_where_vllms_script_puts_it(oneshot: Oneshot, s3: LocalS3) -> None:
    """Who moves from the script to this changes no path, also of encrypted tensors."""
    assert [] == oneshot.report["errors"]
    assert oneshot.uri == oneshot.report["directory"]
    listed = s3.client().list_objects_v2(Bucket="oneshot", Prefix="models/vllm/")["Contents"]
    names = {entry["Key"].removeprefix(f"models/vllm/{MODEL}/") for entry in listed}
    ours = {name.removeprefix("v1/") for name in names if name.startswith("v1/")}
    assert {"model.tensors", "adapter_model.tensors", "adapter_config.json"} <= ours
    assert {"v1.json", *(f"v1/{name}" for name in ours)} == names


@pytest.mark.engine
def test_the_key_is_in_the_file_and_nothing_is_in_plaintext(oneshot: Oneshot, s3: LocalS3) -> None:
    """A raw key that only this user can read, and no tensor that reads without it."""
    assert 0o600 == oneshot.keyfile.stat().st_mode & 0o777
    assert 32 == len(oneshot.keyfile.read_bytes())
    client = s3.client()
    for name in ("model.tensors", "adapter_model.tensors"):
        key = f"models/vllm/{MODEL}/v1/{name}"
        data = client.get_object(Bucket="oneshot", Key=key)["Body"].read()
        # Version and flags of tensorizer's header: encrypted.
        assert data[5] in (3, 4)
        assert oneshot.keyfile.read_bytes() not in data
    again = tensorize(oneshot.home, "build", MODEL, "--keyfile", oneshot.keyfile)
    assert 2 == again.returncode
    assert "no key is overwritten" in again.stderr


@pytest.mark.engine
def test_no_secret_of_a_build_is_left_anywhere(oneshot: Oneshot, s3: LocalS3) -> None:
    """Dagster keeps tags, events and logs for good, and shows them to everybody."""
    raw = oneshot.keyfile.read_bytes()
    secrets = [s3.secret_key.encode(), raw, raw.hex().encode()]
    places = [path for path in oneshot.home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" for path in places)
    for path in places:
        data = path.read_bytes()
        assert not any(secret in data for secret in secrets), path
    said = json.dumps(oneshot.report) + oneshot.stderr
    assert s3.secret_key not in said
    assert raw.hex() not in said


@pytest.mark.engine
def test_a_oneshot_is_reloaded_from_s3_and_held_against_its_manifest(
    oneshot: Oneshot, s3: LocalS3
) -> None:
    """Signature, sizes and the hash of every tensor, with the key that the build left."""
    place = ("--serialized-directory", oneshot.uri)
    given = ("--keyfile", oneshot.keyfile, "--num-readers", 2, "--verify-hash", *flags(s3))
    done = tensorize(oneshot.home, "reload", *place, *given, "--json", **WRONG_ENVIRONMENT)
    assert 0 == done.returncode, done.stderr
    said = json.loads(done.stdout)
    checks = {check["name"]: check["passed"] for check in said["checks"]}
    assert dict.fromkeys(checks, True) == checks
    assert {"artifact_loads", "tensor_hashes_equal", "tensors_complete", "values_finite"} == {
        *checks
    }
    assert said["signed_by_this_home"]
    assert ("s3", "direct") == (said["loads"][0]["source"], said["loads"][0]["path"])
    assert said["answers"][0]["answer"]
    assert s3.secret_key not in done.stdout + done.stderr


@pytest.mark.engine
def test_what_vllms_own_function_wrote_is_reloaded_from_disk(made: Made, home: Path) -> None:
    """No manifest: it says what nobody can know, and what tensorizer's own hashes do say."""
    place = ("--path-to-tensors", made.theirs / "secret" / "model.tensors")
    done = tensorize(
        home, "reload", *place, "--encryption-keyfile", made.keyfile, "--verify-hash", "--json"
    )
    assert 0 == done.returncode, done.stderr
    said = json.loads(done.stdout)
    assert ("disk", "direct") == (said["loads"][0]["source"], said["loads"][0]["path"])
    assert said["answers"][0]["answer"]
    assert ["each tensor has the hash that the file itself gives for it"] == said["held"]
    unknown = " ".join(said["not_verified"])
    assert "no signature" in unknown
    assert "no manifest says which hash" in unknown
    assert "whether the model is its source" in unknown


@pytest.mark.engine
def test_what_vllms_own_function_wrote_is_reloaded_from_s3(
    made: Made, home: Path, s3: LocalS3, s3_root: str
) -> None:
    """Both ranks find their file and the keys, which stand in no process's arguments."""
    bucket, _, prefix = s3_root.removeprefix("s3://").partition("/")
    for path in (made.theirs / "ranks").iterdir():
        s3.client().upload_file(str(path), bucket, f"{prefix}/ranks/{path.name}")
    place = ("--path-to-tensors", f"{s3_root}/ranks/model-rank-%03d.tensors")
    given = ("--model", made.snapshot, *flags(s3), "--deserialization-kwargs")
    done = tensorize(home, "reload", *place, *given, '{"num_readers": 3}')
    assert 0 == done.returncode, done.stderr
    assert "2 ranks" in done.stdout
    assert "from s3" in done.stdout
    assert "NOT verified: each tensor's own hash in the file: give --verify-hash" in done.stdout
    assert s3.secret_key not in done.stdout + done.stderr


@pytest.mark.engine
def test_a_load_that_fails_says_what_the_loader_says(
    made: Made, home: Path, s3: LocalS3, s3_root: str
) -> None:
    """In one line, which names the file, without its URL's signature: no traceback of vLLM's."""
    bucket = s3_root.removeprefix("s3://").partition("/")[0]
    s3.client().upload_file(str(made.theirs / "secret" / "model.tensors"), bucket, "model.tensors")
    place = {"Bucket": bucket, "Key": "model.tensors"}
    signed = s3.client().generate_presigned_url("get_object", Params=place)
    done = tensorize(home, "reload", "--path-to-tensors", signed, "--model", made.snapshot)
    assert 1 == done.returncode
    said = done.stdout + done.stderr
    assert f"{signed.partition('?')[0]} is encrypted, and no key was given" in said
    assert "Traceback" not in said
    assert "X-Amz-" not in said


# Tensors of the repo's own names


class HfBuild(NamedTuple):
    """A build of format hf, published, and what was said of it."""

    home: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def hf_build(made: Made, tmp_path_factory: pytest.TempPathFactory) -> HfBuild:
    """Built by `tensorize build --format hf`, real engines and all."""
    home = new_home(tmp_path_factory.mktemp("hf") / "home")
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(made.snapshot))
        done = tensorize(
            home,
            "build",
            MODEL,
            "--suffix",
            "hf",
            "--format",
            "hf",
            "--json",
            HF_ENDPOINT=hub.endpoint,
        )
    assert done.stdout, done.stderr
    return HfBuild(home, json.loads(done.stdout))


@pytest.mark.engine
def test_a_build_of_format_hf_is_labelled_and_published(hf_build: HfBuild) -> None:
    """Its manifest says that vLLM takes the slow path to it, and its evidence that it did."""
    report = hf_build.report
    assert [] == report["errors"]
    folder = Path(report["directory"])
    data = (folder / layout.MANIFEST).read_bytes()
    stored = manifest.decode(data, None)
    assert "hf" == stored.tensor_format == stored.inputs.profile["format"]
    assert stored.stock_vllm.loadable
    assert "slow path" in stored.stock_vllm.reasons[0]
    names = {tensor.name for tensor in stored.shards[0].tensors}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("qkv_proj" in name for name in names)
    assert "slow" == report["reload_check"]["load_path"]
    (compared,) = [c for c in report["checks"] if c["check"] == "tensor_hashes_equal"]
    assert "as they were read from the file" in compared["description"]


@pytest.mark.engine
def test_a_build_of_format_hf_is_reloaded_over_http_against_its_manifest(
    hf_build: HfBuild, tmp_path: Path, web: str
) -> None:
    """Config and tokenizer come over HTTP too, and have the manifest's hashes."""
    shutil.copytree(hf_build.report["directory"], tmp_path / "served")
    done = tensorize(hf_build.home, "reload", "--serialized-directory", f"{web}/served")
    assert 0 == done.returncode, done.stderr
    assert "from public_url" in done.stdout
    assert "by vLLM's slow path" in done.stdout
    assert "held: tensor_hashes_equal: 21 tensors equal" in done.stdout
