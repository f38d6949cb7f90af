"""What makes a build the same build: its inputs, and the id hashed from exactly these."""

from __future__ import annotations

import hashlib
import json

from pydantic import JsonValue, field_validator

from tensorize_assets.core import jsonio

_ID_DIGITS = 12


class BuildInputs(jsonio.Record):
    """Everything that decides the bytes of a build, and nothing else.

    `profile` holds the profile's fields that change bytes; recipients, prompts, reader counts
    and schedules are not in it. `adapters` are pairs of name and commit. `data_key` is the id of
    the key that an encrypted build's tensors are encrypted with; None for plaintext.
    """

    model: str
    commit: jsonio.Commit
    adapters: tuple[tuple[str, jsonio.Commit], ...] = ()
    profile: dict[str, JsonValue]
    vllm: str
    torch: str
    tensorizer: str
    data_key: jsonio.KeyId | None = None

    @field_validator("vllm", "torch", "tensorizer")
    @classmethod
    def _public_part(cls, version: str) -> str:
        # `2.13.0+cpu` and `2.13.0+cu130` write the same bytes, since weights are stored as
        # loaded: one artifact serves CPU and CUDA hosts, and must not be built once for each.
        # The manifest's `versions` keep the whole string.
        return version.partition("+")[0]

    @field_validator("adapters")
    @classmethod
    def _sorted_by_name(cls, adapters: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        names = [name for name, _ in adapters]
        if len(set(names)) != len(names):
            raise ValueError(f"an adapter is named twice: {', '.join(sorted(names))}")
        # The order in which a profile lists adapters changes no byte.
        return tuple(sorted(adapters))


def build_id(inputs: BuildInputs) -> str:
    """Return the first 12 hex digits of the SHA-256 of the inputs' canonical JSON."""
    fields = jsonio.dump_record(inputs)
    if inputs.data_key is None:
        # Plaintext builds keep the ids that they had before there was encryption.
        del fields["data_key"]
    data = jsonio.canonical(fields, f"build inputs of {inputs.model}")
    return hashlib.sha256(data).hexdigest()[:_ID_DIGITS]


def base_id(inputs: BuildInputs) -> str:
    """Return the id of the plaintext build, by which an encrypted one's data keys are kept."""
    return build_id(inputs.model_copy(update={"data_key": None}))


def differences(old: BuildInputs, new: BuildInputs) -> tuple[str, ...]:
    """Return one line for each input that differs, such as `tensor_parallel_size: 1 → 3`."""
    before, after = _flat(old), _flat(new)
    names = [*before, *(name for name in after if name not in before)]
    return tuple(
        f"{name}: {_shown(before, name)} → {_shown(after, name)}"
        for name in names
        if _shown(before, name) != _shown(after, name)
    )


def _flat(inputs: BuildInputs) -> dict[str, JsonValue]:
    return {
        "model": inputs.model,
        "commit": inputs.commit,
        **{f"adapter {name}": commit for name, commit in inputs.adapters},
        **inputs.profile,
        "vllm version": inputs.vllm,
        "torch version": inputs.torch,
        "tensorizer version": inputs.tensorizer,
        **({"data key": inputs.data_key} if inputs.data_key else {}),
    }


def _shown(fields: dict[str, JsonValue], name: str) -> str:
    if name not in fields:
        return "(absent)"
    value = fields[name]
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
