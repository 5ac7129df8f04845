"""Weight syncs in verl's own GRPO on GPUs: verl's sync and memsaver's, into vLLM and our engine.

Each side runs `verl.trainer.main_ppo` in a process of its own, with FSDP2, a model with random
weights and made-up problems, without network. vLLM is on memsaver's tags; "memsaver-engine" is the
native engine instead. Printed are the seconds of each sync, the rise of the GPU's used bytes during
the first syncs, and the milliseconds of each stage of a later sync. The first sync connects both
sides. Needs verl 0.9.1 with TransferQueue, and, except for
the native engine, vllm 0.24 with what its server imports; no TRL after 0.27 may be installed,
because verl's engine would fail to patch it.

    python -m benchmarks.bench_verl --steps 6 --out runs/verl
    python -m benchmarks.bench_verl --gpus 2 --tensor-parallel 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks import verl_side
from benchmarks.common import GIB, fields_of, make_scale, parser, write_config

ROOT = Path(__file__).parents[1]
SIDES = {"verl": "vllm", "memsaver": "memsaver_vllm", "memsaver-engine": "memsaver"}
PROMPTS, SAMPLES, TOKENS = 32, 4, 128
END, CHAT = (
    "<|endoftext|>",
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
)
VARIABLES = {
    "VLLM_PLUGINS": "memsaver",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "VERL_USE_EXTERNAL_MODULES": "benchmarks.verl_side",
    "VERL_LOGGING_LEVEL": "INFO",
}


def main() -> None:
    args = arguments()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args)
    write_problems(args.out / "problems.parquet")
    failed = [side for side in args.cases if not run(side, args)]
    print("| side | seconds of each sync | GiB more in use during each |\n| --- | --- | --- |")
    for side in args.cases:
        rows = syncs(args.out / f"{side}.jsonl")
        seconds = " ".join(f"{row['seconds']:.3f}" for row in rows)
        rises = " ".join(f"{row['rise'] / GIB:.2f}" for row in rows if "rise" in row)
        print(f"| {side} | {seconds} | {rises} |")
    for side in args.cases:
        print_stages(side, syncs(args.out / f"{side}.jsonl")[verl_side.WATCHED :])
    if failed:
        raise SystemExit(f"failed, see {args.out}/SIDE.log: {', '.join(failed)}")


def arguments() -> argparse.Namespace:
    options = parser(__doc__, SIDES)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--shape", default="qwen2.5-0.5b")
    options.add_argument("--gpus", type=int, default=1, help="ranks of the trainer")
    options.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one engine")
    options.set_defaults(out=Path("runs/verl"))
    return options.parse_args()


def write_model(args: argparse.Namespace) -> None:
    """Write a model with random weights, and a tokenizer of bytes."""
    folder = args.out / "model"
    config = write_config(folder, fields_of(make_scale(args), args.shape))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(config), dtype=torch.bfloat16
    )
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {letter: number for number, letter in enumerate(letters, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": END, "pad_token": END, "chat_template": CHAT}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_problems(path: Path) -> None:
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"problem {number}: write the letter a"}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(PROMPTS * 64)
    ]
    import pandas  # takes 2 s, which no other command needs

    pandas.DataFrame(rows).to_parquet(path)


def keys(side: str, args: argparse.Namespace) -> list[str]:
    """Return verl's settings, in the order of its configuration."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    data = args.out / "problems.parquet"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=128",
        f"data.max_response_length={TOKENS}",
        "data.dataloader_num_workers=0",
        "data.truncation=right",
        f"actor_rollout_ref.model.path={args.out / 'model'}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr=1e-4",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu=16",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{rollout}.name={SIDES[side]}",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.tensor_model_parallel_size={args.tensor_parallel}",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.max_model_len=512",
        f"{rollout}.max_num_seqs=256",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        f"{rollout}.agent.num_workers=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        f"reward.custom_reward_function.path={Path(verl_side.__file__)}",
        "reward.num_workers=1",
        "trainer.logger=[console]",
        f"trainer.n_gpus_per_node={args.gpus}",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={args.out / 'checkpoints'}",
        "trainer.resume_mode=disable",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


def run(side: str, args: argparse.Namespace) -> bool:
    """Run one side, and return whether it ended well; its output goes to a file."""
    rows = args.out / f"{side}.jsonl"
    rows.unlink(missing_ok=True)
    places = [plugins(args.out / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {verl_side.FILE: str(rows), "PYTHONPATH": os.pathsep.join(places), **VARIABLES}
    if side != "verl":
        variables["VERL_ENGINE_VENDOR"] = "memsaver"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys(side, args)]
    command += [f"hydra.run.dir={args.out / 'hydra'}"]
    with (args.out / f"{side}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **variables})
    return done.returncode == 0 and len(syncs(rows)) > args.steps


def print_stages(side: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the median milliseconds of each stage of the syncs that have stages."""
    if staged := [row["stages"] for row in rows if "stages" in row]:
        medians = (
            f"{stage} {statistics.median(row[stage] for row in staged):.2f}" for stage in staged[0]
        )
        print(f"{side}, ms: {', '.join(medians)}")


def plugins(folder: Path) -> str:
    """Return a folder by which vLLM finds our plugin, as after `pip install`."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "memsaver-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memsaver\nVersion: 1\n")
    group = "vllm.general_plugins"
    lines = [f"{name} = {where}" for name, where in declared[group].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    return str(folder)


def syncs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
