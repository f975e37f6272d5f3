"""launch/kubernetes and launch/skypilot.yaml against their schemas, which reject a misspelt key.

Kubernetes' own kinds: the schemas in kubernetes-validate. JobSet and TrainJob: the models of
kubeflow-trainer-api, which are made from their CRDs. SkyPilot: the keys of its task files, listed here, since
the package is too large to install for this.
"""

import copy
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT
from kubeflow_trainer_api import models

LAUNCH = ROOT / "launch"
CUSTOM = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
API_VERSIONS = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()
# {key: type}, from https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKYPILOT = {"name": str, "num_nodes": int, "workdir": str, "resources": dict, "envs": dict} | {
    "setup": str,
    "run": str,
    "file_mounts": dict,
    "secrets": dict,
    "volumes": dict,
}
SKYPILOT_RESOURCES = {"accelerators": str, "use_spot": bool, "infra": str, "cpus": str, "memory": str} | {
    "disk_size": int,
    "image_id": str,
    "job_recovery": (str, dict),
}


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """The keys of `given` that are not in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        found = [f"{path}/{key}" for key in given if key not in kept]
        pairs = [(f"{path}/{key}", value, kept[key]) for key, value in given.items() if key in kept]
    elif isinstance(given, list) and isinstance(kept, list):
        found, pairs = [], [(f"{path}/{n}", *pair) for n, pair in enumerate(zip(given, kept, strict=True))]
    else:
        return []
    return found + [name for where, one, other in pairs for name in lost(one, other, where)]


def check_custom(resource: dict[str, Any]) -> None:
    """Check as Kubernetes' API server does with `--validate=strict`. The models alone allow unknown keys."""
    model = CUSTOM[resource["kind"]]
    assert resource["apiVersion"] == API_VERSIONS[resource["kind"]]
    read = model.from_dict(copy.deepcopy(resource))
    assert read is not None
    assert lost(resource, read.to_dict()) == []


def check_skypilot(task: dict[str, Any]) -> None:
    for allowed, section in ((SKYPILOT, task), (SKYPILOT_RESOURCES, task.get("resources", {}))):
        for key, value in section.items():
            assert isinstance(value, allowed[key]), key  # type: ignore[arg-type]


def check(resource: dict[str, Any]) -> None:
    """Check a resource. Raises the error of the checker of its kind."""
    if "run" in resource:
        check_skypilot(resource)
    elif resource["kind"] in CUSTOM:
        check_custom(resource)
    else:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(resource, version, strict=True)


def resources() -> list[tuple[str, dict[str, Any]]]:
    paths = [*sorted((LAUNCH / "kubernetes").glob("*.yaml")), LAUNCH / "skypilot.yaml"]
    return [
        (f"{path.stem}-{resource.get('kind', 'task')}", resource)
        for path in paths
        for resource in yaml.safe_load_all(path.read_text())
    ]


RESOURCES = resources()


@pytest.mark.parametrize(("name", "resource"), RESOURCES, ids=[name for name, _ in RESOURCES])
def test_a_manifest_passes_its_schema_and_a_misspelt_key_does_not(
    name: str, resource: dict[str, Any]
) -> None:
    check(resource)
    section = "metadata" if "metadata" in resource else "resources"
    with pytest.raises((AssertionError, KeyError, kubernetes_validate.ValidationError)):
        check(resource | {section: resource[section] | {"namex": "one"}})


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_specs(inner)


@pytest.mark.parametrize("path", sorted((LAUNCH / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
def test_pods_run_without_root_and_have_room_for_snapshots_in_memory(path: Path) -> None:
    pods = [pod for resource in yaml.safe_load_all(path.read_text()) for pod in pod_specs(resource)]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_the_network_policy_of_the_page_on_security_selects_the_pods_of_the_job() -> None:
    page = (ROOT / "docs/security.md").read_text()
    (block,) = re.findall(r"^ *```yaml\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    policy = yaml.safe_load(textwrap.dedent(block))
    check(policy)
    manifest = yaml.safe_load_all((LAUNCH / "kubernetes/indexed_job.yaml").read_text())
    kinds = {resource["kind"]: resource for resource in manifest}
    labels = {"job-name": kinds["Job"]["metadata"]["name"]}
    assert kinds["Service"]["spec"]["selector"] == labels
    (rule,) = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"] == {"matchLabels": labels}
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    for name in ("jobset", "trainjob"):
        *_, job = yaml.safe_load_all((LAUNCH / f"kubernetes/{name}.yaml").read_text())
        assert f"`jobset.sigs.k8s.io/jobset-name: {job['metadata']['name']}`" in page
