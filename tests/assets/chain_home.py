"""A Dagster home for tests: catalog, key, cache and store in one folder, and runs of the chain."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

import tensorize_assets
from tensorize_assets import partitions
from tensorize_assets.assets.target import ONESHOT_TAG, Oneshot
from tensorize_assets.core import channel, layout, signing
from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.channel import ChannelEntry
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.s3 import S3Settings, resolve
from tensorize_assets.core.store import open_store
from tensorize_assets.definitions import ASSETS, resources
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.launchers.local import SubprocessLauncher

MODEL = "tiny/llama"
# A random model's perplexity is near the size of its vocabulary.
PROFILE: Mapping[str, Any] = {"reload_device": "cpu", "max_perplexity": 100_000.0}
# Any step that starts a worker with it fails: what passes has started none.
NO_WORKER = SubprocessLauncher(module="no_worker_may_start_here")
UP_TO_ARTIFACT = (
    "hf_snapshot",
    "tensorized_shards",
    "lora_adapters",
    "encrypted_shards",
    "artifact",
)


_STAND_IN_PATH = os.pathsep.join(
    [str(Path(__file__).parent), str(Path(tensorize_assets.__file__).parents[1])]
)


def stand_in(deaths: Path | None = None) -> SubprocessLauncher:
    """A launcher of workers that take no vLLM; `deaths` orders some of them (stand_in/tasks.py)."""
    ordered = {} if deaths is None else {"STAND_IN_DEATHS": str(deaths)}
    return SubprocessLauncher(
        module="stand_in.worker", env={"PYTHONPATH": _STAND_IN_PATH, **ordered}
    )


def oneshot(suffix: str) -> dict[str, str]:
    """The run tag of a one-shot build."""
    return {ONESHOT_TAG: Oneshot(suffix=suffix, profile=Profile(**PROFILE)).model_dump_json()}


@dataclass(frozen=True)
class Home:
    """One folder that holds everything; `endpoint` is the Hub that it reads.

    Of a root in S3 `settings` says how it is reached; keys come from the environment.
    """

    folder: Path
    endpoint: str
    root: str = "artifacts"
    settings: S3Settings | None = None

    @property
    def store(self) -> Any:
        if self.settings is None:
            return LocalStore(self.folder / self.root)
        return open_store(self.root, resolve(self.settings))

    @property
    def key(self) -> signing.SecretKey:
        return signing.load_or_create_signing_key(self.folder / "keys" / "signing.key")

    @property
    def trusted(self) -> tuple[str, ...]:
        return (self.key.public_key,)

    def write_catalog(
        self, models: Mapping[str, Mapping[str, Mapping[str, Any]]], **fields: object
    ) -> None:
        """Models, their suffixes, and of each the fields that differ from PROFILE.

        `fields` are the catalog's own, such as `recipients`.
        """
        content = {
            "root": self.root,
            **fields,
            **({"s3": self.settings.model_dump(exclude_none=True)} if self.settings else {}),
            "models": {
                model: {"profiles": {name: {**PROFILE, **own} for name, own in profiles.items()}}
                for model, profiles in models.items()
            },
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "models.yaml").write_text(yaml.safe_dump(content))

    def resources(self, launcher: SubprocessLauncher | None = None) -> dict[str, Any]:
        return {
            **resources(self.folder),
            "tensorize_hub": HubResource(
                endpoint=self.endpoint, cache_dir=str(self.folder / "hub")
            ),
            "tensorize_launcher": launcher or SubprocessLauncher(),
        }

    def run(
        self,
        model: str = MODEL,
        suffix: str = "v1",
        *,
        key: dg.MultiPartitionKey | None = None,
        instance: dg.DagsterInstance | None = None,
        launcher: SubprocessLauncher | None = None,
        selection: Sequence[str] | None = None,
        tags: Mapping[str, str] | None = None,
        republish: bool = False,
    ) -> Run:
        """Materialize one partition: the whole chain, or some of its assets."""
        with nullcontext(instance) if instance else dg.DagsterInstance.ephemeral() as open_instance:
            if key is None:
                partitions.add_pairs(open_instance, [model], [suffix])
                key = partitions.partition_key(model, suffix)
            result = dg.materialize(
                ASSETS,
                selection=selection,
                partition_key=key,
                instance=open_instance,
                resources=self.resources(launcher),
                tags=tags,
                run_config={"ops": {"published": {"config": {"republish": republish}}}}
                if republish
                else None,
                raise_on_error=False,
            )
            run = open_instance.get_run_by_id(result.run_id)
            log = [
                str(entry.user_message)
                for entry in open_instance.all_logs(result.run_id)
                if entry.dagster_event is None
            ]
        return Run(result, dict(run.tags) if run else {}, log)

    def channel(self, model: str = MODEL, suffix: str = "v1") -> tuple[ChannelEntry, ...]:
        """The channel's history; empty when nothing was published."""
        found = channel.read_channel(self.store, model, suffix, self.trusted)
        return found.channel.entries if found else ()

    def artifact(self, run: Run, suffix: str = "v1") -> Path:
        """The folder of the build that a run was of."""
        return self.store.root / layout.artifact_dir(MODEL, suffix, run.build_id)

    def copy_to(self, folder: Path, endpoint: str) -> Home:
        shutil.copytree(self.folder, folder, symlinks=True)
        return Home(folder, endpoint)


@dataclass(frozen=True)
class Run:
    """What a run did, read from its events."""

    result: dg.ExecuteInProcessResult
    tags: Mapping[str, str]
    log: Sequence[str]

    @property
    def success(self) -> bool:
        return self.result.success

    @property
    def build_id(self) -> str:
        return self.tags["tensorize_assets/build_id"]

    @property
    def materialized(self) -> set[str]:
        return {event.asset_key.to_user_string() for event in self._materializations()}

    @property
    def retried(self) -> list[str]:
        return [str(e.step_key) for e in self.result.all_events if e.is_step_up_for_retry]

    @property
    def failures(self) -> dict[str, str]:
        """What each failed step says, as a person sees it in the UI."""
        found: dict[str, str] = {}
        for event in self.result.get_step_failure_events():
            data: Any = event.event_specific_data
            said = data.user_failure_data and data.user_failure_data.description
            found[str(event.step_key)] = said or data.error_display_string
        return found

    @property
    def checks(self) -> dict[str, bool]:
        return {e.check_name: e.passed for e in self.result.get_asset_check_evaluations()}

    @property
    def check_descriptions(self) -> dict[str, str]:
        return {e.check_name: str(e.description) for e in self.result.get_asset_check_evaluations()}

    def metadata(self, asset: str) -> dict[str, Any]:
        for event in self._materializations():
            if event.asset_key == dg.AssetKey(asset):
                data = event.step_materialization_data.materialization
                return {name: value.value for name, value in data.metadata.items()}
        raise KeyError(asset)

    def data_version(self, asset: str) -> str:
        for event in self._materializations():
            if event.asset_key == dg.AssetKey(asset):
                tags = event.step_materialization_data.materialization.tags or {}
                return tags["dagster/data_version"]
        raise KeyError(asset)

    def _materializations(self) -> list[Any]:
        return list(self.result.get_asset_materialization_events())


def weights(content: bytes) -> bytes:
    """A safetensors file with one tensor, of these bytes."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"weight": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + content


def with_value(safetensors: bytes, tensor: str, bfloat16: int) -> bytes:
    """A safetensors file with the first value of one bfloat16 tensor replaced by these bits."""
    (length,) = struct.unpack("<Q", safetensors[:8])
    start, _ = json.loads(safetensors[8 : 8 + length])[tensor]["data_offsets"]
    at = 8 + length + start
    return safetensors[:at] + struct.pack("<H", bfloat16) + safetensors[at + 2 :]


def flipped(content: bytes) -> bytes:
    """The content with one bit of its last tensor's data changed, at the same size."""
    at = len(content) - 1024
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
