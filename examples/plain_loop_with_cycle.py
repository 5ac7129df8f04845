"""A plain torch RL loop: sample, score, learn. The model learns to answer with token ids below 48.

    python examples/plain_loop_with_cycle.py MODEL_DIR

`plain_loop.py` with memsaver's cycle: an engine samples; they take turns in the device's memory.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from memsaver import MemorySaver
from rollout import Engine, SamplingParams
from trainer_bridge import Cycle, module_sync

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PROMPTS = [[1, 2, 3], [4, 5, 6]]
SAMPLES, TOKENS = 16, 8


def score(answer: list[int]) -> float:
    """The share of an answer's tokens that are below 48."""
    return sum(token < 48 for token in answer) / len(answer)


def log_probs(model: torch.nn.Module, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """fp32 [answers, tokens], of the answers' tokens."""
    ids = torch.tensor([prompt + answer for answer in answers], device=DEVICE)
    logits = model(ids[:, :-1]).logits[:, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, len(prompt) :, None]).squeeze(2)


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[list[int]]]
) -> float:
    """One update from the answers to each prompt; their mean reward."""
    scores = [[score(answer) for answer in answers] for answers in groups]
    rewards = torch.tensor(scores, device=DEVICE)
    advantages = rewards - rewards.mean(1, keepdim=True)
    for prompt, answers, advantage in zip(PROMPTS, groups, advantages, strict=True):
        loss = -(log_probs(model, prompt, answers).mean(1) * advantage).mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return rewards.mean().item()


class Side:
    """What the cycle asks of a trainer: to offload and reload its tags, to sync the weights."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Adam, engine: Engine) -> None:
        self.optimizer, self.saver = optimizer, MemorySaver(device=DEVICE)
        for weight in model.parameters():
            weight.data = self.on_tag("params", weight.data)
            optimizer.state[weight]["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[weight][name] = self.on_tag("optim", torch.zeros_like(weight))
        self.sync_weights = module_sync(dict(model.named_parameters()), [engine]).sync

    def on_tag(self, tag: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.saver.empty(tensor.shape, tensor.dtype, tag=tag, content="host").copy_(tensor)

    def empty_cache(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def offload(self, *tags: str) -> None:
        self.empty_cache()
        self.saver.pause(*tags)

    def reload(self, *tags: str) -> None:
        self.saver.resume(*tags)


def main(path: str, steps: int = 20) -> list[float]:
    """The mean reward of each step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = Engine.from_pretrained(path, DEVICE, kv_tokens=1024, load_weights=False)
    engine.sleep(level=2)
    cycle = Cycle(Side(model, optimizer, engine), engine)
    rewards = []
    for step in range(1, steps + 1):
        cycle.to_rollout(version=step)
        params = SamplingParams(max_tokens=TOKENS, n=SAMPLES, ignore_eos=True, seed=step)
        groups = [[each.token_ids for each in group] for group in engine.generate(PROMPTS, params)]
        cycle.to_train()
        rewards.append(train_step(model, optimizer, groups))
        print(f"step {step}: reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    main(sys.argv[1])
