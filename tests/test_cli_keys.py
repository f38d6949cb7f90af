"""`tensorize keys …`, as a process: exit codes, files, and what is said and not said."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core import sealing, signing
from tensorize_assets.core.local_store import LocalStore

VARIABLES = (sealing.PRIVATE_KEY_VARIABLE, signing.KEY_VARIABLE, "TENSORIZE_CATALOG")


def keys(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `home`, with no keys in the environment but those given."""
    inherited = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", "keys", *arguments],
        env={**inherited, "NO_COLOR": "1", "DAGSTER_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


class Place:
    """A home with a private key and a catalog, and a data key sealed to it in the root."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "models.yaml").write_text(
            "root: root\nmodels: {org/tiny: {profiles: {v1: {reload_device: cpu}}}}\n"
        )
        self.private_file = home / "keys" / "private.key"
        self.private = sealing.generate_private_key(self.private_file)
        self.signing = signing.load_or_create_signing_key(home / "keys" / "signing.key")
        self.store = LocalStore(home / "root")
        recipients = {"anna": self.private.public_key}
        made = sealing.new_data_key(self.store, recipients, self.signing)
        self.key_id = made.key_id
        with made.data_key as key:
            self.key = key.reveal()

    @property
    def secrets(self) -> tuple[str, ...]:
        private = self.private_file.read_text().rpartition(":")[2].strip()
        signing_key = (self.home / "keys" / "signing.key").read_text().strip()
        return (private, signing_key, self.key.hex(), base64.b64encode(self.key).decode())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_person_joins_opens_and_leaves(place: Place, tmp_path: Path) -> None:
    """The whole life of a recipient, at the terminal, and nothing secret on it."""
    said: list[subprocess.CompletedProcess[str]] = []

    def run(*arguments: str, **environment: str) -> dict[str, Any]:
        said.append(keys(place.home, *arguments, "--json", **environment))
        return document(said[-1])

    berts = tmp_path / "bert" / "key"
    made = run("generate", str(berts))
    assert {"private_key_file": str(berts), "public_key": made["public_key"]} == made
    assert 0o600 == stat.S_IMODE(berts.stat().st_mode)

    record = run("reseal", place.key_id, "--add", f"bert={made['public_key']}")
    expected = {"anna": place.private.public_key, "bert": made["public_key"]}
    assert (expected, []) == (record["recipients"], record["former"])

    keyfile = tmp_path / "keyfile"
    berts_text = berts.read_text()
    opened = run("unseal", place.key_id, str(keyfile), "--private-key", str(berts))
    assert {"key_id": place.key_id, "keyfile": str(keyfile)} == opened
    assert place.key == keyfile.read_bytes()
    assert 0o600 == stat.S_IMODE(keyfile.stat().st_mode)
    keyfile.unlink()
    run("unseal", place.key_id, str(keyfile), **{sealing.PRIVATE_KEY_VARIABLE: berts_text})
    assert place.key == keyfile.read_bytes()

    record = run("reseal", place.key_id, "--remove", "bert")
    assert {"anna": place.private.public_key} == record["recipients"]
    assert ["bert"] == [one["name"] for one in record["former"]]
    assert "rotate" in record["changes"][-1]["note"]
    assert {"keys": [record], "problems": []} == run("list")

    for done in said:
        shown = f"{done.args} {done.stdout} {done.stderr}"
        secrets = (*place.secrets, berts_text.rpartition(":")[2].strip())
        assert not any(secret in shown for secret in secrets)


def test_text_says_what_was_done_and_that_a_removed_one_may_have_the_key(place: Place) -> None:
    """People read this, and must not take a removal for a rotation."""
    other = sealing.generate_private_key(place.home / "other").public_key
    done = keys(place.home, "reseal", place.key_id, "--add", f"[b]={other}")
    assert f"data key {place.key_id} is sealed to [b], anna\n" == done.stdout
    done = keys(place.home, "reseal", place.key_id, "--remove", "[b]")
    assert "who was removed may have kept the data key: rotate it\n" == done.stderr
    done = keys(place.home, "list", place.key_id)
    lines = done.stdout.splitlines()
    assert f"anna: {place.private.public_key}" == lines[0]
    assert ["+anna", "+[b]", "-[b] (who was removed may have kept the data key: rotate it)"] == [
        line.partition("UTC: ")[2] for line in lines[1:]
    ]
    done = keys(place.home, "list")
    assert place.key_id in done.stdout


def test_a_key_file_is_never_overwritten(place: Place) -> None:
    """The one command that could lose every build at once."""
    before = place.private_file.read_text()
    done = keys(place.home, "generate")
    assert 1 == done.returncode
    assert f"error: cannot make the private key {place.private_file}" in done.stderr
    assert before == place.private_file.read_text()


def test_an_open_private_key_is_refused(place: Place) -> None:
    """Exit code 1 and the command that closes it; no keyfile."""
    place.private_file.chmod(0o644)
    keyfile = place.home / "keyfile"
    done = keys(place.home, "unseal", place.key_id, str(keyfile))
    assert 1 == done.returncode
    assert f"chmod 600 {place.private_file}" in done.stderr
    assert not keyfile.exists()


def test_without_a_private_key_it_says_who_can_open(place: Place) -> None:
    """A lost key: whom to ask is what one needs to know."""
    place.private_file.unlink()
    done = keys(place.home, "unseal", place.key_id, str(place.home / "keyfile"))
    assert 1 == done.returncode
    assert done.stderr.rstrip().endswith(": anna")
    sealing.generate_private_key(place.private_file)
    done = keys(place.home, "unseal", place.key_id, str(place.home / "keyfile"))
    assert 1 == done.returncode
    assert "does not open data key" in done.stderr
    assert done.stderr.rstrip().endswith(": anna")


def test_a_host_without_a_signing_key_is_told_whom_to_trust(place: Place, tmp_path: Path) -> None:
    """It must neither believe anyone nor make a key that has signed nothing."""
    host = tmp_path / "host"
    keyfile = tmp_path / "keyfile"
    arguments = ("unseal", place.key_id, str(keyfile), "--root", str(place.home / "root"))
    private = ("--private-key", str(place.private_file))
    done = keys(host, *arguments, *private)
    assert 2 == done.returncode
    assert "give --public-key" in done.stderr
    stranger = signing.generate_signing_key().public_key
    done = keys(host, *arguments, *private, "--public-key", stranger)
    assert 1 == done.returncode
    assert "not trusted here" in done.stderr
    done = keys(host, *arguments, *private, "--public-key", place.signing.public_key)
    assert 0 == done.returncode, done.stderr
    assert place.key == keyfile.read_bytes()
    assert not host.exists()


def test_a_damaged_record_does_not_hide_the_others(place: Place) -> None:
    """Exit code 1, and still the list that one came for."""
    place.store.put_bytes("keys/0000000000000000.json", b"{}\n")
    done = keys(place.home, "list", "--json")
    assert 1 == done.returncode
    found = json.loads(done.stdout)
    assert [place.key_id] == [key["key_id"] for key in found["keys"]]
    assert ["is not signed" in problem for problem in found["problems"]] == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name whom to add or remove"),
        (("--add", "bert"), "NAME=PUBLIC_KEY"),
        (("--add", "b=x", "--add", "b=y"), "each name once"),
    ],
)
def test_what_is_asked_wrongly_exits_with_2(
    place: Place, arguments: tuple[str, ...], message: str
) -> None:
    """Scripts tell a wrong call from a failure by it."""
    done = keys(place.home, "reseal", place.key_id, *arguments)
    assert 2 == done.returncode
    assert message in done.stderr


def test_public_prints_the_public_keys_and_makes_none(place: Place, tmp_path: Path) -> None:
    """What another home writes into its catalog, without a look into a file of secrets."""
    found = document(keys(place.home, "public", "--json"))
    expected = {
        "signing_key": place.signing.public_key,
        "signing_key_id": place.signing.key_id,
        "public_key": place.private.public_key,
    }
    assert expected == found
    text = keys(place.home, "public")
    assert place.signing.public_key in text.stdout
    assert place.private.public_key in text.stdout
    assert not any(secret in text.stdout + text.stderr for secret in place.secrets)

    place.private_file.unlink()
    assert document(keys(place.home, "public", "--json"))["public_key"] is None
    nowhere = tmp_path / "nowhere"
    done = keys(nowhere, "public")
    assert 2 == done.returncode
    assert f"no signing key at {nowhere}/keys/signing.key" in done.stderr
    assert not nowhere.exists()
    seed = bytes(range(32))
    done = keys(nowhere, "public", **{signing.KEY_VARIABLE: seed.hex()})
    assert signing.SecretKey(seed).public_key in done.stdout


def test_the_catalogs_trust_list_counts_for_keys_too(place: Place) -> None:
    """A home may share its root with another one that builds."""
    other = signing.generate_signing_key().public_key
    catalog = place.home / "models.yaml"
    catalog.write_text(f"trust: [{other}]\n{catalog.read_text()}")
    done = keys(place.home, "list")
    assert 1 == done.returncode
    assert "not trusted here" in done.stderr
    done = keys(place.home, "reseal", place.key_id, "--remove", "anna")
    assert 1 == done.returncode
    catalog.write_text(catalog.read_text().replace(other, place.signing.public_key))
    (place.home / "keys" / "signing.key").unlink()
    assert 0 == keys(place.home, "list").returncode
    bert = sealing.PrivateKey(bytes(range(32))).public_key
    done = keys(place.home, "reseal", place.key_id, "--add", f"bert={bert}")
    assert 2 == done.returncode
    assert "there is no signing key" in done.stderr
    assert not (place.home / "keys" / "signing.key").exists()
