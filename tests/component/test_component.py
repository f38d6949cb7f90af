"""The component's attributes: what a defs.yaml may say, and how its mistakes are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox
from jsonschema import Draft202012Validator

from tensorize_assets import TensorizedModels
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.resources.catalog import CatalogResource

# Of Dagster's own code, as it loads components.
pytestmark = [
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
]

GOOD = """\
type: tensorize_assets.TensorizedModels
attributes:
  home: ../home
  root: artifacts
  models:
    facebook/opt-125m:
      profiles:
        v1:
          reload_device: cpu
"""
# 32 bytes as text: what could be a secret key.
SECRET = "c2VjcmV0" * 5 + "c2U="


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a component in a project of its own."""
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.defs_folder_path / "models"
        path.mkdir()
        yield path


def load(folder: Path, text: str) -> tuple[TensorizedModels, dg.Definitions]:
    """The component of a defs.yaml with this text, and what it defines."""
    (folder / "defs.yaml").write_text(text)
    project = folder.parents[3]
    sandbox = DefsFolderSandbox(project, folder.parent, folder.parents[1].name)
    with sandbox.load_component_and_build_defs(folder) as (component, defs):
        assert isinstance(component, TensorizedModels)
        return component, defs


def mistakes(folder: Path, text: str) -> list[str]:
    """What is wrong with a defs.yaml, without the folder that it is in."""
    with pytest.raises(Exception, match="Error while loading") as caught:
        load(folder, text)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, CatalogError):
        error = error.__cause__
    return str(error).replace(f"{folder}/", "").splitlines()


def schema_errors(text: str) -> list[str]:
    """What `dg check yaml` says of the attributes."""
    model = TensorizedModels.get_model_cls()
    assert model
    validator = Draft202012Validator(model.model_json_schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text)["attributes"])]


def test_it_is_the_catalog_that_stands_there(folder: Path) -> None:
    """The same fields with the same defaults as in models.yaml; paths are relative to the file."""
    component, _ = load(folder, GOOD)
    expected = Catalog.model_validate(
        {
            "root": str(folder / "artifacts"),
            "models": {"facebook/opt-125m": {"profiles": {"v1": {"reload_device": "cpu"}}}},
        }
    )
    assert expected == component.catalog
    assert folder.parent / "home" == component.home.resolve()
    assert [] == schema_errors(GOOD)


def test_it_may_name_a_catalog_file(folder: Path) -> None:
    """One that the command `tensorize` reads too, and that need not be there yet."""
    text = (
        "type: tensorize_assets.TensorizedModels\nattributes: {home: h, catalog: c/models.yaml}\n"
    )
    component, defs = load(folder, text)
    assert folder / "c" / "models.yaml" == component.catalog
    assert [] == schema_errors(text)
    dg.Definitions.validate_loadable(defs)
    (resource,) = [r for r in (defs.resources or {}).values() if isinstance(r, CatalogResource)]
    assert (str(folder / "c" / "models.yaml"), None) == (resource.path, resource.content)


def test_templates_are_rendered_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every component; then numbers are numbers."""
    monkeypatch.setenv("WHERE", "s3://bucket/prefix")
    monkeypatch.setenv("RANKS", "2")
    text = GOOD.replace("root: artifacts", 'root: "{{ env.WHERE }}"').replace(
        "reload_device: cpu",
        "reload_device: cpu\n          tensor_parallel_size: \"{{ env('RANKS') }}\"\n"
        '          prompts: ["{% if true %}a{% endif %}", "{left} as it is"]',
    )
    catalog = load(folder, text)[0].catalog
    assert isinstance(catalog, Catalog)
    profile = catalog.profile("facebook/opt-125m", "v1")
    assert "s3://bucket/prefix" == catalog.root
    assert (2, ("a", "{left} as it is")) == (profile.tensor_parallel_size, profile.prompts)
    assert [] == schema_errors(text)


def test_a_template_may_give_a_whole_part(folder: Path) -> None:
    """Its mistakes are told at its place."""
    text = GOOD.replace("cpu\n", "cpu\n          prompts: \"{{ ['a', 3] }}\"\n")
    (mistake,) = mistakes(folder, text)
    assert mistake.startswith("defs.yaml:10: models.facebook/opt-125m.profiles.v1.prompts.1: ")


ONE_MISTAKE = {
    "a word": (GOOD.replace("cpu", "gpu"), 9, "did you mean cuda?"),
    "a key": (GOOD.replace("reload", "dtpye: auto\n          reload"), 9, "did you mean dtype?"),
    "no home": (GOOD.replace("  home: ../home\n", ""), 2, "home: is missing"),
    "no home's name": (GOOD.replace("../home", '""'), 3, "home: "),
    "a switch": (GOOD.replace("root", "sensors: no idea\n  root"), 4, "sensors: "),
    "twice": (GOOD + "  root: b\n", 10, "first on line 4"),
    "nothing": (GOOD.replace("cpu", '"{{ env.NO_SUCH_VARIABLE }}"'), 9, "set the variable"),
    "no plain value": (
        GOOD.replace("cpu", '"{{ dg.AutomationCondition.eager() }}"'),
        9,
        "plain values stand here",
    ),
    "two catalogs": (
        GOOD.replace("  root: artifacts\n", "  catalog: models.yaml\n"),
        5,
        "models: stands in the file",
    ),
    "the second component of a file": (
        f"{GOOD}---\n{GOOD.replace('cpu', 'gpu')}",
        19,
        "did you mean cuda?",
    ),
}


@pytest.mark.parametrize(("text", "line", "said"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_a_mistake_is_told_with_its_line(folder: Path, text: str, line: int, said: str) -> None:
    """In the words that `tensorize catalog check` has."""
    (mistake,) = mistakes(folder, text)
    assert mistake.startswith(f"defs.yaml:{line}: ")
    assert said in mistake


@pytest.mark.parametrize(
    ("attributes", "line"), [("", 1), ("attributes:\n", 1), ("attributes: {}\n", 2)]
)
def test_without_attributes_what_is_missing_is_named(
    folder: Path, attributes: str, line: int
) -> None:
    """Dagster itself would call the class without arguments."""
    (mistake,) = mistakes(folder, f"type: tensorize_assets.TensorizedModels\n{attributes}")
    assert mistake.startswith(f"defs.yaml:{line}: home: is missing: Folder of keys")


def test_a_secret_key_is_in_no_message(folder: Path) -> None:
    """Put there by mistake, it must not end up in a log; neither dg's nor ours."""
    text = GOOD.replace(
        "root: artifacts",
        f"root: artifacts\n  recipients: {{a: {SECRET}}}\n  trust: [{SECRET}]",
    )
    said = "\n".join([*mistakes(folder, text), *schema_errors(text)])
    assert SECRET not in said


REFUSED = {
    "a key": GOOD.replace("reload", "dtpye: auto\n          reload"),
    "a word": GOOD.replace("cpu", "gpu"),
    "a suffix": GOOD.replace("v1", "adhoc"),
    "no proof": GOOD.replace("reload_device: cpu", "dtype: auto"),
    "no root": GOOD.replace("  root: artifacts\n", ""),
    "no home": GOOD.replace("  home: ../home\n", ""),
    "a setting": GOOD.replace("root:", "s3: {endpoint: x}\n  root:"),
    "a number": GOOD.replace("root:", "automation: {audit: {within_days: 0}}\n  root:"),
    "a list": GOOD.replace("cpu", "cpu\n          prompts: a"),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_the_schema_refuses_what_the_component_refuses(folder: Path, text: str) -> None:
    """Editors and `dg check yaml` know only the schema; its messages do not show the whole file."""
    (error,) = schema_errors(text)
    assert len(error) < 200
    assert 1 == len(mistakes(folder, text))


def test_it_can_be_made_in_python() -> None:
    """`from_attributes_dict` is what a component of a component uses."""
    attributes: dict[str, Any] = yaml.safe_load(GOOD)["attributes"]
    component = TensorizedModels.from_attributes_dict(attributes=attributes)
    assert isinstance(component.catalog, Catalog)
    assert component.sensors
    with pytest.raises(CatalogError, match=r"root: is missing"):
        TensorizedModels.from_attributes_dict(attributes={"home": "h", "models": {}})
