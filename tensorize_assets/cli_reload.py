"""`tensorize reload`: any tensorizer files, loaded as vLLM's own `deserialize` does, and asked."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer
from pydantic import JsonValue

from tensorize_assets.cli_common import (
    FAILED,
    AnyOrPublicKeys,
    Json,
    S3AccessKeyId,
    S3Endpoint,
    S3SecretAccessKey,
    absolute,
    err,
    errors,
    hub_access,
    json_object,
    listed_keys,
    open_place,
    out,
    prefer_s3,
    print_json,
    s3_access,
    signer_of,
)
from tensorize_assets.core import catalog, releases, s3, self_check
from tensorize_assets.core.catalog import DEFAULT_PROMPTS
from tensorize_assets.core.compare import as_manifest
from tensorize_assets.core.errors import CatalogError, PreflightError, StoreError
from tensorize_assets.core.evidence import CheckOutcome
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.http_source import split_url, without_query
from tensorize_assets.core.manifest import Manifest
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.sealing import DATA_KEY_BYTES
from tensorize_assets.core.self_check import Found
from tensorize_assets.core.tasks import DATA_KEY, ReloadResult, SelfCheckRequest


class _Source(NamedTuple):
    """What was asked for: a directory to look into, and a name in it; or one URL by itself.

    `base` is the directory as vLLM's `tensorizer_uri` begins, `where` what a message calls it all.
    """

    reader: self_check.Directory | None
    base: str
    name: str | None
    where: str
    query: str = ""


def reload(
    path_to_tensors: Annotated[
        str | None,
        typer.Option(
            "--path-to-tensors",
            "--tensorizer-uri",
            help="Tensors to load: a path, an s3:// URI or an http(s):// URL; with a template for "
            "the rank (model-rank-%03d.tensors) where there are several.",
        ),
    ] = None,
    serialized_directory: Annotated[
        str | None,
        typer.Option(
            help="Directory to load instead, which holds model.tensors or model-rank-000.tensors "
            "and so on: a folder, an s3:// URI or an http(s):// URL."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Where config and tokenizer are: a folder or a Hub repo. Default: beside the "
            "tensors."
        ),
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of that repo.")] = "main",
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size", "--tp", min=1, help="Default: as many as there are files."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto (default), float16, bfloat16 or float32.")
    ] = None,
    keyfile: Annotated[
        str | None,
        typer.Option(
            "--keyfile",
            "--encryption-keyfile",
            help="File of the raw key that decrypts the tensors: a path or an s3:// URI.",
        ),
    ] = None,
    num_readers: Annotated[
        int | None, typer.Option(min=1, help="How many threads read a file at once.")
    ] = None,
    verify_hash: Annotated[
        bool,
        typer.Option(
            "--verify-hash", help="Hold each tensor against the hash that the file has of it."
        ),
    ] = False,
    deserialization_kwargs: Annotated[
        str | None,
        typer.Option(help="JSON object of arguments for tensorizer's TensorDeserializer."),
    ] = None,
    s3_access_key_id: S3AccessKeyId = None,
    s3_secret_access_key: S3SecretAccessKey = None,
    s3_endpoint: S3Endpoint = None,
    prompt: Annotated[str, typer.Option(help="What the loaded model is asked.")] = DEFAULT_PROMPTS[
        0
    ],
    public_key: AnyOrPublicKeys = None,
    as_json: Json = False,
) -> None:
    """Load tensors with vLLM and ask the model something: `deserialize` of vLLM's own script.

    Give either the tensors or their directory. Where our manifest is, its signature, the size of
    each file and the hash of each tensor are held against it. Other artifacts load too, those of
    vLLM's script for instance; the output says what could not be verified of them.
    """
    with errors(), ExitStack() as stack:
        if (path_to_tensors is None) == (serialized_directory is None):
            raise CatalogError(
                "give exactly one of --path-to-tensors (or --tensorizer-uri) and "
                "--serialized-directory"
            )
        prefer_s3(s3_access_key_id, s3_secret_access_key, s3_endpoint)
        arguments = _arguments(deserialization_kwargs)
        device = _device()
        source = _source(path_to_tensors, serialized_directory)
        listed = listed_keys(public_key)
        found = (
            Found("", tensor_parallel_size or 1, None)
            if source.reader is None
            else self_check.find(source.reader, source.name, tensor_parallel_size, listed)
        )
        manifest = found.manifest.manifest if found.manifest else None
        _require_fitting(manifest, model, dtype, keyfile)
        scratch = stack.enter_context(private_folder())
        folder = _model_folder(source, manifest, model, revision, scratch)
        key = _key(keyfile)
        settings: dict[str, JsonValue] = {
            "num_readers": num_readers,
            "verify_hash": verify_hash or None,
            "deserialization_kwargs": arguments,
        }
        tensors = f"{source.base}/{found.name}" if source.reader is not None else source.base
        access = s3_access() if s3.is_s3(tensors) else None
        credentials = access.credentials if access else None
        request = SelfCheckRequest(
            model=manifest.model if manifest else source.where,
            suffix=manifest.suffix if manifest else "",
            tensor_parallel_size=found.tensor_parallel_size,
            dtype=manifest.dtype if manifest else dtype or "auto",
            device=device,
            prompts=(prompt,),
            folder=str(folder),
            tensors=tensors,
            settings={name: value for name, value in settings.items() if value is not None},
            encrypted=key is not None,
            s3=access.settings if access else None,
        )
        from tensorize_assets import running

        result = running.run_worker(
            request,
            ReloadResult,
            {
                **(credentials.to_secrets() if credentials else {}),
                **({} if key is None else {DATA_KEY: key}),
                # Not for the worker: what is handed over so is kept out of every log.
                **({"query": source.query.encode()} if source.query else {}),
            },
        )
        checks = as_manifest(manifest, result) if manifest else ()
        verified = verify_hash or arguments.get("verify_hash") is True
        signer = signer_of(found.manifest.key_id, listed) if found.manifest else None
        report = _report(source.where, request, result, manifest, checks, verified)
        if signer is not None:
            report |= {"trusted": signer.trusted, "signed_by_this_home": signer.ours}
            report["held"].insert(0, f"the manifest is {signer.said}")
    if as_json:
        print_json(report)
    else:
        _show(report)
    if not report["success"]:
        raise typer.Exit(FAILED)


def _arguments(text: str | None) -> dict[str, JsonValue]:
    """Arguments for TensorDeserializer; the worker holds them against the installed release."""
    option = "--deserialization-kwargs"
    given = json_object(text, option)
    refused = catalog.REFUSED_DESERIALIZATION_ARGUMENTS
    known = catalog.DESERIALIZATION_ARGUMENTS
    for name in given:
        if name in refused:
            raise CatalogError(f"{option} {name}: {refused[name]}")
        if name not in known:
            near = catalog.did_you_mean(name, known)
            raise CatalogError(
                f"{option} {name}: tensorizer has no such argument{near} (arguments: "
                f"{', '.join(known)})"
            )
    return given


def _device() -> Any:
    vllm = releases.installed()
    if vllm is None:
        raise PreflightError(
            "no vLLM is installed here, which is to load the tensors; install the extra `cpu` or "
            "`gpu`"
        )
    releases.require_supported(vllm.release)
    return vllm.device


def _source(tensors: str | None, directory: str | None) -> _Source:
    place = tensors if tensors is not None else directory or ""
    is_url = place.lower().startswith(("http://", "https://"))
    if is_url:
        # Here, where a password before the host would go on to vLLM.
        split_url(place)
    where = without_query(place) if is_url else place
    if is_url and tensors is not None and where != place:
        # A signed URL is of one file; what lies beside it cannot be asked for.
        return _Source(None, place, None, where, urlsplit(place).query)
    base, name = place.rstrip("/"), None
    if tensors is not None:
        base, _, name = (place if is_url or s3.is_s3(place) else absolute(place)).rpartition("/")
    if is_url:
        return _Source(HttpFolder(base), base, name, where)
    base = absolute(base or "/")
    if not s3.is_s3(base) and not Path(base).is_dir():
        raise StoreError(f"{base} is no folder; correct the place")
    return _Source(open_place(base), base, name, where)


def _require_fitting(
    manifest: Manifest | None, model: str | None, dtype: str | None, keyfile: str | None
) -> None:
    """Raises CatalogError for options that say other than the manifest."""
    if manifest is None:
        return
    if model is not None and model != manifest.model:
        raise CatalogError(
            f"--model {model}: the manifest is of {manifest.model}, whose config and tokenizer lie "
            "beside the tensors; leave --model out"
        )
    if dtype not in (None, "auto", manifest.dtype):
        raise CatalogError(
            f"--dtype {dtype}: the manifest says {manifest.dtype}; leave --dtype out"
        )
    if manifest.encryption is not None and keyfile is None:
        key_id = manifest.encryption.key_id
        raise CatalogError(
            f"the tensors are encrypted with data key {key_id}; give --keyfile (`tensorize keys "
            f"unseal {key_id}` writes it)"
        )


def _model_folder(
    source: _Source, manifest: Manifest | None, model: str | None, revision: str, scratch: Path
) -> Path:
    if model is not None and manifest is None:
        if Path(model).is_dir():
            return Path(model).absolute()
        return self_check.from_hub(hub_access(), model, revision)
    folder = None
    if source.reader is not None:
        folder = self_check.gather(source.reader, manifest, scratch)
    if folder is None:
        raise CatalogError(
            f"{source.where}: there is no config.json beside the tensors; give --model, a folder "
            "or a Hub repo with config and tokenizer"
        )
    return folder


def _key(keyfile: str | None) -> bytes | None:
    """The raw key in a file. Raises StoreError for one that cannot be read, or holds none."""
    if keyfile is None:
        return None
    place, _, name = (keyfile if s3.is_s3(keyfile) else absolute(keyfile)).rpartition("/")
    found = open_place(place or "/").get_bytes(name)
    if found is None:
        raise StoreError(f"the keyfile {keyfile} does not exist; correct the path")
    if len(found.data) != DATA_KEY_BYTES:
        raise StoreError(
            f"the keyfile {keyfile} has {len(found.data)} bytes, and a key has {DATA_KEY_BYTES}; "
            "give the file that `tensorize keys unseal`, or vLLM's script, has written"
        )
    return found.data


def _report(
    where: str,
    request: SelfCheckRequest,
    result: ReloadResult,
    manifest: Manifest | None,
    checks: tuple[CheckOutcome, ...],
    verified: bool,
) -> dict[str, Any]:
    held: list[str] = []
    not_verified: list[str] = []
    if result.error is None and verified:
        held.append("each tensor has the hash that the file itself gives for it")
    if manifest is None:
        not_verified += [
            "who made these files: there is no manifest.json of theirs, and so no signature",
            "whether they are what was written: no manifest says which hash each file and tensor "
            "should have",
            "whether the model is its source: what it was made of is not known",
        ]
        if not verified:
            not_verified.append("each tensor's own hash in the file: give --verify-hash")
    else:
        if not any(not check.passed for check in checks):
            held.append("every file has the manifest's size, and config and tokenizer its hashes")
        not_verified.append("whether it answers as its source does: that is the reload check's")
        if manifest.adapters:
            names = ", ".join(adapter.name for adapter in manifest.adapters)
            not_verified.append(f"adapters ({names}): they have the manifest's size, and no more")
    loads = [load.model_dump(mode="json", exclude={"tensors"}) for load in result.loads]
    answers = result.answers
    return {
        "tensors": where,
        "success": result.error is None and all(check.passed for check in checks),
        "error": result.error,
        "build_id": manifest.build_id if manifest else None,
        "tensor_parallel_size": request.tensor_parallel_size,
        "device": request.device,
        "device_name": result.device_name,
        "vllm_version": result.vllm_version,
        "loads": loads,
        "answers": [
            {"prompt": output.prompt, "answer": output.text}
            for output in (answers.outputs if answers else ())
        ],
        "perplexity": answers.perplexity if answers else None,
        "checks": [check.model_dump(mode="json") for check in checks],
        "held": held,
        "not_verified": not_verified,
    }


def _show(report: dict[str, Any]) -> None:
    def line(text: str, **style: Any) -> None:
        out.print(text, markup=False, highlight=False, **style)

    if report["error"] is not None:
        err.print(f"not loaded: {report['error']}", markup=False, highlight=False)
    loads = report["loads"]
    if loads and report["error"] is None:
        seconds = max(load["seconds"] for load in loads)
        size = sum(load["bytes"] for load in loads)
        slow = ", by vLLM's slow path" if loads[0]["path"] == "slow" else ""
        line(
            f"{report['tensors']}: {len(loads)} ranks, {format_bytes(size)} in {seconds:.2f} s "
            f"({format_bytes(size / max(seconds, 1e-3))}/s) from {loads[0]['source']}{slow}, on "
            f"{report['device_name']} with vLLM {report['vllm_version']}"
        )
    for answer in report["answers"]:
        line(f"{answer['prompt']}{answer['answer']}")
    for check in report["checks"]:
        line(f"{'held' if check['passed'] else 'WRONG'}: {check['name']}: {check['description']}")
    for held in report["held"]:
        line(f"held: {held}")
    for missing in report["not_verified"]:
        line(f"NOT verified: {missing}")
