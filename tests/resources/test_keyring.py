"""Whom a home believes, with which keys it signs and opens, and what it keeps for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorize_assets.core import sealing, signing
from tensorize_assets.core.errors import CatalogError, SignatureError
from tensorize_assets.definitions import resources
from tensorize_assets.resources.keyring import KeyringResource

OTHER = signing.SecretKey(bytes(range(32))).public_key
PRIVATE = bytes(range(32))


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (signing.KEY_VARIABLE, sealing.PRIVATE_KEY_VARIABLE, "TENSORIZE_CATALOG"):
        monkeypatch.delenv(name, raising=False)


def keyring(home: Path, *trust: str) -> KeyringResource:
    """The keyring of a home whose catalog trusts these keys; no list without any."""
    listed = f"trust: [{', '.join(trust)}]\n" if trust else ""
    (home / "models.yaml").write_text(f"root: root\n{listed}models: {{}}\n")
    found = resources(home)["tensorize_keyring"]
    assert isinstance(found, KeyringResource)
    return found


def test_without_a_list_the_own_key_alone_is_believed(tmp_path: Path) -> None:
    """Made at first use; whoever sets up nothing has a home that trusts itself and nobody else."""
    ring = keyring(tmp_path)
    key = ring.key()
    assert (key.public_key,) == ring.trusted() == keyring(tmp_path).trusted()
    assert 0o600 == (tmp_path / "keys" / "signing.key").stat().st_mode & 0o777


def test_the_catalogs_list_is_what_counts(tmp_path: Path) -> None:
    """In its order, and without the own key unless it is on it."""
    own = keyring(tmp_path).key().public_key
    assert (OTHER, own) == keyring(tmp_path, OTHER, own).trusted()
    assert own == keyring(tmp_path, OTHER, own).key().public_key
    assert (OTHER,) == keyring(tmp_path, OTHER).trusted()


def test_a_key_that_nobody_would_believe_signs_nothing(tmp_path: Path) -> None:
    """Said before hours of building, with the line that the catalog lacks."""
    own = keyring(tmp_path).key()
    with pytest.raises(SignatureError, match="nobody would believe") as caught:
        keyring(tmp_path, OTHER).key()
    assert own.public_key in str(caught.value)
    assert "`trust` in the catalog" in str(caught.value)


def test_a_wrong_list_is_refused(tmp_path: Path) -> None:
    """Half a list must not be a shorter list."""
    with pytest.raises(CatalogError, match="not a public signing key"):
        keyring(tmp_path, OTHER, "hello").trusted()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Whoever read it can sign in this home's name, and open its builds."""
    ring = keyring(tmp_path)
    ring.key()
    (tmp_path / "keys" / "signing.key").chmod(0o644)
    with pytest.raises(SignatureError, match="chmod 600"):
        ring.key()
    sealing.generate_private_key(tmp_path / "keys" / "private.key")
    (tmp_path / "keys" / "private.key").chmod(0o640)
    with pytest.raises(sealing.SealingError, match="chmod 600"):
        ring.private()


def test_the_private_key_is_the_environments_or_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is made: builds that are sealed to a key nobody knows of could not be opened."""
    ring = keyring(tmp_path)
    with pytest.raises(sealing.SealingError, match=r"private\.key"):
        ring.private()
    assert not (tmp_path / "keys" / "private.key").exists()
    made = sealing.generate_private_key(tmp_path / "keys" / "private.key")
    assert made.public_key == ring.private().public_key
    monkeypatch.setenv(sealing.PRIVATE_KEY_VARIABLE, PRIVATE.hex())
    assert sealing.PrivateKey(PRIVATE).public_key == ring.private().public_key


def test_what_was_seen_is_kept_in_the_home(tmp_path: Path) -> None:
    """Not in the store, where whoever puts back a channel could put back this too."""
    assert tmp_path / "seen" == keyring(tmp_path).seen()


def test_its_configuration_holds_no_key(tmp_path: Path) -> None:
    """Dagster shows a resource's configuration to everybody who can open the UI."""
    ring = keyring(tmp_path)
    ring.key()
    secret = (tmp_path / "keys" / "signing.key").read_text().strip()
    assert secret not in f"{ring!r} {ring} {ring.model_dump()}"
