"""Where workers run, as the catalog says it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.launcher_ray import RaySettings

LauncherKind = Literal["subprocess", "ray", "k8s"]

LAUNCHER_VARIABLE = "TENSORIZE_LAUNCHER"
"""The environment variable that goes before the catalog's `launcher`."""


class Launchers(BaseModel):
    """Settings of each kind of launcher that a home may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ray: RaySettings | None = Field(default=None, description="A Ray cluster.")
    k8s: K8sSettings | None = Field(default=None, description="A Kubernetes cluster.")
