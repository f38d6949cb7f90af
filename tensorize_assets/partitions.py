"""Partitions: model by suffix, both dynamic, filled from the catalog."""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from tensorize_assets.core.catalog import Catalog, to_partition_key
from tensorize_assets.core.layout import ONESHOT_PARTITION

MODEL = "model"
SUFFIX = "suffix"

models = dg.DynamicPartitionsDefinition(name="tensorize_model")
suffixes = dg.DynamicPartitionsDefinition(name="tensorize_suffix")
model_suffix = dg.MultiPartitionsDefinition({MODEL: models, SUFFIX: suffixes})


def partition_key(model: str, suffix: str) -> dg.MultiPartitionKey:
    """The partition of `suffix` of the Hub repo `model`."""
    return dg.MultiPartitionKey({MODEL: to_partition_key(model), SUFFIX: suffix})


def add_catalog(instance: dg.DagsterInstance, catalog: Catalog) -> None:
    """Add every model and suffix of the catalog; existing ones stay, nothing is removed."""
    pairs = list(catalog.pairs())
    add_pairs(instance, [model for model, _ in pairs], [suffix for _, suffix in pairs])


def add_oneshot(instance: dg.DagsterInstance, model: str) -> None:
    """Add the partition that one-shot builds of `model` run under."""
    add_pairs(instance, [model], [ONESHOT_PARTITION])


def add_pairs(instance: dg.DagsterInstance, repos: list[str], labels: list[str]) -> None:
    """Add these Hub repos and suffixes."""
    keys = [to_partition_key(repo) for repo in dict.fromkeys(repos)]
    instance.add_dynamic_partitions("tensorize_model", keys)
    instance.add_dynamic_partitions("tensorize_suffix", list(dict.fromkeys(labels)))


def add_requests(
    instance: dg.DagsterInstance, repos: Iterable[str], labels: Iterable[str]
) -> list[dg.AddDynamicPartitionsRequest]:
    """What a sensor returns to add those of these Hub repos and suffixes that are missing."""
    keys = list(dict.fromkeys(to_partition_key(repo) for repo in repos))
    wanted = ((models, keys), (suffixes, list(dict.fromkeys(labels))))
    found: list[dg.AddDynamicPartitionsRequest] = []
    for definition, names in wanted:
        if not names:
            continue
        known = set(definition.get_partition_keys(dynamic_partitions_store=instance))
        missing = [name for name in names if name not in known]
        if missing:
            found.append(definition.build_add_request(missing))
    return found
