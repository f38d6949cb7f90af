"""What vLLM says where it cannot serve our builds, and where it was never tried; into CASES.

    python release_cases.py BUILD CASES

With UNTRIED=RELEASE in the environment, that release is installed by its metadata.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm
from vllm.config import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins import load_general_plugins
from vllm.transformers_utils import runai_utils


def said(case: Any) -> str:
    try:
        return f"done: {case()}"
    except Exception as error:  # noqa: BLE001 - what is said is the case
        return f"{type(error).__name__}: {error}"


def loader(load_format: str) -> str:
    settings = {"tensorizer_config": {"tensorizer_uri": "model.tensors"}}
    extra = settings if load_format == "tensorizer" else {}
    config = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    return type(get_model_loader(config)).__name__


def from_s3(build: Path) -> str:
    """An artifact directory in S3 as vLLM's model; its small files come by a stand-in for Run:ai's.

    That streamer is not installed; with it, and a real S3 server, vLLM says the same.
    """

    def pull(_: str, folder: str, allow: list[str] | None, ignore: list[str] | None) -> None:
        shutil.copytree(
            build, folder, ignore=shutil.ignore_patterns("*.tensors"), dirs_exist_ok=True
        )

    with patch.object(runai_utils, "runai_pull_files", pull):
        arguments = EngineArgs(model="s3://bucket/vllm/tiny/plain", load_format="tensorizer")
        return arguments.create_engine_config().model_config.model


def main(build: Path, cases: Path) -> None:
    load_general_plugins()
    found: dict[str, Any] = {
        "release": ".".join(vllm.__version__.split(".")[:2]),
        "ours": said(lambda: loader("tensorizer")),
        "others": said(lambda: loader("auto")),
        "resolvers": sorted(LoRAResolverRegistry.get_supported_resolvers()),
    }
    if "UNTRIED" not in os.environ:
        found["from s3"] = said(lambda: from_s3(build))
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
