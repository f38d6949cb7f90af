"""A real build, encrypted by the real worker: what the asset leaves, and what it never tells."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from chain_home import MODEL, Home

from tensorize_assets.core import jsonio, layout, sealing
from tensorize_assets.core.records import EncryptedRecord, ShardsRecord
from tensorize_assets.core.store import digest

UP_TO_ENCRYPTED = ["hf_snapshot", "tensorized_shards", "lora_adapters", "encrypted_shards"]


def test_a_complete_build_is_encrypted_in_seconds_and_no_key_is_told(built_home: Home) -> None:
    """`both` on a build that is years old: no engine, no model, no weights from the Hub.

    Neither the data key nor the private one is in the log, the metadata or any file of the home.
    """
    home = built_home
    private_file = home.folder / "keys" / "private.key"
    private = sealing.generate_private_key(private_file)
    recipients = {"anna": private.public_key}
    home.write_catalog({MODEL: {"v1": {"encryption": "both"}}}, recipients=recipients)
    run = home.run(selection=UP_TO_ENCRYPTED)
    assert {} == run.failures
    said = run.metadata("encrypted_shards")
    assert ("anna", 1) == (said["recipients"], said["files"])
    assert said["bytes_per_second"] > 0
    assert said["worker_seconds"] < 60
    record = stored(home, "encrypted_shards", EncryptedRecord)
    shards = stored(home, "tensorized_shards", ShardsRecord)
    assert record.directory is not None
    assert record.result is not None
    (file,) = record.result.files
    found = digest(home.store, layout.file_key(record.directory, file.path))
    assert (file.size, file.sha256) == (found.size, found.sha256)
    plain, hidden = shards.result.shards[0].tensors, record.result.tensors[0].tensors
    assert [t.model_copy(update={"sha256": ""}) for t in plain] == [
        t.model_copy(update={"sha256": ""}) for t in hidden
    ]
    with sealing.unseal(home.store, said["data_key"], private, trusted=home.trusted) as key:
        secrets = [key.reveal()]
    secrets.append(base64.b64decode(private_file.read_text().rpartition(":")[2]))
    text = "\n".join([*run.log, *map(str, run.result.all_events)])
    for secret in secrets:
        forms = (secret.hex(), base64.b64encode(secret).decode(), repr(secret))
        assert not [form for form in forms if form in text]
        for path in files(home.folder):
            if path != private_file:
                data = path.read_bytes()
                assert not [form for form in (secret, *map(str.encode, forms)) if form in data]


def stored(home: Home, asset: str, kind: type[Any]) -> Any:
    found = home.store.get_bytes(layout.record_key(asset, MODEL, "v1"))
    return jsonio.load_record(kind, found.data, asset)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
