"""launch/kubernetes and launch/skypilot.yaml against their schemas, which reject a misspelt key.

Kubernetes' own kinds: the schemas in kubernetes-validate. JobSet and TrainJob: the models of
kubeflow-trainer-api, which are made from their CRDs. SkyPilot: the keys of its task files, listed here, since
the package is too large to install for this.
"""

import copy
import re
import textwrap
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT
from kubeflow_trainer_api import models
from support.manifests import KUBERNETES, MANIFESTS, resources, with_key

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


def places(value: Any, place: str = "") -> set[str]:
    """The places of all values in `value`."""
    found, inner = {place}, dict(enumerate(value)) if isinstance(value, list) else value
    for key in inner if isinstance(inner, dict) else ():
        found |= places(inner[key], f"{place}/{key}")
    return found


def check(resource: dict[str, Any]) -> None:
    """Check a resource as its own checker does: Kubernetes' API server, with `--validate=strict`."""
    kind = resource.get("kind", "task")
    if kind == "task":
        for key, value in [*resource.items(), *resource["resources"].items()]:
            assert isinstance(value, (SKYPILOT | SKYPILOT_RESOURCES)[key]), key
    elif kind in CUSTOM:
        assert resource["apiVersion"] == API_VERSIONS[kind]
        read = CUSTOM[kind].from_dict(copy.deepcopy(resource))
        assert read is not None and places(resource) <= places(read.to_dict())  # it allows unknown keys
    else:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(resource, version, strict=True)


RESOURCES = {f"{name} {one.get('kind', 'task')}": one for name in MANIFESTS for one in resources(name)}


@pytest.mark.parametrize("name", RESOURCES)
def test_a_manifest_passes_its_schema_and_a_misspelt_key_does_not(name: str) -> None:
    check(RESOURCES[name])
    section = "metadata" if "metadata" in RESOURCES[name] else "resources"
    misspelt = RESOURCES[name][section] | {"namex": "one"}
    with pytest.raises((AssertionError, KeyError, kubernetes_validate.ValidationError)):
        check(RESOURCES[name] | {section: misspelt})


@pytest.mark.parametrize("name", KUBERNETES)
def test_pods_run_without_root_and_have_room_for_snapshots_in_memory(name: str) -> None:
    pods = list(with_key(resources(name), "containers"))
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
    kinds = {resource["kind"]: resource for resource in resources("kubernetes/indexed_job.yaml")}
    labels = {"job-name": kinds["Job"]["metadata"]["name"]}
    assert kinds["Service"]["spec"]["selector"] == labels
    selector = {"matchLabels": labels}
    (rule,) = policy["spec"]["ingress"]
    assert (policy["spec"]["podSelector"], rule["from"]) == (selector, [{"podSelector": selector}])
    for name in ("jobset", "trainjob"):
        job = resources(f"kubernetes/{name}.yaml")[-1]
        assert f"`jobset.sigs.k8s.io/jobset-name: {job['metadata']['name']}`" in page
