"""The KubeRay file of the how-to: its command parses, and its machines fit the recipe."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from recipes.cli import parse, recipe_and_overrides
from recipes.config.load import find_recipe, load
from recipes.config.recipe import Recipe
from tests.helpers.docs.pages import ROOT

JOB: dict[str, Any] = yaml.safe_load((ROOT / "examples/kuberay.yaml").read_text())
SPEC = JOB["spec"]
CLUSTER = SPEC["rayClusterSpec"]
HEAD, (WORKERS,) = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    program, *words = shlex.split(SPEC["entrypoint"])
    assert program == "memsaver"
    arguments = parse(words)
    assert str(arguments.run_dir).startswith("/shared/")
    name, overrides = recipe_and_overrides(arguments)
    assert name is not None
    return load(find_recipe(name), overrides)


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only


def test_machines_of_the_file_are_those_of_the_recipe(recipe: Recipe) -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    counts = [WORKERS[key] for key in ("replicas", "minReplicas", "maxReplicas")]
    assert counts == [recipe.cluster.machines] * 3
    limits = container(WORKERS)["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == recipe.cluster.per_node
    assert int(limits["cpu"]) >= recipe.cluster.ranks_per_node
    assert HEAD["rayStartParams"]["num-cpus"] == "0", "the head must not get a rank"
    assert recipe.device == "cuda", "the head, where the run is prepared, has no GPU"


@pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "workers"])
def test_nodes_have_the_object_store_and_the_shared_storage(
    group: dict[str, Any], recipe: Recipe
) -> None:
    store = int(group["rayStartParams"]["object-store-memory"])
    assert store >= recipe.cluster.object_store_gib * 2**30
    pod = group["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {
        mount["mountPath"]: volumes[mount["name"]] for mount in container(group)["volumeMounts"]
    }
    assert "persistentVolumeClaim" in mounts["/shared"]
    memory = mounts["/dev/shm"]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert int(re.fullmatch(r"(\d+)Gi", memory["sizeLimit"])[1]) * 2**30 >= store  # type: ignore[index]


def test_start_parameters_are_options_of_ray_start() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    options = {option for param in scripts.start.params for option in param.opts}
    for group in (HEAD, WORKERS):
        assert {f"--{name}" for name in group["rayStartParams"]} <= options


def test_environment_of_the_job_is_readable() -> None:
    assert yaml.safe_load(SPEC["runtimeEnvYAML"]) == {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
    }
