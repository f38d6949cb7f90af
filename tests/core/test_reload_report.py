"""The report of a reload: what it says, and that foreign text in it stays text."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from tensorize_assets.core.evidence import Evidence
from tensorize_assets.core.reload_report import Compared, markdown, plot
from tensorize_assets.core.tasks import Answers, Output, TokenScore

SOURCE = "https://huggingface.co/org/model/tree/" + "a" * 40
ARTIFACT = "s3://models/vllm/org/model/v1-0123456789ab"


def evidence(*checks: dict[str, Any], **fields: Any) -> Evidence:
    listed = checks or ({"name": "artifact_loads", "passed": True, "description": "it does"},)
    content = {
        "model": "org/model",
        "suffix": "v1",
        "build_id": "0" * 12,
        "manifest_sha256": "0" * 64,
        "device": "cpu",
        "device_name": "a CPU",
        "vllm_version": "0.31.0",
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
        "passed": all(check["passed"] for check in listed),
        "checks": listed,
        "perplexity": 12.5,
        "load": {
            "bytes": 2 * 10**9,
            "seconds": 0.5,
            "bytes_per_second": 4e9,
            "host_memory_before": 1,
            "host_memory_after": 2,
        },
        "default_load_seconds": 2.0,
        "prompts_digest": "ff00",
        "when": datetime(2026, 6, 1, 12, 0, tzinfo=UTC),
    }
    return Evidence.model_validate({**content, **fields})


def answers(*said: tuple[str, str, int]) -> Answers:
    """Answers of one token each: prompt, text, token."""
    outputs = tuple(
        Output(prompt=prompt, text=text, positions=(TokenScore(token=token, top={token: -0.5}),))
        for prompt, text, token in said
    )
    return Answers(outputs=outputs, perplexity=12.5, logprobs_finite=True)


def report(found: Evidence, compared: dict[str, Compared] | None) -> str:
    return markdown(found, source=SOURCE, artifact=ARTIFACT, compared=compared)


def tokens(text: str) -> list[Any]:
    """What a reader of Markdown with tables makes of a text, inner tokens too."""
    reader = MarkdownIt("commonmark").enable("table")
    # As lenient as Dagster's UI, and more.
    reader.validateLink = lambda url: True  # type: ignore[method-assign]
    found: list[Any] = []
    for token in reader.parse(text):
        found += [token, *(token.children or ())]
    return found


def codes(text: str) -> list[str]:
    return [token.content for token in tokens(text) if token.type == "code_inline"]


def cells(text: str) -> list[list[str]]:
    """The rows of all tables, each cell as its source."""
    rows: list[list[str]] = []
    inside = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("td_open", "td_close"):
            inside = token.type == "td_open"
        if token.type == "inline" and inside:
            rows[-1].append(token.content)
    return [row for row in rows if row]


def test_a_passing_reload_says_what_was_compared_with_what():
    """Who reads it later has only this to judge by."""
    equal = Compared(answers(("Hello", " world", 1)), answers(("Hello", " world", 1)))
    text = report(evidence(), {"": equal})
    assert {SOURCE, ARTIFACT, "a CPU, TP=1, bfloat16", "vLLM 0.31.0"} <= set(codes(text))
    assert "the artifact is its source" in text
    assert "0.50 s, 2.0 GB, 4.0 GB/s from disk, direct path" in text
    assert ["passed", "`` artifact_loads ``".replace("``", "`"), "` it does `"] in cells(text)
    assert ["same", "` Hello `", "`  world `", "`  world `"] in cells(text)


def test_what_differs_comes_first_and_is_marked():
    """A person looks for the one wrong answer among many."""
    source = answers(("one", "same", 1), ("two", "this", 2))
    artifact = answers(("one", "same", 1), ("two", "that", 3))
    wrong = {"name": "token_ids_equal", "passed": False, "description": "1 of 2 answers differ"}
    text = report(evidence(wrong), {"": Compared(source, artifact)})
    assert "the artifact was refused" in text
    marks = [row for row in cells(text) if row[1] in ("` one `", "` two `")]
    assert [
        ["differs", "` two `", "` this `", "` that `"],
        ["same", "` one `", "` same `", "` same `"],
    ] == marks
    assert ["FAILED", "` token_ids_equal `", "` 1 of 2 answers differ `"] in cells(text)


def test_an_artifact_that_did_not_load_has_no_answers():
    """The source's are shown beside it: they are what was expected."""
    wrong = {"name": "artifact_loads", "passed": False, "description": "CUDA out of memory"}
    found = evidence(wrong, load=None, perplexity=None)
    text = report(found, {"": Compared(answers(("Hello", " world", 1)), None)})
    assert ["differs", "` Hello `", "`  world `", "did not load"] in cells(text)
    assert plot(found) is None
    assert "data:" not in text
    assert "not finite" in text


def test_evidence_that_stands_shows_the_answers_it_holds():
    """Of an earlier run's reload there is only the evidence; its answers were the source's."""
    tokens_equal = {
        "name": "token_ids_equal",
        "passed": True,
        "description": "1 answers equal",
        "metadata": {"answers": [{"prompt": "Hello", "answer": " world"}]},
    }
    adapters_equal = {
        "name": "adapters_equal",
        "passed": True,
        "description": "as its source",
        "metadata": {"adapter_answers": [{"adapter": "loud", "prompt": "Hello", "answer": "!"}]},
    }
    text = report(evidence(tokens_equal, adapters_equal), None)
    assert ["same", "` Hello `", "`  world `", "`  world `"] in cells(text)
    assert "### Answers with adapter ` loud `" in text
    assert ["same", "` Hello `", "` ! `", "` ! `"] in cells(text)


@pytest.mark.parametrize(
    "foreign",
    [
        "a | b",
        "a \\| b",
        "a \\\\| b",
        "| --- | --- |",
        "`code` and ``more``",
        "```\nfence\n```",
        "ends in a backslash \\",
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "![x](http://evil.example/pixel.png)",
        "[click](javascript:alert(1))",
        "http://evil.example www.evil.example who@evil.example",
        "[ref]: http://evil.example\n\n[ref]",
        "# heading\n\n- list\n\n---\n",
        "&lt;b&gt; &#124; *bold* _it_ ~~no~~",
        "line\r\nline\u2028line\u0085line\x00\x1b[2J\u202e",
        " ",
        "",
        "\n",
    ],
)
def test_foreign_text_stays_text(foreign: str):
    """A model may answer anything: no Markdown, no HTML, no link, no image, no other column."""
    plain = report(
        evidence({"name": "artifact_loads", "passed": True, "description": "said"}),
        {"": Compared(answers(("said", "said", 1)), answers(("said", "said", 1)))},
    )
    text = report(
        evidence(
            {"name": "artifact_loads", "passed": True, "description": foreign}, device_name=foreign
        ),
        {"": Compared(answers((foreign, foreign, 1)), answers((foreign, foreign, 1)))},
    )
    kinds = [token.type for token in tokens(text)]
    ours = [token.type for token in tokens(plain)]
    # A blank one is said in our own words.
    assert [kind for kind in ours if kind not in ("code_inline", "text")] == [
        kind for kind in kinds if kind not in ("code_inline", "text")
    ]
    assert not any(kind in ("html_inline", "html_block", "link_open") for kind in kinds)
    assert 1 == kinds.count("image")
    assert len(plain.splitlines()) == len(text.splitlines())
    assert text.isprintable() or set(text) - set(filter(str.isprintable, text)) == {"\n"}


def test_foreign_text_is_shown_as_it_is():
    """But for what would move a cursor: an answer is judged by its characters."""
    said = 'He said: "a `tick`, <b> & 50% of \\x"'
    text = report(evidence(), {"": Compared(answers((said, said, 1)), answers((said, said, 1)))})
    assert 3 == codes(text).count(said)


def test_long_answers_and_many_prompts_are_cut():
    """It is kept in Dagster's event log: a catalog with a book of prompts must not fill it."""
    long = answers(*((f"{n} " + "x" * 10_000, "y" * 10_000, 1) for n in range(200)))
    text = report(evidence(), {"": Compared(long, long)})
    assert len(text) < 40_000
    assert "180 more are the same or not shown." in text


def test_the_plot_is_an_image_without_a_server():
    """Dagster's UI lets data: URLs of images through; what it draws is the two loads."""
    picture = plot(evidence())
    assert picture is not None
    found = re.fullmatch(r"!\[[^\]]*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", picture)
    assert found is not None
    root = ElementTree.fromstring(base64.b64decode(found[1]))
    widths = [float(bar.attrib["width"]) for bar in root.findall(".//{*}rect")][1:]
    ours, default = widths
    assert 4 * ours == pytest.approx(default, rel=0.01)
    assert ["0.50 s  4.0 GB/s", "2.00 s  1.0 GB/s"] == [
        str(text.text) for text in root.findall(".//{*}text") if str(text.text)[0].isdigit()
    ]
