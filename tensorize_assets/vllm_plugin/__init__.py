"""What every vLLM process picks up (entry-point group `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Put our loader in the place of vLLM's for `load_format="tensorizer"`.

    Stock vLLM cannot load tensorizer files on a CPU, never runs the post-load step that quantized
    layers, MLA and CPU kernels need (vllm#55198), and casts every tensor to the model's type
    (vllm#45504). Called once in each process of an engine; importing this package alone imports
    nothing heavy.
    """
    import torch

    from tensorize_assets.vllm_plugin import sodium

    sodium.provide()
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.platforms import current_platform

    from tensorize_assets.vllm_plugin.loader import TensorizedModelLoader
    from tensorize_assets.vllm_plugin.report import reporting

    if current_platform.is_cpu():
        # Linux lets a process use AMX tiles once it asked; vLLM 0.31's attention uses them unasked,
        # and dies of an illegal instruction unless a library has asked before.
        torch.cpu._init_amx()
    register_model_loader("tensorizer")(TensorizedModelLoader)
    if reporting():
        from tensorize_assets.vllm_plugin.timed_default_loader import TimedDefaultLoader

        register_model_loader("auto")(TimedDefaultLoader)
