"""deploy/kubernetes: Dagster, Kubernetes and our own catalog must take what people copy."""

import re
from pathlib import Path
from typing import Any

import dagster as dg
import kubernetes
import kubernetes_validate
import pytest
import yaml
from dagster._core.storage.dagster_run import DagsterRun
from dagster_k8s import k8s_job_executor
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job

from tensorize_assets.automation.run_coordinator import GpuRunCoordinator
from tensorize_assets.core.catalog import Catalog, load_catalog
from tensorize_assets.core.tasks import ShardRequest, SnapshotSource
from tensorize_assets.resources.launchers.chosen import chosen
from tensorize_assets.resources.launchers.k8s import K8sLauncher
from tensorize_assets.resources.launchers.k8s_pods import pod_spec

_DEPLOY = Path(__file__).parents[2] / "deploy"
_VALUES: dict[str, Any] = yaml.safe_load((_DEPLOY / "kubernetes/values.yaml").read_text())
_OBJECTS = list(yaml.safe_load_all((_DEPLOY / "kubernetes/workers.yaml").read_text()))
_EXECUTOR: dict[str, Any] = yaml.safe_load((_DEPLOY / "kubernetes/step_executor.yaml").read_text())
_VERSIONS = ("1.31", "1.37")

# What the chart's own schema allows there (values.schema.json of the chart 1.13).
_CHART_KEYS = {
    "": {
        "global",
        "serviceAccount",
        "telemetry",
        "postgresql",
        "generatePostgresqlPasswordSecret",
        "dagster-user-deployments",
        "dagsterWebserver",
        "dagsterDaemon",
        "runLauncher",
        "computeLogManager",
        "retention",
        "additionalInstanceConfig",
    },
    "deployment": {
        "name",
        "image",
        "dagsterApiGrpcArgs",
        "port",
        "includeConfigInLaunchedRuns",
        "env",
        "envSecrets",
        "podSecurityContext",
        "securityContext",
        "resources",
        "volumes",
        "volumeMounts",
    },
    "webserver": {
        "image",
        "podSecurityContext",
        "securityContext",
        "env",
        "volumes",
        "volumeMounts",
    },
    "daemon": {
        "image",
        "podSecurityContext",
        "securityContext",
        "env",
        "volumes",
        "volumeMounts",
        "runCoordinator",
        "runMonitoring",
        "runRetries",
        "sensors",
        "schedules",
        "backfills",
    },
}


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """That of the ConfigMap."""
    path = tmp_path / "models.yaml"
    path.write_text(_OBJECTS[-1]["data"]["models.yaml"])
    return load_catalog(path)


@pytest.mark.parametrize("version", _VERSIONS)
def test_kubernetes_takes_the_objects(version: str):
    """Strictly: a misspelt field is otherwise dropped in silence."""
    for one in _OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_catalog_names_the_launcher_and_its_accounts(catalog: Catalog):
    """One file for both: what the pods run as is what the objects make."""
    launcher = chosen(catalog)
    assert isinstance(launcher, K8sLauncher)
    assert launcher.versions()["vllm"] == "0.31.0"
    accounts = {one["metadata"]["name"] for one in _OBJECTS if one["kind"] == "ServiceAccount"}
    assert launcher.settings.service_account_name in accounts
    assert _VALUES["global"]["serviceAccountName"] in accounts
    request = ShardRequest(
        model="facebook/opt-125m",
        suffix="v1",
        snapshot=SnapshotSource(folder="/nowhere"),
        root="s3://models/prod",
        directory="vllm/x/v1",
        scratch_dir="/nowhere",
        dtype="auto",
        tensor_parallel_size=1,
    )
    spec = pod_spec(launcher.settings, request)
    for version in _VERSIONS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_chart_has_these_values():
    """Helm drops what a chart does not know."""
    (deployment,) = _VALUES["dagster-user-deployments"]["deployments"]
    assert set(_VALUES) <= _CHART_KEYS[""]
    assert set(deployment) <= _CHART_KEYS["deployment"]
    assert set(_VALUES["dagsterWebserver"]) <= _CHART_KEYS["webserver"]
    assert set(_VALUES["dagsterDaemon"]) <= _CHART_KEYS["daemon"]


@pytest.fixture
def instance(tmp_path: Path) -> dg.DagsterInstance:
    """Dagster's instance as the chart writes it, with its storage and its cluster on this disk."""
    daemon = _VALUES["dagsterDaemon"]
    launcher = _snake(_VALUES["runLauncher"]["config"]["k8sRunLauncher"])
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "x", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
                "current-context": "x",
            }
        )
    )
    written = {
        "run_launcher": {
            "module": "dagster_k8s",
            "class": "K8sRunLauncher",
            "config": {
                **launcher,
                "load_incluster_config": False,
                "kubeconfig_file": str(kubeconfig),
                "service_account_name": _VALUES["global"]["serviceAccountName"],
                "job_namespace": "models",
                "dagster_home": "/opt/dagster/dagster_home",
                "instance_config_map": "dagster-instance",
                "postgres_password_secret": "dagster-postgresql-secret",
            },
        },
        "sensors": _snake(daemon["sensors"]),
        "schedules": _snake(daemon["schedules"]),
        "backfills": _snake(daemon["backfills"]),
        "telemetry": _VALUES["telemetry"],
        **_VALUES["additionalInstanceConfig"],
    }
    # Twice the same key is once the chart's.
    for chart_s in ("runCoordinator", "runMonitoring", "runRetries"):
        assert daemon[chart_s] == {"enabled": False}
    assert _VALUES["retention"] == {"enabled": False}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(written))
    return dg.DagsterInstance.from_config(str(tmp_path))


def test_dagster_takes_the_instance(instance: dg.DagsterInstance):
    """And it limits what the composed deployment limits."""
    composed = yaml.safe_load((_DEPLOY / "dagster.yaml").read_text())
    with instance:
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        ours = [(one["key"], one.get("value")) for one in queue.tag_concurrency_limits or ()]
        theirs = composed["concurrency"]["runs"]["tag_concurrency_limits"]
        assert ours == [(one["key"], one.get("value")) for one in theirs]
        assert type(instance.run_coordinator).__name__ == composed["run_coordinator"]["class"]
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_resume_run_attempts == 0
        assert instance.run_retries_enabled
        pools = instance.get_concurrency_config().pool_config
        assert pools.default_pool_limit == 8


@pytest.mark.parametrize("service", ["dagsterWebserver", "dagsterDaemon"])
def test_the_run_coordinator_sees_the_catalog(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, service: str
):
    """Without it runs are queued as if they took no GPU."""
    values = _VALUES[service]
    for variable in values["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    with instance:
        coordinator = instance.run_coordinator
        assert isinstance(coordinator, GpuRunCoordinator)
        file = coordinator._file()
    (mounted,) = [one for one in values["volumeMounts"] if one["mountPath"] == str(file.parent)]
    (volume,) = [one for one in values["volumes"] if one["name"] == mounted["name"]]
    assert volume["configMap"]["name"] == _OBJECTS[-1]["metadata"]["name"]
    assert file.name in _OBJECTS[-1]["data"]


@pytest.mark.parametrize("version", _VERSIONS)
def test_kubernetes_takes_a_run_s_job(instance: dg.DagsterInstance, version: str):
    """As the run launcher makes it, of its own settings and the code location's."""
    (deployment,) = _VALUES["dagster-user-deployments"]["deployments"]
    with instance:
        launcher: Any = instance.run_launcher
        run = DagsterRun(job_name="build")
        context = K8sContainerContext.create_for_run(run, launcher, include_run_tags=False).merge(
            # What the chart hands on with includeConfigInLaunchedRuns.
            K8sContainerContext.create_from_config(
                {
                    "k8s": {
                        "env_secrets": [one["name"] for one in deployment["envSecrets"]],
                        "env": deployment["env"],
                        "volumes": deployment["volumes"],
                        "volume_mounts": deployment["volumeMounts"],
                        "security_context": deployment["securityContext"],
                    }
                }
            )
        )
        image = f"{deployment['image']['repository']}:{deployment['image']['tag']}"
        job = construct_dagster_k8s_job(
            context.get_k8s_job_config(image, launcher),
            ["dagster", "api", "execute_run"],
            "dagster-run-1",
            user_defined_k8s_config=context.run_k8s_config,
            component="run_worker",
        )
    plain: Any = kubernetes.client.ApiClient().sanitize_for_serialization(job)
    kubernetes_validate.validate(plain, version, strict=True)
    spec = plain["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 60
    assert spec["securityContext"] == deployment["podSecurityContext"]
    assert {"catalog", "seen", "work"} <= {one["name"] for one in spec["volumes"]}


@pytest.mark.parametrize("version", _VERSIONS)
def test_kubernetes_takes_the_pod_of_the_code_location(version: str):
    """The same volumes and security as the chart puts them into its Deployment."""
    (deployment,) = _VALUES["dagster-user-deployments"]["deployments"]
    container = {
        "name": "code",
        "image": "x",
        **{key: deployment[key] for key in ("env", "securityContext", "resources", "volumeMounts")},
    }
    spec = {
        "securityContext": deployment["podSecurityContext"],
        "volumes": deployment["volumes"],
        "containers": [container],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("version", _VERSIONS)
def test_dagster_and_kubernetes_take_the_step_executor(version: str):
    """Its config by the executor's own schema, its pods by Kubernetes'."""

    @dg.job(executor_def=k8s_job_executor.configured(_EXECUTOR))
    def steps() -> None:
        pass

    assert dg.validate_run_config(steps)
    context = K8sContainerContext.create_from_config(
        {
            "k8s": {
                "run_k8s_config": _EXECUTOR["step_k8s_config"],
                "resources": _EXECUTOR["resources"],
                "service_account_name": _EXECUTOR["service_account_name"],
            }
        }
    )
    job = construct_dagster_k8s_job(
        DagsterK8sJobConfig(
            job_image="x",
            dagster_home="/opt/dagster/dagster_home",
            instance_config_map="dagster-instance",
            postgres_password_secret="dagster-postgresql-secret",
        ),
        ["dagster", "api", "execute_step"],
        "dagster-step-1",
        user_defined_k8s_config=context.run_k8s_config,
        component="step_worker",
    )
    plain: Any = kubernetes.client.ApiClient().sanitize_for_serialization(job)
    kubernetes_validate.validate(plain, version, strict=True)
    assert plain["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


def _snake(value: Any) -> Any:
    """As the chart's templates rename what they are given; Kubernetes' own names stay."""
    if not isinstance(value, dict):
        return value
    return {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower(): (
            one if key in ("resources", "podSpecConfig", "jobSpecConfig") else _snake(one)
        )
        for key, one in value.items()
    }
