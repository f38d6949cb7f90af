"""Ask the resolver that vLLM finds for adapters; what came of it goes to CASES.

    python resolver_cases.py BUILDS URL OUT CASES

BUILDS is what real_builds.py left, and URL leads to it.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lora_cases import KEY
from safetensors.torch import load_file
from serving_files import serving
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.plugins import load_general_plugins

from tensorize_assets.core.s3 import ACCESS_VARIABLE, S3Access, S3Credentials, S3Settings
from tensorize_assets.core.serving import VARIABLE
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.vllm_plugin import adapters, lora_resolver

load_general_plugins()
RESOLVER = LoRAResolverRegistry.get_resolver("tensorize_assets")
UNPACK = adapters.unpack


def ask(base: Path | str, name: str) -> LoRARequest | None:
    return asyncio.run(RESOLVER.resolve_lora(str(base), name))


def resolved(base: Path | str, name: str, source: Path) -> dict[str, Any]:
    """What the request for an adapter leads to, beside the adapter's own files."""
    request = ask(base, name)
    assert request
    folder = Path(request.lora_path)
    tensors = folder / "adapter_model.safetensors"
    ours, theirs = load_file(tensors), load_file(source / name / tensors.name)
    config = "adapter_config.json"
    return {
        "name": request.lora_name,
        "files": sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")),
        "same tensors": ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours),
        "same config": json.loads((folder / config).read_text())
        == json.loads((source / name / config).read_text()),
        "modes": [
            oct(path.stat().st_mode & 0o777) for path in (folder.parents[1], folder, tensors)
        ],
        "in memory": folder.is_relative_to("/dev/shm"),
        "again": ask(base, name) == request,
        "folder": str(folder),
    }


def refused(base: Path | str, name: str) -> dict[str, Any]:
    try:
        found = ask(base, name)
    except Exception as error:  # noqa: BLE001 - what it is shows
        return {"message": str(error), "status": getattr(error, "http_status", type(error))}
    return {"message": f"resolved: {found}", "status": 200}


def serve(file: Path | None) -> None:
    """As if this process had been started by `tensorize serve`, or by hand."""
    if file is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = str(file)
    lora_resolver._build.cache_clear()


async def at_once(base: Path) -> dict[str, Any]:
    """Two ask for one adapter while it is held up, and one of them goes."""
    calls: list[str] = []
    go_on = threading.Event()

    def held_up(*arguments: Any) -> Path:
        calls.append(arguments[2].name)
        # Until the loop, which must not wait for this, lets it.
        assert go_on.wait(60)
        return UNPACK(*arguments)

    adapters.unpack = held_up
    try:
        asking = [asyncio.create_task(RESOLVER.resolve_lora(str(base), "late")) for _ in "123"]
        while not calls:
            await asyncio.sleep(0.01)
        asking[0].cancel()
        go_on.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
    finally:
        adapters.unpack = UNPACK
    return {"calls": calls, "results": [type(result).__name__ for result in results]}


def from_s3(builds: Path, folder: Path, keyfile: Path, out: Path) -> dict[str, Any]:
    with LocalS3(out / "server") as server:
        server.create_bucket("builds")
        for path in (builds / "root").rglob("*"):
            if path.is_file():
                key = path.relative_to(builds / "root").as_posix()
                server.client().upload_file(str(path), "builds", f"some/{key}")
        settings = S3Settings(endpoint_url=server.endpoint, region=REGION, max_attempts=2)
        access = S3Access(settings, S3Credentials(server.access_key, server.secret_key))
        access.write(out / "access.json")
        os.environ[ACCESS_VARIABLE] = str(out / "access.json")
        serving(folder, "s3://builds/some", out / "s3", keyfile, settings)
        serve(out / "s3" / "serving.json")
        found: dict[str, Any] = {"s3": resolved(folder, "pirate", builds / "adapters")}
        server.kill()
        found["s3 down"] = refused(folder, "late")
        found["s3 down, had before"] = resolved(folder, "pirate", builds / "adapters")
        server.restart()
        found["s3 up"] = resolved(folder, "late", builds / "adapters")
    del os.environ[ACCESS_VARIABLE]
    return found


def fresh(case: Callable[..., Any], *arguments: object) -> Any:
    """With nothing fetched before."""
    RESOLVER._fetched.clear()
    lora_resolver._place.cache_clear()
    return case(*arguments)


def main(builds: Path, url: str, out: Path, cases: Path) -> None:
    root, source = builds / "root", builds / "adapters"
    plain, secret = root / "vllm/tiny/plain", root / "vllm/tiny/secret"
    foreign = out / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "theirs"}')
    keyfile = out / "key"
    keyfile.write_bytes(KEY)
    found: dict[str, Any] = {
        "by hand": resolved(plain, "pirate", source),
        "another": resolved(plain, "poet", source),
        "unknown": ask(plain, "nobody"),
        "no artifact": ask(builds, "pirate"),
        "another tool's": ask(foreign, "pirate"),
        "of the hub": ask("facebook/opt-125m", "pirate"),
        "cut": refused(plain, "cut"),
        "other": refused(plain, "other"),
        "by hand, encrypted": refused(secret, "pirate"),
        "at once": fresh(lambda: asyncio.run(at_once(plain))),
    }
    serving(secret, str(root), out / "disk", keyfile)
    serve(out / "disk" / "serving.json")
    found["served"] = fresh(resolved, "whatever", "pirate", source)
    found["served, unknown"] = ask("whatever", "nobody")
    serving(plain, f"{url}/root", out / "web")
    serve(out / "web" / "serving.json")
    found["from the web"] = fresh(resolved, plain, "pirate", source)
    found |= fresh(from_s3, builds, secret, keyfile, out)
    changed = out / "changed" / "model"
    changed.mkdir(parents=True)
    (changed / "manifest.json").write_bytes((plain / "manifest.json").read_bytes())
    serving(changed, str(root), out / "changed")
    (changed / "manifest.json").write_bytes((secret / "manifest.json").read_bytes())
    serve(out / "changed" / "serving.json")
    found["another manifest"] = fresh(refused, changed, "pirate")
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
