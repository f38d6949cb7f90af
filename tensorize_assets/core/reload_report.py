"""A reload as a person reads it: Markdown with one picture, for Dagster's UI.

Prompts, answers and messages are anybody's text. Each stands in a code span, whose content is no
Markdown, no HTML and no link for any reader of it, and is cut where it is long.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from tensorize_assets.core.evidence import CheckOutcome, Evidence
from tensorize_assets.core.printable import printable
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.tasks import Answers

# Rows of one table of answers, and characters of a cell.
_MOST_ANSWERS = 20
_MOST_CHARACTERS = 400
_OURS, _DEFAULT = "#2a6f97", "#a9c4d4"
_LABEL, _BAR, _ROW = 250, 300, 26


class Compared(NamedTuple):
    """What the source and the artifact said to the same prompts; None where it did not load."""

    source: Answers
    artifact: Answers | None


class _Said(NamedTuple):
    prompt: str
    source: str
    artifact: str | None
    same: bool


def markdown(
    evidence: Evidence,
    *,
    source: str,
    artifact: str,
    compared: Mapping[str, Compared] | None,
) -> str:
    """Return the report of one reload.

    `source` is the URL of the repo at its commit, `artifact` the URI of the directory. `compared`
    are the answers, those with an adapter by its name and those without under ``""``; None for
    evidence that stands from an earlier run, which holds the artifact's answers where they were
    the source's.
    """
    parts = [
        f"## {_code(evidence.model)} {_code(evidence.suffix)}: "
        + ("the artifact is its source" if evidence.passed else "the artifact was refused"),
        _table(("", "source", "artifact"), _subjects(evidence, source, artifact)),
        "### Checks",
        _table(("", "check", "what was found"), map(_check, evidence.checks)),
    ]
    if (picture := plot(evidence)) is not None:
        parts += ["### Load", picture]
    answers = _from_evidence(evidence) if compared is None else _from_run(compared)
    for adapter, said in answers.items():
        parts += [
            f"### Answers with adapter {_code(adapter)}" if adapter else "### Answers",
            _answers(said),
        ]
    return "\n\n".join(parts) + "\n"


def plot(evidence: Evidence) -> str | None:
    """Seconds of the load, beside those of vLLM's default load of the source, as an image.

    None where nothing was loaded. A data: URL is what Dagster's UI lets through (its Markdown has
    no HTML), and it needs no server.
    """
    load = evidence.load
    if load is None:
        return None
    bars = [("this artifact, every hash verified", load.seconds, _OURS)]
    if evidence.default_load_seconds:
        bars.append(("vLLM's default loader, no hash", evidence.default_load_seconds, _DEFAULT))
    longest = max(seconds for _, seconds, _ in bars) or 1.0
    shapes: list[str] = []
    for number, (name, seconds, color) in enumerate(bars):
        y = 8 + number * _ROW
        width = seconds / longest * _BAR
        rate = format_bytes(round(load.bytes / seconds)) + "/s" if seconds else ""
        shapes += [
            _text(8, y + 14, name),
            f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
            _text(_LABEL + width + 6, y + 14, f"{seconds:.2f} s  {rate}"),
        ]
    width, height = _LABEL + _BAR + 160, 16 + len(bars) * _ROW
    image = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">'
        # The UI has a dark theme too.
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(shapes)}</svg>'
    )
    encoded = base64.b64encode(image.encode()).decode()
    said = "; ".join(f"{name}: {seconds:.2f} s" for name, seconds, _ in bars)
    return f"![{said}](data:image/svg+xml;base64,{encoded})"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _subjects(evidence: Evidence, source: str, artifact: str) -> Iterator[tuple[str, ...]]:
    """What was held against what, a line a property."""
    load = evidence.load
    ours = theirs = "did not load"
    if load is not None:
        ours = (
            f"{load.seconds:.2f} s, {format_bytes(load.bytes)}, "
            f"{format_bytes(round(load.bytes_per_second))}/s from {load.source}, "
            f"{load.path} path"
        )
    if evidence.default_load_seconds is not None:
        theirs = f"{evidence.default_load_seconds:.2f} s"
    where = f"{evidence.device_name}, TP={evidence.tensor_parallel_size}, {evidence.dtype}"
    yield "what", _code(source), _code(artifact)
    yield "build", "", f"{_code(evidence.build_id)}, manifest {_code(evidence.manifest_sha256)}"
    vllm = _code(f"vLLM {evidence.vllm_version}")
    yield "loaded by", f"{vllm}, default loader", f"{vllm}, load_format=tensorizer, verify_hash"
    yield "on", "the same", _code(where)
    yield "load", theirs, ours
    yield "perplexity", _bound(evidence), _number(evidence.perplexity)
    yield "when", "", f"{evidence.when:%Y-%m-%d %H:%M} UTC"


def _bound(evidence: Evidence) -> str:
    for check in evidence.checks:
        bound = check.metadata.get("bound")
        if check.name == "perplexity_sane" and isinstance(bound, int | float):
            return f"at most {_number(bound)}"
    return ""


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _check(check: CheckOutcome) -> tuple[str, ...]:
    return "passed" if check.passed else "FAILED", _code(check.name), _code(check.description)


def _from_run(compared: Mapping[str, Compared]) -> dict[str, list[_Said]]:
    return {adapter: list(_pairs(*both)) for adapter, both in compared.items()}


def _pairs(source: Answers, artifact: Answers | None) -> Iterator[_Said]:
    """Prompt by prompt; equal is what has the same tokens, whatever it looks like."""
    for number, want in enumerate(source.outputs):
        have = artifact.outputs[number] if artifact and number < len(artifact.outputs) else None
        same = have is not None and [p.token for p in want.positions] == [
            p.token for p in have.positions
        ]
        yield _Said(want.prompt, want.text, None if have is None else have.text, same)


def _from_evidence(evidence: Evidence) -> dict[str, list[_Said]]:
    """The answers in the evidence: there where they were equal."""
    found: dict[str, list[_Said]] = {}
    for check in evidence.checks:
        for field in ("answers", "adapter_answers"):
            listed = check.metadata.get(field)
            if not isinstance(listed, list):
                continue
            for one in listed:
                if isinstance(one, dict):
                    prompt, answer = str(one.get("prompt", "")), str(one.get("answer", ""))
                    said = _Said(prompt, answer, answer, True)
                    found.setdefault(str(one.get("adapter", "")), []).append(said)
    return found


def _answers(said: Sequence[_Said]) -> str:
    shown = sorted(said, key=lambda one: one.same)[:_MOST_ANSWERS]
    table = _table(
        ("", "prompt", "source", "artifact"),
        (
            (
                "same" if one.same else "differs",
                _code(one.prompt),
                _code(one.source),
                "did not load" if one.artifact is None else _code(one.artifact),
            )
            for one in shown
        ),
    )
    left_out = len(said) - len(shown)
    return f"{table}\n\n{left_out} more are the same or not shown." if left_out else table


def _table(columns: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    """Foreign text as a code span in a cell of a table."""
    shown = printable(text)
    if len(shown) > _MOST_CHARACTERS:
        shown = f"{shown[:_MOST_CHARACTERS]}…"
    if not shown.strip():
        return "(blank)"
    # A pipe ends a cell also in a code span, unless after a backslash that is not itself the second
    # of two: that is how the UI's parser pairs them. An odd one gets another one beside it.
    shown = re.sub(r"(\\*)\|", lambda found: found[1] + "\\" * (len(found[1]) % 2) + r"\|", shown)
    # Longer than any run of backticks in it; the blanks are stripped again.
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}"
