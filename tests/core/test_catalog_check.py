"""What `tensorize catalog check` finds, and where; and the schema that editors check with."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tensorize_assets.core import sealing, signing
from tensorize_assets.core.catalog_automation import Automation
from tensorize_assets.core.catalog_check import MAX_FILE_BYTES, Problem, check_catalog
from tensorize_assets.core.catalog_schema import catalog_json_schema, catalog_schema_text
from tensorize_assets.core.errors import SignatureError

HOME = Path(__file__).parents[2] / "dagster_home"
SHIPPED = HOME / "models.yaml"
SCHEMA = HOME / "models.schema.json"

# Every profile below starts on line 6.
HEAD = """\
root: artifacts
models:
  facebook/opt-125m:
    profiles:
      v1:
"""
V1 = "models.facebook/opt-125m.profiles.v1"
GOOD = HEAD + "        reload_device: cpu\n"

Check = Callable[[str | bytes], tuple[Problem, ...]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Writes a text to a catalog file and checks it."""

    def run(content: str | bytes) -> tuple[Problem, ...]:
        file = tmp_path / "models.yaml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return check_catalog(file)

    return run


def _profile(*lines: str) -> str:
    """A catalog whose one profile has a reload_device (line 6), then `lines`."""
    return GOOD + "".join(f"        {line}\n" for line in lines)


def _suffix(suffix: str) -> str:
    return GOOD.replace("v1:", f"{suffix}:")


def _model(model: str) -> str:
    return GOOD.replace("facebook/opt-125m:", f"{model}:")


def _root(root: str) -> str:
    return GOOD.replace("root: artifacts", f"root: {root}".rstrip())


def _argument(line: str) -> str:
    return _profile("deserialization_kwargs:", f"  {line}")


def _adapter(*lines: str) -> str:
    """One adapter of a valid name (line 8), with `lines` below it."""
    return _profile("adapters:", "  - name: a", *(f"    {line}" for line in lines))


def _encrypted(how: str, top: str = "") -> str:
    return _profile(f"encryption: {how}") + top


# X25519 keys of the secrets of 32 bytes 0x01 and 0x02; SIGNER is an Ed25519 key.
ANNA = "pOCSkrZRwni5dyxWn1+puxPZBrRqtoyd+dwrRAn4ogk="
BERT = "zo060cy2M+x7cMF4FKXHbs0CloUFDTRHRboFhw5YfVk="
SECRET = base64.b64encode(bytes(range(32))).decode()
PRIVATE = f"X25519-PRIVATE-KEY:{SECRET}"
SIGNER = signing.SecretKey(bytes(range(32))).public_key


def _keys(text: str) -> str:
    """A catalog that begins with the lines of `text`."""
    return text + GOOD


ADAPTER = "models.facebook/opt-125m.profiles.v1.adapters"
PROFILES = "models.facebook/opt-125m.profiles"
KWARGS = f"{V1}.deserialization_kwargs"

# The file, the line and field of its one mistake, and words of the message.
ONE_MISTAKE: dict[str, tuple[str, int, str, list[str]]] = {
    # what happens by itself
    "protected by its folder": (
        _keys("automation:\n  protect:\n    - v1-0123456789ab\n"),
        3,
        "automation.protect.0",
        ["is not a build id", "12 hex digits", "without the suffix"],
    ),
    "a day that never comes": (
        _keys('automation:\n  retensorize: "0 0 31 2 *"\n'),
        2,
        "automation.retensorize",
        ["never comes"],
    ),
    "no cron expression": (
        _keys("automation: {audit: {cron: daily}}\n"),
        1,
        "automation.audit.cron",
        ["five fields", '"0 3 * * 0"'],
    ),
    "a schedule switched off": (
        _keys("automation:\n  retensorize: false\n"),
        2,
        "automation.retensorize",
        ["cron expression", "switched off in the UI"],
    ),
    "unknown automation": (
        _keys("automation:\n  retensorise: x\n"),
        2,
        "automation.retensorise",
        ["did you mean retensorize", "keys here: revisions"],
    ),
    "unknown key of retention": (
        _keys("automation: {retention: {kep: 3}}\n"),
        1,
        "automation.retention.kep",
        ["did you mean keep", "keys here: cron, keep"],
    ),
    "unknown key of revisions": (
        _keys("automation: {revisions: {every_secconds: 3}}\n"),
        1,
        "automation.revisions.every_secconds",
        ["did you mean every_seconds"],
    ),
    "unknown key of resources": (
        _profile("resources: {gpus: 1}"),
        7,
        f"{V1}.resources.gpus",
        ["a rank that computes on one gets one"],
    ),
    "memory without a unit of Kubernetes": (
        _profile("resources: {memory: 16gb}"),
        7,
        f"{V1}.resources.memory",
        ["is not an amount of bytes", "16Gi"],
    ),
    "unknown sharding": (
        _profile("sharding: exekutor"),
        7,
        f"{V1}.sharding",
        ["must be one of virtual, executor", "did you mean executor"],
    ),
    "executor without ranks": (
        _profile("sharding: executor\n        format: hf"),
        7,
        f"{V1}.sharding",
        ["format hf has no ranks"],
    ),
    "unknown launcher": (
        _keys("launcher: kubernetes\n"),
        1,
        "launcher",
        ["must be one of subprocess, ray, k8s"],
    ),
    "a launcher that is not reached": (
        _keys("launcher: ray\n"),
        1,
        "launcher",
        ["is ray, of which launchers: says nothing"],
    ),
    "a launcher's versions without one of them": (
        _keys("launchers: {k8s: {image: x, versions: {vllm: 0.31.0, torch: 2.13.0}}}\n"),
        1,
        "launchers.k8s.versions.tensorizer",
        ["is missing: write tensorizer: and its value"],
    ),
    "a key of workers that is none": (
        _keys('launchers: {ray: {address: "http://ray:8265", worker_public_key: abc}}\n'),
        1,
        "launchers.ray.worker_public_key",
        ["is not a public key", "tensorize keys generate"],
    ),
    "unknown key of a launcher": (
        _keys('launchers: {ray: {address: "http://ray:8265", adress: x}}\n'),
        1,
        "launchers.ray.adress",
        ["did you mean address"],
    ),
    "delete maybe": (
        _keys("automation: {retention: {delete: maybe}}\n"),
        1,
        "automation.retention.delete",
        ["wants true or false", "'maybe'"],
    ),
    # the profile's fields
    "unknown key": (_profile("dtyp: auto"), 7, f"{V1}.dtyp", ["unknown key", "did you mean dtype"]),
    "pipeline": (
        _profile("pipeline_parallel_size: 2"),
        7,
        f"{V1}.pipeline_parallel_size",
        ["has no pipeline stage", "tensor_parallel_size"],
    ),
    "unknown key, nothing near": (_profile("xyz: 1"), 7, f"{V1}.xyz", ["keys here: revision"]),
    "unknown dtype": (
        _profile("dtype: bf16"),
        7,
        f"{V1}.dtype",
        ["'bf16'", "auto, float16, bfloat16, float32", "did you mean bfloat16"],
    ),
    "dtype no": (_profile("dtype: no"), 7, f"{V1}.dtype", ["no (YAML reads it as a boolean)"]),
    "no reload_device": (
        HEAD + "        dtype: auto\n",
        5,
        f"{V1}.reload_device",
        ["missing", "cuda", "cpu", "no default"],
    ),
    "unknown reload_device": (
        HEAD + "        reload_device: gpu\n",
        6,
        f"{V1}.reload_device",
        ["cuda, cpu", "'gpu'"],
    ),
    "unknown track": (_profile("track: latest"), 7, f"{V1}.track", ["follow, pin", "'latest'"]),
    "empty profile": (HEAD, 5, V1, ["wants a mapping", "not nothing"]),
    "profile is text": (HEAD[:-1] + " cpu\n", 5, V1, ["wants a mapping", "'cpu'"]),
    "profile is a list": (HEAD + "        - reload_device: cpu\n", 5, V1, ["mapping", "a list"]),
    "TP zero": (
        _profile("tensor_parallel_size: 0"),
        7,
        f"{V1}.tensor_parallel_size",
        ["at least 1", "not 0"],
    ),
    "TP huge": (
        _profile("tensor_parallel_size: 5000"),
        7,
        f"{V1}.tensor_parallel_size",
        ["at most 1024", "not 5000"],
    ),
    "TP quoted": (
        _profile('tensor_parallel_size: "2"'),
        7,
        f"{V1}.tensor_parallel_size",
        ["whole number", "write 2 without quotes"],
    ),
    "TP yes": (
        _profile("tensor_parallel_size: yes"),
        7,
        f"{V1}.tensor_parallel_size",
        ["whole number", "yes", "boolean"],
    ),
    "TP 1.5": (
        _profile("tensor_parallel_size: 1.5"),
        7,
        f"{V1}.tensor_parallel_size",
        ["whole number", "1.5"],
    ),
    "TP of a thousand digits": (
        _profile("tensor_parallel_size: " + "9" * 5000),
        7,
        f"{V1}.tensor_parallel_size",
        ["cannot be read as a number"],
    ),
    "revision 1.0": (_profile("revision: 1.0"), 7, f"{V1}.revision", ['quote it: "1.0"']),
    "revision of digits": (
        _profile("revision: 0123456"),
        7,
        f"{V1}.revision",
        ["as a number", 'quote it: "0123456"'],
    ),
    "revision on": (_profile("revision: on"), 7, f"{V1}.revision", ["boolean", 'quote it: "on"']),
    "revision a date": (
        _profile("revision: 2024-01-31"),
        7,
        f"{V1}.revision",
        ["as a date", 'quote it: "2024-01-31"'],
    ),
    "revision empty": (_profile("revision:"), 7, f"{V1}.revision", ["wants text", "nothing"]),
    "revision a list": (_profile("revision: [main]"), 7, f"{V1}.revision", ["text", "a list"]),
    "revision with a blank": (_profile("revision: a b"), 7, f"{V1}.revision", ["branch, tag"]),
    "perplexity_tolerance zero": (
        _profile("perplexity_tolerance: 0"),
        7,
        f"{V1}.perplexity_tolerance",
        ["more than 0"],
    ),
    "perplexity_tolerance 1e-1": (
        _profile("perplexity_tolerance: 1e-1"),
        7,
        f"{V1}.perplexity_tolerance",
        ["wants a number", "write 0.1"],
    ),
    "perplexity_tolerance infinite": (
        _profile("perplexity_tolerance: .inf"),
        7,
        f"{V1}.perplexity_tolerance",
        ["finite"],
    ),
    "max_perplexity one": (_profile("max_perplexity: 1"), 7, f"{V1}.max_perplexity", ["than 1"]),
    "no prompts": (_profile("prompts: []"), 7, f"{V1}.prompts", ["empty", "at least one"]),
    "prompts are text": (_profile("prompts: Hello"), 7, f"{V1}.prompts", ["a list", "'Hello'"]),
    "empty prompt": (
        _profile("prompts:", "- Hello", '- " "'),
        9,
        f"{V1}.prompts.1",
        ["prompt is empty"],
    ),
    "prompt yes": (_profile("prompts: [yes]"), 7, f"{V1}.prompts.0", ['quote it: "yes"']),
    # tensorizer's arguments
    "device": (_argument("device: cpu"), 8, f"{KWARGS}.device", ["vLLM decides", "reload_device"]),
    "dtype argument": (_argument("dtype: x"), 8, f"{KWARGS}.dtype", ["vLLM decides", "set dtype"]),
    "mode": (_argument("mode: r"), 8, f"{KWARGS}.mode", ["vLLM decides"]),
    "encryption": (_argument("encryption: k"), 8, f"{KWARGS}.encryption", ["keys never stand"]),
    "file_obj": (_argument("file_obj: k"), 8, f"{KWARGS}.file_obj", ["names the file itself"]),
    "filter_func": (_argument("filter_func: k"), 8, f"{KWARGS}.filter_func", ["a function"]),
    "unknown argument": (
        _argument("num_reader: 2"),
        8,
        f"{KWARGS}.num_reader",
        ["tensorizer 2.10.1 has no such argument", "did you mean num_readers"],
    ),
    "argument of a wrong type": (
        _argument("num_readers: many"),
        8,
        f"{KWARGS}.num_readers",
        ["whole number"],
    ),
    "switch of a wrong type": (
        _argument("plaid_mode: 1"),
        8,
        f"{KWARGS}.plaid_mode",
        ["true or false"],
    ),
    "argument without a value": (
        _argument("num_readers:"),
        8,
        f"{KWARGS}.num_readers",
        ["no value", "remove the line"],
    ),
    "verify_hash off": (_argument("verify_hash: no"), 8, f"{KWARGS}.verify_hash", ["proves"]),
    "serialization argument": (
        _profile("serialization_kwargs: {device: cpu}"),
        7,
        f"{V1}.serialization_kwargs.device",
        ["no such argument", "limit_cpu_concurrency"],
    ),
    "serialization encryption": (
        _profile("serialization_kwargs: {encryption: k}"),
        7,
        f"{V1}.serialization_kwargs.encryption",
        ["keys never stand"],
    ),
    # adapters
    "adapter without repo": (_adapter(), 8, f"{ADAPTER}.0.repo", ["missing", "Hub repo"]),
    "adapter without name": (
        _profile("adapters:", "  - repo: a/b"),
        8,
        f"{ADAPTER}.0.name",
        ["missing", "when it is served"],
    ),
    "unknown key of an adapter": (
        _adapter("repo: a/b", "revison: main"),
        10,
        f"{ADAPTER}.0.revison",
        ["unknown key", "did you mean revision", "keys here: name, repo, revision"],
    ),
    "adapters are a mapping": (
        _profile("adapters: {a: b/c}"),
        7,
        f"{ADAPTER}",
        ["wants a list (lines of - name: and below it repo:)", "a mapping"],
    ),
    "adapter is text": (
        _profile("adapters: [a/b]"),
        7,
        f"{ADAPTER}.0",
        ["wants a mapping (lines of name: and repo:)", "'a/b'"],
    ),
    "adapter named twice": (
        _adapter("repo: a/b") + "          - {name: A, repo: a/c}\n",
        10,
        f"{ADAPTER}.1.name",
        ["another adapter of this profile is called a"],
    ),
    "adapter named like a path": (
        _profile("adapters: [{name: ../a, repo: a/b}]"),
        7,
        f"{ADAPTER}.0.name",
        ["is not a name"],
    ),
    "adapter of no repo": (_adapter("repo: a/b/c"), 9, f"{ADAPTER}.0.repo", ["not a Hub repo id"]),
    "revision of an adapter": (
        _adapter("repo: a/b", "revision: 1.0"),
        10,
        f"{ADAPTER}.0.revision",
        ['quote it: "1.0"'],
    ),
    # encryption and keys
    "encryption yes": (
        _encrypted("yes"),
        7,
        f"{V1}.encryption",
        ["one of none, both, only", "yes (YAML reads it as a boolean)"],
    ),
    "encryption misspelt": (_encrypted("onyl"), 7, f"{V1}.encryption", ["did you mean only"]),
    "encryption for nobody": (
        _encrypted("both"),
        7,
        f"{V1}.encryption",
        ["nobody could open it", "recipients: at the top", "tensorize keys generate"],
    ),
    "encryption for an empty list": (
        _encrypted("only", "recipients: {}\n"),
        7,
        f"{V1}.encryption",
        ["nobody could open it"],
    ),
    "recipient with a private key": (
        _keys(f"recipients:\n  anna: {ANNA}\n  bert: {PRIVATE}\n"),
        3,
        "recipients.bert",
        ["a private key was given as a public one", "make a new pair"],
    ),
    "recipient with no key": (
        _keys("recipients: {anna: hello}\n"),
        1,
        "recipients.anna",
        ["not a public key", "tensorize keys generate"],
    ),
    "recipients with one key": (
        _keys(f"recipients:\n  anna: {ANNA}\n  bert: {ANNA}\n"),
        3,
        "recipients.bert",
        ["has the public key of anna"],
    ),
    "recipients that differ in case": (
        _keys(f"recipients:\n  anna: {ANNA}\n  Anna: {BERT}\n"),
        3,
        "recipients.Anna",
        ["too much like the recipient anna"],
    ),
    "recipients are a list": (
        _keys(f"recipients: [{ANNA}]\n"),
        1,
        "recipients",
        ["lines of name: public key", "a list"],
    ),
    "recipients are a private key": (
        _keys(f"recipients: {PRIVATE}\n"),
        1,
        "recipients",
        ["wants a mapping", "(not shown)"],
    ),
    "key and name exchanged": (
        _keys(f"recipients: {{{SECRET}: {ANNA}}}\n"),
        1,
        "recipients.(not shown)",
        ["is not a name"],
    ),
    "recipients misspelt": (
        _keys(f"recipient: {{anna: {ANNA}}}\n"),
        1,
        "recipient",
        ["did you mean recipients"],
    ),
    "trust is text": (_keys(f"trust: {SIGNER}\n"), 1, "trust", ["wants a list", "- public key"]),
    "trust nobody": (_keys("trust: []\n"), 1, "trust", ["is empty", "remove the key"]),
    "trust garbage": (_keys("trust:\n  - hello\n"), 2, "trust.0", ["tensorize keys public"]),
    "trust a key to open builds": (
        _keys(f"trust:\n  - {SIGNER}\n  - {BERT}\n"),
        3,
        "trust.1",
        ["another kind of key"],
    ),
    "trust a secret key": (
        _keys(f"trust: [{SECRET}]\n"),
        1,
        "trust.0",
        ["another kind of key", "change this one if it is a secret"],
    ),
    "trust a private key": (
        _keys(f"trust: [{PRIVATE}]\n"),
        1,
        "trust.0",
        ["not a public signing key"],
    ),
    # suffixes and models
    "suffix with /": (_suffix("v1/a"), 5, f"{PROFILES}.v1/a", ["'/'"]),
    "suffix with |": (_suffix("v1|a"), 5, f"{PROFILES}.v1|a", ["'|'"]),
    "suffix with ,": (_suffix('"v1,a"'), 5, f"{PROFILES}.v1,a", ["','"]),
    "suffix with ..": (_suffix("v1..a"), 5, f"{PROFILES}.v1..a", ["'..'"]),
    "suffix with a blank": (_suffix("v1 a"), 5, f"{PROFILES}.v1 a", ["' '", "use letters"]),
    "suffix with a control character": (
        _suffix('"v1\\e[31m"'),
        5,
        rf"{PROFILES}.'v1\x1b[31m'",
        [r"'\x1b'"],
    ),
    # vLLM puts the rank into the path with %.
    "suffix with %": (_suffix('"v1%d"'), 5, f"{PROFILES}.v1%d", ["'%'"]),
    "suffix with a backslash": (_suffix("v1\\a"), 5, PROFILES + ".v1\\a", ["'\\\\'"]),
    "suffix starting with .": (_suffix(".v1"), 5, f"{PROFILES}..v1", ["start with '.'"]),
    "suffix starting with -": (_suffix("-v1"), 5, f"{PROFILES}.-v1", ["start with '-'"]),
    "suffix adhoc": (_suffix("adhoc"), 5, f"{PROFILES}.adhoc", ["reserved", "one-shot"]),
    "suffix like a channel": (_suffix("v1.json"), 5, f"{PROFILES}.v1.json", ["channel"]),
    "suffix too long": (_suffix("v" * 65), 5, f"{PROFILES}.{'v' * 65}", ["at most 64", "65"]),
    "suffix empty": (_suffix('""'), 5, PROFILES, ["a key is empty"]),
    "suffix 1": (_suffix("1"), 5, f"{PROFILES}.1", ["as a number", 'quote it: "1"']),
    "suffix 1.10": (_suffix("1.10"), 5, f"{PROFILES}.1.10", ["number", 'quote it: "1.10"']),
    "suffix no": (_suffix("no"), 5, f"{PROFILES}.no", ["a boolean", 'quote it: "no"']),
    "suffix a date": (_suffix("2024-01-31"), 5, f"{PROFILES}.2024-01-31", ["a date", "quote it"]),
    "suffix a list": (_suffix("? [v1]\n      "), 5, PROFILES, ["key must be text", "a list"]),
    "model with --": (_model("a--b"), 3, "models.a--b", ["not a Hub repo id", "without --"]),
    "model with two /": (_model("a/b/c"), 3, "models.a/b/c", ["not a Hub repo id", "org/name"]),
    "model with |": (_model("a/b|c"), 3, "models.a/b|c", ["not a Hub repo id"]),
    "model a URL": (_model("https://hf/a/b"), 3, "models.https://hf/a/b", ["not a Hub repo id"]),
    "model without profiles": (
        "root: a\nmodels:\n  a/b: {}\n",
        3,
        "models.a/b.profiles",
        ["is missing", "profiles:"],
    ),
    "empty profiles": (
        "root: a\nmodels:\n  a/b:\n    profiles: {}\n",
        4,
        "models.a/b.profiles",
        ["empty", "at least one"],
    ),
    "profile field under the model": (
        GOOD.replace("    profiles:", "    dtype: auto\n    profiles:"),
        4,
        "models.facebook/opt-125m.dtype",
        ["belongs to a profile"],
    ),
    "models that differ in case": (
        GOOD + "  Facebook/OPT-125m: {profiles: {v1: {reload_device: cpu}}}\n",
        7,
        "models.Facebook/OPT-125m",
        ["too much like the model facebook/opt-125m (line 3)"],
    ),
    "suffixes that differ in case": (
        GOOD + "      V1: {reload_device: cpu}\n",
        7,
        f"{PROFILES}.V1",
        ["too much like the suffix v1 (line 5)", "ignore case"],
    ),
    # the file as a whole
    "unknown top key": (f"model: 1\n{GOOD}", 1, "model", ["did you mean models"]),
    "model at the top": (f"a/b: 1\n{GOOD}", 1, "a/b", ["is a model", "under models:"]),
    "no root": (GOOD.replace("root: artifacts\n", ""), 1, "root", ["is missing", "artifacts"]),
    "no models": ("root: artifacts\n", 1, "models", ["is missing", "models:"]),
    "models empty": ("root: artifacts\nmodels:\n", 2, "models", ["wants a mapping", "nothing"]),
    "root elsewhere": (_root("gs://bucket/a"), 1, "root", ["is a URL", "folder"]),
    "root with a key in it": (_root("s3://k:s@bucket/a"), 1, "root", ["without credentials"]),
    "s3 with a secret": (
        "s3: {secret_access_key: hunter2}\n" + GOOD,
        1,
        "s3.secret_access_key",
        ["never stand in a catalog", "S3_ACCESS_KEY_ID"],
    ),
    "s3 misspelt": ("s3: {regoin: x}\n" + GOOD, 1, "s3.regoin", ["did you mean region"]),
    "s3 elsewhere": (
        "s3: {endpoint_url: ftp://x}\n" + GOOD,
        1,
        "s3.endpoint_url",
        ["URL of an S3 server"],
    ),
    "s3 addressed strangely": (
        "s3: {addressing: vhost}\n" + GOOD,
        1,
        "s3.addressing",
        ["auto, path, virtual"],
    ),
    "s3 checksums": (
        "s3: {checksums: always}\n" + GOOD,
        1,
        "s3.checksums",
        ["when_supported, when_required"],
    ),
    "root empty": (_root('""'), 1, "root", ["is empty"]),
    "root without a value": (_root(""), 1, "root", ["wants text"]),
    "root at home": (_root("~/artifacts"), 1, "root", ["~ is not expanded"]),
    "root with %": (_root("a%d"), 1, "root", ["%", "vLLM"]),
    "root 1": (_root("1"), 1, "root", ['quote it: "1"']),
    # used twice
    "model twice": (
        GOOD + "  facebook/opt-125m: {profiles: {v2: {reload_device: cpu}}}\n",
        7,
        "models.facebook/opt-125m",
        ["model stands here twice, first on line 3"],
    ),
    "suffix twice": (
        GOOD + '      "v1": {reload_device: cuda}\n',
        7,
        V1,
        ["suffix stands here twice, first on line 5"],
    ),
    "field twice": (_profile("reload_device: cuda"), 7, f"{V1}.reload_device", ["twice", "line 6"]),
    "argument twice": (
        _profile("deserialization_kwargs: {num_readers: 1,", "    num_readers: 2}"),
        8,
        f"{KWARGS}.num_readers",
        ["twice", "line 7"],
    ),
    "top key twice": (GOOD + "root: b\n", 7, "root", ["twice", "line 1"]),
    # anchors, merges and tags
    "merge of text": (_profile("<<: main"), 7, f"{V1}.<<", ["merges the text 'main'", "*anchor"]),
    "two merges": (
        GOOD.replace("v1:", "v1: &a")
        + "      v2: &b {reload_device: cpu}\n      v3:\n        <<: *a\n        <<: *b\n",
        10,
        f"{PROFILES}.v3.<<",
        ["twice", "[*first, *second]"],
    ),
    "mistake in a merged mapping": (
        GOOD.replace("v1:", "v1: &a")
        + "        dtyp: auto\n      v2: {<<: *a}\n      v3: {<<: [*a]}\n",
        7,
        f"{V1}.dtyp",
        ["did you mean dtype"],
    ),
    "Python tag": (
        _profile("revision: !!python/object/apply:os.system [id]"),
        7,
        f"{V1}.revision",
        ["tag !!python/object/apply:os.system is not allowed", "remove the tag"],
    ),
    "own tag": (_profile("revision: !env X"), 7, f"{V1}.revision", ["the tag !env"]),
    "binary": (_profile("revision: !!binary bWFpbg=="), 7, f"{V1}.revision", ["tag !!binary"]),
    "set": (_profile("serialization_kwargs: !!set {}"), 7, f"{V1}.serialization_kwargs", ["!!set"]),
    "forced int": (_profile("revision: !!int x"), 7, f"{V1}.revision", ["cannot be read"]),
    "alias of itself": (
        _profile("serialization_kwargs: &a", "  limit_cpu_concurrency: *a"),
        7,
        f"{V1}.serialization_kwargs.limit_cpu_concurrency",
        ["alias refers to what it stands in"],
    ),
}


@pytest.mark.parametrize(
    ("content", "line", "field", "words"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys()
)
def test_a_mistake_is_found_once_with_its_line_and_field(
    check: Check, content: str, line: int, field: str, words: list[str]
) -> None:
    """One mistake, one problem: a second message about the same thing sends people astray."""
    problems = check(content)
    assert [(line, field)] == [(problem.line, problem.field) for problem in problems]
    assert [word for word in words if word not in problems[0].message] == []


UNREADABLE: dict[str, tuple[str | bytes, int, list[str]]] = {
    "empty": ("", 1, ["empty", "root and models"]),
    "comments only": ("# nothing\n", 1, ["empty"]),
    "null": ("---\n", 1, ["empty"]),
    "list": ("# x\n- a\n", 2, ["holds a list", "root and models"]),
    "text": ("artifacts\n", 1, ["holds the text 'artifacts'"]),
    "Latin-1": (b"root: a\nmodels: \xe9\n", 2, ["not UTF-8 (byte 0xe9)", "save the file as UTF-8"]),
    "UTF-16": (GOOD.encode("utf-16"), 1, ["not UTF-8"]),
    "NUL": (b"root: a\nmodels: \x00\n", 2, ["not YAML", "remove the character"]),
    "unclosed bracket": (_profile("prompts: [a"), 8, ["not YAML", "expected"]),
    "tab": (GOOD + "\tv2:\n", 7, ["not YAML", "indent with spaces"]),
    "unknown alias": (_profile("revision: *r"), 7, ["not YAML", "undefined alias 'r'"]),
    "no blank after the colon": (_profile("dtype:auto"), 8, ["expected ':'", "key from line 7"]),
    "two documents": (GOOD + "---\nroot: b\n", 7, ["not YAML", "document"]),
    "bad escape": (_profile(r'revision: "\U00110000"'), 7, ["not YAML", "an escape"]),
    "nested too deep": ("[" * 30, 1, ["not YAML"]),
    "mappings too deep": ("a: " + "{b: " * 25 + "1" + "}" * 25, 1, ["nested deeper than 20"]),
    "too large": ("#" * (MAX_FILE_BYTES + 1), 0, ["larger than 2048 KiB"]),
}


@pytest.mark.parametrize(("content", "line", "words"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_file_that_is_no_catalog_says_why(
    check: Check, content: str | bytes, line: int, words: list[str]
) -> None:
    """Nothing below can be checked, so the one message must be enough to go on."""
    problem = check(content)[0]
    assert line == problem.line
    assert [word for word in words if word not in problem.message] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.yaml", "no such file"), ("", "cannot be read: "), ("a\0b", "cannot contain NUL")],
)
def test_a_file_that_cannot_be_opened_is_a_problem_without_a_line(
    tmp_path: Path, name: str, words: str
) -> None:
    """A wrong path is the commonest mistake of all; it has no line to show."""
    path = f"{tmp_path}/{name}"
    (problem,) = check_catalog(path)
    assert (path, 0, "") == (problem.file, problem.line, problem.field)
    assert words in problem.message
    assert str(problem) == f"{path}: {problem.message}"


def test_all_mistakes_are_found_at_once(check: Check) -> None:
    """Mending one at a time, with a run between, is what makes people give up."""
    content = """\
root: gs://bucket
models:
  facebook/opt-125m:
    profiles:
      v1:
        dtype: int8
        tensor_parallel_size: -1
        revision: 1.0
        deserialization_kwargs: {device: cpu, dtype: x, mode: r}
      v1:
        reload_device: gpu
      adhoc: {reload_device: cpu}
      "a b": [1]
  a--b:
    profile: {}
  a/b:
    profiles:
      v1: &v1 {reload_device: cpu, dytpe: auto}
      v2: {<<: *v1, track: no}
extra: !!python/name:os.system
"""
    expected = [
        (1, "root"),
        (5, f"{V1}.reload_device"),
        (6, f"{V1}.dtype"),
        (7, f"{V1}.tensor_parallel_size"),
        (8, f"{V1}.revision"),
        (9, f"{KWARGS}.device"),
        (9, f"{KWARGS}.dtype"),
        (9, f"{KWARGS}.mode"),
        (10, V1),
        (11, f"{V1}.reload_device"),
        (12, f"{PROFILES}.adhoc"),
        (13, f"{PROFILES}.a b"),
        (13, f"{PROFILES}.a b"),
        (14, "models.a--b"),
        (14, "models.a--b.profiles"),
        (15, "models.a--b.profile"),
        (16, "models.a/b"),
        (18, "models.a/b.profiles.v1.dytpe"),
        (19, "models.a/b.profiles.v2.track"),
        (20, "extra"),
    ]
    found = [(p.line, p.field) for p in check(content)]
    # Two mistakes on one line may come in either order of their columns.
    assert sorted(expected) == sorted(found)
    assert found == sorted(found, key=lambda at: at[0])


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        "root: a\nmodels: {}\n",
        _profile("revision: refs/pr/1"),
        _profile('revision: "1.0"'),
        _profile("max_perplexity: 20", "perplexity_tolerance: 0.5"),
        _profile("deserialization_kwargs: {num_readers: 4, verify_hash: true}"),
        _suffix('"1"'),
        _adapter("repo: a/b"),
        _adapter("repo: a/b", 'revision: "1.0"') + "          - {name: b-1.x, repo: a/b}\n",
        _encrypted("none"),
        _encrypted("both", f"recipients: {{anna: {ANNA}, bert: {BERT}}}\ntrust: [{SIGNER}]\n"),
        GOOD.replace("v1:", "v1: &a") + "      v2: {<<: *a, tensor_parallel_size: 2}\n",
        GOOD.replace("v1:", "v1: &a") + "      v2: *a\n",
        # A merged value that the profile overrides is not used, whatever it is.
        GOOD + "      v2: {dtype: auto, <<: {dtype: int8, reload_device: cpu}}\n",
    ],
)
def test_what_is_right_passes(check: Check, content: str) -> None:
    """Strictness that refuses what YAML users rightly write would be a fault of ours."""
    assert check(content) == ()


def test_two_models_with_one_partition_key_are_found(check: Check) -> None:
    """They would share partitions and artifacts; one of them is no repo id either."""
    content = GOOD + "  facebook--opt-125m: {profiles: {v1: {reload_device: cpu}}}\n"
    messages = " ".join(problem.message for problem in check(content))
    assert "not a Hub repo id" in messages
    assert "both have the partition key facebook--opt-125m" in messages


def test_heads_are_checked_where_the_config_is_known(tmp_path: Path) -> None:
    """A size that does not fit is found before a download, not after it."""
    file = tmp_path / "models.yaml"
    asked: list[tuple[str, str]] = []

    def known(model: str, revision: str) -> Mapping[str, Any] | None:
        asked.append((model, revision))
        return {"num_attention_heads": 9} if revision == "main" else None

    file.write_text(
        GOOD.replace("reload_device: cpu", "reload_device: gpu\n        tensor_parallel_size: 2")
        + "      v2: {reload_device: cpu, tensor_parallel_size: 2, revision: other}\n"
        "      v3: {reload_device: cpu, tensor_parallel_size: 3}\n"
        "      v4: {reload_device: cpu}\n"
    )
    problems = check_catalog(file, known)
    expected = [(6, f"{V1}.reload_device"), (7, f"{V1}.tensor_parallel_size")]
    assert expected == [(problem.line, problem.field) for problem in problems]
    assert "sizes that work: 1, 3, 9" in problems[1].message
    model = "facebook/opt-125m"
    assert [(model, "main"), (model, "other"), (model, "main")] == asked
    assert len(check_catalog(file)) == 1


@pytest.mark.parametrize("secret", [SECRET, PRIVATE, bytes(range(32)).hex()])
@pytest.mark.parametrize(
    "content",
    [
        _keys("recipients: {anna: x%s}\n"),
        _keys("recipients: {%s: anna}\n"),
        _keys("recipients: {anna: [%s]}\n"),
        _keys("recipients: [%s]\n"),
        _keys("recipients: %s\n"),
        _keys("recipients: {<<: %s}\n"),
        _keys("recipients: !!int %s\n"),
        _keys("trust: [%s]\n"),
        _keys("trust: %s\n"),
        _keys("trust: {%s: x, y: %s}\n"),
        _keys("%s: x\n"),
        _keys("trust: *%s\n"),
        _profile("encryption: %s"),
        _profile("adapters: [%s]"),
        _profile("dtype: " + "x" * 80 + " %s"),
    ],
)
def test_a_key_is_never_quoted(check: Check, content: str, secret: str) -> None:
    """Whoever pastes a secret into the catalog must not find it in the log of a build as well."""
    problems = check(content.replace("%s", secret))
    assert problems
    shown = " ".join(f"{problem} {problem!r}" for problem in problems)
    bare = secret.removeprefix("X25519-PRIVATE-KEY:")
    assert [part for part in (bare, bare.lower(), bare[:12], bare[-12:]) if part in shown] == []


def test_the_key_of_a_recipient_is_not_to_be_trusted(check: Check) -> None:
    """Both kinds look alike; on the trust list it would be of no use, and nobody would notice."""
    # Of 16 such keys one is a point that could be a signing key's too.
    both = next(
        key
        for n in range(1, 200)
        if (key := sealing.PrivateKey(bytes([n]) * 32).public_key) and _could_sign(key)
    )
    (problem,) = check(_keys(f"recipients: {{anna: {both}}}\ntrust: [{both}]\n"))
    assert (2, "trust.0") == (problem.line, problem.field)
    assert "is the key of recipient anna, which signs nothing" in problem.message


def _could_sign(key: str) -> bool:
    try:
        return bool(signing.check_verify_key(key))
    except SignatureError:
        return False


def test_values_that_may_be_secret_are_not_shown(check: Check) -> None:
    """A token in the wrong place must not reach a log through our message."""
    problems = check(_profile("hf_token: hunter2", "serialization_kwargs: {encryption: hunter2}"))
    assert len(problems) == 2
    assert [problem for problem in problems if "hunter2" in str(problem)] == []


@pytest.mark.parametrize(
    "content",
    ["b: &b {<<: *b, x: 1}\nv: {<<: *b}\n", "b: &b\n  <<: [*b, *b]\n", "b: &b [{c: *b}]\n"],
)
def test_an_alias_inside_its_own_anchor_is_refused(check: Check, content: str) -> None:
    """PyYAML composes such loops; whoever walks the tree must not run round in them."""
    messages = [problem.message for problem in check(content)]
    assert len([message for message in messages if "an alias refers to" in message]) == 1


def test_the_committed_schema_is_up_to_date() -> None:
    """Editors read the file, not the models: run python -m tensorize_assets.core.catalog_schema."""
    assert catalog_schema_text() == SCHEMA.read_text()


def test_the_schema_command_writes_the_file(tmp_path: Path) -> None:
    """It is what a developer runs after changing a field."""
    target = tmp_path / "schema.json"
    command = [sys.executable, "-m", "tensorize_assets.core.catalog_schema", str(target)]
    subprocess.run(command, check=True, cwd=HOME.parent, timeout=60)
    assert catalog_json_schema() == json.loads(target.read_text())


def test_the_shipped_catalog_names_its_schema() -> None:
    """Editors look at the first line only."""
    first = SHIPPED.read_text().split("\n")[0]
    assert f"# yaml-language-server: $schema={SCHEMA.name}" == first


def _schema_errors(catalog: Any) -> list[str]:
    schema = catalog_json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return [str(e.json_path) for e in jsonschema.Draft7Validator(schema).iter_errors(catalog)]


def test_the_schema_accepts_the_shipped_catalog() -> None:
    """An editor full of red lines teaches people to ignore them."""
    assert _schema_errors(yaml.safe_load(SHIPPED.read_text())) == []


# Mistakes that JSON cannot hold, or that a schema cannot see.
BEYOND_A_SCHEMA = {
    *("a day that never comes", "a launcher that is not reached", "executor without ranks"),
    *("suffix empty", "suffix 1", "suffix 1.10", "suffix no", "suffix a date", "suffix a list"),
    *("models that differ in case", "suffixes that differ in case"),
    *("model twice", "suffix twice", "field twice", "argument twice", "top key twice"),
    *("adapter named twice", "encryption for nobody", "encryption for an empty list"),
    *("recipients with one key", "recipients that differ in case"),
    *("trust a key to open builds", "trust a secret key"),
    *("merge of text", "two merges", "Python tag", "own tag", "binary", "set", "forced int"),
    *("alias of itself", "perplexity_tolerance infinite", "TP of a thousand digits"),
    *(
        "revision with a blank",
        "root elsewhere",
        "root with a key in it",
        "root at home",
        "root with %",
    ),
}


@pytest.mark.parametrize("name", sorted(ONE_MISTAKE.keys() - BEYOND_A_SCHEMA))
def test_the_schema_refuses_what_a_schema_can_see(name: str) -> None:
    """The editor and the command must agree, or one of them is wrong."""
    assert _schema_errors(yaml.safe_load(ONE_MISTAKE[name][0]))


def test_the_schema_offers_the_defaults_of_the_models() -> None:
    """Completion in the editor shows them; this one is the field people set most."""
    profile = catalog_json_schema()["$defs"]["Profile"]
    assert profile["required"] == ["reload_device"]
    assert profile["properties"]["dtype"]["default"] == "auto"


def test_the_readme_shows_the_defaults_of_what_happens_by_itself() -> None:
    """Whoever copies the block must not change anything by it."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    found = re.search(r"^( +)automation: .*?(?=\n\n)", readme, re.DOTALL | re.MULTILINE)
    assert found is not None
    block = yaml.safe_load(textwrap.dedent(found[0]))
    assert Automation() == Automation.model_validate(block["automation"])
