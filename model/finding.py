"""What an examination of a machine found: a line for each part of it, and what follows for running a model here."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One part of the machine.

    Attributes:
        name: What was looked at.
        status: "ok"; "warn": monograph runs, and something is slower or missing; "fail": it does not run.
        text: What was found.
        remedy: The way out; empty where none is needed.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order to show.

    Attributes:
        findings: A line each.
        on_gpu: Whether a model would run on a GPU.
    """

    findings: tuple[Finding, ...]
    on_gpu: bool

    @property
    def can_run(self) -> bool:
        """Whether monograph runs here, if only on the CPU."""
        return not self.named("fail")

    def named(self, status: Status) -> list[str]:
        """Names of the findings of a status."""
        return list(dict.fromkeys(finding.name for finding in self.findings if finding.status == status))

    @property
    def verdict(self) -> str:
        """What it comes to, in a sentence."""
        failed, warned = self.named("fail"), self.named("warn")
        if failed:
            return f"monograph cannot run here: {', '.join(failed)}"
        text = f"monograph can run here, on {'the GPU' if self.on_gpu else 'the CPU'}"
        return f"{text}; see {', '.join(warned)}" if warned else text

    def to_json(self) -> str:
        """The findings as JSON, under "findings", with "can_run", "on_gpu" and "verdict"."""
        fields = {"can_run": self.can_run, "on_gpu": self.on_gpu, "verdict": self.verdict}
        return json.dumps({**fields, "findings": [asdict(finding) for finding in self.findings]}, indent=2)

    def __str__(self) -> str:
        width = max((len(finding.name) for finding in self.findings), default=0)
        return "\n".join([*_lines(self.findings, width), "", self.verdict])


def worst(*statuses: Status) -> Status:
    """The gravest of some statuses."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max(statuses, key=order.index)


def _lines(findings: Iterable[Finding], width: int) -> Iterable[str]:
    for finding in findings:
        yield f"{finding.status:<4}  {finding.name:<{width}}  {finding.text}"
        margin = " " * (width + 8)
        yield from textwrap.wrap(
            finding.remedy,
            max(40, _WIDTH),
            initial_indent=f"{margin}-> ",
            subsequent_indent=f"{margin}   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
