"""The launcher that the catalog, or the environment, names."""

# No `annotations` of __future__: Dagster reads those of a resource's fields as they are.

import os
from collections.abc import Mapping
from importlib import import_module
from typing import get_args

import dagster as dg

from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.catalog_launchers import LAUNCHER_VARIABLE, LauncherKind
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.protocol import R, WorkerRequest
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.launchers.base import Launcher, LaunchReport, StepContext
from tensorize_assets.resources.launchers.local import SubprocessLauncher

# Their libraries are extras, and take a second to import.
_CLUSTERS = {"ray": "RayLauncher", "k8s": "K8sLauncher"}


def chosen(catalog: Catalog | None) -> Launcher:
    """The launcher of TENSORIZE_LAUNCHER, or else of `catalog`; None is a catalog without any.

    For a catalog that cannot be read there is `LauncherAtFirstUse`.

    Raises:
        CatalogError: there is none of that kind, or its settings or its library are missing.
    """
    kind = os.environ.get(LAUNCHER_VARIABLE) or (catalog.launcher if catalog else "subprocess")
    if kind == "subprocess":
        return SubprocessLauncher()
    if kind not in _CLUSTERS:
        raise CatalogError(
            f"{LAUNCHER_VARIABLE} is {kind!r}; write one of {', '.join(get_args(LauncherKind))}"
        )
    settings = catalog and getattr(catalog.launchers, kind)
    if not settings:
        raise CatalogError(
            f"{LAUNCHER_VARIABLE} is {kind}, of which the catalog's launchers: says nothing; add "
            "its settings there"
        )
    try:
        module = import_module(f"tensorize_assets.resources.launchers.{kind}")
    except ModuleNotFoundError as error:
        raise CatalogError(
            f"launcher {kind} needs {error.name}: install tensorize_assets with the extra `{kind}`"
        ) from error
    return getattr(module, _CLUSTERS[kind])(settings=settings)


class LauncherAtFirstUse(Launcher):
    """The launcher of a catalog that could not be read when Dagster loaded its definitions.

    Nobody knows which one it names, and another one would run workers where they must not. Each
    use reads the catalog anew, and raises CatalogError with what is wrong in it while it is.
    """

    catalog: dg.ResourceDependency[CatalogResource]

    @property
    def shares_disks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the launcher which the catalog names now."""
        return self._launcher().shares_disks

    def run(
        self,
        context: StepContext,
        request: WorkerRequest,
        result_type: type[R],
        secrets: Mapping[str, bytes] | None = None,
        resources: RankResources | None = None,
    ) -> LaunchReport[R]:
        """As `Launcher.run`."""
        return self._launcher().run(context, request, result_type, secrets, resources)

    def versions(self) -> dict[str, str]:
        """As `Launcher.versions`."""
        return self._launcher().versions()

    def _launcher(self) -> Launcher:
        return chosen(self.catalog.catalog())
