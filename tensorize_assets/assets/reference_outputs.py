"""reference_outputs: what the source says, once for each commit, adapters, dtype, TP and device."""

import dagster as dg

from tensorize_assets.assets.snapshots import local_adapter
from tensorize_assets.assets.target import (
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.core import hub, jsonio, layout
from tensorize_assets.core.compare import prompts_digest
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.records import ReferenceRecord, SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import ReferenceRequest, ReferenceResult
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.launcher import SubprocessLauncher
from tensorize_assets.resources.store import StoreResource


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"vllm"},
    code_version="1",
    pool="tensorize_worker",
)
def reference_outputs(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    catalog: CatalogResource,
    artifact_store: StoreResource,
    hub_access: HubResource,
    launcher: SubprocessLauncher,
) -> dg.MaterializeResult[ReferenceRecord]:
    """Greedy tokens and top log-probabilities of the source, loaded by vLLM's default loader.

    With adapters, also of the source with each, in the same engine. Made at the artifact's own
    dtype, TP and device: between TP sizes the order of reductions differs, and with it a token now
    and then.
    """
    with failures(context):
        target = target_of(context, catalog)
        require_one_build(context, target, hf_snapshot)
        profile = target.profile
        digest = prompts_digest(profile.prompts, hf_snapshot.inputs.adapters)
        store = artifact_store.open(target.root)
        key = layout.reference_key(
            hf_snapshot.inputs.commit,
            profile.dtype,
            profile.tensor_parallel_size,
            profile.reload_device,
            hf_snapshot.inputs.vllm,
            digest,
        )
        result = read_reference(store, key)
        shared = result is not None
        if result is None:
            access = hub_access.access()
            folder = hub.ensure_local(access, hf_snapshot.snapshot)
            result = launcher.run(
                context,
                ReferenceRequest(
                    model=target.model,
                    suffix=target.suffix,
                    folder=str(folder),
                    tensor_parallel_size=profile.tensor_parallel_size,
                    dtype=profile.dtype,
                    device=profile.reload_device,
                    prompts=profile.prompts,
                    adapters=tuple(local_adapter(access, one) for one in hf_snapshot.adapters),
                ),
                ReferenceResult,
            ).result
            store.put_bytes(key, jsonio.canonical(jsonio.dump_record(result), store.uri(key)))
    return dg.MaterializeResult(
        value=ReferenceRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=hf_snapshot.build_id,
            reference=key,
            prompts_digest=digest,
        ),
        metadata={
            "answers": dg.MetadataValue.table(
                [
                    dg.TableRecord({"prompt": output.prompt, "answer": output.text})
                    for output in result.answers.outputs
                ]
            ),
            "perplexity": result.answers.perplexity,
            "device": result.device_name,
            "load_seconds": max(load.seconds for load in result.loads),
            "made_by_an_earlier_run": shared,
        },
    )


def read_reference(store: Store, key: str) -> ReferenceResult | None:
    """The answers under `key`; None when absent, or written by another release."""
    stored = store.get_bytes(key)
    if stored is None:
        return None
    try:
        return jsonio.load_record(ReferenceResult, stored.data, store.uri(key))
    except StoreError:
        return None
