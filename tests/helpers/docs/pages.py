"""The Markdown pages and their code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# a file shown is "``` {.python}", which ruff leaves alone
FENCE = re.compile(r"^( *)```(?: \{\.)?(\w*)([^}`]*)\}?\s*$")
NOT_RUN = re.compile(r"^\s*<!-- not run: (.+) -->\s*$")
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$')


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block.

    line: of its first line of code, from 1. options: behind its language. not_run: the reason in
    the comment above it.
    """

    page: Path
    line: int
    language: str
    options: str
    text: str
    not_run: str | None

    @property
    def snippet(self) -> str | None:
        """The path of the file that the block shows."""
        found = SNIPPET.match(self.text.strip())
        return found[1] if found else None

    def compile(self) -> object:
        """Tracebacks name the page and its line. A SyntaxError is the block's."""
        return compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str | None = None) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
        text = "\n".join(line.removeprefix(opened[1]) for line in lines[number + 1 : end])
        reason = _reason(lines, number)
        about = {"language": opened[2], "options": opened[3].strip(), "not_run": reason}
        found.append(Block(page=page, line=number + 2, text=text, **about))
        number = end + 1
    return [block for block in found if language in (None, block.language)]


def _reason(lines: list[str], fence: int) -> str | None:
    above = [line for line in lines[max(0, fence - 2) : fence] if line.strip()]
    found = NOT_RUN.match(above[-1]) if above else None
    return found[1] if found else None
