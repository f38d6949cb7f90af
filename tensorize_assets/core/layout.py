"""Every path of the store, spelled once, as keys: posix paths relative to its root."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

from tensorize_assets.core.errors import StoreError

MANIFEST = "manifest.json"
PROVENANCE = "provenance.dsse.json"
"""The signed statement of how an artifact came to be, beside its manifest and not in it."""

ENCRYPTED_ENDING = "-encrypted"
"""How the directory of an encrypted variant ends."""

ADAPTER_TENSORS = "adapter_model.tensors"
ADAPTER_CONFIG = "adapter_config.json"

ARTIFACTS_FOLDER = "vllm/"
"""The prefix of every artifact and channel."""

EVIDENCE_FOLDER = "evidence/"
"""The prefix of all evidence."""

AUDIT_FOLDER = "audit/"
"""The prefix of what audits found."""

REFERENCES_FOLDER = "references/"
"""The prefix of what source models answered."""

SNAPSHOTS_FOLDER = "snapshots/"
"""The prefix of what is kept of Hub repos."""

BUILD_RECORDS_FOLDER = "records/hf_snapshot/"
"""The prefix of the records that every run of the chain begins with."""

KEYS_FOLDER = "keys/"
"""The prefix of every sealed data key and its record."""

BUILD_KEYS_FOLDER = f"{KEYS_FOLDER}builds/"
"""The prefix of the records of which data keys builds are encrypted with."""

HIDDEN_PREFIX = ".tmp-"
"""Names of the store's own half-written files and locks. No key may have such a part."""

ONESHOT_PARTITION = "adhoc"
"""The suffix partition under which one-shot builds run, whatever their folder is called."""

_BUILD_NAME = re.compile(rf"(.+)-([0-9a-f]{{12}})({ENCRYPTED_ENDING})?")
_COMMIT = re.compile(r"([0-9a-f]{40})(?:\.json)?")
# A hash has 64 digits and a commit 40: no repo's name makes one of the two read as the other.
_MIRRORED = re.compile(
    rf"{SNAPSHOTS_FOLDER}(?P<repo>[^/]+(?:/[^/]+)?)/"
    r"(?:(?P<commit>[0-9a-f]{40})/(?P<name>snapshot|lease)\.json|files/[0-9a-f]{64}(?:\.blocks)?)"
)

# File systems and SeaweedFS refuse longer path segments; said here, the message names the part.
_MAX_PART_BYTES = 255


class Mirrored(NamedTuple):
    """Of which repo a mirrored object is: a file, or of a `commit` its list or lease, by `name`."""

    repo: str
    commit: str | None
    name: str | None


class BuildName(NamedTuple):
    """What the name of an artifact directory says. A one-shot's may read like one, and is none."""

    suffix: str
    build_id: str
    encrypted: bool


def check_part(part: str, what: str = "path segment") -> str:
    """Return `part` when it can be one segment of a key.

    Raises StoreError for what would escape the root or be another key when written:
    empty, `.`, `..`, a slash or backslash, control characters, lone surrogates, more than
    255 bytes of UTF-8, or the prefix that the store keeps for itself.
    """
    if not part or part in (".", ".."):
        raise _refused(what, part, "it is empty or a step to another folder")
    if "/" in part or "\\" in part:
        raise _refused(what, part, "it holds a slash or backslash")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in part):
        raise _refused(what, part, "it holds a control character")
    if any(0xD800 <= ord(char) < 0xE000 for char in part):
        raise _refused(what, part, "it is not valid Unicode")
    if len(part.encode()) > _MAX_PART_BYTES:
        raise _refused(what, part, f"it has more than {_MAX_PART_BYTES} bytes")
    if part.startswith(HIDDEN_PREFIX):
        raise _refused(what, part, f"names starting with {HIDDEN_PREFIX} are the store's own")
    return part


def check_key(key: str) -> str:
    """Return `key` when each of its segments can stand in the store; StoreError otherwise."""
    for part in key.split("/"):
        check_part(part, f"a segment of key {key!r}")
    return key


def check_model(model: str) -> str:
    """Return `model` when it is a Hub id that can stand in the store; StoreError otherwise."""
    parts = model.split("/")
    if len(parts) > 2:
        raise _refused("model", model, "a Hub id is `org/name` or `name`")
    for part in parts:
        check_part(part, f"a part of model {model!r}")
    return model


def check_suffix(suffix: str) -> str:
    """Return `suffix` when it can stand in the store; StoreError otherwise."""
    check_part(suffix, "suffix")
    # `x.json` as a one-shot folder would stand where the channel of suffix `x` belongs.
    if suffix.endswith(".json"):
        raise _refused("suffix", suffix, "it ends in .json, as channels do")
    return suffix


def model_folder(model: str) -> str:
    """Return the folder of everything vLLM loads of `model` (`org/name` or `name`)."""
    return f"{ARTIFACTS_FOLDER}{check_model(model)}"


def artifact_dir(model: str, suffix: str, build_id: str) -> str:
    """Return the artifact directory of one build of a profile."""
    return f"{model_folder(model)}/{check_part(f'{check_suffix(suffix)}-{build_id}', 'build')}"


def encrypted_dir(model: str, suffix: str, build_id: str) -> str:
    """Return the directory of one encrypted build of a profile."""
    return f"{artifact_dir(model, suffix, build_id)}{ENCRYPTED_ENDING}"


def oneshot_encrypted_dir(model: str, suffix: str) -> str:
    """Return the directory of the encrypted variant of a one-shot build."""
    return f"{oneshot_dir(model, suffix)}{ENCRYPTED_ENDING}"


def oneshot_dir(model: str, suffix: str) -> str:
    """Return the artifact directory of a one-shot build, named as vLLM's script names it."""
    return f"{model_folder(model)}/{check_suffix(suffix)}"


def channel_key(model: str, suffix: str) -> str:
    """Return the key of the channel of one model and suffix."""
    return f"{model_folder(model)}/{check_part(f'{check_suffix(suffix)}.json', 'channel')}"


def file_key(directory: str, path: str) -> str:
    """Return the key of the file `path` (relative, posix) in a directory; `""` is the root."""
    return f"{check_key(directory)}/{check_key(path)}" if directory else check_key(path)


def manifest_key(directory: str) -> str:
    """Return the key of the manifest of an artifact directory."""
    return file_key(directory, MANIFEST)


def provenance_key(directory: str) -> str:
    """Return the key of the provenance of an artifact directory."""
    return file_key(directory, PROVENANCE)


def build_in_name(directory: str) -> str | None:
    """Return the build id that an artifact directory's name ends in; None for other names."""
    found = build_name(directory)
    return found.build_id if found else None


def build_name(directory: str) -> BuildName | None:
    """Return what the name of a build's directory says; None for other names."""
    match = _BUILD_NAME.fullmatch(directory.rstrip("/").rpartition("/")[2])
    return BuildName(match[1], match[2], match[3] is not None) if match else None


def pair_of(key: str, folder: str) -> tuple[str, str] | None:
    """Return model and suffix of a key FOLDER/MODEL/SUFFIX.json; None for other keys."""
    model, _, name = key.removeprefix(folder).rpartition("/")
    if not key.startswith(folder) or not name.endswith(".json"):
        return None
    try:
        return check_model(model), check_suffix(name.removesuffix(".json"))
    except StoreError:
        return None


def commit_in(key: str) -> str | None:
    """Return the commit that a key of a snapshot or a reference names; None for other keys."""
    if key.startswith(SNAPSHOTS_FOLDER) and "files" in key.split("/")[2:]:
        # Of no commit, also where the repo is called as one.
        return None
    found = (_COMMIT.fullmatch(part) for part in reversed(key.split("/")))
    return next((match[1] for match in found if match), None)


def evidence_key(manifest_sha256: str, device: str, vllm_version: str) -> str:
    """Return the key of the evidence of one reload: of which manifest, on what."""
    name = f"{check_part(device, 'device')}-{check_part(vllm_version, 'vLLM version')}.json"
    return f"{evidence_folder(manifest_sha256)}{name}"


def evidence_folder(manifest_sha256: str) -> str:
    """Return the prefix of all evidence of one manifest."""
    return f"{EVIDENCE_FOLDER}{check_part(manifest_sha256, 'manifest hash')}/"


def audit_key(manifest_sha256: str) -> str:
    """Return the key of what the last audit of one manifest's directory found."""
    return f"{AUDIT_FOLDER}{check_part(f'{manifest_sha256}.json', 'manifest hash')}"


def manifest_sha256_in(key: str) -> str:
    """Return the hash of the manifest that an evidence or an audit record is of."""
    return key.split("/")[1].removesuffix(".json")


def snapshots_of(repo: str) -> str:
    """Return the prefix of all that is mirrored of a Hub repo."""
    return f"{SNAPSHOTS_FOLDER}{check_model(repo)}/"


def snapshot_folder(repo: str, commit: str) -> str:
    """Return the prefix of what is kept of a repo for one commit alone."""
    return f"{snapshots_of(repo)}{check_part(commit, 'commit')}/"


def snapshot_key(repo: str, commit: str) -> str:
    """Return the key of the list of a repo's files at one commit."""
    return f"{snapshot_folder(repo, commit)}snapshot.json"


def snapshot_lease_key(repo: str, commit: str) -> str:
    """Return the key of who is mirroring a commit."""
    return f"{snapshot_folder(repo, commit)}lease.json"


def snapshot_file_key(repo: str, sha256: str) -> str:
    """Return the key of a mirrored file, by its content."""
    # Of one repo each: what is of a repo is readable, or removed, by its prefix.
    return f"{snapshots_of(repo)}files/{check_part(sha256, 'file hash')}"


def snapshot_blocks_key(repo: str, sha256: str) -> str:
    """Return the key of the signed list of a mirrored file's blocks."""
    return f"{snapshot_file_key(repo, sha256)}.blocks"


def mirrored(key: str) -> Mirrored | None:
    """Return of what a key below `snapshots/` is; None for other keys."""
    match = _MIRRORED.fullmatch(key)
    return Mirrored(match["repo"], match["commit"], match["name"]) if match else None


def pin_key(model: str, suffix: str, revision: str) -> str:
    """Return the key that keeps the commit a pinned profile was first built at."""
    # A branch may hold a slash (`refs/pr/1`); quoted, it stays one segment.
    name = check_part(f"{quote(revision, safe='')}.json", "revision")
    return f"pins/{check_model(model)}/{check_suffix(suffix)}/{name}"


def adapter_pin_key(model: str, suffix: str, repo: str, revision: str) -> str:
    """Return the key that keeps the commit of an adapter's repo, as `pin_key` does."""
    name = check_part(f"{quote(f'{repo}@{revision}', safe='')}.json", "revision")
    return f"pins/{check_model(model)}/{check_suffix(suffix)}/adapters/{name}"


def reference_key(
    commit: str,
    dtype: str,
    tensor_parallel_size: int,
    device: str,
    vllm_version: str,
    prompts_digest: str,
) -> str:
    """Return the key of the outputs that the source model gave under these conditions."""
    conditions = f"{dtype}-tp{tensor_parallel_size}-{device}-{vllm_version}-{prompts_digest}.json"
    folder = f"{REFERENCES_FOLDER}{check_part(commit, 'commit')}"
    return f"{folder}/{check_part(conditions, 'reference')}"


def record_key(asset: str, model: str, suffix: str) -> str:
    """Return the key of an asset's record for one partition."""
    name = check_part(f"{check_suffix(suffix)}.json", "suffix")
    return f"records/{check_part(asset, 'asset')}/{check_model(model)}/{name}"


def value_key(asset: Sequence[str], partition: Sequence[str]) -> str:
    """Return the key of what an asset of another project returned, for one partition or none."""
    # A part may hold anything, slashes too; quoted, each stays one segment.
    parts = [check_part(quote(part, safe=""), "asset") for part in asset]
    if partition:
        # No asset's part is quoted so: ["a"] at partition "b" is not ["a", "b"].
        parts.append("@")
        parts += [check_part(quote(part, safe=""), "partition") for part in partition]
    return f"values/{'/'.join(parts)}.json"


def key_record_key(key_id: str) -> str:
    """Return the key of the record of who can open a data key."""
    # Beside the seals, not among them: a recipient may have any name.
    return f"{KEYS_FOLDER}{check_part(f'{key_id}.json', 'key id')}"


def seals_folder(key_id: str) -> str:
    """Return the prefix of all seals of one data key."""
    return f"{KEYS_FOLDER}{check_part(key_id, 'key id')}/"


def seal_key(key_id: str, recipient: str) -> str:
    """Return the key of a data key as it is sealed to one recipient."""
    return f"{seals_folder(key_id)}{check_part(recipient, 'recipient')}"


def build_key_key(model: str, suffix: str, build_id: str) -> str:
    """Return the key of the record of which data key a build is encrypted with."""
    name = check_part(f"{check_suffix(suffix)}-{build_id}.json", "build")
    # No key id is called `builds`: they are hex.
    return f"{BUILD_KEYS_FOLDER}{check_model(model)}/{name}"


def seen_key(where: str) -> str:
    """Return the key, in a home's own folder, of what was seen last of the history at a URI."""
    return f"{hashlib.sha256(where.encode(errors='surrogateescape')).hexdigest()}.json"


def adapter_folder(name: str, count: int) -> str:
    """Return the folder of an adapter below its artifact directory, `""` for the directory itself.

    One adapter lies beside the model, as vLLM's scripts put it; of `count` above 1 each has its
    own.
    """
    return "" if count == 1 else f"adapters/{check_part(name, 'adapter')}"


def adapter_file(name: str, count: int, file: str) -> str:
    """Return the path of an adapter's `file` below its artifact directory."""
    folder = adapter_folder(name, count)
    return f"{folder}/{file}" if folder else file


NO_STAGES = (
    "a file of tensors is named by its tensor-parallel rank alone, as vLLM does, and has no "
    "pipeline stage: use a larger tensor_parallel_size"
)
"""Why there are no builds with pipeline parallelism."""


def shard_name(rank: int, tensor_parallel_size: int) -> str:
    """Return the file of one rank's tensors, as vLLM's loader looks for it."""
    if not 0 <= rank < tensor_parallel_size:
        raise StoreError(
            f"rank {rank} does not exist at tensor_parallel_size {tensor_parallel_size}: "
            f"ranks are 0 to {tensor_parallel_size - 1}"
        )
    name = tensorizer_uri_name(tensor_parallel_size)
    return name if tensor_parallel_size == 1 else name % rank


def tensorizer_uri_name(tensor_parallel_size: int) -> str:
    """Return the last part of the `tensorizer_uri` that vLLM is given for these ranks."""
    # vLLM formats a template when it saves at TP=1, but not when it loads there.
    return "model.tensors" if tensor_parallel_size == 1 else "model-rank-%03d.tensors"


def _refused(what: str, value: str, why: str) -> StoreError:
    return StoreError(f"{what} {value!r} cannot be part of a path in the store: {why}; rename it")
