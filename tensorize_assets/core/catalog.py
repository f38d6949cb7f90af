"""The catalog: which models are built, and each way (suffix) they are built.

`load_catalog` reads `models.yaml`; `catalog_check` finds the mistakes in one, with their lines.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from tensorize_assets.core.catalog_automation import Automation
from tensorize_assets.core.catalog_launchers import LauncherKind, Launchers
from tensorize_assets.core.catalog_snapshots import Snapshots
from tensorize_assets.core.errors import CatalogError, SignatureError, StoreError
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.s3 import S3Settings, is_other_url, is_s3, split_uri
from tensorize_assets.core.sealing import KEY_PATTERN, SealingError, check_public_key
from tensorize_assets.core.signing import check_verify_key

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To boil an egg, first",
    "The three primary colours are red,",
)

# One-shot builds from the command line run under this suffix.
RESERVED_SUFFIX = "adhoc"
MAX_SUFFIX_LENGTH = 64
# Far above any host; a bound keeps absurd numbers out of rank loops and file names.
MAX_TENSOR_PARALLEL_SIZE = 1024

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]{0,94}[A-Za-z0-9_])?"
MODEL_ID_PATTERN = rf"^(?!.*(?:--|\.\.))(?!.*\.git$)(?:{_NAME}/)?{_NAME}$"
SUFFIX_PATTERN = (
    r"^(?!.*\.\.)(?!.*\.[Jj][Ss][Oo][Nn]$)(?![Aa][Dd][Hh][Oo][Cc]$)"
    rf"[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,{MAX_SUFFIX_LENGTH - 1}}}$"
)

ADAPTER_NAME_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9_.\-]{0,62}[A-Za-z0-9_\-])?$"
# Shorter than any key is as text: one that stands in the name's place is refused.
RECIPIENT_NAME_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9_.\-]{0,38}[A-Za-z0-9_\-])?$"
# What Dagster takes for an owner (is_valid_owner in dagster/_core/definitions/utils.py), and less:
# it takes any text after team:.
OWNER_PATTERN = (
    r"^(?:team:[A-Za-z0-9_][A-Za-z0-9_.\-]{0,62}"
    r"|[A-Za-z0-9_][A-Za-z0-9._%+\-]*@[A-Za-z0-9.\-]+\.[A-Za-z]{2,7})$"
)

# What a value must be, by the argument's name. Arguments of TensorSerializer.__init__ and
# TensorDeserializer.__init__ in tensorizer 2.10.1 (tensorizer/serialization.py), together with
# the REFUSED ones below; core must not import tensorizer, so tests compare these with it.
SERIALIZATION_ARGUMENTS: Mapping[str, Literal["switch", "count"]] = {
    "compress_tensors": "switch",
    "limit_cpu_concurrency": "count",
}
DESERIALIZATION_ARGUMENTS: Mapping[str, Literal["switch", "count"]] = {
    "num_readers": "count",
    "plaid_mode": "switch",
    "plaid_mode_buffers": "count",
    "verify_hash": "switch",
}
_MAX_COUNT = 1024

_VLLM_DECIDES = "vLLM decides this argument itself and refuses it in a profile"
REFUSED_SERIALIZATION_ARGUMENTS: Mapping[str, str] = {
    "file_obj": "the builder names the file itself; remove this line",
    "encryption": "keys never stand in a catalog, and the builder passes them itself; remove "
    "this line",
}
# device, dtype and mode: BLACKLISTED_TENSORIZER_ARGS in vLLM 0.31.0,
# vllm/model_executor/model_loader/tensorizer_loader.py.
REFUSED_DESERIALIZATION_ARGUMENTS: Mapping[str, str] = {
    "device": f"{_VLLM_DECIDES}; set reload_device (cuda or cpu) in the profile instead",
    "dtype": f"{_VLLM_DECIDES}; set dtype in the profile instead",
    "mode": f"{_VLLM_DECIDES}: a load always reads; remove this line",
    "file_obj": "the loader names the file itself; remove this line",
    "lazy_load": "the loader always sets it itself; remove this line",
    "encryption": "keys never stand in a catalog, and the loader passes them itself; remove "
    "this line",
    "filter_func": "a function cannot be written in YAML, and a reload reads every tensor; "
    "remove this line",
}

# A config.json is somebody else's file: a larger number is nonsense, not a model.
_MAX_HEADS = 1_000_000
# Where a config.json says how many attention heads there are.
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# The names, and their order, are those of vLLM 0.31.0: get_total_num_kv_heads in
# vllm/transformers_utils/model_arch_config_convertor.py.
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name nearest to `name`, else an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower()[:80], by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def _model_id(value: str) -> str:
    # huggingface_hub.utils.validate_repo_id says the same, but importing it takes longer than
    # reading the catalog; a test holds the two equal.
    if re.fullmatch(MODEL_ID_PATTERN, value) is None:
        raise ValueError(
            "is not a Hub repo id: org/name or name, each of 1 to 96 letters, digits, - _ ., "
            "starting and ending with a letter, digit or _, without -- or .., not ending in .git"
        )
    return value


def _suffix(value: str) -> str:
    problem = _suffix_problem(value)
    if problem:
        raise ValueError(problem)
    return value


def _suffix_problem(value: str) -> str | None:
    allowed = "use letters, digits, . _ -"
    if not value:
        return f"a suffix is empty; {allowed}"
    strange = next((c for c in value if not re.fullmatch(r"[A-Za-z0-9_.\-]", c)), None)
    if strange is not None:
        return f"a suffix cannot contain {strange!a}; {allowed}"
    if value[0] in ".-":
        return f"a suffix cannot start with {value[0]!r}; start with a letter or digit"
    if ".." in value:
        return f"a suffix cannot contain '..'; {allowed}"
    if len(value) > MAX_SUFFIX_LENGTH:
        return f"a suffix has at most {MAX_SUFFIX_LENGTH} characters, this one {len(value)}"
    if value.lower() == RESERVED_SUFFIX:
        return f"the suffix {RESERVED_SUFFIX} is reserved for one-shot builds; choose another name"
    if value.lower().endswith(".json"):
        return "a suffix cannot end in .json, which is the name of its channel file"
    return None


def _revision(value: str) -> str:
    # What `git check-ref-format` refuses, as far as one can get it wrong by hand.
    if not value or re.search(r"[\s\x00-\x1f\x7f~^:?*\[\\]|\.\.|@\{|//|^[/\-]|/$", value):
        raise ValueError("is not a branch, tag or commit; write main, a tag, or a 40-digit commit")
    return value


def _adapter_name(value: str) -> str:
    if re.fullmatch(ADAPTER_NAME_PATTERN, value) is None:
        raise ValueError(
            "is not a name: 1 to 64 letters, digits, . _ -, starting with a letter or digit"
        )
    return value


def _recipient_name(value: str) -> str:
    if re.fullmatch(RECIPIENT_NAME_PATTERN, value) is None:
        raise ValueError(
            "is not a name: 1 to 40 letters, digits, . _ -, starting with a letter or digit; "
            "write name: public key"
        )
    return value


def _recipient_key(value: str) -> str:
    try:
        return check_public_key(value)
    except SealingError as error:
        raise ValueError(str(error)) from None


def _recipients(recipients: dict[str, str]) -> dict[str, str]:
    names, keys = list(recipients), list(recipients.values())
    lower = [name.lower() for name in names]
    problems: dict[tuple[str | int, ...], str] = {}
    for n, name in enumerate(names):
        if keys[n] in keys[:n]:
            other = names[keys.index(keys[n])]
            problems[name,] = f"has the public key of {other}: a key is one recipient; remove one"
        elif lower[n] in lower[:n]:
            # Each names a file, and some disks ignore case.
            other = names[lower.index(lower[n])]
            problems[name,] = f"too much like the recipient {other}; rename one"
    _refuse(problems)
    return recipients


def _adapters(adapters: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
    # Without regard to case: each has a folder, and some disks have none either.
    names = [adapter.name.lower() for adapter in adapters]
    _refuse(
        {
            (n, "name"): f"another adapter of this profile is called {name}; rename one"
            for n, name in enumerate(names)
            if name in names[:n]
        }
    )
    return adapters


def _refuse(problems: Mapping[tuple[str | int, ...], str]) -> None:
    """Raise ValidationError with each problem at its path, if there is any."""
    errors = [
        InitErrorDetails(
            type=PydanticCustomError("refused", "{reason}", {"reason": problem}),
            loc=path,
            # The value may be a key that somebody put here by mistake.
            input="(not shown)",
        )
        for path, problem in problems.items()
    ]
    if errors:
        raise ValidationError.from_exception_data("catalog", errors)


def _owner(value: str) -> str:
    if re.fullmatch(OWNER_PATTERN, value) is None:
        raise ValueError("is not an owner: an email address, or team:NAME as in team:ml-platform")
    return value


def _trusted_key(value: str) -> str:
    try:
        return check_verify_key(value)
    except SignatureError as error:
        raise ValueError(str(error)) from None


def _root(value: str) -> str:
    if is_s3(value):
        try:
            split_uri(value)
        except StoreError as error:
            raise ValueError(str(error)) from None
    elif is_other_url(value):
        raise ValueError("is a URL that is not s3://; write s3://bucket/prefix, or a folder")
    if not value or value != value.strip() or re.search(r"[\x00-\x1f\x7f]", value):
        raise ValueError("is not a folder; write a path such as artifacts, without blanks around")
    if value.startswith("~"):
        raise ValueError("~ is not expanded; write the whole path, or one relative to this file")
    if "%" in value:
        raise ValueError("cannot contain %: vLLM puts the rank into the path with %-formatting")
    return value


def _prompt(value: str) -> str:
    if not value.strip():
        raise ValueError("a prompt is empty; write some text or remove the line")
    return value


def _argument_problem(
    name: str,
    value: JsonValue,
    known: Mapping[str, Literal["switch", "count"]],
    refused: Mapping[str, str],
) -> str | None:
    if name in refused:
        return refused[name]
    if name not in known:
        near = did_you_mean(name, known)
        return f"tensorizer 2.10.1 has no such argument{near} (arguments: {', '.join(known)})"
    if value is None:
        return "has no value; write one, or remove the line for tensorizer's default"
    if known[name] == "switch" and not isinstance(value, bool):
        return "wants true or false"
    if known[name] == "count" and (type(value) is not int or not 1 <= value <= _MAX_COUNT):
        return f"wants a whole number from 1 to {_MAX_COUNT}"
    if name == "verify_hash" and value is False:
        return "cannot be false: a reload that checks no hash proves nothing; remove this line"
    return None


def _checked_arguments(
    arguments: dict[str, JsonValue],
    known: Mapping[str, Literal["switch", "count"]],
    refused: Mapping[str, str],
) -> dict[str, JsonValue]:
    _refuse(
        {
            (name,): problem
            for name, value in arguments.items()
            if (problem := _argument_problem(name, value, known, refused))
        }
    )
    return arguments


def _serialization(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return _checked_arguments(arguments, SERIALIZATION_ARGUMENTS, REFUSED_SERIALIZATION_ARGUMENTS)


def _deserialization(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return _checked_arguments(
        arguments, DESERIALIZATION_ARGUMENTS, REFUSED_DESERIALIZATION_ARGUMENTS
    )


def _arguments_schema(known: Mapping[str, Literal["switch", "count"]]) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "switch": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 1, "maximum": _MAX_COUNT},
    }
    properties = {name: kinds[kind] for name, kind in known.items()}
    if "verify_hash" in properties:
        properties["verify_hash"] = {"const": True}
    return {"properties": properties, "additionalProperties": False}


ModelId = Annotated[
    str,
    AfterValidator(_model_id),
    WithJsonSchema({"type": "string", "pattern": MODEL_ID_PATTERN}),
]
Suffix = Annotated[
    str, AfterValidator(_suffix), WithJsonSchema({"type": "string", "pattern": SUFFIX_PATTERN})
]
AdapterName = Annotated[
    str,
    AfterValidator(_adapter_name),
    WithJsonSchema({"type": "string", "pattern": ADAPTER_NAME_PATTERN}),
]
RecipientName = Annotated[
    str,
    AfterValidator(_recipient_name),
    WithJsonSchema({"type": "string", "pattern": RECIPIENT_NAME_PATTERN}),
]
RecipientKey = Annotated[
    str, AfterValidator(_recipient_key), WithJsonSchema({"type": "string", "pattern": KEY_PATTERN})
]
TrustedKey = Annotated[
    str, AfterValidator(_trusted_key), WithJsonSchema({"type": "string", "pattern": KEY_PATTERN})
]
Owner = Annotated[
    str, AfterValidator(_owner), WithJsonSchema({"type": "string", "pattern": OWNER_PATTERN})
]
Prompt = Annotated[
    str, AfterValidator(_prompt), WithJsonSchema({"type": "string", "pattern": r"\S"})
]


Encryption = Literal["none", "both", "only"]
TensorFormat = Literal["vllm", "hf"]
Sharding = Literal["virtual", "executor"]


class Adapter(BaseModel):
    """A LoRA adapter of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: AdapterName = Field(
        description="What the adapter is called when it is served: a label such as summarize."
    )
    repo: ModelId = Field(description="The adapter's Hub repo: org/name.")
    revision: Annotated[str, AfterValidator(_revision)] = Field(
        default="main",
        description="Branch, tag or commit of the adapter's repo.",
        min_length=1,
        max_length=200,
    )


class Profile(BaseModel):
    """One way to build a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: Annotated[str, AfterValidator(_revision)] = Field(
        default="main",
        description="Branch, tag or commit of the Hub repo.",
        min_length=1,
        max_length=200,
    )
    track: Literal["follow", "pin"] = Field(
        default="follow",
        description="follow: build again when the revision moves. pin: stay at the commits that "
        "the revision, and those of adapters, had at the first build.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        strict=True,
        ge=1,
        le=MAX_TENSOR_PARALLEL_SIZE,
        description="Number of devices the model is split over; one shard file is written for "
        "each. Must divide the model's attention heads.",
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        default="auto",
        description="Type that the weights are stored in. auto: what vLLM chooses from the "
        "model's config.json.",
    )
    format: TensorFormat = Field(
        default="vllm",
        description="vllm: each rank's tensors as vLLM holds them, read straight onto its devices. "
        "hf: one file with the repo's own tensors and names, made without vLLM; vLLM sorts them "
        "out as it loads, on the slow path. Only with tensor_parallel_size 1.",
    )
    sharding: Sharding = Field(
        default="virtual",
        description="virtual: each rank is built alone on a CPU, no GPU needed. executor: vLLM's "
        "own ranks write on their devices, for models that a CPU build of vLLM cannot construct. "
        "Both write the same bytes.",
    )
    resources: RankResources | None = Field(
        default=None,
        description="What each rank of this model asks for where the launcher is a cluster.",
    )
    reload_device: Literal["cuda", "cpu"] = Field(
        description="Device on which the finished artifact is loaded again and compared before "
        "it is published. There is no default: choose the proof you want.",
    )
    adapters: Annotated[tuple[Adapter, ...], AfterValidator(_adapters)] = Field(
        default=(),
        description="LoRA adapters that are stored, reloaded and served with the model. A new "
        "commit of one is a new build.",
    )
    encryption: Encryption = Field(
        default="none",
        description="none: tensors are stored as they are. both: an encrypted artifact beside the "
        "plaintext one. only: nothing but the encrypted one; plaintext tensors are never written.",
    )
    serialization_kwargs: Annotated[dict[str, JsonValue], AfterValidator(_serialization)] = Field(
        default={},
        description="Arguments for tensorizer's TensorSerializer. A change is a new build.",
        json_schema_extra=_arguments_schema(SERIALIZATION_ARGUMENTS),
    )
    deserialization_kwargs: Annotated[dict[str, JsonValue], AfterValidator(_deserialization)] = (
        Field(
            default={},
            description="Arguments for tensorizer's TensorDeserializer when the artifact is "
            "reloaded. device, dtype and mode are vLLM's own and refused.",
            json_schema_extra=_arguments_schema(DESERIALIZATION_ARGUMENTS),
        )
    )
    prompts: tuple[Prompt, ...] = Field(
        default=DEFAULT_PROMPTS,
        min_length=1,
        description="Prompts whose greedy answers must be the same from the source model and "
        "from the artifact.",
    )
    max_perplexity: float = Field(
        default=500.0,
        strict=True,
        gt=1,
        allow_inf_nan=False,
        description="A first build is refused when its perplexity on the bundled text is higher.",
    )
    perplexity_tolerance: float = Field(
        default=0.10,
        strict=True,
        gt=0,
        allow_inf_nan=False,
        description="A later build is refused when its perplexity is higher than the published "
        "build's by more than this fraction: 0.1 is 10 %.",
    )

    @model_validator(mode="after")
    def _format_has_ranks(self) -> Profile:
        if self.format == "hf" and self.tensor_parallel_size > 1:
            size = self.tensor_parallel_size
            reason = (
                f"format hf is one file of the whole model, and vLLM wants one for each of {size} "
                "ranks; write 1, or use format vllm"
            )
            _refuse({("tensor_parallel_size",): reason})
        if self.format == "hf" and self.sharding == "executor":
            _refuse({("sharding",): "format hf has no ranks that could write; remove this line"})
        return self


class ModelEntry(BaseModel):
    """One model and the ways to build it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profiles: dict[Suffix, Profile] = Field(
        min_length=1,
        description="Ways to build the model, by suffix: a short label such as v1 or v1-tp2 that "
        "names the artifact and its channel.",
        json_schema_extra={"additionalProperties": False},
    )


class Catalog(BaseModel):
    """Every model that is built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Annotated[str, AfterValidator(_root)] = Field(
        description="Where artifacts are written: a folder, relative to this file, or "
        "s3://bucket/prefix.",
        min_length=1,
    )
    s3: S3Settings | None = Field(
        default=None,
        description="How an s3:// root is reached, where boto3's own settings are not enough. "
        "Never credentials: those come from the environment, a profile or the machine's role.",
    )
    recipients: Annotated[dict[RecipientName, RecipientKey], AfterValidator(_recipients)] = Field(
        default={},
        description="Who can open encrypted builds: public keys by name, as `tensorize keys "
        "generate` prints them. The home that builds must be one of them, to reload what it built.",
        json_schema_extra={"additionalProperties": False},
    )
    trust: tuple[TrustedKey, ...] | None = Field(
        default=None,
        min_length=1,
        description="Public signing keys (base64) whose manifests, evidence and channels are "
        "believed. Without it: this home's own key alone.",
    )
    owners: tuple[Owner, ...] = Field(
        default=(),
        description="Who answers for the assets, as Dagster shows it: email addresses, or "
        "team:NAME. An edit counts when Dagster loads the code location again.",
    )
    launcher: LauncherKind = Field(
        default="subprocess",
        description="Where workers run: on the machine of the Dagster step, as Ray jobs, or as "
        "Kubernetes pods. TENSORIZE_LAUNCHER goes before it. A change counts when Dagster loads "
        "the code location again.",
    )
    launchers: Launchers = Field(
        default=Launchers(), description="How clusters are reached, by the launcher's kind."
    )
    snapshots: Snapshots = Field(
        default=Snapshots(), description="Whether the root has a mirror of the Hub's files."
    )
    automation: Automation = Field(
        default=Automation(),
        description="What happens by itself: new commits, builds made again, audits, retention.",
    )
    models: dict[ModelId, ModelEntry] = Field(
        description="Models by their Hub repo id: org/name.",
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="after")
    def _launcher_is_reached(self) -> Catalog:
        if self.launcher != "subprocess" and getattr(self.launchers, self.launcher) is None:
            reason = f"is {self.launcher}, of which launchers: says nothing; add its settings there"
            _refuse({("launcher",): reason})
        return self

    @model_validator(mode="after")
    def _each_key_has_one_use(self) -> Catalog:
        names = {key: name for name, key in self.recipients.items()}
        _refuse(
            {
                ("trust", n): f"is the key of recipient {names[key]}, which signs nothing; write "
                "the signing key's public key (`tensorize keys public` prints both)"
                for n, key in enumerate(self.trust or ())
                if key in names
            }
        )
        return self

    def profile(self, model: str, suffix: str) -> Profile:
        """The profile of a pair. Raises CatalogError, naming what is near, when there is none."""
        entry = self.models.get(model)
        if entry is None:
            near = difflib.get_close_matches(model, self.models, n=3, cutoff=0.4)
            raise CatalogError(
                f"{model} (suffix {suffix}) is not in the catalog; add it under models:, or use "
                f"one of: {_some(near or self.models)}"
            )
        profile = entry.profiles.get(suffix)
        if profile is None:
            raise CatalogError(
                f"{model} has no suffix {suffix} in the catalog; add it under the model's "
                f"profiles:, or use one of: {_some(entry.profiles)}"
            )
        return profile

    def is_encrypted_only(self, repo: str) -> bool:
        """Whether a profile with `encryption: only` is of a repo, a model's or an adapter's."""
        return any(
            profile.encryption == "only"
            and (model == repo or any(adapter.repo == repo for adapter in profile.adapters))
            for model, entry in self.models.items()
            for profile in entry.profiles.values()
        )

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every (model, suffix), in the file's order."""
        for model, entry in self.models.items():
            for suffix in entry.profiles:
                yield model, suffix


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    return (", ".join(listed[:10]) or "(none)") + more


def to_partition_key(model: str) -> str:
    """`facebook/opt-125m` as `facebook--opt-125m`: Dagster nests keys with `/` into folders.

    Raises CatalogError for what is not a Hub repo id.
    """
    return _valid_model(model).replace("/", "--")


def from_partition_key(key: str) -> str:
    """The repo id of a partition key: the reverse of `to_partition_key`. Raises CatalogError."""
    return _valid_model(key.replace("--", "/", 1))


def _valid_model(model: str) -> str:
    try:
        return _model_id(model)
    except ValueError as error:
        raise CatalogError(f"{model!a} {error}") from None


def byte_fields(profile: Profile) -> dict[str, JsonValue]:
    """The profile's fields that change stored bytes: those, and no others, go into the build id."""
    return {
        "dtype": profile.dtype,
        # All of them, although today's arguments change no byte: which ones do is tensorizer's
        # business and may change, and a needless build is better than a stale one.
        "serialization_kwargs": dict(profile.serialization_kwargs),
        "tensor_parallel_size": profile.tensor_parallel_size,
        # Builds of the first format keep the ids that they had before there was a second.
        **({} if profile.format == "vllm" else {"format": profile.format}),
    }


def check_tensor_parallel(profile: Profile, config: Mapping[str, Any]) -> str | None:
    """What is wrong with the profile's tensor_parallel_size for a model's config.json, or None.

    None also when the config does not say how many heads there are; vLLM has the last word.
    """
    return tensor_parallel_problem(profile.tensor_parallel_size, config)


def tensor_parallel_problem(size: int, config: Mapping[str, Any]) -> str | None:
    """See `check_tensor_parallel`; rules of vLLM 0.31.0.

    `size` must divide the attention heads: verify_with_parallel_config in vllm/config/model.py.
    It must divide the KV heads, or be a multiple of them (they are then replicated):
    QKVParallelLinear in vllm/model_executor/layers/linear.py, and the assertions in LlamaAttention
    (models/llama.py; gemma.py and qwen2.py alike). OPT, GPT-2 and GPT-NeoX have no KV heads of
    their own. With MLA, KV heads do not matter (get_num_kv_heads in vllm/config/model.py).
    """
    text = _mapping(config.get("text_config"))
    source = text if _first_count(text, _HEADS) else config
    found = _first_count(source, _HEADS)
    if found is None:
        return None
    heads_name, heads = found
    kv_name, kv_heads = _first_count(source, _KV_HEADS) or found
    if source.get("kv_lora_rank") is not None:
        kv_heads = heads
    working = [
        n
        for n in range(1, min(heads, MAX_TENSOR_PARALLEL_SIZE) + 1)
        if heads % n == 0 and _fits_kv_heads(n, kv_heads)
    ]
    remedy = f"sizes that work: {', '.join(map(str, working))}"
    if heads % size:
        return (
            f"tensor_parallel_size {size} does not divide the model's {heads} attention heads "
            f"({heads_name} in config.json); {remedy}"
        )
    if not _fits_kv_heads(size, kv_heads):
        return (
            f"tensor_parallel_size {size} neither divides the model's {kv_heads} KV heads "
            f"({kv_name} in config.json) nor is a multiple of them; {remedy}"
        )
    return None


def _fits_kv_heads(size: int, kv_heads: int) -> bool:
    return kv_heads % size == 0 or size % kv_heads == 0


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _first_count(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, int] | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value <= _MAX_HEADS:
            return name, value
    return None


def resolve_root(catalog: Catalog, path: Path) -> str:
    """`root` of the catalog at `path`: an s3:// URI as it is, a folder made absolute."""
    if is_s3(catalog.root):
        return catalog.root
    return str((path.parent / catalog.root).resolve())


def load_catalog(path: Path) -> Catalog:
    """The catalog in a YAML file; a file that has not changed is not read again.

    Raises CatalogError with every mistake, one a line: `FILE:LINE: FIELD: what is wrong`.
    """
    try:
        stat = path.stat()
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    except OSError:
        version = None
    catalog, problems = _read(path, version)
    if catalog is None:
        raise CatalogError(problems)
    return catalog


# A thousand models take a second to read, and sensors and steps ask for the catalog all the time.
@functools.lru_cache(maxsize=4)
def _read(path: Path, version: object) -> tuple[Catalog | None, str]:
    # catalog_check builds on the models above.
    from tensorize_assets.core.catalog_check import read_catalog

    catalog, problems = read_catalog(path)
    return catalog and resolve_bundle(catalog, path), "\n".join(map(str, problems))


def resolve_bundle(catalog: Catalog, path: Path) -> Catalog:
    """The catalog at `path` with its ca_bundle made absolute: it is relative to it, as root is."""
    if catalog.s3 is None or catalog.s3.ca_bundle is None:
        return catalog
    bundle = str((path.parent / catalog.s3.ca_bundle).resolve())
    settings = catalog.s3.model_copy(update={"ca_bundle": bundle})
    return catalog.model_copy(update={"s3": settings})
