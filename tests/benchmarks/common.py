"""What every benchmark shares: conditions, medians, Markdown tables, model directories of real shapes."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

QWEN25: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}


def conditions() -> str:
    """Date, hardware and versions, in one line."""
    packages = ("triton", "transformers", "ray")
    versions = [f"{name} {_version(name)}" for name in packages]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{time.strftime('%Y-%m-%d')}; {name}, torch {torch.__version__}, {', '.join(versions)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def write_config(directory: Path, size: str, **changes: Any) -> Path:
    """A model directory of a Qwen2.5 shape without weights."""
    from transformers import GenerationConfig, Qwen2Config

    shape = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "architectures": ["Qwen2ForCausalLM"]}
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    Qwen2Config(**{**shape, **ids, **rope, **QWEN25[size], **changes}).save_pretrained(directory)
    GenerationConfig(eos_token_id=None).save_pretrained(directory)
    return directory


def random_model(directory: Path, size: str, dtype: torch.dtype) -> Any:
    """A model of that shape with random weights on the GPU, saved to `directory`, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(write_config(directory, size))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    return model.eval()


def median_ms(run: Callable[[], object], repeats: int = 10, warmup: int = 3) -> float:
    """Median wall time of `run` in milliseconds, the device being idle before and after."""
    times = []
    for i in range(warmup + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i >= warmup:
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def timed(run: Callable[[], object]) -> float:
    """Milliseconds, the device's work included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def free_bytes() -> int:
    """Bytes of the device that another can take, less some for itself."""
    return torch.cuda.mem_get_info()[0] - (2 << 30)


def others_write(nbytes: int) -> None:
    """What another engine would do with the memory meanwhile; 0: nothing, and the driver clears it."""
    if not nbytes:
        time.sleep(1.0)
        return
    torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


class Sampler:
    """Used bytes of the device, the current one unless named, every half millisecond, from a thread."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.used: list[int] = []
        self._device = device or torch.cuda.current_device()  # of this thread: a new one begins with the first device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            free, total = torch.cuda.mem_get_info(self._device)
            self.used.append(total - free)
            time.sleep(5e-4)

    def __enter__(self) -> Sampler:
        self._thread.start()
        while not self.used:
            time.sleep(1e-3)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def rise(self) -> int:
        return max(self.used) - self.used[0]


def copy_bandwidth(nbytes: int = 4 << 30) -> float:
    """Bytes a second, read and write counted, of one large device-to-device copy: the floor of every other copy."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * nbytes / (median_ms(lambda: target.copy_(source)) / 1e3)


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, printed and returned."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    text = "\n".join(lines)
    print(text, flush=True)
    return text


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1
        else f"{value:,.1f}"
        if isinstance(value, float)
        else str(value)
    )


def save(out: Path | None, name: str, result: dict[str, Any]) -> None:
    """Full results as JSON under the folder that the caller named."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps({"conditions": conditions(), **result}, indent=1))
