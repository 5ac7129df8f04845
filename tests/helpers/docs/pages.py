"""The Markdown pages and their code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# a block that includes a file begins with "``` {.python}", which ruff does not format
FENCE = re.compile(r"^( *)```(?: \{\.)?(\w*)([^}`]*)\}?\s*$")
NOT_RUN = re.compile(r"^\s*<!-- not run: (.+) -->\s*$")
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$')


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # number of the first line of code, from 1
    language: str  # the word after the fence; may be empty
    options: str  # the text after the language
    text: str
    not_run: str | None  # the reason in the comment above the block

    @property
    def snippet(self) -> str | None:
        """Return the path of the file that the block includes."""
        match = SNIPPET.match(self.text.strip())
        return match[1] if match else None

    def compile(self) -> object:
        """Compile the block so that tracebacks name the page and the line."""
        return compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, of one language if it is given."""
    fenced: list[Block] = []
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
        fenced.append(Block(page=page, line=number + 2, text=text, **about))
        number = end + 1
    return [block for block in fenced if language in (None, block.language)]


def _reason(lines: list[str], fence: int) -> str | None:
    above = [line for line in lines[max(0, fence - 2) : fence] if line.strip()]
    match = NOT_RUN.match(above[-1]) if above else None
    return match[1] if match else None
