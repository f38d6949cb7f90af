from __future__ import annotations

import pytest

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.printable import printable, quoted


class Counted(str):
    """A key that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_key_given_twice_is_found_in_one_pass() -> None:
    """It is looked for before any signature is: comparing each with each takes minutes."""
    pairs: list[tuple[str, None]] = [(Counted(number), None) for number in (*range(2000), 1999)]
    with pytest.raises(ValueError, match="key '1999' is given twice"):
        jsonio._unique_keys(pairs)  # pyright: ignore[reportPrivateUsage]
    assert Counted.compared < 20_000


def test_a_key_nobody_knows_is_named_printably() -> None:
    """Fields of a document that is not believed yet are anybody's."""
    with pytest.raises(jsonio.StoreError) as caught:
        jsonio.load_record(jsonio.Record, b'{"a\\u001b[2J\\nb": 1}', "it")
    assert r"a\x1b[2J\nb: " in str(caught.value)
    with pytest.raises(jsonio.StoreError) as caught:
        jsonio.parse(b'{"%b": 1, "%b": 2}' % (b"k" * 10_000, b"k" * 10_000), "it")
    assert len(str(caught.value)) < 300


def test_what_is_not_printable_is_escaped() -> None:
    assert r"\x1b\x07\n\ud800\u202e é" == printable("\x1b\x07\n\ud800\u202e é")
    assert "a\n\\t" == printable("a\n\t", keep="\n")
    assert "'" + "k" * 80 + "'…" == quoted("k" * 100)


def test_what_a_document_holds_is_counted_in_one_pass() -> None:
    """Strings that look like the beginning of names do not have it looked at again and again."""
    strings = rb"\"" * 3_000_000
    document = b'{"a":"' + b":" * 70_000 + b'","b":"' + strings
    with pytest.raises(StoreError, match=r"the document"):
        jsonio.parse(document, "the document")
    assert set(jsonio.parse(document + b'"}', "the document")) == {"a", "b"}
