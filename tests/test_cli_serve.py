"""`tensorize serve` and `fetch` as processes: what they say, hand on, hide and leave behind."""

from __future__ import annotations

import json
import os
import resource
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent / "core"))

from small_builds import KEY, MODEL, PRIVATE, SMALL, SUFFIX, Build, build, new_key, put

from tensorize_assets.core import layout, releases
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.s3 import ACCESS_VARIABLE, S3Access
from tensorize_assets.core.serving import VARIABLE, current
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.demo.s3_server import REGION, LocalS3

HIDDEN = ("TENSORIZE_", "S3_", "AWS_", "VLLM_", "DAGSTER_HOME", "OMP_NUM_THREADS")
# The command as it is, up to its last step, which it says instead.
INSTEAD_OF_EXEC = """
import json, os, sys
from pathlib import Path

def say(path, command, environment):
    print(json.dumps({"path": path, "command": command, "environment": environment,
        "files": {str(p): p.read_bytes().hex() for v in environment.values()
                  if v.endswith(".json") for p in Path(v).parent.rglob("*") if p.is_file()},
        "keyfile": json.loads(Path(environment["TENSORIZE_ASSETS_SERVING"]).read_bytes())["keyfile"]
    }))
    sys.stdout.flush()
    input()
    os._exit(0)

os.execve = say
from tensorize_assets.cli import main
main()
"""


def inherited(home: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    return {**kept, "NO_COLOR": "1", "DAGSTER_HOME": str(home), **variables}


def tensorize(home: Path, *arguments: object, **variables: str) -> CompletedProcess[str]:
    """Run the command, which leaves no folder for keys behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorize_assets.cli", *map(str, arguments)],
        env=inherited(home, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout, stderr = process.communicate(timeout=120)
    assert set() == {path for path in private_places() if f"-{process.pid}-" in path.name}
    return CompletedProcess(process.args, process.returncode, stdout, stderr)


def private_places() -> set[Path]:
    name = f"tensorize-assets-{os.getuid()}"
    places = [Path(place, name) for place in ("/dev/shm", tempfile.gettempdir())]
    return {path for place in places if place.is_dir() for path in place.iterdir()}


@pytest.fixture
def vllm() -> str:
    """The release that is installed."""
    found = releases.installed()
    if found is None:
        pytest.skip("vLLM is not installed (extra `cpu` or `gpu`)")
    return found.release


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the private key of who may open encrypted builds, and none of the builder's."""
    folder = tmp_path / "home"
    (folder / "keys").mkdir(parents=True)
    key = folder / "keys" / "private.key"
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT, 0o600)
    PRIVATE.write_to(descriptor)
    os.close(descriptor)
    return folder


TRUST = ("--public-key", KEY.public_key)


def both(store: Store, vllm: str) -> tuple[Build, Build, bytes]:
    """A build with an adapter, published in plaintext and encrypted, and its key."""
    key_id, key = new_key(store)
    adapters = {"poet": 8}
    plain = build(store, vllm=vllm, adapters=adapters)
    secret = build(store, vllm=vllm, adapters=adapters, data_key=key_id)
    put(plain, secret)
    return plain, secret, key


class Become:
    """What a process would have become."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.command: list[str] = said["command"]
        self.environment: dict[str, str] = said["environment"]
        self.files = {Path(path): bytes.fromhex(data) for path, data in said["files"].items()}
        self.keyfile = said["keyfile"] and Path(said["keyfile"])


class Asked:
    """`tensorize serve` up to its exec; it stands there until it is ended."""

    def __init__(self, home: Path, *arguments: object, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", INSTEAD_OF_EXEC, "serve", *map(str, arguments)],
            env=inherited(home, **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Become:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(self.process.communicate()[1])
        return Become(json.loads(line))

    def __exit__(self, *_: object) -> None:
        self.stderr = self.process.communicate("\n", timeout=60)[1]


# --print


def test_print_shows_the_command_and_leaves_nothing(
    store: LocalStore, home: Path, vllm: str
) -> None:
    """For a manifest of Kubernetes, or to see what is served; no key is opened for it."""
    _, secret, _ = both(store, vllm)
    options = ("serve", MODEL, SUFFIX, "--root", store.root, *TRUST, "--encrypted", "--print")
    done = tensorize(home, *options, "--", "--port", "8001", TENSORIZE_ASSETS_PRIVATE_KEY="wrong")
    assert 0 == done.returncode, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in words
    assert ["--port", "8001"] == words[-2:]
    assert "FOLDER" in words
    shown = json.loads(tensorize(home, *options, "--json").stdout)
    assert (secret.manifest.build_id, True, 1, "cpu") == (
        shown["build_id"],
        shown["encrypted"],
        shown["entry"],
        shown["evidence_device"],
    )
    assert (
        words[words.index("--load-format") : -2]
        == (shown["command"][shown["command"].index("--load-format") :])
    )


def test_json_is_of_print(store: LocalStore, home: Path, vllm: str) -> None:
    """A server's output is a log."""
    done = tensorize(home, "serve", MODEL, SUFFIX, "--root", store.root, *TRUST, "--json")
    assert 2 == done.returncode
    assert "--json goes with --print" in done.stderr


# What it becomes


def test_from_a_disk_vllm_gets_the_artifact_itself(
    store: LocalStore, home: Path, vllm: str
) -> None:
    """Nothing is copied; and one line says what is served."""
    plain, _, _ = both(store, vllm)
    asked = Asked(home, MODEL, SUFFIX, "--root", store.root, *TRUST)
    with asked as become:
        folder = str(store.root / plain.directory)
        assert folder in become.command
        settings = json.loads(
            become.command[become.command.index("--model-loader-extra-config") + 1]
        )
        assert f"{folder}/model-rank-%03d.tensors" == settings["tensorizer_uri"]
        said = current(become.environment)
        assert said is not None
        assert (folder, str(store.root), None, plain.sha256, 1, "cpu") == (
            said.folder,
            said.root,
            said.keyfile,
            said.manifest_sha256,
            said.entry,
            said.evidence_device,
        )
        assert Path(said.reports).is_dir()
        assert ACCESS_VARIABLE not in become.environment
        own = Path(become.environment[VARIABLE]).parent
        assert own in private_places()
        assert 0o600 == stat.S_IMODE(Path(become.environment[VARIABLE]).stat().st_mode)
    (line,) = asked.stderr.splitlines()
    for part in (MODEL, plain.manifest.build_id, "a" * 12, "entry 1", "cpu", plain.directory):
        assert part in line


@pytest.mark.fault("Secrets", "what `tensorize serve` becomes: arguments and environment", "none")
def test_secrets_are_neither_in_the_command_nor_in_the_environment(
    home: Path, vllm: str, s3: LocalS3, s3_root: str, s3_access: S3Access
) -> None:
    """vLLM logs its arguments, everybody sees them, and a crash may show an environment."""
    remote = open_store(s3_root, s3_access)
    _, secret, key = both(remote, vllm)
    text = home.joinpath("keys", "private.key").read_text()
    secrets = {
        "TENSORIZE_ASSETS_PRIVATE_KEY": text.split(":")[-1].strip(),
        "TENSORIZE_ASSETS_SIGNING_KEY": "00" * 32,
        "S3_ACCESS_KEY_ID": s3.access_key,
        "S3_SECRET_ACCESS_KEY": s3.secret_key,
    }
    options = (MODEL, SUFFIX, "--root", s3_root, *TRUST, "--encrypted", "--endpoint-url")
    with Asked(home, *options, s3.endpoint, "--region", REGION, **secrets) as become:
        assert not secrets.keys() & become.environment.keys()
        for text in (*become.command, *become.environment.values()):
            assert not [one for one in secrets.values() if one in text]
            assert key.hex() not in text
        assert become.keyfile is not None
        assert str(become.keyfile) not in " ".join(become.command)
        assert key == become.keyfile.read_bytes()
        access = Path(become.environment[ACCESS_VARIABLE])
        assert s3.secret_key.encode() in become.files[access]
        for path in (become.keyfile, access):
            assert path.is_relative_to("/dev/shm")
            assert (0o600, 0o700) == (
                stat.S_IMODE(path.stat().st_mode),
                stat.S_IMODE(path.parent.parent.stat().st_mode),
            )
        said = current(become.environment)
        assert said is not None
        assert (s3_root, secret.directory, s3.endpoint) == (
            said.root,
            said.directory,
            said.s3 and said.s3.endpoint_url,
        )
        for name, data in SMALL.items():
            assert data == Path(said.folder, name).read_bytes()
        assert Path(said.folder, layout.MANIFEST).exists()
        assert not list(Path(said.folder).glob("*.tensors"))
        own = {Path(become.environment[VARIABLE]).parent, become.keyfile.parent}
        assert own <= private_places()
    # It was never vLLM; who comes next sweeps.
    with Asked(home, *options, s3.endpoint, "--region", REGION, **secrets):
        assert not own & private_places()


@pytest.mark.fault("Secrets", "a crash of `tensorize serve` with a data key", "no core is left")
def test_a_server_that_holds_a_key_leaves_no_core(store: LocalStore, home: Path, vllm: str) -> None:
    """Also as the program that it becomes; one that holds none is the user's to look into."""
    both(store, vllm)
    ours = resource.getrlimit(resource.RLIMIT_CORE)
    options = (MODEL, SUFFIX, "--root", store.root, *TRUST)
    for encrypted, limit in (((), ours), (("--encrypted",), (0, 0))):
        asked = Asked(home, *options, *encrypted)
        with asked:
            assert limit == psutil.Process(asked.process.pid).rlimit(psutil.RLIMIT_CORE)
            held = Path(f"/proc/{asked.process.pid}/coredump_filter").read_text()
            assert bool(encrypted) == (int(held, 16) == 0)


def test_a_web_root_needs_no_access(
    store: LocalStore, home: Path, vllm: str, web: Callable[[Path], str]
) -> None:
    """Names are quoted, and the template of ranks is not."""
    plain, _, _ = both(store, vllm)
    root = web(store.root).replace("http", "HTTP")
    with Asked(home, MODEL, SUFFIX, "--root", root, *TRUST) as become:
        settings = json.loads(
            become.command[become.command.index("--model-loader-extra-config") + 1]
        )
        uri = settings["tensorizer_uri"]
        assert uri.startswith(f"{web(store.root)}/vllm/org/tiny-%C3%A9/")
        assert uri.endswith("/model-rank-%03d.tensors")
        assert plain.manifest.build_id in uri
        assert ACCESS_VARIABLE not in become.environment
        said = current(become.environment)
        assert said is not None
        assert web(store.root) == said.root


def test_a_keyfile_is_taken_as_it_is(
    store: LocalStore, home: Path, vllm: str, tmp_path: Path
) -> None:
    """Mounted by others, and copied nowhere."""
    _, _, key = both(store, vllm)
    keyfile = tmp_path / "mounted"
    keyfile.write_bytes(key)
    keyfile.chmod(0o600)
    options = (MODEL, SUFFIX, "--root", store.root, *TRUST, "--encrypted", "--keyfile", keyfile)
    with Asked(home, *options) as become:
        assert keyfile == become.keyfile
        assert not [path for path, data in become.files.items() if key in data]
        assert str(keyfile) not in " ".join(become.command)


# What is refused


@pytest.mark.parametrize(
    ("mode", "size", "said"),
    [
        (0o644, 32, "open to other users (mode 0644)"),
        (0o600, 33, "is no file of 32 bytes"),
        (0o600, 0, "is no file of 32 bytes"),
    ],
)
def test_a_keyfile_that_is_none_is_refused(
    store: LocalStore, home: Path, vllm: str, tmp_path: Path, mode: int, size: int, said: str
) -> None:
    """vLLM would say so after a minute; and whom it is open to may have read it."""
    both(store, vllm)
    keyfile = tmp_path / "keyfile"
    keyfile.write_bytes(bytes(size))
    keyfile.chmod(mode)
    options = ("--root", store.root, *TRUST, "--encrypted", "--keyfile", keyfile)
    done = tensorize(home, "serve", MODEL, SUFFIX, *options)
    assert (1, "") == (done.returncode, done.stdout)
    assert said in done.stderr.replace("\n", " ")


def test_refusals_say_what_to_do_and_leave_nothing(
    store: LocalStore, home: Path, vllm: str, tmp_path: Path
) -> None:
    """Each is one line, with the exit code of its kind."""
    plain, _, _ = both(store, vllm)
    root = ("--root", store.root)
    there = (MODEL, SUFFIX, *root, *TRUST)
    cases: list[tuple[int, str, tuple[object, ...], dict[str, str]]] = [
        (2, "give --root", (MODEL, SUFFIX, *TRUST), {}),
        (2, "give --public-key", (MODEL, SUFFIX, *root), {}),
        (1, "nothing of org/other", ("org/other", SUFFIX, *root, *TRUST), {}),
        (2, "this one is empty", (MODEL, SUFFIX, "--root", "", *TRUST), {}),
        (
            2,
            "--root: give a folder, s3://bucket/prefix or an http(s):// URL",
            (MODEL, SUFFIX, "--root", "gs://b/x", *TRUST),
            {},
        ),
        (2, "leave out --keyfile", (*there, "--keyfile", home / "keys" / "private.key"), {}),
        (2, "--dtype: the build's tensors", (*there, "--", "--dtype", "float32"), {}),
        (1, "VLLM_PLUGINS", there, {"VLLM_PLUGINS": "other"}),
        (
            1,
            "there is no private key",
            (*there, "--encrypted", "--private-key", tmp_path / "nowhere"),
            {},
        ),
    ]
    for code, said, arguments, variables in cases:
        done = tensorize(home, "serve", *arguments, **variables)
        assert code == done.returncode, done.stderr
        assert said in done.stderr
        assert "" == done.stdout
    config = store.root / plain.key("config.json")
    config.write_bytes(b"[]")
    done = tensorize(home, "serve", *there)
    assert 1 == done.returncode
    assert "config.json is not what its manifest says" in done.stderr


def test_without_vllm_or_its_plugin_nothing_is_started(
    store: LocalStore, home: Path, vllm: str, tmp_path: Path
) -> None:
    """An environment that could not load the build is told what it lacks."""
    both(store, vllm)
    source = Path(releases.__file__).parents[2]
    options = ("serve", MODEL, SUFFIX, "--root", str(store.root), *TRUST, "--print")
    for hidden, said in (
        ("version", "no vLLM is installed"),
        ("entry_points", "does not find the plugin"),
    ):
        # As in an environment without that distribution.
        script = (
            "from importlib import metadata\n"
            "def absent(name): raise metadata.PackageNotFoundError(name)\n"
            "def none(group): return metadata.EntryPoints()\n"
            f"metadata.{hidden} = {'absent' if hidden == 'version' else 'none'}\n"
            "from tensorize_assets.cli import main\nmain()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *options],
            env=inherited(home, PYTHONPATH=str(source)),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert 1 == done.returncode, done.stderr
        assert said in done.stderr


def test_a_host_without_a_home_gets_none(store: LocalStore, vllm: str, tmp_path: Path) -> None:
    """A pod that only serves has nowhere to keep what it saw."""
    both(store, vllm)
    nowhere = tmp_path / "nowhere"
    options = ("serve", MODEL, SUFFIX, "--root", store.root, *TRUST, "--print")
    assert 0 == tensorize(nowhere, *options).returncode
    assert not nowhere.exists()


# fetch


def test_fetch_brings_what_serve_would_serve(
    store: LocalStore, home: Path, vllm: str, tmp_path: Path, web: Callable[[Path], str]
) -> None:
    """The init container's whole work: over HTTP, and then without it."""
    _, secret, key = both(store, vllm)
    folder = tmp_path / "to"
    options = ("fetch", MODEL, SUFFIX, folder, "--root", web(store.root), *TRUST, "--encrypted")
    done = tensorize(tmp_path / "nowhere", *options, "--json")
    assert 0 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert (secret.manifest.build_id, len(secret.manifest.files), 0) == (
        report["build_id"],
        report["files"],
        report["kept"],
    )
    assert {"bytes", "seconds", "bytes_per_second", "source", "target"} <= report.keys()
    again = tensorize(tmp_path / "nowhere", *options)
    assert f"{report['files']} there already" in again.stdout
    with Asked(home, MODEL, SUFFIX, "--root", folder, *TRUST, "--encrypted") as become:
        assert str(folder / secret.directory) in become.command
        assert become.keyfile is not None
        assert key == become.keyfile.read_bytes()


def test_fetch_is_not_to_where_one_happens_to_be(store: LocalStore, home: Path) -> None:
    """An empty DIRECTORY is a variable that was not set."""
    done = tensorize(home, "fetch", MODEL, SUFFIX, "", "--root", store.root, *TRUST)
    assert 2 == done.returncode
    assert "this one is empty" in done.stderr


def test_of_a_folder_nobody_should_change_the_mode(
    store: LocalStore, home: Path, vllm: str, tmp_path: Path
) -> None:
    """`chmod 600` of a folder shuts its owner out."""
    both(store, vllm)
    tmp_path.chmod(0o755)
    options = ("--root", store.root, *TRUST, "--encrypted", "--keyfile", tmp_path)
    done = tensorize(home, "serve", MODEL, SUFFIX, *options)
    assert 1 == done.returncode
    assert "is no file of 32 bytes" in done.stderr.replace("\n", " ")
    assert "chmod" not in done.stderr


@pytest.mark.parametrize("target", ["s3://bucket/x", "https://host/x"])
def test_fetch_takes_a_folder(store: LocalStore, home: Path, target: str) -> None:
    """A URL would be a folder of that name."""
    done = tensorize(home, "fetch", MODEL, SUFFIX, target, "--root", store.root, *TRUST)
    assert 2 == done.returncode
    assert "is a folder on this host" in done.stderr
