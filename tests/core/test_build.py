from __future__ import annotations

import pytest
from pydantic import ValidationError

from tensorize_assets.core import jsonio
from tensorize_assets.core.build import BuildInputs, build_id, differences
from tensorize_assets.core.errors import StoreError

ADAPTERS = (("poet", "d" * 40), ("coder", "c" * 40))
INPUTS = BuildInputs(
    model="facebook/opt-125m",
    commit="27dcfa74d334bc871f3234de431e71c6eeba5dd6",
    adapters=ADAPTERS,
    profile={"tensor_parallel_size": 1, "dtype": "auto", "serialization_kwargs": {}},
    vllm="0.31.0",
    torch="2.13.0+cpu",
    tensorizer="2.10.1",
)


def changed(**fields: object) -> BuildInputs:
    return BuildInputs.model_validate({**INPUTS.model_dump(), **fields})


def test_the_build_id_of_known_inputs_never_changes() -> None:
    """Every published path holds one: an id that changes builds every model again."""
    assert "6a589f56c48c" == build_id(INPUTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "facebook/opt-350m"},
        {"commit": "0" * 40},
        {"adapters": ADAPTERS[:1]},
        {"adapters": (ADAPTERS[0], ("coder", "0" * 40))},
        {"profile": {**INPUTS.profile, "dtype": "float16"}},
        {"vllm": "0.32.0"},
        {"torch": "2.14.0"},
        {"tensorizer": "2.10.2"},
    ],
)
def test_every_input_that_changes_bytes_changes_the_id(fields: dict[str, object]) -> None:
    """Two different builds under one id would share a directory that is written once."""
    assert build_id(INPUTS) != build_id(changed(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"torch": "2.13.0"},
        {"torch": "2.13.0+cu130"},
        {"adapters": ADAPTERS[::-1]},
        {"profile": dict(reversed(INPUTS.profile.items()))},
    ],
)
def test_what_changes_no_byte_does_not_change_the_id(fields: dict[str, object]) -> None:
    """One artifact serves CPU and CUDA hosts, whose versions differ in their local part only."""
    assert build_id(INPUTS) == build_id(changed(**fields))


def test_an_adapter_named_twice_is_refused() -> None:
    """They would be written over each other."""
    with pytest.raises(ValidationError, match="an adapter is named twice"):
        changed(adapters=(ADAPTERS[0], ("poet", "e" * 40)))


def test_differences_are_lines_that_people_read() -> None:
    """A pinned profile that is built again must say why."""
    new = changed(
        commit="0" * 40,
        adapters=(("coder", "e" * 40),),
        profile={"tensor_parallel_size": 3, "dtype": "auto", "encryption": "both"},
        vllm="0.32.0",
    )
    expected = (
        f"commit: {INPUTS.commit} → {'0' * 40}",
        f"adapter coder: {'c' * 40} → {'e' * 40}",
        f"adapter poet: {'d' * 40} → (absent)",
        "tensor_parallel_size: 1 → 3",
        "serialization_kwargs: {} → (absent)",
        "vllm version: 0.31.0 → 0.32.0",
        "encryption: (absent) → both",
    )
    assert expected == differences(INPUTS, new)
    assert () == differences(INPUTS, changed(torch="2.13.0+cu130"))


def test_canonical_json_does_not_depend_on_order_or_escapes() -> None:
    """Hashes and signatures are of bytes: one value may have one form only."""
    expected = '{"a":[1,2.5,null,true],"b":{"x":"é→","y":""}}\n'.encode()
    assert expected == jsonio.canonical({"b": {"y": "", "x": "é→"}, "a": [1, 2.5, None, True]})
    assert expected == jsonio.canonical(jsonio.parse(expected, "it"))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": {"b": [0.0, float("nan")]}}, r"a\.b\[1\]"),
        ({"a": float("inf")}, "a"),
        ({"a": "\ud800"}, "a"),
    ],
)
def test_what_json_does_not_have_is_refused_by_field(value: dict[str, object], field: str) -> None:
    """A model that computes NaN must end in a message, not in a document nobody can read."""
    with pytest.raises(StoreError, match=f"it cannot be written as JSON: {field} is NaN"):
        jsonio.canonical(value, "it")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a":1,"a":2}', "key 'a' is given twice"),
        (b'{"x":{"a":1,"a":1}}', "key 'a' is given twice"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":-Infinity}', "-Infinity is not JSON"),
        (b'{"a":1e999}', "the number 1e999 is too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "is not a valid JSON document"),
        (b'{"a":"\xff"}', "is not a valid JSON document"),
        (b'\xef\xbb\xbf{"a":1}', "is not a valid JSON document"),
        (b"[" * 100_000, "is not a valid JSON document"),
        (b"[1]", "is not a JSON object"),
        (b"", "is not a valid JSON document"),
        (b" " * (jsonio.MAX_BYTES + 1), "documents end at 14680064 bytes"),
    ],
)
def test_documents_that_readers_could_read_differently_are_refused(
    data: bytes, message: str
) -> None:
    """What is verified must be what is used, whichever parser uses it."""
    with pytest.raises(StoreError, match=message) as caught:
        jsonio.parse(data, "root/x.json")
    assert str(caught.value).startswith("root/x.json ")


def test_a_record_with_wrong_fields_names_them_all() -> None:
    """One run must be enough to see everything that is wrong."""
    data = b'{"model":"m","commit":"x","profile":{},"vllm":1,"torch":"2","more":0}'
    with pytest.raises(StoreError) as caught:
        jsonio.load_record(BuildInputs, data, "root/x.json")
    assert "root/x.json is not a valid BuildInputs" in str(caught.value)
    for field in ("commit: ", "vllm: ", "tensorizer: Field required", "more: "):
        assert field in str(caught.value)
