"""Adapters beside the base: PEFT's answers, alone and in a batch, over sleeps and new versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from memsaver import StateError
from rollout import AdapterSlots, Engine, KVTiers, Output, SamplingParams
from rollout.engine.stepping import joined
from rollout.tag_names import ADAPTER_SLOTS
from tests.helpers.case_selection import rounds, some
from tests.helpers.models import MLA, greedy
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.adapters import SHAPES, save_adapter
from tests.helpers.rollout.answers import GAP, assert_same, check, firsts, random_prompts
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.updates import TINY, checkpoint, tiny

SLOTS = AdapterSlots(slots=3, rank=4)
CONFIG: dict[str, Any] = {"kv_tokens": 512, "max_running": 8, "adapters": SLOTS}
PROMPTS = random_prompts((60, 1, 17))
NAMES = (None, "0", "1", "2")
KINDS: list[tuple[str, dict[str, Any]]] = some(
    ("qwen3", TINY),
    ("llama", {"attention_bias": True}),
    whole=[("qwen2", {}), ("mistral", {"sliding_window": 24})],
)


def greedily(name: str | None, tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, adapter=name)


def write_adapters(
    folder: Path, base: PreTrainedModel
) -> tuple[dict[str, Path], dict[str | None, PreTrainedModel]]:
    """Write an adapter of each shape; return folders and models by name."""
    folders, models = {}, dict[str | None, PreTrainedModel]({None: base})
    for seed, shape in enumerate(SHAPES):
        name = str(seed)
        folders[name] = folder / name
        models[name] = save_adapter(folders[name], base, seed, **shape)
    return folders, models


@pytest.mark.parametrize(("kind", "changes"), KINDS, ids=[kind for kind, _ in KINDS])
def test_answers_equal_peft_in_a_batch_of_several_adapters_and_none(
    kind: str, changes: dict[str, Any], saved: Saved, tmp_path: Path, device: str
) -> None:
    path, base = saved(kind, **changes)
    folders, models = write_adapters(tmp_path, base)
    engine = Engine.from_pretrained(path, device, **CONFIG)
    for name, folder in folders.items():
        engine.load_adapter(folder, name)
    pairs = [(prompt, name) for name in NAMES for prompt in PROMPTS]
    params = [greedily(name) for _, name in pairs]
    together = engine.generate([prompt for prompt, _ in pairs], params)
    for (prompt, name), answer in zip(pairs, together, strict=True):
        check(models[name].to(device), [prompt], [answer])
        alone = engine.generate([prompt], greedily(name))
        # On a GPU, fp32 products have other bits in another batch, see `row_wise`.
        assert_same(firsts([answer]), firsts(alone), atol=0.0 if device == "cpu" else GAP)


def test_requests_keep_their_version_and_new_ones_take_the_next(path: Path, tmp_path: Path) -> None:
    folders, models = write_adapters(tmp_path, tiny(0))
    engine = Engine.from_pretrained(path, **CONFIG | {"adapters": AdapterSlots(slots=2, rank=4)})
    outputs = list[Output]()
    for shape in "01":
        engine.load_adapter(folders[shape], "a")
        engine.submit(PROMPTS[0], greedily("a", 8))
        outputs += [*engine.step(), *engine.step()]
    with pytest.raises(StateError, match="no slot is free for adapter 'b'"):
        engine.load_adapter(folders["2"], "b")
    with pytest.raises(StateError, match="unfinished requests use it"):
        engine.unload_adapter("a")
    engine.sleep(unfinished="recompute", level=2)
    engine.wake_up()
    engine.load(path)
    while engine.unfinished:
        outputs += engine.step()
    for version, (answer,) in enumerate(joined(outputs)):
        assert answer.token_ids == greedy(models[str(version)], PROMPTS[0], 8)
        assert answer.weight_versions == [version] * 8
    assert engine.adapters is not None and engine.adapters.versions == {"a": 1}
    check(tiny(0), PROMPTS[:1], engine.generate(PROMPTS[:1], greedily(None)))  # uncached until now
    engine.unload_adapter("a")
    engine.load_adapter(folders["2"], "b")
    with pytest.raises(ValueError, match="no adapter is named 'a'; loaded: b"):
        engine.generate(PROMPTS, greedily("a"))


def answers(rank: int, path: str, folders: dict[str, Path]) -> list[Any]:
    group = dist.group.WORLD
    engine = Engine.from_pretrained(path, group=group, tensor_parallel_size=2, **CONFIG)
    for name, folder in folders.items():
        engine.load_adapter(folder, name)
    params = [greedily(name) for name in NAMES]
    return engine.generate(PROMPTS[:1] * len(NAMES), params)


def test_two_ranks_answer_like_one(path: Path, tmp_path: Path) -> None:
    folders, models = write_adapters(tmp_path, tiny(0))
    both = results(start_ranks(answers, 2, tmp_path / "store", str(path), folders))
    assert both[0] == both[1]
    for name, answer in zip(NAMES, both[0], strict=True):
        check(models[name], PROMPTS[:1], [answer])


def edited(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: part[:, :-1].clone() for name, part in load_file(file).items()}, file)


BAD: list[tuple[Callable[[Path], None], dict[str, Any], str]] = [
    (lambda _: None, {"rank": 3}, "has rank 4, and the engine's slots rank 3; raise"),
    (lambda _: None, {"target_modules": ["q_proj"]}, "factors without a place .*down_proj"),
    (lambda folder: edited(folder, use_dora=True), {}, "use_dora=True is not supported"),
    (lambda folder: edited(folder, peft_type="IA3"), {}, "peft_type='IA3' is not supported"),
    (lambda folder: edited(folder, rank_pattern={"q": 1}), {}, "rank_pattern=.* not supported"),
    (lambda folder: edited(folder, r="4"), {}, "r and lora_alpha must be numbers"),
    (cut, {}, "has shape .* it is an adapter of another base"),
    (lambda f: (f / "adapter_config.json").unlink(), {}, "adapter_config.json"),
    (lambda f: (f / "adapter_model.safetensors").unlink(), {}, "adapter_model.safetensors"),
]


@pytest.mark.parametrize(("spoil", "slots", "text"), BAD)
def test_bad_adapter_is_refused_and_the_last_version_stays(
    spoil: Callable[[Path], None], slots: dict[str, Any], text: str, path: Path, tmp_path: Path
) -> None:
    folders, models = write_adapters(tmp_path, tiny(0))
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    room: dict[str, Any] = {"slots": 1, "rank": 4, "target_modules": sorted(layers), **slots}
    engine = Engine.from_pretrained(path, **CONFIG | {"adapters": AdapterSlots(**room)})
    if not slots:
        engine.load_adapter(folders["1"], "a")
    spoil(folders["0"])
    with pytest.raises(ValueError, match=text):
        engine.load_adapter(folders["0"], "a")
    if not slots:
        check(models["1"], PROMPTS, engine.generate(PROMPTS, greedily("a")))


def test_adapters_that_an_engine_cannot_have_are_refused(path: Path, saved: Saved) -> None:
    plain = Engine.from_pretrained(path, kv_tokens=64)
    with pytest.raises(ValueError, match="the engine has no adapters; build it with adapters="):
        plain.generate(PROMPTS, greedily("a", 1))
    with pytest.raises(StateError, match="no slots for them; build it with adapters="):
        plain.load_adapter(path, "a")
    for kind, changes in (("deepseek_v2", MLA), ("qwen3_next", {})):
        with pytest.raises(ValueError, match="adapters=.* is for models with plain attention"):
            Engine.from_pretrained(saved(kind, **changes)[0], adapters=SLOTS)
    with pytest.raises(ValueError, match="target_modules=.*lm_head.* cannot have; it can:"):
        Engine.from_pretrained(path, adapters=AdapterSlots(target_modules=("lm_head",)))
    for wrong in ({"slots": 0}, {"rank": 0}):
        with pytest.raises(ValueError):
            AdapterSlots(**wrong)
    with pytest.raises(ValueError, match="adapter=3 must be the name"):
        SamplingParams(adapter=3)  # type: ignore[arg-type]


def test_discard_by_others_is_noticed(path: Path, tmp_path: Path) -> None:
    folders, _ = write_adapters(tmp_path, tiny(0))
    engine = Engine.from_pretrained(path, **CONFIG)
    engine.load_adapter(folders["0"], "a")
    engine.saver.pause(ADAPTER_SLOTS, content="discard")
    assert "paused: adapter_slots" in str(engine.unavailable_reason())
    engine.wake_up()
    with pytest.raises(StateError, match="adapters were discarded: a .load or unload them"):
        engine.generate(PROMPTS, greedily(None))
    engine.load_adapter(folders["0"], "a")
    engine.generate(PROMPTS, greedily("a"))


BEGINNING = tuple(random_prompts((17,))[0])
ASKED = [(5, 3), BEGINNING, (*BEGINNING, 7, 7, 9), (*BEGINNING, *BEGINNING, 1), (8,) * 33]
LENGTH = 5


class AdapterMachine(RuleBasedStateMachine):
    """Loads, requests by name, sleeps and updates: no keys of another adapter are ever used."""

    folders: dict[str, Path]
    models: dict[str | None, PreTrainedModel]

    @initialize(tiers=st.booleans(), chunk=st.sampled_from([8, 64]))
    def build(self, tiers: bool, chunk: int) -> None:
        sizes: dict[str, Any] = {"kv_tokens": 128, "max_running": 4, "max_prefill_tokens": chunk}
        below = KVTiers(host_ratio=2.0) if tiers else None
        self.engine = Engine.from_pretrained(checkpoint(), adapters=SLOTS, tiers=below, **sizes)
        self.loaded: dict[str, str] = {}  # the shape of each adapter
        self.asked: dict[int, tuple[tuple[int, ...], str | None, list[int]]] = {}

    @rule(name=st.sampled_from("ab"), shape=st.sampled_from("012"))
    def load(self, name: str, shape: str) -> None:
        try:
            self.engine.load_adapter(self.folders[shape], name)
            self.loaded[name] = shape
        except StateError as error:
            assert "no slot is free" in str(error) and self.engine.unfinished

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        try:
            self.engine.unload_adapter(name)
            del self.loaded[name]
        except StateError as error:
            assert "unfinished requests use it" in str(error) and self.engine.unfinished

    @rule(which=st.sampled_from(ASKED), data=st.data())
    def submit(self, which: tuple[int, ...], data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([None, *sorted(self.loaded)]))
        id = self.engine.submit(which, greedily(name, LENGTH))
        self.asked[id] = which, None if name is None else self.loaded[name], []

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.asked[output.id][2].extend(output.token_ids)

    @rule(level=st.integers(1, 2))
    def nap(self, level: int) -> None:
        self.engine.sleep(level, unfinished="recompute")
        self.engine.wake_up()
        if level == 2:
            self.engine.load(checkpoint(), in_flight="recompute")

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        while self.engine.unfinished:
            self.step(1)
        for prompt, shape, tokens in self.asked.values():
            assert tokens == greedy(self.models[shape], list(prompt), LENGTH)
        self.engine.saver.close()


@pytest.fixture(scope="module", autouse=True)
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    found = write_adapters(tmp_path_factory.mktemp("adapters"), tiny(0))
    AdapterMachine.folders, AdapterMachine.models = found
    yield


AdapterMachine.TestCase.settings = settings(max_examples=rounds(12, 300), stateful_step_count=30)
TestAdapterSteps = AdapterMachine.TestCase
