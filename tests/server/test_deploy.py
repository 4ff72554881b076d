"""What `deploy/` starts is a command line and an environment that `ridgeline serve` takes."""

import shlex
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from ridgeline.cli.environment import apply_environment
from ridgeline.cli.main import build_parser
from ridgeline.fleet.router import PREFIX

DEPLOY = Path(__file__).parents[2] / "deploy"


def served(words, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = build_parser().parse_args(words)
    apply_environment(arguments)
    return arguments


def entrypoint():
    line = (DEPLOY / "Dockerfile").read_text().split("ENTRYPOINT ")[1]
    return yaml.safe_load(line)[1:]


def test_the_unit(monkeypatch):
    text = (DEPLOY / "ridgeline.service").read_text().replace("\\\n", " ")
    (line,) = [each for each in text.splitlines() if each.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart=").replace("${CREDENTIALS_DIRECTORY}", "/c"))
    found = served(words[1:], {"RIDGELINE_MODEL": "a/b"}, monkeypatch)
    assert (found.model, found.port, found.data_dir) == ("a/b", 8000, "/var/lib/ridgeline")


def test_the_compose_file(monkeypatch):
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["ridgeline"]
    plain = dict.fromkeys(service["environment"], "")
    assert served(entrypoint(), plain, monkeypatch).model is None
    assert served(entrypoint(), {"RIDGELINE_MODEL": "a/b"}, monkeypatch).model == "a/b"


def test_the_manifests(monkeypatch):
    parts = yaml.safe_load_all((DEPLOY / "kubernetes" / "ridgeline.yaml").read_text())
    by_kind = {part["kind"]: part for part in parts}
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    found = served(entrypoint(), environment, monkeypatch)
    assert (found.model, found.quantization) == ("Qwen/Qwen3-0.6B", "int4")
    assert pod["enableServiceLinks"] is False
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}
    assert container["startupProbe"]["httpGet"]["path"] == "/health"
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"].items() <= labels.items()


def test_the_manifests_of_a_fleet(monkeypatch):
    """The router knows all engines that may be started, and publishes what the autoscaler asks."""
    parts = list(yaml.safe_load_all((files("ridgeline.fleet") / "kubernetes.yaml").read_text()))
    by_kind = {part["kind"]: part for part in parts}
    engine, router = (
        by_kind[kind]["spec"]["template"]["spec"] for kind in ("StatefulSet", "Deployment")
    )
    environment = {each["name"]: each["value"] for each in engine["containers"][0]["env"]}
    assert served(entrypoint(), environment, monkeypatch).router_key_file == "/key/router-key"
    routed = served(router["containers"][0]["command"][1:], {}, monkeypatch)
    scaler = by_kind["HorizontalPodAutoscaler"]["spec"]
    name = by_kind["StatefulSet"]["metadata"]["name"]
    service = by_kind["StatefulSet"]["spec"]["serviceName"]
    assert routed.max_replicas == scaler["maxReplicas"]
    assert routed.engine == [
        f"http://{name}-{n}.{service}:8000" for n in range(scaler["maxReplicas"])
    ]
    assert scaler["scaleTargetRef"]["name"] == name
    metric = scaler["metrics"][0]["external"]["metric"]["name"]
    assert metric == f"{PREFIX}wanted_replicas"
    (rule,) = yaml.safe_load(by_kind["ConfigMap"]["data"]["config.yaml"])["externalRules"]
    assert metric in rule["seriesQuery"]
    for pod in (engine, router):
        mounts = {m["name"] for part in ("initContainers", "containers") for c in pod[part]
                  for m in c["volumeMounts"]}  # fmt: skip
        assert mounts - {"data"} == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("name", ["RIDGELINE_PORT", "RIDGELINE_SERVICE_HOST"])
def test_a_service_of_the_same_name_changes_nothing(monkeypatch, name):
    value = "tcp://10.0.0.1:80" if name == "RIDGELINE_PORT" else "10.0.0.1"
    assert not hasattr(served(["serve"], {name: value}, monkeypatch), "port")
