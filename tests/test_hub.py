"""Models of the Hugging Face Hub by their names: recipe, engine and trainer bring them alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.model import resolve_model
from tests.helpers.hub import GATED, Hub
from tests.helpers.trainer_bridge.models import write_model

BOTH_SIDES = """
from rollout import Engine, SamplingParams
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig

engine = Engine.from_pretrained("org/tiny", kv_tokens=64)
(answer,), = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
batch = SequenceBatch(prompt_ids=[[1, 2, 3]], response_ids=[list(answer.token_ids)])
(scores,) = Trainer(TrainerConfig(model_path="org/tiny")).compute_log_prob(batch)
assert all(abs(one - other) < 1e-4 for one, other in zip(scores, answer.logprobs, strict=True))
"""
RECIPE = """
from recipes.setup.models import find_model

folder = find_model("org/tiny", weights=WEIGHTS)
assert (folder / "config.json").is_file()
assert bool(list(folder.glob("*.safetensors"))) == WEIGHTS
assert list(find_model("org/tiny").glob("*.safetensors"))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    model = Path(write_model(folder / "model"))
    (model / "consolidated.safetensors").write_bytes(b"the weights again")
    (model / "training.log").write_text("no part of a model")
    (folder / "cache").mkdir()
    made = Hub("org/tiny", model, folder / "cache")
    with made.served():
        yield made


def test_engine_and_trainer_take_the_name_of_a_model_of_the_hub(hub: Hub) -> None:
    done = hub.run("-c", BOTH_SIDES)
    assert done.returncode == 0, done.stderr
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors"} <= fetched
    assert not {"consolidated.safetensors", "training.log"} & fetched


def test_a_recipe_brings_weights_only_where_they_are_read(hub: Hub, tmp_path: Path) -> None:
    other = Hub(hub.model, hub.folder, tmp_path)
    with other.served():
        done = other.run("-c", f"WEIGHTS = False\n{RECIPE}")
    assert done.returncode == 0, done.stderr


def test_a_model_that_the_hub_does_not_give_is_one_line(hub: Hub) -> None:
    lines = refusals(hub, "org/absent", GATED)
    assert "no public model of the Hub; correct it, or set HF_TOKEN" in lines[0]
    assert f"accept its terms at https://huggingface.co/{GATED}, and set HF_TOKEN" in lines[1]


def test_without_the_hub_its_cache_is_asked(hub: Hub) -> None:
    first = f"WEIGHTS = True\n{RECIPE}"
    assert hub.run("-c", first).returncode == 0
    before = len(hub.asked)
    (line,) = refusals(hub, "org/absent", offline=True, first=first)
    assert "the Hub cannot be reached (HF_HUB_OFFLINE" in line and len(hub.asked) == before


def refusals(hub: Hub, *names: str, offline: bool = False, first: str = "") -> list[str]:
    """What `memsaver run` says of each model, on one line, after the code `first`."""
    code = "from recipes.cli import main\n"
    code += "".join(f"assert main(['run', 'tiny', 'model.path={name}']) == 2\n" for name in names)
    done = hub.run("-c", first + code, offline=offline)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    pairs = zip(names, lines, strict=True)
    assert all(f"model.path={name}: " in line for name, line in pairs), lines
    return lines


def test_a_folder_wins_over_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    assert resolve_model("org/tiny") == Path("org/tiny")
    assert resolve_model("no/such/folder") == Path("no/such/folder")
