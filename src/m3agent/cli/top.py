"""`m3agent top`: a live table of the runtimes that this user's programs opened with `Runtime.open(monitor=True)`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m3agent.runtime.monitor import reports

NOBODY = "No runtime is open with a monitor: open one with m3agent.Runtime.open(monitor=True)."
_UNITS = ("", "k", "M", "G", "T", "P")


def show(console: Console, *, once: bool, as_json: bool, seconds: float) -> None:
    """Until it is interrupted, or once."""
    if as_json:
        print(json.dumps(list(reports())))
    elif once:
        console.print(picture(list(reports())))
    else:
        with Live(picture(list(reports())), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                live.update(picture(list(reports())), refresh=True)


def picture(found: list[dict[str, Any]]) -> Group | Text:
    return Group(*(part for report in found for part in _runtime(report))) if found else Text(NOBODY)


def _runtime(report: Mapping[str, Any]) -> tuple[Text, Table]:
    stats, rates = report["stats"], report["rates"]
    reused = stats["reused_tokens"] / stats["prompt_tokens"] if stats["prompt_tokens"] else 0.0
    lines = [
        f"{report['model']}, process {report['pid']}, on {report['device']}",
        f"  requests  {stats['active_requests']} running, {stats['waiting_requests']} waiting",
        f"  speed     {rates['output_tokens_per_second']:.0f} tokens/s out, "
        f"{rates['prompt_tokens_per_second']:.0f} in, step {1000 * rates['step_seconds']:.1f} ms, "
        f"{_short(rates['flops_per_second'])}FLOP/s, busy {rates['busy']:.0%}",
        f"  pages     {stats['used_pages']} used, {stats['cached_pages']} cached, of {stats['total_pages']} "
        f"with {stats['page_tokens']} tokens; {stats['host_pages']} in the host",
        f"  tokens    {_short(stats['prompt_tokens'])} of prompts, {reused:.1%} reused; "
        f"{_short(stats['output_tokens'])} said; {stats['accepted_tokens']} of {stats['drafted_tokens']} drafts right",
    ]
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("sequence", "state", "tokens", "cached", "pages", "shared"):
        table.add_column(column, justify="left" if column in ("sequence", "state") else "right")
    for each in report["sequences"]:
        numbers = (str(each[name]) for name in ("tokens", "cached", "pages", "shared"))
        table.add_row(Text(each["name"] or "–"), each["state"], *numbers)
    return Text("\n".join(lines)), table


def _short(number: float) -> str:
    for unit in _UNITS:
        if number < 1000:
            return f"{number:.3g} {unit}" if unit else f"{number:.0f} "
        number /= 1000
    return f"{number:.3g} E"
