"""The doctor's table, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from memsaver.doctor.check import Check

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    description = "Examine this machine; exit status 1 when a check failed."
    parser = argparse.ArgumentParser(prog="python -m memsaver.doctor", description=description)
    parser.add_argument("--device", metavar="DEVICE", help="cuda:N, or cpu for no GPU (default: the current GPU)")
    return report(parser.parse_args(argv).device)


def report(device: str | None) -> int:
    """Examine, print, and return the exit status."""
    from memsaver.doctor import examine

    checks = examine(device)
    show(checks)
    return int(any(check.status == "fail" for check in checks))


def show(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("check", overflow="fold")
    table.add_column("status")
    table.add_column("found, and what to do", overflow="fold")
    for check in checks:
        told = Text(check.found)
        if check.remedy:
            told.append(f"\n-> {check.remedy}", style=COLOURS[check.status])
        table.add_row(Text(check.name), Text(check.status, style=COLOURS[check.status]), told)
    attention = sum(check.status in ("warn", "fail") for check in checks)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(checks)} checks, {attention} need attention")
