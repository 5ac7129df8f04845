"""SGLang in its own process, for `bench_vllm --engine sglang`.

It runs on torch_memory_saver with its own update from tensors, or on our tags with our sync.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from benchmarks import vllm_side
from benchmarks.vllm_side import SEQUENCES

OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",  # for both: others need packages that may be missing
    "sampling_backend": "pytorch",
    "disable_radix_cache": True,  # every prompt is computed
}
QUICK = {"cuda_graph_bs_decode": [1, 16, 64, 128, 256]}


class Rival:
    """SGLang without changes."""

    tensors: dict[str, Tensor]
    engine: Any
    keeps = False

    def __init__(self, path: str, size: vllm_side.Size) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.engine = Engine(
            model_path=path,
            load_format="dummy",
            skip_tokenizer_init=True,
            grammar_backend="none",
            dtype="bfloat16",
            enable_memory_saver=True,
            disable_prefill_cuda_graph=True,
            cuda_graph_max_bs_decode=SEQUENCES,
            max_total_tokens=size.kv_tokens,
            mem_fraction_static=0.9,
            max_running_requests=SEQUENCES,
            chunked_prefill_size=8192,
            context_length=size.context,
            **OPTIONS,
            **(QUICK if size.quick else {}),
        )

    def give(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def load(self) -> None:
        """Load the weights by SGLang's own loader, from handles of the tensors."""
        good, why = self.engine.update_weights_from_tensor(list(self.tensors.items()))
        assert good, why

    sync = load

    def sleep(self, level: int) -> None:
        assert level == 2, "SGLang's level is chosen when the engine is made"
        self.engine.release_memory_occupation(["kv_cache", "weights"])

    def wake(self, tag: str) -> None:
        self.engine.resume_memory_occupation([tag])

    def answers(
        self, given: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        same = {"temperature": temperature, "ignore_eos": True}
        params = [{"max_new_tokens": new, **same} for new in lengths]
        outputs = self.engine.generate(input_ids=given, sampling_params=params, return_logprob=True)
        return [list(output["output_ids"]) for output in outputs]

    def forget(self) -> None:
        pass


class Ours(Rival):
    """The same engine on our tags; `sync` writes like a trainer with one rank."""

    keeps = True

    def __init__(self, path: str, size: vllm_side.Size) -> None:
        from rollout.hosted import SglangRollout

        self.rollout = SglangRollout.from_pretrained(
            path,
            load_weights=False,
            kv_tokens=size.kv_tokens,
            max_running=SEQUENCES,
            max_context_len=size.context - 2,
            **OPTIONS,
            **(QUICK if size.quick else {}),
        )
        self.engine = self.rollout.engine.engine
        self.version = 0

    give = vllm_side.Ours.give
    sync = vllm_side.Ours.sync
    prepare = vllm_side.Ours.prepare
    answers = vllm_side.Ours.answers

    def sleep(self, level: int) -> None:
        self.rollout.sleep(level)

    def wake(self, tag: str) -> None:
        self.rollout.wake_up(["weights"] if tag == "weights" else None)


if __name__ == "__main__":
    vllm_side.run({"ours": Ours, "rival": Rival}, sys.argv[1:])
