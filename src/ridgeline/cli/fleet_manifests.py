"""``ridgeline fleet up --manifests``: plain objects for Kubernetes, without an operator."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from ridgeline.cli.fleet_file import FleetFile
from ridgeline.core.errors import DiskError, SettingsError
from ridgeline.fleet.config import RouterConfig

_HEAD = """\
# kubectl create secret generic ridgeline-fleet --from-file=keys.toml --from-file=router-key
# kubectl apply -f fleet.yaml
"""
_OWN_NAMES = ("host", "port", "router_key_file", "api_key_file")  # which the pods decide
_ENGINE_URL = "http://ridgeline-engine-{}.ridgeline-engines:8000"


def write_manifests(file: FleetFile, folder: Path) -> Path:
    """Write ``fleet.yaml`` into a folder; returns its path.

    Raises:
        SettingsError: something of the file has no place in them.
        DiskError: it cannot be written.
    """
    path = folder / "fleet.yaml"
    text = _HEAD + _text(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}.") from None
    return path


def _text(file: FleetFile) -> str:
    import yaml

    template = (files("ridgeline.fleet") / "kubernetes.yaml").read_text(encoding="utf-8")
    parts = list(yaml.safe_load_all(template))
    by_kind = {part["kind"]: part for part in parts if part["kind"] != "Service"}
    if file.engines:
        raise SettingsError("engines that run already have no manifests: leave engines out.")
    file.served("manifests")  # whose settings exist, and are possible
    for kind in ("StatefulSet", "Deployment"):
        pod = by_kind[kind]["spec"]["template"]["spec"]
        for container in (*pod["initContainers"], *pod["containers"]):
            container["image"] = file.image
    pod = by_kind["StatefulSet"]["spec"]["template"]["spec"]
    pod["containers"][0]["env"] = [
        {"name": f"RIDGELINE_{name.upper()}", "value": _value(name, value)}
        for name, value in {
            "model": file.model or "embedded",
            **file.engine_settings,
            "router_key_file": "/key/router-key",
        }.items()
    ]
    by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"] = _router(file)
    scaler = by_kind["HorizontalPodAutoscaler"]["spec"]
    scaler["minReplicas"], scaler["maxReplicas"] = file.budget.min_replicas, file.most
    if not file.scaling:
        by_kind["StatefulSet"]["spec"]["replicas"] = file.most
        parts = [
            each for each in parts if each["kind"] not in ("HorizontalPodAutoscaler", "ConfigMap")
        ]
    return str(yaml.safe_dump_all(parts, sort_keys=False, width=100))


def _router(file: FleetFile) -> list[str]:
    settings: dict[str, Any] = {"host": "0.0.0.0", "router_key_file": "/key/router-key"}
    for name, value in file.router_settings.items():
        if name in _OWN_NAMES:
            raise SettingsError(f"router.{name} is the pod's own: leave it out.")
        if name not in RouterConfig.__dataclass_fields__:
            raise SettingsError(f"router.{name} is of engines here: write engine.{name}.")
        settings[name] = value
    options = [
        option
        for name, value in (settings | file.scaling).items()
        for option in _options(name.replace("_", "-"), value)
    ]
    return ["ridgeline", "route", *options] + [
        f"--engine={_ENGINE_URL.format(number)}" for number in range(file.most)
    ]


def _options(name: str, value: Any) -> list[str]:
    """A setting as a command line has it."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]


def _value(name: str, value: Any) -> str:
    if isinstance(value, dict | list):
        raise SettingsError(f"engine.{name} has no place in an environment variable.")
    return str(value).lower() if isinstance(value, bool) else str(value)
