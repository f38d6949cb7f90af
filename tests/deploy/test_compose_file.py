"""What docker-compose.yml and the Dockerfile promise, read from the files."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from composed import COMPOSE, REPO, services

# It has no public name.
from dagster._utils.tags import TagConcurrencyLimitsCounter

from tensorize_assets.core.catalog import load_catalog

SERVICES = services()
DOCKERFILE = (REPO / "Dockerfile").read_text()
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|KEY|CREDENTIALS|WEBHOOK$|PGSERVICEFILE")


def each_service() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", SERVICES.values(), ids=list(SERVICES))


def read(path: str) -> Any:
    return yaml.safe_load((REPO / path).read_text())


@pytest.mark.parametrize(
    "arguments",
    [[], ["--profile", "webhook"], ["-f", "docker-compose.yml", "-f", "deploy/gpu.yml"]],
    ids=["plain", "webhook", "gpu"],
)
def test_docker_compose_accepts_it(arguments: list[str]):
    """A key that it does not know, or a merge that yields nonsense, ends the one command up."""
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    done = subprocess.run(
        [command, *arguments, "config", "--quiet"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (0, "") == (done.returncode, done.stderr)


@each_service()
def test_a_service_is_watched_and_may_do_little(service: dict[str, Any]):
    """What breaks out of one is nobody, can write nowhere, and fills no disk with logs."""
    assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["read_only"]
    assert ["ALL"] == service["cap_drop"]
    assert ["no-new-privileges:true"] == service["security_opt"]
    assert "unless-stopped" == service["restart"]
    assert "max-size" in service["logging"]["options"]


@each_service()
def test_an_image_is_of_one_version(service: dict[str, Any]):
    """What `up` starts today it starts in a year."""
    assert re.search(r":\d+\.\d+[\w.-]*$", service["image"])


def test_our_images_are_of_the_packages_version():
    """A release that keeps the old tag would start the old image."""
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    ours = {service["image"] for service in SERVICES.values() if "build" in service}
    assert {
        f"tensorize-assets-code:{version}-cpu",
        f"tensorize-assets-orchestration:{version}",
    } == ours
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert all(re.search(r":\d+\.\d+\.\d+", base) or base in ("base", "vllm") for base in bases)


@pytest.mark.fault("Secrets", "docker-compose.yml, which is committed", "no secret in it")
@each_service()
def test_no_secret_stands_in_the_file(service: dict[str, Any]):
    """It is committed; and what stands in the environment shows to whoever may inspect."""
    given = {key: text or "" for key, text in (service.get("environment") or {}).items()}
    for key, text in given.items():
        if SECRET.search(key):
            assert "" == text or text.startswith("/run/secrets/"), key
        # A password in a URL.
        assert not re.search(r"//[^/@\s]*:[^/@\s]+@", str(text)), key


@pytest.mark.fault(
    "Secrets",
    "a service of docker-compose.yml is broken into",
    "it has the secrets that it uses, and no other",
)
@each_service()
def test_a_service_has_the_secrets_that_it_names_and_no_other(service: dict[str, Any]):
    """One that was broken into gives away no more than it used."""
    texts = [str(text) for text in (service.get("environment") or {}).values()]
    named = set(re.findall(r"/run/secrets/(\w+)", " ".join([*texts, *service["command"]])))
    assert named == set(service["secrets"])


@pytest.mark.fault(
    "Secrets", "by its defaults: every port of docker-compose.yml", "published on loopback alone"
)
@each_service()
def test_ports_are_published_on_loopback_alone(service: dict[str, Any]):
    """Dagster's UI lets anybody start a run."""
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@each_service()
def test_who_is_waited_for_is_healthy_first(service: dict[str, Any]):
    """A daemon without its database ends, and with it `up --wait`."""
    for other, how in service.get("depends_on", {}).items():
        assert {"condition": "service_healthy"} == how
        assert other in SERVICES


def test_images_run_as_nobody_in_particular_and_are_watched_without_compose_too():
    """They are run by other orchestrators as well."""
    stages = re.split(r"^FROM .* AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)
    final = dict(zip(stages[1::2], stages[2::2], strict=True))
    for name in ("orchestration", "code"):
        assert "USER tensorize" in final[name]
        assert "HEALTHCHECK" in final[name]


def test_an_image_takes_what_it_copies_and_no_secret():
    """The context is what .dockerignore lets in; a key in it would lie in a layer for ever."""
    allowed = [
        line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    copied = {
        source
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert sorted(copied) == sorted(allowed)
    assert all((REPO / source).exists() for source in copied)


def test_the_images_commands_are_those_of_the_compose_file():
    """One of the two would be forgotten when the other changes."""
    commands = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert [SERVICES["webserver"]["command"], SERVICES["code"]["command"]] == [
        yaml.safe_load(command) for command in commands
    ]


def test_instances_differ_only_in_where_they_keep_things():
    """Limits, retries and retention hold in every deployment alike."""
    home, demo, deployed = (
        read(path)
        for path in (
            "dagster_home/dagster.yaml",
            "tensorize_assets/demo/dagster.yaml",
            "deploy/dagster.yaml",
        )
    )
    assert home == demo
    assert {"storage", "compute_logs"} == deployed.keys() - home.keys()
    assert home == {key: value for key, value in deployed.items() if key in home}


def test_the_catalog_that_is_mounted_is_one():
    """Who starts it unchanged sees a model being built."""
    catalog = load_catalog(REPO / "deploy" / "catalog" / "models.yaml")
    bucket = catalog.root.removeprefix("s3://").partition("/")[0]
    (buckets,) = (part for part in SERVICES["s3"]["command"] if part.startswith("-bucket="))
    logs = SERVICES["code"]["environment"]["DAGSTER_LOGS_BUCKET"]
    assert {bucket, logs} == set(buckets.removeprefix("-bucket=").split(","))


def test_the_daemon_sees_the_locks_of_builds_that_are_started_by_hand():
    """Else a killed one counts as under way. A new volume has the owner of the image's folder."""
    locks = "locks:/opt/tensorize/run_locks"
    assert ["code", "daemon"] == [name for name in SERVICES if locks in str(SERVICES[name])]
    assert "/opt/tensorize/run_locks" in DOCKERFILE


def test_secrets_are_made_once_and_belong_to_their_owner(tmp_path: Path):
    """A second `make up` that made new ones would lock everybody out of what is there."""
    folder = tmp_path / "secrets"
    made: list[dict[str, str]] = []
    for _ in range(2):
        done = subprocess.run(
            ["sh", str(REPO / "deploy" / "secrets.sh"), str(folder)],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert "" == done.stdout + done.stderr
        made.append({path.name: path.read_text() for path in folder.iterdir()})
    assert made[0] == made[1]
    files = yaml.safe_load(COMPOSE.read_text())["secrets"].values()
    assert {Path(secret["file"]).name for secret in files} == set(made[0])
    assert all(made[0].values())
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert f"password={made[0]['postgres_password']}\n" in made[0]["pg_service.conf"]


def test_secrets_are_not_committed():
    """`git add .` after `make up` must not take them along."""
    ignored = (REPO / ".gitignore").read_text().splitlines()
    assert {"/.env", "/deploy/secrets/"} <= set(ignored)


def test_the_example_of_settings_names_each_one():
    """A setting that nobody finds is none, and one that is not read misleads."""
    read_by_compose = set(re.findall(r"\$\{(\w+):-", COMPOSE.read_text()))
    example = (REPO / ".env.example").read_text()
    assert read_by_compose == set(re.findall(r"^#?(\w+)=", example, re.MULTILINE))


def test_the_images_package_is_not_built_where_an_empty_one_was():
    """setuptools copies what is newer, and the empty package is newer than a checkout."""
    empty = re.findall(r"touch (\S+)/tensorize_assets/__init__.py", DOCKERFILE)
    built = re.findall(r"^RUN pip install --no-deps (/\S+)$", DOCKERFILE, re.MULTILINE)
    assert (1, 2) == (len(empty), len(built))
    assert not set(empty) & set(built)


def test_of_a_partition_one_run_goes_at_a_time():
    """Two runs of one build would write the same objects."""

    def run(partition: str) -> dg.DagsterRun:
        return dg.DagsterRun(job_name="build", tags={"dagster/partition": partition})

    limits = read("dagster_home/dagster.yaml")["concurrency"]["runs"]["tag_concurrency_limits"]
    under_way = TagConcurrencyLimitsCounter(limits, [run("org--a|v1")])
    assert under_way.is_blocked(run("org--a|v1"))
    assert not under_way.is_blocked(run("org--a|v2"))


@pytest.mark.parametrize("home", ["dagster_home", "examples/your_project/dagster_home"])
def test_of_workers_one_goes_at_a_time(home: str):
    """Each may take a whole device or host."""
    pools = read(f"{home}/dagster.yaml")["concurrency"]["pools"]
    assert (1, "op") == (pools["default_limit"], pools["granularity"])
