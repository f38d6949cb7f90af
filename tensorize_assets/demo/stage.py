"""What the demo runs on: a Dagster home, a local Hub with the model and its adapter, and S3."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

from tensorize_assets.core.sealing import (
    PRIVATE_KEY_VARIABLE,
    PrivateKey,
    generate_private_key,
    load_private_key,
)
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.models import ADAPTER, MODEL, make_adapter, make_snapshot
from tensorize_assets.demo.s3_server import LocalS3

_BUCKET = "tensorize-demo"

# The name of its Dagster home, and the root that its catalog names.
_ROOTS = {
    "s3": ("dagster_home", f"s3://{_BUCKET}/models"),
    "disk": ("dagster_home_disk", "../artifacts"),
}

# The user's own, which would come before the demo's server or be mixed with its keys.
_NOT_OURS = (
    "S3_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "HF_TOKEN",
    "TENSORIZE_CATALOG",
    PRIVATE_KEY_VARIABLE,
)

Say = Callable[[str], None]
Root = Literal["s3", "disk"]


class Stage(NamedTuple):
    """The demo's Dagster home, and the Hub it reads."""

    home: Path
    hub: LocalHub


@contextmanager
def stage(directory: Path, root: Root, say: Say, hub_port: int = 0) -> Generator[Stage]:
    """Run the Hub and, where there is one to run, the S3 server; this process's environment leads
    to them meanwhile.

    Raises:
        TensorizeAssetsError: the model or its adapter cannot be had, or a server does not start.
    """
    home = _home(directory, root)
    snapshot = make_snapshot(directory, say)
    adapter = make_adapter(directory, snapshot, say)
    with (
        LocalHub(port=hub_port) as hub,
        _store(directory, root, say) as store,
        _environment({"HF_ENDPOINT": hub.endpoint, **store}),
    ):
        for repo, folder in ((MODEL, snapshot), (ADAPTER, adapter)):
            hub.add_repo(repo)
            hub.commit(repo, folder_files(folder))
        say(f"a local Hub serves {MODEL} and {ADAPTER} at {hub.endpoint}")
        yield Stage(home, hub)


def _home(directory: Path, root: Root) -> Path:
    name, where = _ROOTS[root]
    home = directory / name
    home.mkdir(parents=True, exist_ok=True)
    ours = files("tensorize_assets.demo")
    (home / "dagster.yaml").write_text(ours.joinpath("dagster.yaml").read_text())
    models = ours.joinpath("models.yaml").read_text()
    recipients = f"recipients:\n  demo: {_private_key(home).public_key}\n"
    (home / "models.yaml").write_text(f"root: {where}\n{recipients}\n{models}")
    return home


def _private_key(home: Path) -> PrivateKey:
    """The key that opens the demo's encrypted builds; made once."""
    path = home / "keys" / "private.key"
    return load_private_key(path) if path.exists() else generate_private_key(path)


@contextmanager
def _store(directory: Path, root: Root, say: Say) -> Generator[dict[str, str]]:
    """Run the S3 server where there is one to run; give the variables that lead to it."""
    if root == "disk":
        yield {}
        return
    with LocalS3(directory / "s3") as server:
        server.create_bucket(_BUCKET)
        say(f"a local S3 server (SeaweedFS) holds {_ROOTS[root][1]} at {server.endpoint}")
        yield {
            "S3_ENDPOINT_URL": server.endpoint,
            "S3_ACCESS_KEY_ID": server.access_key,
            "S3_SECRET_ACCESS_KEY": server.secret_key,
        }


@contextmanager
def _environment(variables: dict[str, str]) -> Generator[None]:
    """Set variables of this process, and only for as long as the demo runs."""
    before = dict(os.environ)
    for name in _NOT_OURS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    # The ways to the Hub and to S3 are not through a proxy.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (before.get(name), "127.0.0.1")))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
