"""What is told, when, and how it is sent, without Dagster."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from alert_receiver import PATH, Receiver

from tensorize_assets.automation.audit import INTACT
from tensorize_assets.automation.revisions import POSSIBLE, REACHABLE
from tensorize_assets.core import alerts
from tensorize_assets.core.alerts import Book, Cause, Failure, Message, Outcome
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.secret_settings import ALERT_WEBHOOK

UI = "http://127.0.0.1:3000"
DAY = 24 * 3600.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def step(error: str = "boom", *, subject: str = "org/m v1", run: str = "run1") -> Failure:
    return Failure("step", subject, "tensorized_shards", error, f"/runs/{run}")


def noted(book: Book, now: float, *failures: Failure, passed: frozenset[str] = frozenset()) -> Book:
    """The book after a tick with these failures, and a pass of their step for these subjects."""
    causes = dict(book.causes)
    well = {("step", subject, "tensorized_shards") for subject in passed}
    alerts.forget_old(causes, now)
    missed = alerts.note(causes, Outcome(failures, well), now)
    return Book(causes=causes, missed=book.missed + missed)


def texts(book: Book, now: float = 0) -> list[str]:
    return [message.body["text"] for message in alerts.due(book, UI, now)]


def all_told(book: Book, now: float) -> Book:
    for message in alerts.due(book, UI, now):
        book = alerts.told(book, message, now)
    return book


def test_a_cause_is_told_once_with_a_link_and_what_to_do() -> None:
    """A build that is tried again every ten minutes would fill the channel."""
    book = noted(Book(), 0, step("WorkerError: no space left"))
    (text,) = texts(book)
    assert text.startswith("*Run failed: org/m v1*\n• step tensorized_shards: WorkerError: no sp")
    assert f"<{UI}/runs/run1|run run1>: Nothing was published" in text
    book = all_told(book, 0)
    assert [] == texts(book)
    assert [] == texts(noted(book, 600, step("WorkerError: no space left", run="run2")))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("rank 3 of 8: killed", "rank 5 of 8: killed", True),
        ("build 0a1b2c3d4e5f is gone", "build ffffffffff01 is gone", True),
        ("at 2026-11-30T07:00:00: refused", "at 2026-12-01T09:10:11.5: refused", True),
        ("no space left\nfree: a lot", "no space left\nfree: nothing", True),
        ("no space left", "no token given", False),
    ],
)
def test_ids_numbers_and_times_make_no_other_cause(first: str, second: str, same: bool) -> None:
    """They differ each time; another reason is news."""
    assert same == (alerts.cause_key(step(first)) == alerts.cause_key(step(second)))


def test_an_open_cause_is_told_again_after_a_day_with_a_count() -> None:
    """What nobody saw to must not be forgotten, nor said with each failure."""
    book = all_told(noted(Book(), 0, step()), 0)
    for hour in (1, 2, 22):
        book = noted(book, hour * 3600.0, step(run=f"run{hour}"))
        assert [] == texts(book)
    book = noted(book, DAY, step(run="run24"))
    (text,) = texts(book)
    assert "step tensorized_shards (still so, 4 times since the last message): boom" in text
    assert "/runs/run24" in text
    assert [] == texts(noted(all_told(book, DAY), DAY + 3600, step()))


def test_what_is_over_is_told_once_in_one_line() -> None:
    """Whoever was woken wants to know."""
    book = noted(Book(), 0, step(), step(subject="org/other v1", run="run2"))
    assert 2 == len(texts(book))
    book = noted(all_told(book, 0), 60, passed=frozenset({"org/m v1", "org/other v1"}))
    assert ["*Recovered*: org/m v1 tensorized_shards, org/other v1 tensorized_shards"] == texts(
        book
    )
    assert [] == texts(all_told(book, 60))


@pytest.mark.parametrize("in_one_tick", [True, False])
def test_what_comes_and_goes_is_told_once_a_day(in_one_tick: bool) -> None:
    """A sensor that fails every other time would fill the channel with failures and recoveries."""
    book, said = Book(), list[str]()

    def tell(now: float) -> None:
        nonlocal book
        said.extend(texts(book, now))
        book = all_told(book, now)

    for minute in range(0, 24 * 60, 10):
        book = noted(book, minute * 60.0, step())
        if not in_one_tick:
            tell(minute * 60.0)
        book = noted(book, minute * 60.0, passed=frozenset({"org/m v1"}))
        tell(minute * 60.0)
    expected = ["shards: boom", "*Recovered*", "(again, 138 times since", "*Recovered*"]
    if in_one_tick:
        expected = ["(over by now): boom", "(again, 138 times since the last message; over by now)"]
    assert len(expected) == len(said)
    assert all(words in text for words, text in zip(expected, said, strict=True))


def test_what_was_over_for_an_hour_is_news() -> None:
    """It is another story by then."""
    book = noted(all_told(noted(Book(), 0, step()), 0), 60, passed=frozenset({"org/m v1"}))
    later = 60 + alerts.QUIET_S
    (text,) = texts(noted(all_told(book, 60), later, step()), later)
    assert "• step tensorized_shards: boom" in text
    assert {} == noted(all_told(book, 60), later).causes


def test_what_fails_again_and_goes_on_is_told_an_hour_later() -> None:
    """Or the last that people heard would be that it is over, and it may not fail twice."""
    book = noted(all_told(noted(Book(), 0, step()), 0), 60, passed=frozenset({"org/m v1"}))
    book = noted(all_told(book, 60), 90, step())
    assert [] == texts(book, 90)
    later = 60 + alerts.QUIET_S
    assert [] == texts(book, later - 1)
    book = noted(book, later)
    (text,) = texts(book, later)
    assert "• step tensorized_shards (again, once since the last message): boom" in text
    book = all_told(book, later)
    assert [] == texts(book, later + 60)
    book = noted(book, later + 90, passed=frozenset({"org/m v1"}))
    assert ["*Recovered*: org/m v1 tensorized_shards"] == texts(book, later + 90)


def test_what_fails_before_it_could_be_told_that_it_is_over_is_not_over() -> None:
    """The webhook was down meanwhile: people know that it fails, and so it does."""
    book = noted(all_told(noted(Book(), 0, step()), 0), 60, passed=frozenset({"org/m v1"}))
    assert [] == texts(noted(book, 90, step()), 90)


def test_a_hub_of_which_other_repos_fail_is_the_same_cause() -> None:
    """Its text lists the repos below its first line, and in trouble they are others each time."""

    def check(error: str) -> str:
        return alerts.cause_key(Failure("check", "", "hf_snapshot.hub_reachable", error, "/x"))

    first, second = "1 of 3 cannot be read:\norg/a: 503", "2 of 3 cannot be read:\norg/b: 401"
    assert check(first) == check(second)


@pytest.mark.parametrize("check", [REACHABLE, POSSIBLE, INTACT])
def test_a_check_that_compares_no_build_has_advice_of_its_own(check: str) -> None:
    """That the channel has not moved would be no help where the store rots or the Hub is away."""
    book = noted(Book(), 0, Failure("check", "", f"asset.{check}", "boom", "/x"))
    (text,) = texts(book)
    assert "The channel has not moved" not in text


def test_what_was_over_before_it_could_be_told_is_still_told() -> None:
    """The webhook was down for an hour: what went wrong meanwhile is not lost."""
    book = noted(noted(noted(Book(), 0, step()), 60, step()), 90, passed=frozenset({"org/m v1"}))
    (text,) = texts(book)
    assert "step tensorized_shards (2 times; over by now): boom" in text
    assert [] == texts(all_told(book, 99))


def test_failures_of_one_page_are_one_message_and_alike_checks_one_line() -> None:
    """A worker that dies fails ten checks of one run for one reason."""
    died = [
        Failure("check", "org/m v1", f"reload_check.{name}", "the worker died", "/runs/r")
        for name in ("artifact_loads", "values_finite")
    ]
    other = Failure("check", "org/m v1", "reload_check.logprobs_close", "too far", "/runs/r")
    (text,) = texts(noted(Book(), 0, *died, other))
    assert text.startswith(
        "*Check failed: org/m v1*\n"
        "• check reload_check.artifact_loads, reload_check.values_finite: the worker died\n"
        "• check reload_check.logprobs_close: too far\n"
    )
    assert "The channel has not moved" in text


def test_of_many_failures_twenty_are_told_and_the_rest_is_counted() -> None:
    """A broken vLLM fails the whole fleet: that is one thing to see to."""
    book = noted(Book(), 0, *(step(subject=f"org/m{n} v1", run=f"r{n}") for n in range(57)))
    said = texts(book)
    assert 21 == len(said)
    assert said[20].startswith("*And 37 more failures*: org/m20 v1, org/m21 v1, ")
    assert [] == texts(all_told(book, 0))


def test_the_book_has_an_end_and_counts_what_it_has_no_place_for() -> None:
    """It is stored with every tick. Who was told goes first; who was not is counted."""
    many = [step(subject=f"org/m{n} v1", run=f"r{n}") for n in range(alerts.MOST_CAUSES)]
    book = noted(Book(), 0, *many)
    full = noted(book, 1, step(subject="org/one v1"), step(subject="org/two v1"))
    assert (alerts.MOST_CAUSES, 2) == (len(full.causes), full.missed)
    assert texts(full)[20].startswith("*And 982 more failures*")
    seen = all_told(full, 2)
    assert 0 == seen.missed
    room = noted(seen, 3, step(subject="org/one v1"))
    assert (alerts.MOST_CAUSES, 0) == (len(room.causes), room.missed)
    assert 1 == len(texts(room))


def test_a_cause_that_nothing_can_solve_is_forgotten_after_a_month() -> None:
    """Its model may have left the catalog."""
    causes = dict(all_told(noted(Book(), 0, step()), 0).causes)
    alerts.forget_old(causes, 29 * DAY)
    assert 1 == len(causes)
    alerts.forget_old(causes, 31 * DAY)
    assert {} == causes


def test_text_of_others_is_escaped_and_cut() -> None:
    """An error may quote anybody's file: no mention, no link, no control characters, no novel."""
    hostile = "<!channel> & <http://evil|click> \x1b[2J\u202e" + "<" * 5000
    many = [
        Failure("check", "org/m v1", f"reload_check.c{n}", f"{'x' * n}: {hostile}", "/runs/r")
        for n in range(10)
    ]
    ((body, _, _),) = alerts.due(noted(Book(), 0, *many), UI, 0)
    text = body["blocks"][0]["text"]["text"]
    assert body["text"] == text
    assert "&lt;!channel&gt; &amp; &lt;http://evil|click&gt; \\x1b[2J\\u202e&lt;" in text
    assert 3000 > len(text)
    assert "\n<http://127.0.0.1:3000/runs/r|run r>: " in text
    assert 1 == text.count("<")
    # As a book may be read back from where it was stored.
    assert Cause.model_validate_json(
        next(iter(noted(Book(), 0, *many).causes.values())).model_dump_json()
    )


def test_a_lone_surrogate_does_not_end_the_alerts() -> None:
    """Undecodable bytes of a worker's output come as such, and no JSON can hold them."""
    book = noted(Book(), 0, step("bad \udcff byte"))
    (message,) = alerts.due(book, UI, 0)
    assert json.dumps(message.body).encode()
    assert book == Book.model_validate_json(book.model_dump_json())


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/services/a-secret",
        "ftp://127.0.0.1/a-secret",
        "https://user:a-secret@hooks.example.com/x",
        "https:///a-secret",
        "https://hooks.example.com/a secret",
        "https://hooks.example.com:port/a-secret",
        "https://[::1/a-secret",
        "a-secret",
        "file:///etc/a-secret",
        "http://127.0.0.1.example.com/a-secret",
    ],
)
def test_a_url_that_would_give_the_secret_away_is_refused_unquoted(url: str) -> None:
    """Plain HTTP would send it readable, and the message may end up in a log."""
    with pytest.raises(CatalogError, match="must be an https:// URL") as caught:
        alerts.webhook_url({ALERT_WEBHOOK: url})
    assert "secret" not in str(caught.value).replace("it is a secret", "")


@pytest.mark.parametrize(
    "url", ["https://hooks.example.com/x", "http://127.0.0.1:1/x", "http://[::1]:9/"]
)
def test_the_url_comes_from_the_environment_or_a_file(url: str, tmp_path: Path) -> None:
    """Orchestrators mount secrets as files."""
    assert alerts.webhook_url({}) is None
    file = tmp_path / "url"
    file.write_text(f"{url}\n")
    assert url == alerts.webhook_url({ALERT_WEBHOOK: url})
    assert url == alerts.webhook_url({f"{ALERT_WEBHOOK}_FILE": str(file)})


@pytest.mark.parametrize("content", [b"", b"a-secret\nmore", b"\xff\xfe", b"a" * 5000])
def test_a_file_that_holds_no_secret_is_refused_unquoted(content: bytes, tmp_path: Path) -> None:
    """Half of one would be sent somewhere."""
    file = tmp_path / "a-secret"
    file.write_bytes(content)
    with pytest.raises(CatalogError, match=f"{ALERT_WEBHOOK}_FILE names must hold") as caught:
        alerts.webhook_url({f"{ALERT_WEBHOOK}_FILE": str(file)})
    assert "a-secret" not in str(caught.value)


def test_a_secret_in_the_variable_for_its_file_is_not_quoted() -> None:
    """The likeliest mistake, and the message goes to the UI."""
    url = "https://hooks.example.com/a-secret"
    with pytest.raises(CatalogError, match="cannot be read: No such file") as caught:
        alerts.webhook_url({f"{ALERT_WEBHOOK}_FILE": url})
    assert "a-secret" not in str(caught.value)


def test_a_message_arrives_as_json(receiver: Receiver) -> None:
    """As Slack, Mattermost and others take it."""
    (message,) = alerts.due(noted(Book(), 0, step("größer: 日本")), UI, 0)
    assert alerts.send(receiver.url, message.body).accepted
    (got,) = receiver.messages
    assert got == message.body
    assert got["blocks"][0]["text"]["text"] == got["text"]
    assert "größer: 日本" in got["text"]


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    """Another place would learn what failed here."""
    receiver.answers.append((302, {"Location": "/elsewhere"}))
    receiver.answers.append((307, {"Location": receiver.url}))
    for status in ("302", "307"):
        answer = alerts.send(receiver.url, {"text": "x"})
        assert not answer.accepted
        assert status in answer.said
        assert "not followed" in answer.said
    assert [PATH, PATH] == receiver.paths


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [
        ("30", 30, 30),
        (format_datetime(datetime.now(UTC) + timedelta(hours=20), usegmt=True), 3600, 3600),
        ("-5", 0, 0),
        ("nan", 0, 0),
        ("soon", 0, 0),
    ],
)
def test_retry_after_says_how_long_to_wait(
    receiver: Receiver, retry_after: str, least: float, most: float
) -> None:
    """Seconds or a date, and never so long that alerts are off."""
    receiver.answers.append((429, {"Retry-After": retry_after}))
    answer = alerts.send(receiver.url, {"text": "x"})
    assert not answer.accepted
    assert least <= answer.wait_s <= most


@pytest.mark.fault("Secrets", "an alert that cannot be sent", "its URL is in no error and no log")
def test_neither_an_error_nor_a_log_holds_the_url(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients log URLs at debug level, and some of their errors quote them."""
    caplog.set_level(logging.DEBUG)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    receiver.answers.extend([(404, {}), (500, {}), (410, {})])
    said = [alerts.send(receiver.url, {"text": "x"}).said for _ in range(4)]
    said.append(alerts.send(f"http://127.0.0.1:{port}{PATH}", {"text": "x"}).said)
    said.append(alerts.send("http://127.0.0.1:1/a-secret-path\n", {"text": "x"}).said)
    assert "accepted" == said[3]
    assert "Connection refused" in said[4]
    assert [] == [text for text in [*said, caplog.text] if "secret" in text]


def test_a_server_that_hangs_up_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does, the tick goes on and the message waits."""
    monkeypatch.setattr(alerts, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        answer = alerts.send(url, {"text": "x"})
    assert not answer.accepted
    assert "no answer within" in answer.said


def test_a_message_that_was_not_accepted_stays_due() -> None:
    """Nothing is ticked off before the webhook has it."""
    book = noted(Book(), 0, step(), step(subject="org/other v1", run="run2"))
    first, second = alerts.due(book, UI, 0)
    book = alerts.told(book, first, 0)
    assert [second] == alerts.due(book, UI, 0)
    assert isinstance(second, Message)
