"""Data keys for workers, and the worker that encrypts files of one directory into another."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import dagster as dg

from tensorize_assets.assets.earlier import Earlier
from tensorize_assets.assets.target import Target
from tensorize_assets.core import sealing
from tensorize_assets.core.records import EncryptedBuild
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import (
    DATA_KEY,
    OLD_DATA_KEY,
    EncryptRequest,
    EncryptResult,
    TensorFile,
)
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.local import Launcher, LaunchReport
from tensorize_assets.resources.store import StoreResource


@contextmanager
def data_key(
    store: Store, keyring: KeyringResource, key_id: str | None
) -> Generator[dict[str, bytes]]:
    """The secrets of a worker that encrypts or decrypts with this data key; none without one.

    Raises as `sealing.unseal`.
    """
    if key_id is None:
        yield {}
        return
    private, trusted = keyring.private(), keyring.trusted()
    with sealing.unseal(store, key_id, private, trusted=trusted) as key:
        yield {DATA_KEY: key.reveal()}


def encrypt(
    context: dg.AssetExecutionContext,
    target: Target,
    build: EncryptedBuild,
    files: Sequence[TensorFile],
    *,
    source: str,
    store: Store,
    artifact_store: StoreResource,
    keyring: KeyringResource,
    launcher: Launcher,
    old_key: sealing.DataKey | None = None,
) -> LaunchReport[EncryptResult]:
    """Have a worker encrypt `files` of the directory `source` into that of `build`.

    With `old_key` they are encrypted already. Raises as `Launcher.run` and
    `sealing.unseal`.
    """
    handed_over = artifact_store.hand_over(target.root)
    with sealing.unseal(
        store, build.key_id, keyring.private(), trusted=keyring.trusted()
    ) as data_key:
        secrets = {**handed_over.secrets, DATA_KEY: data_key.reveal()}
        if old_key is not None:
            secrets[OLD_DATA_KEY] = old_key.reveal()
        return launcher.run(
            context,
            EncryptRequest(
                model=target.model,
                suffix=target.suffix,
                root=target.root,
                source=source,
                directory=build.directory,
                files=tuple(files),
                scratch_dir=artifact_store.scratch_for(target.root),
                s3=handed_over.settings,
            ),
            EncryptResult,
            secrets,
            resources=target.profile.resources,
        )


def encrypt_anew(
    context: dg.AssetExecutionContext,
    target: Target,
    build: EncryptedBuild,
    files: Sequence[TensorFile],
    *,
    old: Earlier,
    store: Store,
    artifact_store: StoreResource,
    keyring: KeyringResource,
    launcher: Launcher,
) -> tuple[EncryptResult, dict[str, int | float | str]]:
    """Have a worker give files of `old` the data key of `build`; also what the UI shows of it."""
    context.log.info(
        f"{store.uri(old.directory)} is complete under data key {old.key_id}: its files are "
        f"encrypted anew with {build.key_id}, and not made again"
    )
    with sealing.unseal(store, old.key_id, keyring.private(), trusted=keyring.trusted()) as old_key:
        report = encrypt(
            context,
            target,
            build,
            files,
            source=old.directory,
            store=store,
            artifact_store=artifact_store,
            keyring=keyring,
            launcher=launcher,
            old_key=old_key,
        )
    return report.result, {"encrypted_anew_from": old.directory, **worker_metadata(report)}


def worker_metadata(report: LaunchReport[EncryptResult]) -> dict[str, int | float | str]:
    """What the encrypting worker took, and its rate."""
    seconds = report.result.seconds["encrypt"]
    size = sum(file.size for file in report.result.files)
    return {
        "worker_seconds": report.seconds,
        "worker_peak_memory": report.peak_memory_bytes,
        "seconds_encrypt": seconds,
        "bytes_per_second": round(size / max(seconds, 1e-3)),
    }
