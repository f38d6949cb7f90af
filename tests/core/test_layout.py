from __future__ import annotations

import pytest

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreError

SHA = "a" * 64
COMMIT = "b" * 40


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (
            "vllm/facebook/opt-125m/v1-0123456789ab",
            layout.artifact_dir("facebook/opt-125m", "v1", "0123456789ab"),
        ),
        ("vllm/gpt2/v1-0123456789ab", layout.artifact_dir("gpt2", "v1", "0123456789ab")),
        ("vllm/facebook/opt-125m/my-run", layout.oneshot_dir("facebook/opt-125m", "my-run")),
        ("vllm/facebook/opt-125m/v1.json", layout.channel_key("facebook/opt-125m", "v1")),
        ("vllm/gpt2/v1/manifest.json", layout.manifest_key("vllm/gpt2/v1")),
        (
            "vllm/gpt2/v1/1_Pooling/config.json",
            layout.file_key("vllm/gpt2/v1", "1_Pooling/config.json"),
        ),
        ("manifest.json", layout.manifest_key("")),
        (f"evidence/{SHA}/cuda-0.31.0.json", layout.evidence_key(SHA, "cuda", "0.31.0")),
        (
            f"snapshots/facebook/opt-125m/{COMMIT}/snapshot.json",
            layout.snapshot_key("facebook/opt-125m", COMMIT),
        ),
        (f"snapshots/gpt2/files/{SHA}", layout.snapshot_file_key("gpt2", SHA)),
        ("pins/gpt2/v1/refs%2Fpr%2F1.json", layout.pin_key("gpt2", "v1", "refs/pr/1")),
        (
            f"references/{COMMIT}/bfloat16-tp3-cpu-0.31.0+cpu-ff00.json",
            layout.reference_key(COMMIT, "bfloat16", 3, "cpu", "0.31.0+cpu", "ff00"),
        ),
        (
            "records/artifact/facebook/opt-125m/v1.json",
            layout.record_key("artifact", "facebook/opt-125m", "v1"),
        ),
        ("model.tensors", layout.shard_name(0, 1)),
        ("model-rank-002.tensors", layout.shard_name(2, 3)),
        ("model.tensors", layout.tensorizer_uri_name(1)),
        ("model-rank-%03d.tensors", layout.tensorizer_uri_name(3)),
    ],
)
def test_paths_are_spelled_as_vllm_and_the_design_spell_them(expected: str, actual: str) -> None:
    """vLLM finds shards by name, and a published path can never be renamed."""
    assert expected == actual


BAD_PARTS = ["", ".", "..", "a/../b", "/a", "a\\b", "a\nb", "a\x00b", "a\x7fb", "\ud800", ".tmp-x"]


@pytest.mark.parametrize("bad", [*BAD_PARTS, "x" * 256])
def test_a_suffix_that_escapes_is_refused_everywhere(bad: str) -> None:
    """A suffix comes from a file that people edit, and ends in paths that are written to."""
    for build in (
        lambda: layout.artifact_dir("gpt2", bad, "0123456789ab"),
        lambda: layout.oneshot_dir("gpt2", bad),
        lambda: layout.channel_key("gpt2", bad),
        lambda: layout.pin_key("gpt2", bad, "main"),
        lambda: layout.record_key("artifact", "gpt2", bad),
    ):
        with pytest.raises(StoreError, match="cannot be part of a path"):
            build()


@pytest.mark.parametrize("bad", [*BAD_PARTS, "a/b/c", "org/", "../gpt2", "org/.."])
def test_a_model_that_escapes_is_refused(bad: str) -> None:
    """A model id may come from a command line."""
    with pytest.raises(StoreError, match="cannot be part of a path"):
        layout.model_folder(bad)


@pytest.mark.parametrize("bad", [*BAD_PARTS, "a//b", "a/", "/etc/passwd", "../x", "a/./b"])
def test_a_key_that_escapes_is_refused(bad: str) -> None:
    """Keys also come out of documents that others wrote."""
    with pytest.raises(StoreError, match="cannot be part of a path"):
        layout.check_key(bad)


def test_a_suffix_cannot_stand_where_a_channel_does() -> None:
    """A one-shot folder `v1.json` would keep the suffix `v1` from ever being published."""
    with pytest.raises(StoreError, match=r"ends in \.json"):
        layout.oneshot_dir("gpt2", "v1.json")


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (-1, 1), (0, 0)])
def test_a_rank_outside_its_group_has_no_file(rank: int, size: int) -> None:
    """A wrong rank must not silently name another rank's file."""
    with pytest.raises(StoreError, match=f"rank {rank} does not exist"):
        layout.shard_name(rank, size)


@pytest.mark.parametrize(
    ("expected", "directory"),
    [
        (("v1", "0123456789ab", False), "vllm/org/m/v1-0123456789ab"),
        (("v1-tp2", "0123456789ab", True), "vllm/org/m/v1-tp2-0123456789ab-encrypted/"),
        (None, "vllm/org/m/v1"),
        (None, "vllm/org/m/v1-0123456789AB"),
        (None, "vllm/org/m/-0123456789ab"),
        # The random name of a one-shot build.
        (None, "vllm/org/m/0f8fad5bd9cb469fa16570867728950e"),
    ],
)
def test_a_directorys_name_tells_its_build(expected: object, directory: str) -> None:
    """Retention takes directories for builds by it, before their manifests are read."""
    assert expected == layout.build_name(directory)


@pytest.mark.parametrize(
    ("expected", "key"),
    [
        (("org/m", "v1"), "vllm/org/m/v1.json"),
        (("m", "v1"), "vllm/m/v1.json"),
        (None, "vllm/v1.json"),
        (None, "vllm/org/m/v1/model.tensors"),
        (None, "keys/org/m/v1.json"),
        (None, "vllm/a/b/c/d.json"),
    ],
)
def test_the_key_of_a_channel_tells_its_pair(expected: object, key: str) -> None:
    """It is the reverse of `channel_key`, for keys that a listing shows."""
    assert expected == layout.pair_of(key, layout.ARTIFACTS_FOLDER)


def test_the_key_of_an_answer_or_a_snapshot_tells_its_commit() -> None:
    """By it what no build is made of any more is found."""
    commit = "a" * 40
    assert commit == layout.commit_in(
        layout.reference_key(commit, "auto", 1, "cpu", "0.31.0", "ff00")
    )
    assert commit == layout.commit_in(layout.snapshot_key("org/m", commit))
    assert commit == layout.commit_in(layout.snapshot_folder(f"org/{'b' * 40}", commit))
    assert layout.commit_in("references/README.md") is None
    assert layout.commit_in(layout.snapshot_file_key(f"org/{'b' * 40}", "c" * 64)) is None


def test_evidence_and_audits_tell_their_manifest() -> None:
    """So that what is left of a manifest that is gone is found."""
    sha256 = "a" * 64
    assert sha256 == layout.manifest_sha256_in(layout.evidence_key(sha256, "cpu", "0.31.0"))
    assert sha256 == layout.manifest_sha256_in(layout.audit_key(sha256))
