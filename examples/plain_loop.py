"""A plain torch RL loop: sample, score, learn. The model learns to answer with token ids below 48.

    python examples/plain_loop.py [MODEL_DIR]

`plain_loop_with_cycle.py` is the same loop with memsaver's cycle.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


def sample(model: torch.nn.Module, prompt: list[int]) -> list[list[int]]:
    ids = torch.tensor([prompt] * SAMPLES, device=DEVICE)
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    settings |= {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[:, len(prompt) :].tolist()


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
    rewards = []
    for step in range(1, steps + 1):
        groups = [sample(model, prompt) for prompt in PROMPTS]
        rewards.append(train_step(model, optimizer, groups))
        print(f"step {step}: reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model to answer with token ids below 48.")
    parser.add_argument("model", nargs="?", help="model directory; default: a small random model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(arguments.model or write_random_model(folder))
