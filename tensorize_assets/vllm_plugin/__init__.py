"""What every vLLM process picks up (entry-point group `vllm.general_plugins`)."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from tensorize_assets.core import releases, serving
from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.s3 import ACCESS_VARIABLE
from tensorize_assets.core.scratch import remove_at_exit

# shard_writer.FOLDER_VARIABLE, whose module imports the worker's.
_SHARD_RANKS = "TENSORIZE_ASSETS_SHARD_RANKS"


def register() -> None:
    """Put our loader in the place of vLLM's for `load_format="tensorizer"`, and offer adapters.

    Stock vLLM cannot load tensorizer files on a CPU, never runs the post-load step that quantized
    layers, MLA and CPU kernels need (vllm#55198), and casts every tensor to the model's type
    (vllm#45504). Called once in each process of an engine; importing this package alone imports
    nothing heavy.
    """
    found = releases.installed()
    if found is not None:
        try:
            releases.require_supported(found.release)
        except PreflightError as error:
            _refuse(str(error))
            return
    _register()


def _refuse(said: str) -> None:
    """Have a release that was never tried say so where it is asked to load our files."""
    try:
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError:
        # Whatever else it loads is none of ours.
        return

    class Refusing(BaseModelLoader):
        def __new__(cls, *_: object) -> Refusing:
            raise PreflightError(said)

    register_model_loader("tensorizer")(Refusing)


def _register() -> None:
    import torch

    from tensorize_assets.vllm_plugin import sodium

    sodium.provide()
    from vllm.lora.resolver import LoRAResolverRegistry
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.platforms import current_platform

    from tensorize_assets.vllm_plugin import report, startup
    from tensorize_assets.vllm_plugin.loader import TensorizedModelLoader
    from tensorize_assets.vllm_plugin.lora_resolver import ArtifactResolver

    if current_platform.is_cpu():
        # Linux lets a process use AMX tiles once it asked; vLLM 0.31's attention uses them unasked,
        # and dies of an illegal instruction unless a library has asked before.
        torch.cpu._init_amx()
    register_model_loader("tensorizer")(TensorizedModelLoader)
    LoRAResolverRegistry.register_resolver("tensorize_assets", ArtifactResolver())
    if report.checking():
        from tensorize_assets.vllm_plugin.timed_default_loader import TimedDefaultLoader

        register_model_loader("auto")(TimedDefaultLoader)
    if _SHARD_RANKS in os.environ:
        # Ranks of executor mode, which write their files: they need the worker's code.
        from tensorize_assets.vllm_plugin import shard_writer

        shard_writer.register()
    served = serving.current()
    # Engine and ranks are processes of multiprocessing; the server itself is not.
    if served is not None and multiprocessing.parent_process() is None:
        startup.watch(served)
        for path in (served.reports, served.keyfile, os.environ.get(ACCESS_VARIABLE)):
            if path is not None:
                remove_at_exit(Path(path).parent)
