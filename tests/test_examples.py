"""The examples are what people copy: the API server and our own commands must take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from tensorize_assets.cli import app

SERVE = Path(__file__).parent.parent / "examples" / "kubernetes" / "serve.yaml"


@pytest.fixture
def deployment() -> dict[str, Any]:
    """The Deployment that fetches and serves."""
    return yaml.safe_load(SERVE.read_text())


@pytest.mark.parametrize("version", ["1.31", "1.35"])
def test_kubernetes_takes_the_deployment(deployment: dict[str, Any], version: str) -> None:
    """Strictly: a misspelt field is otherwise dropped in silence."""
    kubernetes_validate.validate(deployment, version, strict=True)


def test_its_commands_are_ours(deployment: dict[str, Any]) -> None:
    """An option that was renamed shows here, and not in a pod that does not start."""
    pod = deployment["spec"]["template"]["spec"]
    commands = [container["args"] for container in (*pod["initContainers"], *pod["containers"])]

    parsed = [_parsed(command) for command in commands]

    assert ["fetch", "serve"] == [name for name, _ in parsed]
    fetched, served = (values for _, values in parsed)
    assert fetched["root"] == "s3://models/prod"
    # What the one wrote is what the other reads.
    assert fetched["directory"] == served["root"]
    assert fetched["public_key"] == served["public_key"]


def _parsed(command: list[str]) -> tuple[str, dict[str, Any]]:
    program, name, *arguments = command
    assert "tensorize" == program
    group: Any = get_command(app)
    context = group.commands[name].make_context(name, arguments)
    return name, context.params
