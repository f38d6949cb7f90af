"""The process that imports vLLM. Importing anything of it first fixes vLLM's environment."""

from tensorize_assets.worker.environment import prepare

prepare()
