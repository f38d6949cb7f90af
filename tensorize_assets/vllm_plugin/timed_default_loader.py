"""vLLM's own default loader with a clock beside it, for the reload check's comparison."""

from __future__ import annotations

import time

import torch
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from tensorize_assets.core.tasks import RankLoad
from tensorize_assets.vllm_plugin import report


class TimedDefaultLoader(DefaultModelLoader):
    """Reports how long reading the weights into a constructed model took."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        before = report.host_memory()
        start = time.perf_counter()
        super().load_weights(model, model_config)
        seconds = time.perf_counter() - start
        if not report.reporting():
            return
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        report.write(
            RankLoad(
                rank=get_tensor_model_parallel_rank(),
                device="cpu" if current_platform.is_cpu() else "cuda",
                device_name=report.device_name(),
                seconds=seconds,
                bytes=size,
                host_memory_before=before,
                host_memory_after=report.host_memory(),
            )
        )
