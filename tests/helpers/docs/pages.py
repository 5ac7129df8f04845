"""The Markdown pages and their code blocks.

`python -m tests.helpers.docs.pages` writes the example files into the pages that show them.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)([^`]*)$")
NOT_RUN = re.compile(r"^\s*<!-- not run: (.+) -->\s*$")
# A paragraph that ends in a block links the file that the block shows. Such links are HTML because
# MkDocs refuses Markdown links to files outside of docs/.
SNIPPET = re.compile(r'<a href="(?:\.\./)+(examples/[\w./]+)">')
BEFORE = {"plain_loop_with_cycle.py": "plain_loop.py"}  # of a block that shows a diff


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # number of the first line of code, from 1
    language: str  # the word after the fence; may be empty
    options: str  # the text after the language
    text: str
    not_run: str | None  # the reason in the comment above the block
    snippet: str | None  # path of the file that the block shows

    @property
    def expected(self) -> str:
        """Return the text of the file, or its difference from the file before, marked by line."""
        assert self.snippet is not None
        path = ROOT / self.snippet
        after = path.read_text().splitlines()
        if self.language == "diff":
            before = path.with_name(BEFORE[path.name]).read_text().splitlines()
            after = list(difflib.unified_diff(before, after, lineterm=""))[2:]
        return "\n".join(line.rstrip() for line in after)

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
        about["snippet"] = _snippet(lines, number)
        fenced.append(Block(page=page, line=number + 2, text=text, **about))
        number = end + 1
    return [block for block in fenced if language in (None, block.language)]


def typed(page: Path) -> list[str]:
    """Return the lines that a reader types: those of the page's blocks in bash."""
    lines = [line for block in blocks(page, "bash") for line in block.text.splitlines()]
    return [line.strip() for line in lines if line.strip()]


def _reason(lines: list[str], fence: int) -> str | None:
    above = [line for line in lines[max(0, fence - 2) : fence] if line.strip()]
    match = NOT_RUN.match(above[-1]) if above else None
    return match[1] if match else None


def _snippet(lines: list[str], fence: int) -> str | None:
    if fence < 2 or lines[fence - 1]:
        return None
    paragraph = "\n".join(lines[:fence]).rstrip().rpartition("\n\n")[2]
    files = SNIPPET.findall(paragraph)
    return files[-1] if files else None


def write_snippets() -> None:
    for page in PAGES:
        text = page.read_text()
        for block in blocks(page):
            if block.snippet is not None:
                text = text.replace(f"\n{block.text}\n```", f"\n{block.expected}\n```", 1)
        page.write_text(text)


if __name__ == "__main__":
    write_snippets()
