"""Train Qwen2.5-0.5B-Instruct on GSM8K with TRL: accelerate launch train.py."""

from datasets import Dataset, load_dataset
from gsm8k_rewards import brief, right
from trl import GRPOConfig, GRPOTrainer


def chats(split: str) -> Dataset:
    """Return GSM8K with each question as a chat."""
    rows = load_dataset("openai/gsm8k", "main", split=split)
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})


args = GRPOConfig(
    output_dir="runs/trl",
    max_steps=200,
    num_generations=8,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=16,
    max_completion_length=512,
    temperature=1.0,
    reward_weights=[1.0, 0.1],
    beta=0.0,
    learning_rate=1e-6,
    warmup_steps=10,
    gradient_checkpointing=True,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_enable_sleep_mode=True,
    vllm_gpu_memory_utilization=0.4,
    eval_strategy="steps",
    eval_steps=20,
    save_steps=20,
    save_total_limit=1,
    logging_steps=1,
    log_completions=True,
    report_to="tensorboard",
    seed=0,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[right, brief],
    args=args,
    train_dataset=chats("train"),
    eval_dataset=chats("test").select(range(200)),
)
trainer.train()
trainer.save_model("my-model")
