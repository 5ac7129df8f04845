"""A plain torch RL loop: sample, score, learn. The model learns to answer with token ids below 48.

    python examples/plain_loop_with_cycle.py [MODEL_DIR]

`plain_loop.py` with memsaver's cycle: engine and trainer take turns in the device's memory.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from memsaver import MemorySaver
from rollout import Engine, SamplingParams
from trainer_bridge import Cycle, module_sync

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PROMPTS = [[1, 2, 3], [4, 5, 6]]
SAMPLES, TOKENS = 16, 8


def score(answer: list[int]) -> float:
    """Return the fraction of an answer's tokens that are below 48."""
    return sum(token < 48 for token in answer) / len(answer)


def log_probs(model: torch.nn.Module, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Compute the log-probabilities of the answers' tokens, fp32 [answers, tokens]."""
    ids = torch.tensor([prompt + answer for answer in answers], device=DEVICE)
    logits = model(ids[:, :-1]).logits[:, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, len(prompt) :, None]).squeeze(2)


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[list[int]]]
) -> float:
    """Update the model with the answers to each prompt, and return their mean reward."""
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
    """The cycle's view of the trainer: offloads and reloads its tags, and syncs the weights."""

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


def write_random_model(folder: str) -> str:
    """Save a small random Llama with a vocabulary of 96 tokens, and return its folder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=64, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main(path: str, steps: int = 20) -> list[float]:
    """Train for some steps, and return the mean reward of each step."""
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
        answers = engine.generate(PROMPTS, params)
        groups = [[answer.token_ids for answer in group] for group in answers]
        cycle.to_train()
        rewards.append(train_step(model, optimizer, groups))
        print(f"step {step}: reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model to answer with token ids below 48.")
    parser.add_argument("model", nargs="?", help="model directory; default: a small random model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(arguments.model or write_random_model(folder))
