"""The Dagster component: models and profiles, declared in a project's defs.yaml."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster.components import Scaffolder, ScaffoldRequest, scaffold_with
from pydantic import BaseModel, ConfigDict, Field, RootModel

from tensorize_assets.component_schema import Schema, attributes_schema
from tensorize_assets.component_yaml import as_written, catalog_of, record_of, rendered
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.definitions import build_defs

_HOME = "tensorize_home"

_PYTHON = f'''import dagster as dg

from tensorize_assets import TensorizedModels


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> TensorizedModels:
    # A catalog in a file: its edits count at once, and the `tensorize` command reads it too.
    return TensorizedModels(
        catalog=context.project_root / "models.yaml", home=context.project_root / "{_HOME}"
    )
'''


class _Scaffolder(Scaffolder):
    """A defs.yaml with one model that anybody can build, and what else can stand there."""

    def scaffold(self, request: ScaffoldRequest) -> None:
        """Write it, or the component in Python; and keep the home out of git."""
        if request.scaffold_format == "python":
            (request.target_path / "component.py").write_text(_PYTHON, encoding="utf-8")
        else:
            (request.target_path / "defs.yaml").write_bytes(
                Path(__file__).with_name("component_defs.yaml").read_bytes()
            )
        if request.project_root:
            home = request.project_root / _HOME
            home.mkdir(exist_ok=True)
            # Private keys are made in it at first use.
            (home / ".gitignore").write_text("*\n", encoding="utf-8")


class _Beside(BaseModel):
    """Attributes that are not of the catalog."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    home: str = Field(
        min_length=1,
        description="Folder of keys, of the Hub's files and of scratch, relative to this file. "
        "Keep it, and keep it out of git.",
    )
    catalog: str = Field(
        default="",
        description="A catalog file (models.yaml), relative to this file, instead of root, models "
        "and the rest. Its edits count at once.",
    )
    group_name: str = Field(
        default="", description="The group of all assets, instead of those that they have."
    )
    sensors: bool = Field(
        default=True,
        strict=True,
        description="Whether new commits start builds, and assets follow one another.",
    )
    schedules: bool = Field(
        default=True,
        strict=True,
        description="Whether builds are made again after an update, audited and cleaned up.",
    )


class _Attributes(RootModel[dict[str, Any]]):
    """What stands under `attributes:`, not yet held against anything.

    It is read again where templates are rendered, by the rules of catalogs: with lines, and without
    a secret in a message.
    """

    @classmethod
    def __get_pydantic_json_schema__(cls, _core_schema: Any, _handler: Any) -> Schema:
        return attributes_schema(_Beside)


@scaffold_with(_Scaffolder)
@dataclass(frozen=True)
class TensorizedModels(dg.Component, dg.Resolvable):
    """Hugging Face models as verified tensors that vLLM loads straight onto its devices.

    Declares models, and each way (profile) they are built, with the fields of models.yaml; or
    names such a file. Brings the assets of `tensorize_assets`, with sensors that build new commits
    and schedules that look after what was built. A project can have one.
    """

    catalog: Catalog | Path
    home: Path
    group_name: str | None = None
    sensors: bool = True
    schedules: bool = True

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """What `dg` and the UI show of the type."""
        return dg.ComponentTypeSpec(
            description=cls.__doc__,
            tags=["huggingface", "vllm"],
            produces=["asset", "asset_check", "job", "resource", "schedule", "sensor"],
        )

    @classmethod
    def model(cls) -> type[BaseModel]:
        """The attributes in YAML, as `dg check yaml` and editors know them."""
        return _Attributes

    @classmethod
    def load(
        cls, attributes: BaseModel | None, context: dg.ComponentLoadContext
    ) -> "TensorizedModels":
        """The component of a defs.yaml. Raises CatalogError with every mistake in it."""
        # Dagster has None for an empty mapping, and would leave out what is wrong with it.
        return super().load(attributes or _Attributes({}), context)

    @classmethod
    def resolve_from_model(
        cls, context: dg.ResolutionContext, model: BaseModel
    ) -> "TensorizedModels":
        """The component of these attributes.

        Raises CatalogError with every mistake, one a line: `FILE:LINE: FIELD: what is wrong`.
        """
        assert isinstance(model, _Attributes)
        written = rendered(as_written(context, model.root), context)
        ours, theirs = written.split(_Beside.model_fields)
        beside = record_of(_Beside, ours)
        if beside.catalog:
            theirs.refuse("stands in the file that `catalog` names; remove one of the two")
            catalog = written.file.parent / beside.catalog
        else:
            catalog = catalog_of(theirs)
        return cls(
            catalog=catalog,
            home=written.file.parent / beside.home,
            group_name=beside.group_name or None,
            sensors=beside.sensors,
            schedules=beside.schedules,
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """As `tensorize_assets.build_defs`."""
        return build_defs(
            self.catalog,
            self.home,
            group_name=self.group_name,
            sensors=self.sensors,
            schedules=self.schedules,
        )
