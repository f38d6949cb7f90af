"""`tensorize store …`: whether a store can do what the product needs of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tensorize_assets.cli_common import (
    FAILED,
    AwsProfile,
    CaBundle,
    EndpointUrl,
    Json,
    Region,
    absolute,
    catalog_path,
    errors,
    found_catalog,
    out,
    print_json,
    s3_access,
)
from tensorize_assets.core.catalog import resolve_root
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.s3 import S3Access, is_s3
from tensorize_assets.core.store_check import StoreReport, check_store

_STYLES = {"works": "green", "fails": "bold red", "tolerated": "yellow", "skipped": "dim"}

store_app = typer.Typer(
    help="The artifact store: what it can do, and how fast.", no_args_is_help=True
)


@store_app.callback()
def _group() -> None:
    """A group also while it has one command."""


@store_app.command("check")
def check(
    uri: Annotated[
        str | None,
        typer.Argument(
            help="s3://bucket/prefix or a folder. Default: the root of the Dagster home's catalog."
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: AwsProfile = None,
    ca_bundle: CaBundle = None,
    addressing: Annotated[str | None, typer.Option(help="auto, path or virtual.")] = None,
    checksums: Annotated[str | None, typer.Option(help="when_supported or when_required.")] = None,
    as_json: Json = False,
) -> None:
    """Try each verb that the product needs, and say what works, how fast, and what to set.

    Writes 64 MiB under a hidden name of the root and removes it again. Settings of S3 are those
    of the Dagster home's catalog, where there is one; the options go before them. Credentials
    come from --profile, S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY, or boto3's own chain.
    """
    given = {
        "endpoint_url": endpoint_url,
        "region": region,
        "profile": profile,
        "ca_bundle": ca_bundle,
        "addressing": addressing,
        "checksums": checksums,
    }
    with errors():
        root, access = _resolve(uri, given)
        report = check_store(root, access)
    if as_json:
        print_json({"healthy": report.healthy, **report.model_dump(mode="json")})
    else:
        _show(report)
    if not report.healthy:
        raise typer.Exit(FAILED)


def _resolve(uri: str | None, given: dict[str, str | None]) -> tuple[str, S3Access | None]:
    """The root to check and how S3 is reached.

    Raises CatalogError for a wrong catalog or option, and when neither names a root.
    """
    if uri is None:
        catalog = found_catalog()
        if catalog is None:
            raise CatalogError(f"give the store to check; there is no catalog at {catalog_path()}")
        uri = resolve_root(catalog, catalog_path())
    return absolute(uri), s3_access(given) if is_s3(uri) else None


def _show(report: StoreReport) -> None:
    table = Table(title=report.root)
    table.add_column("verb", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("MB/s", justify="right", no_wrap=True)
    table.add_column("needs", no_wrap=True)
    for verb in report.verbs:
        style = _STYLES[verb.status]
        table.add_row(
            verb.name,
            f"[{style}]{verb.status}[/]",
            _number(verb.milliseconds),
            _number(verb.mb_per_s),
            verb.needs,
        )
    out.print(table)
    for name, value in report.facts.items():
        out.print(f"{name}: {value}", markup=False, highlight=False)
    # Below the table, whose cells would break the text into slivers; one reason is told once.
    reasons: dict[str, list[str]] = {}
    for verb in report.verbs:
        if verb.reason and verb.status != "skipped":
            reasons.setdefault(verb.reason, []).append(verb.name)
    for reason, names in reasons.items():
        out.print(f"{', '.join(names)}: {reason}", markup=False, highlight=False)
    for left in report.left:
        out.print(f"left behind: {left}", style="yellow", markup=False, highlight=False)
    if report.healthy:
        out.print("The product can work here.", style="green")
    else:
        out.print("The product cannot work here as it is.", style="bold red")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
