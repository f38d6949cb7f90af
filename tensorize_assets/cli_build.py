"""`tensorize build`: the whole chain for one model, of the catalog or of the command line."""

from __future__ import annotations

import os
import uuid
from os import environ
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tensorize_assets.cli_common import (
    FAILED,
    Json,
    S3AccessKeyId,
    S3Endpoint,
    S3SecretAccessKey,
    absolute,
    catalog_path,
    err,
    errors,
    home_and_catalog,
    hub_access,
    json_object,
    open_place,
    out,
    prefer_s3,
    print_json,
    private_key_path,
    recipient_key,
    trusted_keys,
)
from tensorize_assets.core import layout, local_adapter, releases, sealing
from tensorize_assets.core.catalog import Catalog, Profile, resolve_root
from tensorize_assets.core.errors import CatalogError


def build(
    model: Annotated[str, typer.Argument(help="Hub repo id, such as facebook/opt-125m.")],
    suffix: Annotated[
        str | None,
        typer.Option(
            help="A profile of the catalog; or a new name for a one-shot build. A random UUID if "
            "not given."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", "--tensor-parallel-size", help="tensor_parallel_size."),
    ] = None,
    pipeline: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "--pp", hidden=True)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float16, bfloat16 or float32.")] = None,
    reload_device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu. Default: the device of the vLLM that is installed."),
    ] = None,
    tensor_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="vllm (default), or hf: one file with the repo's own names, made without vLLM; it "
            "loads on vLLM's slow path.",
        ),
    ] = None,
    serialized_directory: Annotated[
        str | None,
        typer.Option(
            help="Root, as vLLM's script has it: a folder or s3://bucket/prefix. Default: the "
            "catalog's root."
        ),
    ] = None,
    lora_path: Annotated[
        str | None,
        typer.Option(help="A LoRA adapter to store with the model: a folder, or a Hub repo."),
    ] = None,
    keyfile: Annotated[
        Path | None,
        typer.Option(
            help="Encrypt the tensors with a new random key, and write the key to this file, "
            "mode 0600. Nothing is written in plaintext."
        ),
    ] = None,
    serialization_kwargs: Annotated[
        str | None,
        typer.Option(help="JSON object of arguments for tensorizer's TensorSerializer."),
    ] = None,
    s3_access_key_id: S3AccessKeyId = None,
    s3_secret_access_key: S3SecretAccessKey = None,
    s3_endpoint: S3Endpoint = None,
    as_json: Json = False,
) -> None:
    """Run the whole chain for one model, as a Dagster run that the UI shows.

    Takes what `serialize` of vLLM's tensorize_vllm_model.py does, with the same meaning.
    """
    given = {
        "revision": revision,
        "tensor_parallel_size": tp,
        "dtype": dtype,
        "reload_device": reload_device,
        "format": tensor_format,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with errors():
        if pipeline not in (None, 1):
            raise CatalogError(f"--pipeline-parallel-size: {layout.NO_STAGES}")
        prefer_s3(s3_access_key_id, s3_secret_access_key, s3_endpoint)
        home, catalog = home_and_catalog()
        entry = catalog.models.get(model)
        if serialization_kwargs is not None:
            options["serialization_kwargs"] = json_object(
                serialization_kwargs, "--serialization-kwargs"
            )
        if entry is not None and suffix in entry.profiles:
            if options or serialized_directory or lora_path or keyfile:
                raise CatalogError(
                    f"{model} has a profile {suffix!r} in the catalog: change it there, or choose "
                    "another --suffix for a one-shot build"
                )
            _finish(_run_pair(home, catalog, model, suffix), as_json)
            return
        if lora_path is not None:
            options["adapters"] = [_adapter(lora_path)]
        if keyfile is not None:
            options["encryption"] = "only"
            keyfile = _free_keyfile(keyfile)
        root = absolute(serialized_directory) if serialized_directory else None
        oneshot = {
            "suffix": suffix or uuid.uuid4().hex,
            "profile": _profile(options),
            "root": root,
            "keyfile": keyfile is not None,
        }
        report = _run_oneshot(home, model, oneshot)
        key_id = report.get("hf_snapshot", {}).get("data_key")
        if keyfile is not None and key_id is not None:
            # Also after a failure: it opens what was written until then.
            _write_key(root or resolve_root(catalog, catalog_path(home)), key_id, keyfile)
            report["keyfile"] = str(keyfile)
        _finish(report, as_json)


def _profile(options: dict[str, Any]) -> dict[str, Any]:
    options.setdefault("reload_device", _installed_device())
    return options


def _installed_device() -> Literal["cpu", "cuda"]:
    found = releases.installed()
    return found.device if found else "cuda"


def _adapter(place: str) -> dict[str, str]:
    """The adapter of a one-shot: of a folder, taken into the cache; or else of a Hub repo."""
    if Path(place).is_dir():
        repo, commit = local_adapter.take(hub_access(), Path(place))
        return {"name": repo.rpartition("/")[2], "repo": repo, "revision": commit}
    return {"name": local_adapter.name_of(place.rpartition("/")[2]), "repo": place}


def _free_keyfile(keyfile: Path) -> Path:
    """Where the key will be written. Raises CatalogError, before anything is built, if it cannot.

    The home needs a private key, to load what it encrypts: without one it gets one.
    """
    place = keyfile.absolute()
    if "://" in str(keyfile) or not place.parent.is_dir():
        raise CatalogError(f"--keyfile {keyfile}: give a file in a folder that exists on this disk")
    if os.path.lexists(place):
        raise CatalogError(f"--keyfile {keyfile}: there is something; no key is overwritten")
    if (
        not environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
        and not private_key_path().exists()
    ):
        sealing.generate_private_key(private_key_path())
    return place


def _write_key(root: str, key_id: str, keyfile: Path) -> None:
    store, trusted = open_place(root), trusted_keys(None)
    own = recipient_key(store, key_id, None, trusted)
    with sealing.unseal(store, key_id, own, trusted=trusted) as data_key:
        sealing.write_keyfile(data_key, keyfile)


def _run_pair(home: Path, catalog: Catalog, model: str, suffix: str) -> dict[str, Any]:
    from tensorize_assets import running

    with running.open_instance(home) as instance:
        return running.report(running.build_pair(instance, home, catalog, model, suffix))


def _run_oneshot(home: Path, model: str, oneshot: dict[str, Any]) -> dict[str, Any]:
    from pydantic import ValidationError

    from tensorize_assets import running
    from tensorize_assets.assets.target import Oneshot

    try:
        checked = Oneshot(
            suffix=oneshot["suffix"],
            profile=Profile.model_validate(oneshot["profile"]),
            root=oneshot["root"],
            keyfile=oneshot["keyfile"],
        )
    except ValidationError as error:
        wrong = [f"{_option(e['loc'])}: {e['msg']}" for e in error.errors()]
        raise CatalogError("; ".join(wrong)) from error
    with running.open_instance(home) as instance:
        return running.report(running.build_oneshot(instance, home, model, checked))


def _option(field: tuple[int | str, ...]) -> str:
    """The option that sets a field of a one-shot's profile."""
    name = str(field[0] if field else "")
    options = {"tensor_parallel_size": "--tp", "adapters": "--lora-path"}
    within = f" {field[1]}" if name.endswith("_kwargs") and field[1:] else ""
    return options.get(name, f"--{name.replace('_', '-')}") + within


def _finish(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    elif report["success"]:
        out.print(f"published: {report['directory']}", markup=False)
    else:
        err.print("not published:", style="bold red")
        for line in report["errors"]:
            err.print(f"  {line}", markup=False)
    if not report["success"]:
        raise typer.Exit(FAILED)
