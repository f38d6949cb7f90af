"""The adapters of a build, as the resolver hands them to vLLM; vLLM itself has none of them yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "resolver_cases.py"
WHOLE = ["by hand", "another", "served", "from the web", "s3", "s3 up"]


@pytest.fixture(scope="session")
def cases(
    builds: Path,
    web: Any,
    tmp_path_factory: pytest.TempPathFactory,
    run_script: Callable[..., None],
) -> dict[str, Any]:
    """What came of each case of resolver_cases.py."""
    out = tmp_path_factory.mktemp("resolver")
    run_script(SCRIPT, builds, web(builds), out, out / "cases.json", TMPDIR=str(out))
    return json.loads((out / "cases.json").read_text())


@pytest.mark.parametrize("name", WHOLE)
def test_an_adapter_is_had_as_peft_had_saved_it(cases: dict[str, Any], name: str) -> None:
    """From a folder, a web server and S3, in the clear and encrypted; then vLLM's own path goes."""
    case = cases[name]
    assert ["adapter_config.json", "adapter_model.safetensors"] == case["files"]
    assert case["same tensors"]
    assert case["same config"]


@pytest.mark.parametrize("name", WHOLE)
def test_no_other_user_reads_it_and_decrypted_it_is_on_no_disk(
    cases: dict[str, Any], name: str
) -> None:
    """A disk keeps what a killed server left."""
    case = cases[name]
    assert ["0o700", "0o700", "0o600"] == case["modes"]
    assert (name in ("served", "s3", "s3 up")) == case["in memory"]


def test_it_is_kept_by_what_it_holds(cases: dict[str, Any]) -> None:
    """Another build, with other adapters of these names, would find none of them here."""
    assert all(cases[name]["again"] for name in WHOLE)
    names = {name: Path(cases[name]["folder"]).name for name in WHOLE}
    assert names["by hand"] == names["from the web"]
    assert names["by hand"] != names["served"]
    assert names["by hand"] != names["another"]


NOBODYS = ["unknown", "served, unknown", "no artifact", "another tool's", "of the hub"]


@pytest.mark.parametrize("name", NOBODYS)
def test_what_the_build_has_not_is_left_to_others(cases: dict[str, Any], name: str) -> None:
    """vLLM asks the next resolver, and answers 404 where there is none."""
    assert cases[name] is None


@pytest.mark.parametrize(
    ("name", "file"), [("cut", "adapter_model.tensors"), ("other", "adapter_config.json")]
)
def test_what_is_not_the_manifests_is_not_loaded(
    cases: dict[str, Any], name: str, file: str
) -> None:
    """Neither the tensors nor the config, of which the scaling would be another."""
    case = cases[name]
    assert 500 == case["status"]
    assert case["message"].startswith(f"adapter {name} was not loaded: cannot copy ")
    assert f"adapters/{name}/{file}: the stream is not what belongs at " in case["message"]


def test_a_store_that_is_down_is_said_and_asked_again(cases: dict[str, Any]) -> None:
    """What was fetched before goes on; what was not is had as soon as the store is there."""
    case = cases["s3 down"]
    assert 503 == case["status"]
    assert case["message"].startswith("adapter late was not loaded: ")
    assert "s3://builds/some/vllm/tiny/secret/adapters/late/adapter_config.json" in case["message"]
    assert cases["s3"] == cases["s3 down, had before"]
    assert cases["s3 up"]["same tensors"]


def test_many_who_ask_at_once_wait_for_one_fetch(cases: dict[str, Any]) -> None:
    """In a thread, so that the server answers others; also when the first of them goes."""
    case = cases["at once"]
    assert ["late"] == case["calls"]
    assert ["CancelledError", "LoRARequest", "LoRARequest"] == case["results"]


def test_without_serve_there_is_no_key(cases: dict[str, Any]) -> None:
    """A server that was started by hand has it among vLLM's arguments, where no resolver looks."""
    case = cases["by hand, encrypted"]
    assert 500 == case["status"]
    assert "is encrypted, and only `tensorize serve` gives the key" in case["message"]


def test_a_manifest_that_was_exchanged_after_the_start_is_not_believed(
    cases: dict[str, Any],
) -> None:
    """It was verified when the server was started, and its signature is not looked at again."""
    case = cases["another manifest"]
    assert 500 == case["status"]
    assert "is not the manifest of build" in case["message"]
