"""`dg` in somebody's project finds the component, scaffolds it, and takes what it scaffolded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TYPE = "tensorize_assets.TensorizedModels"
DG = Path(sys.executable).with_name("dg")
FILES = {
    "pyproject.toml": """\
[project]
name = "my_project"
version = "0.1.0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "my_project"
""",
    "src/my_project/__init__.py": "",
    "src/my_project/defs/__init__.py": "",
    # What `create-dagster` writes.
    "src/my_project/definitions.py": """\
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
""",
}


class Project:
    """A Dagster project in a folder, and `dg` in it: without telemetry, and without network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.defs = self.folder / "src" / "my_project" / "defs"
        for name, text in FILES.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._home = folder / "home"
        self._home.mkdir()
        (self._home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        self._config = folder / "dg.toml"
        self._config.write_text("[cli.telemetry]\nenabled = false\n")

    def dg(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What a command says."""
        ours = ("DAGSTER_", "TENSORIZE_", "HF_")
        return subprocess.run(
            [str(DG), *arguments],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if not name.startswith(ours)}
            | {
                "DAGSTER_HOME": str(self._home),
                "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
                "DG_CLI_CONFIG": str(self._config),
                # Elsewhere the project is installed.
                "PYTHONPATH": os.pathsep.join(
                    [str(self.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        """What a command answers with `--json`."""
        done = self.dg(*arguments, "--json")
        assert 0 == done.returncode, done.stdout
        # Warnings stand before it.
        return json.loads(done.stdout[done.stdout.index("{") :])


def passes(project: Project, *arguments: str) -> str:
    """What a command says that succeeds."""
    done = project.dg(*arguments)
    assert 0 == done.returncode, done.stdout
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without definitions."""
    return Project(tmp_path)


@pytest.fixture(scope="module")
def scaffolded(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with our component as it was scaffolded."""
    made = Project(tmp_path_factory.mktemp("scaffolded"))
    passes(made, "scaffold", "defs", TYPE, "models")
    return made


def test_the_component_is_listed(scaffolded: Project) -> None:
    """By the entry point of the installed package."""
    (item,) = [one for one in scaffolded.json("list", "components")["items"] if one["key"] == TYPE]
    assert item["summary"].startswith("Hugging Face models as verified tensors")


def test_a_scaffolded_project_passes(scaffolded: Project) -> None:
    """What a new user runs next; nothing was edited."""
    said = passes(scaffolded, "check", "defs")
    assert "All component YAML validated successfully" in said
    assert "All definitions loaded successfully" in said


def test_its_definitions_are_listed(scaffolded: Project) -> None:
    """Our assets, with their checks, and the job."""
    found = scaffolded.json("list", "defs")
    assert {"hf_snapshot", "reload_check", "published"} <= {
        one["asset_key"] for one in found["assets"]
    }
    assert "build" in {one["name"] for one in found["jobs"]}


def test_its_keys_stay_out_of_git(scaffolded: Project) -> None:
    """They are made in the project's own folder at first use."""
    assert "*\n" == (scaffolded.folder / "tensorize_home" / ".gitignore").read_text()


def test_dg_points_to_a_mistake(scaffolded: Project, project: Project) -> None:
    """By the schema, before anything is loaded."""
    text = (scaffolded.defs / "models" / "defs.yaml").read_text()
    text = text.replace("reload_device: cpu", "reload_device: gpu")
    path = project.defs / "models" / "defs.yaml"
    path.parent.mkdir()
    path.write_text(text)
    line = text[: text.index("reload_device: gpu")].count("\n") + 1
    done = project.dg("check", "yaml")
    assert 1 == done.returncode
    assert f"{path}:{line} - " in done.stdout
    assert "'gpu' is not one of ['cuda', 'cpu']" in done.stdout


def test_it_is_scaffolded_in_python_too(project: Project) -> None:
    """With a catalog in a file, which is not there yet: the project loads all the same."""
    passes(project, "scaffold", "defs", TYPE, "models", "--format", "python")
    assert "All definitions loaded successfully" in passes(project, "check", "defs")
