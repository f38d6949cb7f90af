"""reference_outputs: what the source says, once for each commit, adapters, dtype, TP and device."""

import dagster as dg

from tensorize_assets.assets.metadata import table
from tensorize_assets.assets.snapshots import Snapshots
from tensorize_assets.assets.target import (
    IO_MANAGER,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.automation.conditions import FOLLOWS
from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.compare import prompts_digest
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.records import ReferenceRecord, SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import ReferenceRequest, ReferenceResult
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"vllm"},
    code_version="1",
    pool="tensorize_engine",
    automation_condition=FOLLOWS,
    io_manager_key=IO_MANAGER,
)
def reference_outputs(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> dg.MaterializeResult[ReferenceRecord]:
    """Greedy tokens and top log-probabilities of the source, loaded by vLLM's default loader.

    One file below `references/COMMIT/`, which builds of the same commit share. With adapters, also
    of the source with each, in the same engine. Made at the artifact's own dtype, TP and device:
    between TP sizes the order of reductions differs, and with it a token now and then.
    """
    with failures(context):
        target = target_of(context, tensorize_catalog)
        require_one_build(context, target, hf_snapshot)
        profile = target.profile
        digest = prompts_digest(profile.prompts, hf_snapshot.inputs.adapters)
        store = tensorize_store.open(target.root)
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
        worker: dict[str, int | float] = {}
        if result is None:
            snapshots = Snapshots.of(
                context,
                target,
                tensorize_catalog,
                tensorize_launcher,
                store,
                tensorize_hub,
                tensorize_keyring,
            )
            source = snapshots.source(hf_snapshot.snapshot)
            adapters = tuple(map(snapshots.adapter, hf_snapshot.adapters))
            # Only where something is read from the root: who needs no keys gets none.
            reads_root = any(one.mirrored for one in (source, *(a.source for a in adapters)))
            handed_over = tensorize_store.hand_over(target.root) if reads_root else None
            report = tensorize_launcher.run(
                context,
                ReferenceRequest(
                    model=target.model,
                    suffix=target.suffix,
                    snapshot=source,
                    tensor_parallel_size=profile.tensor_parallel_size,
                    dtype=profile.dtype,
                    device=profile.reload_device,
                    prompts=profile.prompts,
                    adapters=adapters,
                    root=target.root if handed_over else None,
                    s3=handed_over.settings if handed_over else None,
                ),
                ReferenceResult,
                handed_over.secrets if handed_over else None,
                resources=profile.resources,
            )
            result = report.result
            worker = {
                "worker_seconds": report.seconds,
                "worker_peak_memory": report.peak_memory_bytes,
            }
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
            "answers": table(
                {"prompt": output.prompt, "answer": output.text}
                for output in result.answers.outputs
            ),
            "perplexity": result.answers.perplexity,
            "device": result.device_name,
            "load_seconds": max(load.seconds for load in result.loads),
            "made_by_an_earlier_run": shared,
            **worker,
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
