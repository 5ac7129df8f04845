"""Trainer and engine of one process, by handle; fallbacks are printed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest

import memsaver
from rollout import Engine, SamplingParams
from trainer_bridge import Trainer

PROMPTS, GREEDY = [[5, 6, 7], [8]], SamplingParams(max_tokens=6, temperature=0)


@pytest.mark.parametrize("shadow", [False, True])
def test_by_handle_and_by_pages_is_the_same(
    shadow: bool,
    model_path: str,
    make_trainer: Callable[..., Trainer],
    device: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer(model_path, device=device)
    assert trainer.transports == ()
    with contextlib.closing(memsaver.MemorySaver(device=device)) as saver:
        engine = Engine.from_pretrained(model_path, device=device, kv_tokens=64, saver=saver)
        with caplog.at_level(logging.WARNING, "memsaver"):
            trainer.connect([engine])
            assert [each.kind for each in trainer.transports] == ["pages"] and not caplog.messages
            mapped = trainer.sync_weights(1, shadow=shadow)
            before = engine.generate(PROMPTS, GREEDY)
            trainer.connect([engine], transport="handle")
        (handle,) = trainer.transports
        assert (handle.kind, handle.nbytes, handle.reason) == ("handle", mapped.nbytes, "asked for")
        assert caplog.messages == [str(handle)] and "by handle over the handle instead of mapped pages" in str(handle)
        if not shadow:
            engine.sleep(2)
            engine.wake_up()
        receipt = trainer.sync_weights(2, shadow=shadow)
        assert (receipt.digests, receipt.nbytes) == (mapped.digests, mapped.nbytes)
        after = engine.generate(PROMPTS, GREEDY)
        assert [s[0].token_ids for s in after] == [s[0].token_ids for s in before]
        with pytest.raises(ValueError, match="each rank speaks for all targets that it writes"):
            trainer.connect([engine], transport="relay")
        del engine
