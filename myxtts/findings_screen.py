"""Findings on the terminal: a table of what was asked and found, and one line that says whether all is well."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from myxtts.observe.findings import Finding

_STYLES = {"pass": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_UNLIMITED = 100_000
"""Columns of a file or a pipe: whoever searches the output must find sentences in one piece."""


def show_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print findings with their reasons and fixes; the last line says whether nothing fails."""
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        level = Text(finding.level.upper(), style=_STYLES[finding.level])
        table.add_row(level, Text(finding.code, no_wrap=True), _told(finding))
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    warnings = "1 warning" if counts["warn"] == 1 else f"{counts['warn']} warnings"
    if counts["fail"]:
        failed = ", ".join(finding.code for finding in findings if finding.level == "fail")
        console.print(Text(f"{counts['fail']} failed, {warnings}, {counts['pass']} passed"))
        console.print(Text(f"CHECKS FAILED: {failed}", style=_STYLES["fail"]))
    else:
        console.print(Text(f"All validation checks passed: {counts['pass']} passed, {warnings}"))
        console.print(Text("ALL CHECKS PASSED", style="bold green"))


def _told(finding: Finding) -> Text:
    """What was found, why that is so, and what to do, in lines below each other."""
    told = Text(finding.what)
    if finding.why:
        told.append(f"\n{finding.why}", style="dim")
    if finding.fix:
        gain = f" (about {finding.gain:.2g} times as fast)" if finding.gain else ""
        told.append(f"\n→ {finding.fix}{gain}")
    return told
