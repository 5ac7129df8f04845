"""Thirty deliberate bugs in all five packages, each of which `make test` has to catch.

`python -m tests.planted` plants one after the other in a copy of the working tree and runs there
the tests of the package (`--tests` names others) until the first that fails; `--tree DIR` takes
another checkout, `1 5 7` some of the bugs. The results are in docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Bug(NamedTuple):
    """What is wrong, and where: in `file`, `right` stands once and becomes `wrong`."""

    what: str
    file: str
    right: str
    wrong: str
    tests: str = ""


BUGS = [
    # ------------------------------------------------------------------ memsaver
    Bug(
        "a refused pause leaves the tag frozen (missing undo)",
        "memsaver/tag/transaction.py",
        "                undo.callback(arena.thaw)\n            self._drain(streams)",
        "            self._drain(streams)",
    ),
    Bug(
        "two processes resume at once (lock left out)",
        "memsaver/tag/transaction.py",
        "            with self._device_lock:\n                refills",
        "            if True:\n                refills",
    ),
    Bug(
        "a discarded tag keeps its version (stale version)",
        "memsaver/tag/arena.py",
        "        self.backup, self.version = backup, None\n",
        "        self.backup = backup\n",
    ),
    Bug(
        "a kept copy that ends past the tag's memory counts as its content (off by one extent)",
        "memsaver/content/on_host.py",
        "offset + nbytes > committed for",
        "offset > committed for",
    ),
    Bug(
        "extents that a peer hands over in vain stay charged (missing undo)",
        "memsaver/memory/page_pool.py",
        "            undo.callback(shim.discharge, backend.phys, nbytes)\n",
        "",
    ),
    Bug(
        "a piece of exactly the right size is left out (off by one)",
        "memsaver/memory/page_pool.py",
        "if rest >= size:",
        "if rest > size:",
    ),
    Bug(
        "a forked child believes that it holds its parent's lock",
        "memsaver/system/device_lock.py",
        "        self._depth = 0\n        self._close()\n",
        "        self._close()\n",
    ),
    # ------------------------------------------------------------------ kvcache
    Bug(
        "an extend that fails on the device leaves pages in the table that are free (missing undo)",
        "kvcache/blocks.py",
        "            self._pages[at] = before\n",
        "",
    ),
    Bug(
        "a forked sequence writes into a page that its fork shares (copy on write left out)",
        "kvcache/blocks.py",
        "self._forked[[parent, child.row]] = True",
        "self._forked[child.row] = True",
    ),
    Bug(
        "the upper half of a split node loses its locks",
        "kvcache/radix/tree.py",
        "upper.lock_ref = node.hits, node.priority, node.lock_ref",
        "upper.lock_ref = node.hits, node.priority, 0",
    ),
    Bug(
        "pages computed under older weights are found (stale version)",
        "kvcache/radix/cache.py",
        "if version < self.version:\n            return len(run)",
        "if version < 0:\n            return len(run)",
    ),
    Bug(
        "fp8 rows are scaled in the wanted dtype instead of fp32 (wrong cast)",
        "kvcache/ops/quant.py",
        "(buffer[loc].view(stored).float() * scale).clamp",
        "(buffer[loc].view(stored).to(dtype) * scale.to(dtype)).clamp",
    ),
    Bug(
        "a writer fills a staging range one round too early (off by one)",
        "kvcache/staging.py",
        "or before < watermark.round",
        "or before <= watermark.round",
    ),
    Bug(
        "readers and writers of replicated heads are paired wrongly (swapped ranks)",
        "kvcache/staging.py",
        "HeadSlice(src_rank, first - src_first, first - dst_first, count)",
        "HeadSlice(src_rank, first - dst_first, first - src_first, count)",
    ),
    # ------------------------------------------------------------------ rollout
    Bug(
        "a committed double buffer leaves the old weights' prefixes in the cache (stale version)",
        "rollout/weights/update.py",
        "            self._shadow.exchange()\n            self._on_new_weights()\n",
        "            self._shadow.exchange()\n",
    ),
    Bug(
        "top-k lets one token more in (off by one)",
        "rollout/ops/sampling.py",
        "ordered.masked_fill(rank >= limit, 0.0)",
        "ordered.masked_fill(rank > limit, 0.0)",
    ),
    Bug(
        "the position is left out of the random numbers",
        "rollout/ops/sampling.py",
        "for column in range(1, counters.shape[1]):",
        "for column in range(1, counters.shape[1] - 1):",
    ),
    Bug(
        "an aborted sample keeps its swapped pages on the host (missing undo)",
        "rollout/serving/scheduler.py",
        "            self.blocks.forget(sample.swapped)\n",
        "",
    ),
    Bug(
        "a tensor-parallel rank looks tokens up in the other ranks' rows (swapped ranks)",
        "rollout/parallel.py",
        "at = token_ids - self.rank * len(rows)",
        "at = token_ids - (self.size - 1 - self.rank) * len(rows)",
    ),
    Bug(
        "a fork shares cached pages without a lock of its own (lock left out)",
        "rollout/serving/prefix.py",
        "            self.cache.inc_lock_ref(self._held[child].node)\n",
        "",
    ),
    # ------------------------------------------------------------------ trainer_bridge
    Bug(
        "the lower bound clips above as well (swapped bounds)",
        "trainer_bridge/training/losses.py",
        "ratio.clamp(1 - eps_low, 1 + eps_high)",
        "ratio.clamp(1 - eps_high, 1 + eps_low)",
    ),
    Bug(
        "a sync that fails does not poison the rollout",
        "trainer_bridge/cycle.py",
        'POISONING = ("sync_weights",)',
        "POISONING = ()",
    ),
    Bug(
        "one rank's failure alone lets the others go on (off by one)",
        "trainer_bridge/sync/agree.py",
        "        if failed:\n            raise SyncError(stage",
        "        if len(failed) > 1:\n            raise SyncError(stage",
    ),
    Bug(
        "a reload that fails counts as done (missing undo)",
        "trainer_bridge/offload.py",
        "                saver.resume(*memory)\n            elif wait:",
        "                self._offloaded -= set(chosen)\n"
        "                saver.resume(*memory)\n            elif wait:",
    ),
    Bug(
        "the learning rate is that of the update before (off by one)",
        "trainer_bridge/training/optimizer.py",
        "1 - (updates - self.start) /",
        "1 - (max(self.start, updates - 1) - self.start) /",
    ),
    Bug(
        "two ranks learn from the same sequences (swapped ranks)",
        "trainer_bridge/training/batch.py",
        "    mine = order[rank::world]\n",
        "    mine = order[rank // 2 :: world]\n",
    ),
    # ------------------------------------------------------------------ recipes
    Bug(
        "advantages divide by the sample's deviation, not the group's (off by one)",
        "recipes/loop.py",
        "float(np.std(numbers))",
        "float(np.std(numbers, ddof=1))",
    ),
    Bug(
        "an evaluation comes a step late (off by one)",
        "recipes/loop.py",
        "(step - 1) % self.setup.recipe.eval.every == 0",
        "step % self.setup.recipe.eval.every == 0",
    ),
    Bug(
        "`latest` names a checkpoint that is still being written (swapped order)",
        "recipes/logs/run_folder.py",
        '            write(folder / f"step_{step}")\n'
        '            replace_text(folder / "latest", f"step_{step}\\n")\n',
        '            replace_text(folder / "latest", f"step_{step}\\n")\n'
        '            write(folder / f"step_{step}")\n',
    ),
    Bug(
        "a step that is computed again shuffles otherwise (seed left out)",
        "recipes/ppo.py",
        "/mini_batches/{step}/{epoch}",
        "/mini_batches/{epoch}",
    ),
]


def plant(bug: Bug, tree: Path) -> None:
    path = tree / bug.file
    text = path.read_text()
    assert text.count(bug.right) == 1, (
        f"{bug.file}: {bug.right!r} stands there {text.count(bug.right)} times"
    )
    path.write_text(text.replace(bug.right, bug.wrong))


def copy_of(tree: Path, folder: Path) -> Path:
    """The files that git knows, and the built shim."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.split()
    shims = [str(path.relative_to(tree)) for path in tree.glob("memsaver/native/_shim*.so")]
    for name in [name for name in [*listed, *shims] if (tree / name).is_file()]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, folder / name)
    return folder


def caught_by(tree: Path, tests: list[str], workers: int) -> str:
    """The first test that fails, "" where none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", *tests]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadgroup", "--no-loadscope-reorder"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        last = (done.stdout + done.stderr).strip().splitlines()[-1]
        return f"pytest ended with {done.returncode}: {last}"
    return failed[0].split(" - ")[0].partition("@")[0] if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="bugs to plant, from 1; none: all")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--tests", nargs="*", help="instead of the package's own")
    parser.add_argument("-n", dest="workers", type=int, default=2)
    chosen = parser.parse_args()
    escaped = 0
    for number, bug in enumerate(BUGS, 1):
        if chosen.numbers and number not in chosen.numbers:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_of(chosen.tree, Path(folder))
            plant(bug, tree)
            found = caught_by(
                tree, chosen.tests or [f"tests/{bug.file.split('/')[0]}"], chosen.workers
            )
        escaped += not found
        print(
            f"{number:2} {time.monotonic() - started:5.0f} s  {bug.what}: {found or 'ESCAPED'}",
            flush=True,
        )
    sys.exit(1 if escaped else 0)


if __name__ == "__main__":
    main()
