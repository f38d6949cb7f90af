"""The channel: which build of a model and suffix is current, as a signed, numbered history.

Every move is a compare-and-swap of the whole document, so of two
racing publishers both end in the history.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, cast

from pydantic import Field, JsonValue, model_validator

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import ConflictError, StoreError
from tensorize_assets.core.evidence import Device
from tensorize_assets.core.seen import last_mark, note, require_newer
from tensorize_assets.core.store import Reader, Store

# At least one writer wins each round, so this many publishers of one channel may race.
_ATTEMPTS = 64
_LONGEST_PAUSE_S = 0.5

# The entries an error message lists.
_LISTED = 20


class EncryptedVariant(jsonio.Record):
    """The encrypted artifact that was published beside a plaintext one."""

    build_id: jsonio.BuildId
    directory: jsonio.RelativePath
    manifest_sha256: jsonio.Sha256


class ChannelEntry(jsonio.Record):
    """One move: the build that became current for `vllm_version`, and the evidence it had.

    With `encryption: only` it is the encrypted build; with `both` that one is `encrypted`.
    """

    number: Annotated[int, Field(ge=1)]
    build_id: jsonio.BuildId
    directory: jsonio.RelativePath
    manifest_sha256: jsonio.Sha256
    commit: jsonio.Commit
    vllm_version: jsonio.PathPart
    device: Device
    evidence_key: jsonio.RelativePath
    reason: Literal["publish", "rollback"]
    when: jsonio.Instant
    encrypted: EncryptedVariant | None = None

    @model_validator(mode="after")
    def _names_its_evidence(self) -> ChannelEntry:
        own = layout.evidence_key(self.manifest_sha256, self.device, self.vllm_version)
        if self.evidence_key != own:
            raise ValueError(f"evidence_key is {self.evidence_key}, but the entry's own is {own}")
        return self

    def manifests(self) -> Iterator[tuple[str, str, str]]:
        """Build id, directory and the manifest's SHA-256 of each variant."""
        yield self.build_id, self.directory, self.manifest_sha256
        if self.encrypted is not None:
            other = self.encrypted
            yield other.build_id, other.directory, other.manifest_sha256


class Channel(jsonio.Record):
    """The whole history, oldest entry first."""

    format: Literal[1] = 1
    model: jsonio.ModelId
    suffix: jsonio.Suffix
    entries: Annotated[tuple[ChannelEntry, ...], Field(min_length=1)]

    @property
    def current(self) -> ChannelEntry:
        """The last move, whatever vLLM version it is for."""
        return self.entries[-1]

    def current_for(self, vllm_version: str) -> ChannelEntry | None:
        """Return the last move for one vLLM version, or None when it has no evidence here."""
        return next(
            (entry for entry in reversed(self.entries) if entry.vllm_version == vllm_version), None
        )

    @model_validator(mode="after")
    def _is_one_history(self) -> Channel:
        numbers = [entry.number for entry in self.entries]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"entries are numbered {numbers}, not 1 to {len(numbers)}")
        folder = f"{layout.model_folder(self.model)}/"
        seen: set[str] = set()
        for entry in self.entries:
            for _, directory, _ in entry.manifests():
                if not directory.startswith(folder):
                    raise ValueError(f"entry {entry.number} names {directory}, outside {folder}")
            if entry.reason == "rollback" and entry.build_id not in seen:
                raise ValueError(f"entry {entry.number} rolls back to a build never published")
            seen.add(entry.build_id)
        return self


class StoredChannel(NamedTuple):
    """A channel as it was read, with the ETag its next move compares, and its bytes."""

    channel: Channel
    etag: str
    data: bytes


def read_channel(
    store: Reader,
    model: str,
    suffix: str,
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> StoredChannel | None:
    """Return the channel of a model and suffix, or None when nothing was published.

    `seen` is the folder in which this home keeps how far it has seen each channel; without one,
    an old channel that was put back is believed.

    Raises SignatureError for a signature that is missing, wrong or not by one of the `trusted`
    public keys (None: any), StoreError for a damaged history or that of another channel,
    HistoryError for an older one than was seen.
    """
    key = layout.channel_key(model, suffix)
    where = store.uri(key)
    mark = last_mark(seen, where)
    found = store.get_bytes(key)
    remedy = f"`tensorize channel accept {model} {suffix}`"
    if found is None:
        require_newer(mark, where, (), remedy)
        return None
    payload = signing.verify("channel", found.data, trusted, where).payload
    channel = jsonio.load_record(Channel, jsonio.canonical(payload, where), where)
    if (channel.model, channel.suffix) != (model, suffix):
        raise StoreError(
            f"{where} is the channel of {channel.model} {channel.suffix}, not of {model} {suffix}; "
            "restore it"
        )
    entries = cast("list[JsonValue]", payload["entries"])
    require_newer(mark, where, entries, remedy)
    note(seen, where, entries)
    return StoredChannel(channel, found.etag, found.data)


def append(
    store: Store,
    key: signing.SecretKey,
    model: str,
    suffix: str,
    *,
    build_id: str,
    directory: str,
    manifest_sha256: str,
    commit: str,
    vllm_version: str,
    device: Device,
    trusted: Collection[str] | None,
    encrypted: EncryptedVariant | None = None,
    when: datetime | None = None,
    unless: Callable[[Channel], bool] | None = None,
    require: Callable[[], None] | None = None,
    seen: Path | None = None,
) -> Channel:
    """Make a build current for `vllm_version` and return the channel.

    Does nothing when it is current there already, with evidence of this device, or when `unless`
    says so of the very history that would be added to. `require` is called after that history was
    read, each time it is, and raises what forbids the move. That the evidence exists and passes is
    the caller's to verify. `when` is now unless given.

    Raises as `read_channel` does, and ConflictError when others kept moving the channel.
    """

    def extend(channel: Channel | None) -> tuple[ChannelEntry, ...]:
        if require is not None:
            require()
        if channel is not None and unless is not None and unless(channel):
            return ()
        entries = channel.entries if channel else ()
        entry = ChannelEntry(
            number=len(entries) + 1,
            build_id=build_id,
            directory=directory,
            manifest_sha256=manifest_sha256,
            commit=commit,
            vllm_version=vllm_version,
            device=device,
            evidence_key=layout.evidence_key(manifest_sha256, device, vllm_version),
            reason="publish",
            when=when or datetime.now(UTC),
            encrypted=encrypted,
        )
        return () if _is_current(entry, entries) else (entry,)

    return _move(store, key, model, suffix, trusted, extend, seen)


def rollback_target(
    store: Store,
    model: str,
    suffix: str,
    to_build_id: str | None = None,
    *,
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> tuple[ChannelEntry, ...]:
    """Return the entries that `rollback` would add now, all of one build; moves nothing.

    Whoever verifies these rolls back to their `build_id`: by then, None may be another build.

    Raises StoreError when there is no such build in the history or it is current already, and as
    `read_channel` does.
    """
    found = read_channel(store, model, suffix, trusted, seen)
    if found is None:
        raise StoreError(f"{model} {suffix} has no channel: nothing was published to roll back to")
    target = to_build_id or _previous_build(found.channel)
    entries = _rollback_entries(found.channel, target, None)
    if not entries:
        raise StoreError(
            f"build {target} of {model} {suffix} is current already; {_history(found.channel)}"
        )
    return entries


def next_rollback(channel: Channel) -> tuple[ChannelEntry, ...]:
    """Return the entries that `rollback` would add now if no build is named; none if it cannot."""
    try:
        return _rollback_entries(channel, _previous_build(channel), None)
    except StoreError:
        return ()


def rollback(
    store: Store,
    key: signing.SecretKey,
    model: str,
    suffix: str,
    to_build_id: str | None = None,
    *,
    trusted: Collection[str] | None,
    when: datetime | None = None,
    require: Callable[[], None] | None = None,
    seen: Path | None = None,
) -> Channel:
    """Make an earlier build current again and return the channel.

    `to_build_id` None is the last build before the current one; after a rollback that is the one
    rolled back from. Every vLLM version that the target has evidence for moves, one entry each;
    others stay where they are. That the build is still there is the caller's to verify; `require`
    as in `append`.

    Raises StoreError as `rollback_target` does, and as `append` does.
    """
    # Decided once: read again after a lost race, "the build before" would be another one.
    planned = rollback_target(store, model, suffix, to_build_id, trusted=trusted, seen=seen)
    target = planned[0].build_id

    def extend(channel: Channel | None) -> tuple[ChannelEntry, ...]:
        if require is not None:
            require()
        if channel is None:
            raise StoreError(
                f"the channel of {model} {suffix} was removed meanwhile; nothing was moved"
            )
        return _rollback_entries(channel, target, when)

    return _move(store, key, model, suffix, trusted, extend, seen)


def _move(
    store: Store,
    key: signing.SecretKey,
    model: str,
    suffix: str,
    trusted: Collection[str] | None,
    extend: Callable[[Channel | None], tuple[ChannelEntry, ...]],
    seen: Path | None,
) -> Channel:
    """Add what `extend` makes of the channel as it is; again when another writer was first."""
    place = layout.channel_key(model, suffix)
    for attempt in range(_ATTEMPTS):
        found = read_channel(store, model, suffix, trusted, seen)
        added = extend(found.channel if found else None)
        if found and not added:
            return found.channel
        entries = (*found.channel.entries, *added) if found else added
        channel = Channel(model=model, suffix=suffix, entries=entries)
        payload = jsonio.dump_record(channel)
        data = signing.sign("channel", payload, key)
        try:
            if found:
                store.put_bytes(place, data, if_match=found.etag)
            else:
                store.put_bytes(place, data, if_absent=True)
        except ConflictError:
            # Random, so that publishers that lost together do not meet again.
            time.sleep(random.uniform(0, min(0.01 * 2**attempt, _LONGEST_PAUSE_S)))
        else:
            note(seen, store.uri(place), cast("list[JsonValue]", payload["entries"]))
            return channel
    raise ConflictError(
        f"{store.uri(place)} was moved by others {_ATTEMPTS} times in a row; run this again"
    )


def _is_current(entry: ChannelEntry, entries: tuple[ChannelEntry, ...]) -> bool:
    for other in reversed(entries):
        if other.vllm_version != entry.vllm_version:
            continue
        if (other.build_id, other.manifest_sha256, other.encrypted) != (
            entry.build_id,
            entry.manifest_sha256,
            entry.encrypted,
        ):
            return False
        # The same build, current through the evidence of another device: look further back, or
        # two devices that publish in turn would lengthen the history each time.
        if other.device == entry.device:
            return True
    return False


def _previous_build(channel: Channel) -> str:
    for entry in reversed(channel.entries):
        # Of its own vLLM: builds of two releases are current beside each other.
        now = channel.current_for(entry.vllm_version)
        if now is not None and entry.build_id != now.build_id:
            return entry.build_id
    raise StoreError(
        f"{channel.model} {channel.suffix} has no earlier build to roll back to; "
        f"{_history(channel)}"
    )


def _rollback_entries(
    channel: Channel, target: str, when: datetime | None
) -> tuple[ChannelEntry, ...]:
    last = {entry.vllm_version: entry for entry in channel.entries if entry.build_id == target}
    if not last:
        raise StoreError(
            f"build {target} was never published to {channel.model} {channel.suffix}; "
            f"{_history(channel)}"
        )
    moved = [
        entry
        for version, entry in last.items()
        if (current := channel.current_for(version)) and current.build_id != target
    ]
    # The order of the old moves, so that the channel's `current` is the same one as then.
    moved.sort(key=lambda entry: entry.number)
    fresh = {"reason": "rollback", "when": when or datetime.now(UTC)}
    return tuple(
        ChannelEntry.model_validate(
            {**entry.model_dump(), **fresh, "number": channel.current.number + step}
        )
        for step, entry in enumerate(moved, start=1)
    )


def _history(channel: Channel) -> str:
    left_out = len(channel.entries) - _LISTED
    lines = [
        f"{entry.number}. {entry.build_id} ({entry.reason}, vLLM {entry.vllm_version}, "
        f"{entry.device}, {entry.when:%Y-%m-%d %H:%M} UTC)"
        for entry in channel.entries[-_LISTED:]
    ]
    if left_out > 0:
        lines.insert(0, f"… {left_out} older")
    return f"its history: {'; '.join(lines)}"
