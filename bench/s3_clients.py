"""One transfer by one client, timed without its imports: python s3_clients.py CLIENT put|get FILE.

Prints seconds and the peak of anonymous memory above what the process had before, in bytes. BUCKET,
S3_ENDPOINT_URL, S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY are variables of the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEY = "bench.bin"
BUCKET = os.environ["BUCKET"]
ENDPOINT = os.environ["S3_ENDPOINT_URL"]
ID, SECRET = os.environ["S3_ACCESS_KEY_ID"], os.environ["S3_SECRET_ACCESS_KEY"]

Transfer = Callable[[], object]


def ours(verb: str, path: Path) -> Transfer:
    from tensorize_assets.core.s3 import resolve
    from tensorize_assets.core.store import open_store

    store = open_store(f"s3://{BUCKET}", resolve())
    store.stat("warm")
    if verb == "put":
        return lambda: store.put_file(KEY, path)
    if verb == "get":
        return lambda: store.get_file(KEY, path)
    return lambda: _drain(store.open_read(KEY))


def _drain(stream: Any) -> None:
    buffer = memoryview(bytearray(8 << 20))
    with stream:
        while stream.readinto(buffer):
            pass


def _boto3(verb: str, path: Path, config: Any) -> Transfer:
    import boto3

    client: Any = boto3.client(
        "s3",
        endpoint_url=ENDPOINT,
        aws_access_key_id=ID,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
    if verb == "put":
        return lambda: client.upload_file(str(path), BUCKET, KEY, Config=config)
    if verb == "get":
        return lambda: client.download_file(BUCKET, KEY, str(path), Config=config)
    return lambda: _read_all(client.get_object(Bucket=BUCKET, Key=KEY)["Body"])


def _read_all(body: Any) -> None:
    while body.read(8 << 20):
        pass


def boto3_default(verb: str, path: Path) -> Transfer:
    from boto3.s3.transfer import TransferConfig

    # Not "auto": with awscrt installed that is a client which ignores endpoint_url.
    return _boto3(verb, path, TransferConfig(preferred_transfer_client="classic"))


def boto3_tuned(verb: str, path: Path) -> Transfer:
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(
        multipart_chunksize=64 << 20, max_concurrency=8, preferred_transfer_client="classic"
    )
    return _boto3(verb, path, config)


def obstore(verb: str, path: Path) -> Transfer:
    import obstore as obs
    from obstore.store import S3Store

    store: Any = S3Store(
        BUCKET,
        endpoint=ENDPOINT,
        access_key_id=ID,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )
    if verb == "put":
        return lambda: obs.put(store, KEY, path, chunk_size=16 << 20, max_concurrency=8)

    def get() -> None:
        if verb == "stream":
            for _ in obs.get(store, KEY).stream(min_chunk_size=8 << 20):
                pass
            return
        with path.open("wb") as file:
            for chunk in obs.get(store, KEY).stream(min_chunk_size=8 << 20):
                file.write(chunk)

    return get


def awscrt(verb: str, path: Path) -> Transfer:
    from urllib.parse import urlsplit

    from awscrt import auth, http, io, s3

    host = urlsplit(ENDPOINT).netloc
    credentials = auth.AwsCredentialsProvider.new_static(ID, SECRET)
    client = s3.S3Client(
        bootstrap=io.ClientBootstrap.get_or_create_static_default(),
        region="us-east-1",
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        credential_provider=credentials,
        part_size=16 << 20,
        throughput_target_gbps=10,
    )
    headers = [("host", host)]
    if verb == "put":
        headers += [("content-length", str(path.stat().st_size))]
    request = http.HttpRequest(
        "PUT" if verb == "put" else "GET", f"/{BUCKET}/{KEY}", http.HttpHeaders(headers)
    )
    kind = s3.S3RequestType.PUT_OBJECT if verb == "put" else s3.S3RequestType.GET_OBJECT

    def run() -> None:
        options: dict[str, Any] = {"send_filepath" if verb == "put" else "recv_filepath": str(path)}
        client.make_request(type=kind, request=request, **options).finished_future.result(600)

    return run


def s5cmd(verb: str, path: Path) -> Transfer:
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    clients = os.environ.get("CLIENTS")
    command = [
        str(Path(clients, "bin") / "s5cmd") if clients else "s5cmd",
        *("--endpoint-url", ENDPOINT, "--log", "error", "cp"),
    ]
    remote = f"s3://{BUCKET}/{KEY}"
    command += [str(path), remote] if verb == "put" else [remote, str(path)]
    return lambda: subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


CLIENTS: dict[str, Callable[[str, Path], Transfer]] = {
    "ours": ours,
    "boto3 default": boto3_default,
    "boto3 tuned": boto3_tuned,
    "obstore": obstore,
    "awscrt": awscrt,
    "s5cmd": s5cmd,
}


def anonymous() -> int:
    """Bytes of this process that are of no file; anonymous mappings count as shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(fields[1]) * 1024 for fields in found)


def main(client: str, verb: str, path: Path) -> None:
    transfer = CLIENTS[client](verb, path)
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    transfer()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "memory": peak - before, "whole": peak}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
