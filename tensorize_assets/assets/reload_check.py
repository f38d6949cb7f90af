"""reload_check: the artifact loaded as it will be served, and compared with its source."""

import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, cast

import dagster as dg
from pydantic import Field, JsonValue

from tensorize_assets.assets.encrypting import data_key
from tensorize_assets.assets.metadata import Cell, table
from tensorize_assets.assets.reference_outputs import read_reference
from tensorize_assets.assets.target import (
    IO_MANAGER,
    Target,
    commit_url,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.automation.conditions import FOLLOWS
from tensorize_assets.core import channel, compare, reload_report
from tensorize_assets.core.errors import EvidenceError, TensorizeAssetsError
from tensorize_assets.core.evidence import (
    CheckOutcome,
    Evidence,
    LoadFigures,
    read_evidence,
    write_evidence,
)
from tensorize_assets.core.layout import evidence_key
from tensorize_assets.core.manifest import StoredManifest, read_manifest
from tensorize_assets.core.records import (
    ArtifactPlace,
    ArtifactRecord,
    ReferenceRecord,
    ReloadRecord,
)
from tensorize_assets.core.reload_report import Compared
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import ReferenceResult, ReloadRequest, ReloadResult
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.local import Launcher, LaunchReport
from tensorize_assets.resources.store import HandedOver, StoreResource

_KEY = dg.AssetKey("reload_check")

_Metadata = dict[str, dg.MetadataValue | str | int | float | bool]


class ReloadConfig(dg.Config):
    """How to reload."""

    again: bool = Field(
        default=False,
        description="Load the artifact again also where passing evidence of it stands.",
    )


class _Reloaded(NamedTuple):
    """The evidence of one of the artifact's directories, a person's report of it, and the worker's
    own where it was had just now.
    """

    encrypted: bool
    evidence: Evidence
    report: str
    worker: LaunchReport[ReloadResult] | None


def _check_specs() -> list[dg.AssetCheckSpec]:
    with warnings.catch_warnings():
        # Partitioned checks are in preview in Dagster 1.13, and without a partition a check has
        # one status for all: a good model's pass would cover a bad one's failure.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name=name,
                asset=_KEY,
                description=description,
                blocking=True,
                partitions_def=model_suffix,
            )
            for name, description in compare.CHECKS.items()
        ]


@dg.asset(
    key=_KEY,
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"vllm"},
    code_version="1",
    pool="tensorize_engine",
    automation_condition=FOLLOWS,
    check_specs=_check_specs(),
    io_manager_key=IO_MANAGER,
)
def reload_check(
    context: dg.AssetExecutionContext,
    config: ReloadConfig,
    artifact: ArtifactRecord,
    reference_outputs: ReferenceRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> Iterator[dg.AssetCheckResult | dg.MaterializeResult[ReloadRecord]]:
    """Evidence that this artifact loads and answers as its source does; of each variant its own.

    The evidence is a signed file below `evidence/`, by which `published` judges; the metadata has a
    report of it. A check passes if it does for every variant. Every check emits a result whatever
    fails: Dagster lets downstream pass a blocking check that says nothing.
    """
    try:
        with failures(context):
            target = target_of(context, tensorize_catalog)
            require_one_build(context, target, artifact, reference_outputs)
            store = tensorize_store.open(target.root)
            perplexity = _published_perplexity(context, store, tensorize_keyring, target, artifact)
            reloaded: list[_Reloaded] = []
            for place in artifact.variants:
                stored = read_manifest(store, place.directory, tensorize_keyring.trusted())
                if stored is None or stored.sha256 != place.manifest_sha256:
                    raise EvidenceError(
                        f"{store.uri(place.directory)} has lost its manifest, or has another than "
                        "its record says; materialize the asset artifact again"
                    )
                evidence = (
                    None
                    if config.again
                    else _passed_before(store, tensorize_keyring, target, stored, reference_outputs)
                )
                worker = compared = None
                if evidence is None:
                    reference = read_reference(store, reference_outputs.reference)
                    if reference is None:
                        raise EvidenceError(
                            f"{store.uri(reference_outputs.reference)} is gone; materialize "
                            "reference_outputs again"
                        )
                    handed_over = tensorize_store.hand_over(target.root)
                    encryption = stored.manifest.encryption
                    with data_key(
                        store, tensorize_keyring, encryption and encryption.key_id
                    ) as secrets:
                        worker = tensorize_launcher.run(
                            context,
                            _request(target, stored, place, handed_over),
                            ReloadResult,
                            {**handed_over.secrets, **secrets},
                            resources=target.profile.resources,
                        )
                    evidence = _evidence(
                        target, stored, reference_outputs, reference, worker.result, perplexity
                    )
                    write_evidence(store, tensorize_keyring.key(), evidence)
                    compared = _compared(reference, worker.result)
                report = reload_report.markdown(
                    evidence,
                    source=commit_url(
                        tensorize_hub.access(), target.model, stored.manifest.inputs.commit
                    ),
                    artifact=store.uri(place.directory),
                    compared=compared,
                )
                reloaded.append(_Reloaded(place.encrypted, evidence, report, worker))
    except dg.RetryRequested:
        raise  # not decided yet: the next attempt has results of its own
    except Exception as error:
        yield from _results(compare.failed(_reason(error)))
        raise
    for one in reloaded:
        which = f"{_kind(one)} artifact" if len(reloaded) > 1 else "artifact"
        when = f"{one.evidence.when:%Y-%m-%d %H:%M}"
        context.log.info(
            f"{which}: reloaded on {one.evidence.device_name}"
            if one.worker
            else f"{which}: evidence of {when} UTC stands: not loaded again"
        )
    found = [one.evidence for one in reloaded]
    yield dg.MaterializeResult(
        value=ReloadRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=artifact.build_id,
            evidence=tuple(
                evidence_key(one.manifest_sha256, one.device, one.vllm_version) for one in found
            ),
            passed=all(one.passed for one in found),
        ),
        metadata=_metadata(reloaded),
        check_results=list(_results(_together(reloaded))),
    )


def _kind(reloaded: _Reloaded) -> str:
    return "encrypted" if reloaded.encrypted else "plaintext"


def _together(reloaded: Sequence[_Reloaded]) -> tuple[CheckOutcome, ...]:
    """Each check over all variants. What is shown beside it is the first's, where it has any."""
    if len(reloaded) == 1:
        return reloaded[0].evidence.checks
    checks: list[CheckOutcome] = []
    for outcomes in zip(*(one.evidence.checks for one in reloaded), strict=True):
        said = [
            f"{_kind(one)}: {outcome.description}"
            for one, outcome in zip(reloaded, outcomes, strict=True)
        ]
        checks.append(
            CheckOutcome(
                name=outcomes[0].name,
                passed=all(outcome.passed for outcome in outcomes),
                description="; ".join(said),
                metadata=outcomes[0].metadata or outcomes[-1].metadata,
            )
        )
    return tuple(checks)


def _request(
    target: Target, stored: StoredManifest, artifact: ArtifactPlace, handed_over: HandedOver
) -> ReloadRequest:
    manifest = stored.manifest
    shards = {shard.file for shard in manifest.shards}
    return ReloadRequest(
        model=target.model,
        suffix=target.suffix,
        root=target.root,
        directory=artifact.directory,
        companions=tuple(file for file in manifest.files if file.path not in shards),
        adapters=manifest.adapters,
        encrypted=manifest.encryption is not None,
        s3=handed_over.settings,
        tensor_parallel_size=manifest.tensor_parallel_size,
        dtype=manifest.dtype,
        device=target.profile.reload_device,
        prompts=target.profile.prompts,
        deserialization_kwargs=target.profile.deserialization_kwargs,
    )


def _passed_before(
    store: Store,
    keyring: KeyringResource,
    target: Target,
    stored: StoredManifest,
    reference: ReferenceRecord,
) -> Evidence | None:
    """Passing evidence for this manifest, device, vLLM, prompts and adapters.

    A failure is tried again.
    """
    found = read_evidence(
        store,
        stored.sha256,
        target.profile.reload_device,
        stored.manifest.inputs.vllm,
        keyring.trusted(),
    )
    if found is None or not found.passed or found.prompts_digest != reference.prompts_digest:
        return None
    if {check.name for check in found.checks} != compare.CHECKS.keys():
        return None
    return found


def _published_perplexity(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    target: Target,
    artifact: ArtifactRecord,
) -> float | None:
    """What the channel's current build had; None for a first build, or when it is this one."""
    published = channel.read_channel(
        store, target.model, target.suffix, keyring.trusted(), keyring.seen()
    )
    if published is None:
        return None
    entry = published.channel.current
    if entry.build_id == artifact.variants[0].build_id:
        return None
    try:
        found = read_evidence(
            store, entry.manifest_sha256, entry.device, entry.vllm_version, keyring.trusted()
        )
    except TensorizeAssetsError as error:
        context.log.warning(f"the profile's own perplexity bound is used: {error}")
        return None
    if found is None or found.perplexity is None:
        context.log.warning(
            f"the profile's own perplexity bound is used: the published build {entry.build_id} has "
            "lost its evidence"
        )
        return None
    return found.perplexity


def _evidence(
    target: Target,
    stored: StoredManifest,
    reference_record: ReferenceRecord,
    reference: ReferenceResult,
    reload: ReloadResult,
    published_perplexity: float | None,
) -> Evidence:
    manifest = stored.manifest
    checks = compare.outcomes(manifest, target.profile, reference, reload, published_perplexity)
    return Evidence(
        model=target.model,
        suffix=target.suffix,
        build_id=manifest.build_id,
        manifest_sha256=stored.sha256,
        device=target.profile.reload_device,
        device_name=reload.device_name,
        vllm_version=reload.vllm_version,
        tensor_parallel_size=manifest.tensor_parallel_size,
        dtype=manifest.dtype,
        passed=all(check.passed for check in checks),
        checks=checks,
        perplexity=compare.perplexity(reload.answers),
        load=_figures(reload),
        default_load_seconds=max((load.seconds for load in reference.loads), default=None),
        prompts_digest=reference_record.prompts_digest,
        when=datetime.now(UTC),
    )


def _compared(reference: ReferenceResult, reload: ReloadResult) -> dict[str, Compared]:
    """The answers of both sides: the model's own, and with each adapter."""
    return {
        "": Compared(reference.answers, reload.answers),
        **{
            name: Compared(answers, reload.adapters.get(name))
            for name, answers in reference.adapters.items()
        },
    }


def _figures(reload: ReloadResult) -> LoadFigures | None:
    """All ranks together: they load at the same time, so the slowest is the load's time."""
    if not reload.loads:
        return None
    seconds = max(load.seconds for load in reload.loads)
    size = sum(load.bytes for load in reload.loads)
    return LoadFigures(
        bytes=size,
        seconds=seconds,
        bytes_per_second=size / seconds,
        host_memory_before=sum(load.host_memory_before for load in reload.loads),
        host_memory_after=sum(load.host_memory_after for load in reload.loads),
        source=reload.loads[0].source,
        part_retries=sum(load.part_retries for load in reload.loads),
        restarts=sum(load.restarts for load in reload.loads),
        path=reload.loads[0].path,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, dg.Failure) and error.description:
        return error.description
    return f"{type(error).__name__}: {error}"


def _results(checks: tuple[CheckOutcome, ...]) -> Iterator[dg.AssetCheckResult]:
    for check in checks:
        yield dg.AssetCheckResult(
            asset_key=_KEY,
            check_name=check.name,
            passed=check.passed,
            description=check.description,
            severity=dg.AssetCheckSeverity.ERROR,
            metadata={name: _shown(value) for name, value in check.metadata.items()},
        )


def _shown(value: JsonValue) -> dg.MetadataValue:
    if isinstance(value, bool):
        return dg.MetadataValue.bool(value)
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    if isinstance(value, float):
        return dg.MetadataValue.float(value)
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        if len(rows) == len(value) and all(map(_is_flat, rows)):
            return table(cast("list[dict[str, Cell]]", rows))
        return dg.MetadataValue.json(value)
    return dg.MetadataValue.text(str(value))


def _is_flat(row: dict[str, JsonValue]) -> bool:
    return not any(isinstance(value, list | dict) for value in row.values())


def _metadata(reloaded: Sequence[_Reloaded]) -> _Metadata:
    """The first variant's figures, and the second's by names of their own."""
    metadata: _Metadata = {}
    for number, one in enumerate(reloaded):
        prefix = f"{_kind(one)}_" if number else ""
        figures = _figures_of(one.evidence)
        if one.worker is not None:
            figures["worker_seconds"] = one.worker.seconds
            figures["worker_peak_memory"] = one.worker.peak_memory_bytes
        figures["report"] = dg.MetadataValue.md(one.report)
        metadata |= {f"{prefix}{name}": value for name, value in figures.items()}
    return metadata


def _figures_of(evidence: Evidence) -> _Metadata:
    metadata: _Metadata = {
        "device": evidence.device,
        "device_name": evidence.device_name,
        "vllm_version": evidence.vllm_version,
        "passed": evidence.passed,
        "reloaded_at": dg.MetadataValue.timestamp(evidence.when),
        "checks": table(
            {"check": check.name, "passed": check.passed, "found": check.description}
            for check in evidence.checks
        ),
    }
    if evidence.default_load_seconds is not None:
        metadata["default_load_seconds"] = evidence.default_load_seconds
    if evidence.perplexity is not None:
        metadata["perplexity"] = evidence.perplexity
    for check in evidence.checks:
        answers = check.metadata.get("answers")
        if isinstance(answers, list) and answers and isinstance(answers[0], dict):
            metadata["first_answer"] = f"{answers[0]['prompt']}{answers[0]['answer']}"
        with_adapters = cast("list[dict[str, str]]", check.metadata.get("adapter_answers", []))
        # Backwards: the one that stays is the adapter's first.
        for said in reversed(with_adapters):
            metadata[f"first_answer_with_{said['adapter']}"] = f"{said['prompt']}{said['answer']}"
    load = evidence.load
    if load is not None:
        metadata |= {
            "load_source": load.source,
            "load_path": load.path,
            "load_part_retries": load.part_retries,
            "load_restarts": load.restarts,
            "load_bytes": load.bytes,
            "load_seconds": load.seconds,
            "load_bytes_per_second": load.bytes_per_second,
            "host_memory_before": load.host_memory_before,
            "host_memory_after": load.host_memory_after,
            "loads": _load_table(evidence, load),
        }
    return metadata


def _load_table(evidence: Evidence, load: LoadFigures) -> dg.MetadataValue:
    rows: list[dict[str, Cell]] = [
        {
            "loader": "tensorizer, every hash verified",
            "seconds": round(load.seconds, 3),
            "bytes_per_second": round(load.bytes_per_second),
        }
    ]
    if evidence.default_load_seconds:
        rows.append(
            {
                "loader": "vLLM's default (safetensors), no hash",
                "seconds": round(evidence.default_load_seconds, 3),
                "bytes_per_second": round(load.bytes / evidence.default_load_seconds),
            }
        )
    return table(rows)
