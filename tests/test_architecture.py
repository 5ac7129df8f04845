"""Rules of docs/architecture.md and CONTRIBUTING.md that can be checked in the sources."""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tests.helpers.trainer_bridge.private_torch import PRIVATE

ROOT = Path(__file__).parent.parent
CHAIN = ["memsaver", "kvcache", "rollout", "trainer_bridge", "recipes"]

# The key may be imported only in files whose paths start like this.
ALONE = {
    "cuda": ["memsaver/memory/cuda.py", "memsaver/system/gpu_processes.py"],
    "triton": ["memsaver/ops/", "kvcache/ops/", "rollout/ops/", "trainer_bridge/ops/"],
    "ray": [
        "rollout/actor_base.py",
        "trainer_bridge/coordinator.py",
        "trainer_bridge/remote/",
        "trainer_bridge/adoption/verl/engine_rollout.py",
        "trainer_bridge/adoption/verl/engine_server.py",
        "trainer_bridge/adoption/verl/replica.py",
    ],
    "transformers": [
        "kvcache/observed_model.py",
        "rollout/model/",
        "rollout/server/",
        "trainer_bridge/",
        "recipes/",
    ],
    "huggingface_hub": ["rollout/model/hub.py"],
    "yaml": ["recipes/"],
    "pydantic": ["rollout/server/", "recipes/"],
    "fastapi": ["rollout/server/"],
    "renderers": ["rollout/server/"],
    "xgrammar": ["rollout/model/guide.py"],
    "torch.distributed.fsdp": ["trainer_bridge/"],
    "unittest": [],  # a mock in the product shows that an interface is missing
}
# The command, and the module that verl imports, stand above all packages.
ABOVE_ALL = {"memsaver/__main__.py", "memsaver/compat/verl_plugin.py"}
FOR_ALL = {("memsaver", "ops"), ("memsaver", "system")}
# The first room imports the second, which stands above it, in functions only.
UPWARD = {("trainer_bridge.models", "trainer_bridge.exact")}
# Names of several files: one role in each of their packages or rooms.
ROLES = {"actor", "base", "config", "errors", "experts", "tag_names", "vllm"}
# Files that read the date; all others measure with clocks that nobody sets.
DATED = (  # files that read dates
    "memsaver/system/clock.py",
    "recipes/logs/environment.py",
    "recipes/logs/run_folder.py",
    "recipes/planner/command.py",
    "recipes/setup/preparation.py",
    "rollout/server/answers.py",
)
FOREIGN_MODULES = {"os", "torch", "aten", "_python_dispatch"}  # their private names may be used
FOREIGN_NAMES = {  # of named tuples, torch, transformers, TRL and verl
    "_asdict", "_replace", "_local_tensor", "_buffers", "_modules", "_parameters",
    "_non_persistent_buffers_set", "_apply_gate", "_llm_weights_sleeping", "_ROLLOUT_REGISTRY",
}  # fmt: skip
# This file alone reads attributes of FSDP2.
FSDP_INTERNALS = "trainer_bridge/fsdp_internals.py"
FSDP_NAMES = {name.rpartition(".")[2] for name in chain(*PRIVATE.values())} | {"_replace"}
PRIVATE_PATH = re.compile(rf"\b({'|'.join(CHAIN)})\.[\w.]*\b_[a-z]\w*", re.IGNORECASE)

Rule = Callable[[str, ast.AST], Iterator[str]]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def nodes_are_released() -> Iterator[None]:
    """Keep the million nodes out of all garbage collections, and release them."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return (
        [node.module]
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
        else []
    )


def starts(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def follows_the_chain(file: str, node: ast.AST) -> Iterator[str]:
    package = CHAIN.index(file.split("/")[0])
    if file in ABOVE_ALL:
        return
    for module in imports(node):
        for later in CHAIN[package + 1 :]:
            if starts(module, later):
                yield f"imports {module}: {later} comes after {CHAIN[package]}"
        for name, places in ALONE.items():
            if starts(module, name) and not file.startswith(tuple(places)):
                yield f"may not import {module}"


def enters_by_a_face(file: str, node: ast.AST) -> Iterator[str]:
    """Report imports of another package that go past its face: its modules and its rooms.

    The modules of memsaver.ops and memsaver.system are open to all, and kernels call kernels.
    """
    if file in ABOVE_ALL:
        return
    for module in imports(node):
        package, *inside = module.split(".")
        if package in CHAIN and package != file.split("/")[0] and len(inside) > 1:
            kernels = inside[0] == "ops" and "/ops/" in file
            if not kernels and (package, inside[0]) not in FOR_ALL:
                yield f"imports {module}: past the face of {package}.{inside[0]}"


def nests_no_comprehension(file: str, node: ast.AST) -> Iterator[str]:
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if isinstance(node, kinds):
        if len(node.generators) > 1:
            yield "has a comprehension with two loops"
        if any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node):
            yield "has a comprehension inside another"


def measures_by_steady_clocks(file: str, node: ast.AST) -> Iterator[str]:
    names = ("time.time", "time.time_ns", "datetime.now")
    last = node.attr if isinstance(node, ast.Attribute) else ""
    if file in DATED or not any(name.endswith(f".{last}") for name in names):
        return  # `unparse` of every node takes a second
    if (name := ast.unparse(node)) in names:
        yield f"reads {name}: measure with time.monotonic or memsaver.system.clock"


def logs_no_exception(file: str, node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("_log."):
        return
    if any(isinstance(part, ast.Name) and part.id == "error" for part in node.args):
        yield "logs an exception, whose frames keep an engine's memory: log its text"


def takes_helpers_from_their_place(file: str, node: ast.AST) -> Iterator[str]:
    for module in imports(node):
        shared = starts(module, "tests.helpers") or module == "tests.planted"
        if starts(module, "tests") and not shared:
            yield f"imports {module}: shared test code belongs in tests/helpers"


def reads_public_state(file: str, node: ast.AST) -> Iterator[str]:
    foreign = FSDP_NAMES if file == FSDP_INTERNALS else FOREIGN_NAMES
    if isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in foreign:
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        own = ast.unparse(node.value) in ("self", "cls", "super()")
        if not own and not (isinstance(root, ast.Name) and root.id in FOREIGN_MODULES):
            yield f"reads {ast.unparse(node)}"
    if isinstance(node, ast.ImportFrom) and any(
        starts(node.module or "", package) for package in CHAIN
    ):
        yield from (
            f"imports {alias.name} of {node.module}" for alias in node.names if _private(alias.name)
        )
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and PRIVATE_PATH.fullmatch(node.value)
    ):
        yield f"names {node.value}"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize(
    ("folders", "rule"),
    [
        (CHAIN, follows_the_chain),
        (CHAIN, enters_by_a_face),
        (CHAIN, nests_no_comprehension),
        (CHAIN, measures_by_steady_clocks),
        (CHAIN, logs_no_exception),
        (["tests", "benchmarks"], takes_helpers_from_their_place),
        (["trainer_bridge", "tests", "benchmarks"], reads_public_state),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_file_keeps_the_rule(folders: list[str], rule: Rule) -> None:
    broken = []
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        file = str(path.relative_to(ROOT))
        for node in nodes(path):
            broken += [
                f"{file}:{getattr(node, 'lineno', 0)} {problem}" for problem in rule(file, node)
            ]
    assert not broken, "\n".join(broken)


def file_imports(package: str) -> dict[str, set[str]]:
    """Map each module of a package to the package's modules that it imports, even lazily."""
    files = {module_of(path): path for path in (ROOT / package).rglob("*.py")}
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        for node in nodes(path):
            graph[module].update(modules_named(node, files))
        graph[module].discard(module)
    return graph


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_named(node: ast.AST, known: Container[str]) -> list[str]:
    """Return the known modules that a statement imports; `from a import b` may import a.b."""
    names = imports(node)
    if isinstance(node, ast.ImportFrom) and names:
        inside = [f"{names[0]}.{alias.name}" for alias in node.names]
        names = [name if name in known else names[0] for name in inside]
    return [name for name in names if name in known]


def room_imports(package: str) -> dict[str, set[str]]:
    """Map each room of a package, a folder or a file beside folders, to the rooms it imports."""
    graph: dict[str, set[str]] = {}
    for module, imported in file_imports(package).items():
        graph.setdefault(room_of(module), set()).update(map(room_of, imported))
    return {room: imported - {room} for room, imported in graph.items()}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes in circles, and those on a path from one circle to another."""
    left = set(graph)
    while True:
        named = set().union(*(graph[node] for node in left))
        stay = {node for node in left & named if graph[node] & left}
        if stay == left:
            return left
        left = stay


def test_in_circles_omits_nodes_that_are_in_no_circle() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "below"}, "above": {"a"}, "below": set()}
    assert in_circles(graph) == {"a", "b", "c"}
    assert in_circles(graph | {"c": {"below"}}) == set()


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    circles = in_circles(graph)
    assert not circles, "\n".join(
        f"{name} imports {sorted(graph[name] & circles)}" for name in sorted(circles)
    )


@pytest.mark.parametrize("package", CHAIN)
def test_modules_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    assert_no_circle(file_imports(package))


@pytest.mark.parametrize("package", CHAIN)
def test_rooms_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    graph = room_imports(package)
    for lower, upper in UPWARD:
        if lower in graph:
            graph[lower].remove(upper)
    assert_no_circle(graph)


def titles(picture: str) -> list[str]:
    """Return the bold words of a picture of docs/architecture.md, in order."""
    text = (ROOT / "docs/images" / picture).read_text()
    return re.findall(r"\w+", " ".join(re.findall(r'"bold"[^>]*>([^<]+)<', text)))


@pytest.mark.parametrize("package", CHAIN)
def test_picture_has_every_room_above_the_rooms_that_it_uses(package: str) -> None:
    words = titles("architecture.svg")
    column = words[words.index(package) + 1 :]
    column = column[: next((at for at, word in enumerate(column) if word in CHAIN), None)]
    rooms, graph = [f"{package}.{word}" for word in column], room_imports(package)
    folders = {room for room in graph if (ROOT / room.replace(".", "/")).is_dir()} - {package}
    assert folders <= {*rooms} <= graph.keys()
    for place, room in enumerate(rooms):
        assert {(room, used) for used in graph[room] & {*rooms[:place]}} <= UPWARD


def test_picture_of_a_step_names_records_of_the_product() -> None:
    named = {word for word in titles("grpo-step.svg") if word[0].isupper()} - {"GRPO"}
    trees = (nodes(file) for package in CHAIN for file in (ROOT / package).rglob("*.py"))
    classes = {node.name for tree in trees for node in tree if isinstance(node, ast.ClassDef)}
    assert len(named) > 10 and named <= classes


def test_files_of_one_name_have_one_role() -> None:
    files = (path for package in CHAIN for path in (ROOT / package).rglob("[!_]*.py"))
    counts = Counter(path.stem for path in files)
    assert {name for name, count in counts.items() if count > 1} == ROLES


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for package in CHAIN:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in nodes(file):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(
                        f"{file.relative_to(ROOT)}:{node.lineno}"
                    )
    assert not {name: files for name, files in places.items() if len(files) > 1}
