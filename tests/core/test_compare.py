"""The reload's checks: each fails for its own reason, and only then."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tensorize_assets.core import compare, jsonio
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.evidence import CheckOutcome
from tensorize_assets.core.manifest import AdapterEntry, EncryptionEntry
from tensorize_assets.core.tasks import (
    Answers,
    Output,
    RankLoad,
    ReferenceResult,
    Refusal,
    ReloadResult,
    TensorReport,
    TokenScore,
)

# Two ranks, each with the tensors `lm_head.weight` and `scale`, in bfloat16.
MANIFEST = manifests.decode((Path(__file__).parent / "golden" / "manifest.json").read_bytes(), None)
PROFILE = Profile(reload_device="cpu", max_perplexity=100.0, perplexity_tolerance=0.1)


def answers(perplexity: float = 20.0) -> Answers:
    """Two prompts of two positions each."""
    positions = (
        TokenScore(token=7, top={7: -0.5, 8: -1.5}),
        TokenScore(token=9, top={9: -0.25, 3: -2.0}),
    )
    outputs = (
        Output(prompt="Hi", text=" there", positions=positions),
        Output(prompt="Lo", text=" here", positions=positions),
    )
    return Answers(outputs=outputs, perplexity=perplexity, logprobs_finite=True)


def load(rank: int) -> RankLoad:
    """A rank that loaded exactly what the manifest lists."""
    return RankLoad(
        rank=rank,
        device="cpu",
        device_name="CPU",
        seconds=0.5,
        bytes=1000,
        host_memory_before=1,
        host_memory_after=2,
        tensors={
            tensor.name: TensorReport(sha256=tensor.sha256, finite=True)
            for tensor in MANIFEST.shards[rank].tensors
        },
    )


SOURCE = ReferenceResult(answers=answers(), loads=(), device_name="CPU", vllm_version="0.31.0")
RELOAD = ReloadResult(
    answers=answers(), loads=(load(0), load(1)), device_name="CPU", vllm_version="0.31.0"
)


def checked(
    reload: ReloadResult = RELOAD,
    *,
    source: ReferenceResult = SOURCE,
    published_perplexity: float | None = None,
    **manifest: Any,
) -> dict[str, CheckOutcome]:
    found = compare.outcomes(
        MANIFEST.model_copy(update=manifest), PROFILE, source, reload, published_perplexity
    )
    # What evidence holds is JSON: infinities and NaN must not have got in.
    for outcome in found:
        jsonio.canonical(jsonio.dump_record(outcome))
    assert [*compare.CHECKS] == [outcome.name for outcome in found]
    return {outcome.name: outcome for outcome in found}


def failing(found: dict[str, CheckOutcome]) -> set[str]:
    return {name for name, outcome in found.items() if not outcome.passed}


def with_answers(change: Callable[[Answers], Answers]) -> ReloadResult:
    return RELOAD.model_copy(update={"answers": change(answers())})


def with_position(
    prompt: int, position: int, score: TokenScore, **more: Any
) -> Callable[[Answers], Answers]:
    """The answers with one position of one output replaced."""

    def change(given: Answers) -> Answers:
        outputs = list(given.outputs)
        positions = list(outputs[prompt].positions)
        positions[position] = score
        outputs[prompt] = outputs[prompt].model_copy(update={"positions": tuple(positions)})
        return given.model_copy(update={"outputs": tuple(outputs), **more})

    return change


def with_load(rank: int, **fields: Any) -> ReloadResult:
    """The reload with some fields of one rank's load replaced."""
    loads = [one.model_copy(update=fields) if one.rank == rank else one for one in RELOAD.loads]
    return RELOAD.model_copy(update={"loads": tuple(loads)})


def tensors(rank: int, **changed: TensorReport | None) -> dict[str, TensorReport]:
    """A rank's tensors; `weight` and `scale` are replaced, or left out where None."""
    names = {"weight": "lm_head.weight", "scale": "scale", "extra": "extra"}
    found = dict(load(rank).tensors)
    for short, report in changed.items():
        if report is None:
            del found[names[short]]
        else:
            found[names[short]] = report
    return found


def test_a_faithful_reload_passes_every_check() -> None:
    """The plain case, with what a person sees of each check."""
    found = checked()
    assert set() == failing(found)
    assert "2 answers equal" == found["token_ids_equal"].description
    assert {"prompt": "Hi", "answer": " there"} in found["token_ids_equal"].metadata["answers"]  # type: ignore[operator]
    assert "4 tensors equal" == found["tensor_hashes_equal"].description
    assert 0.0 == found["logprobs_close"].metadata["largest_difference"]


def test_of_the_repos_own_names_it_says_what_was_compared() -> None:
    """In the model these tensors have other names: their hashes are those of what was read."""
    slow = tuple(one.model_copy(update={"path": "slow"}) for one in RELOAD.loads)
    found = checked(RELOAD.model_copy(update={"loads": slow}), tensor_format="hf")
    assert set() == failing(found)
    said = found["tensor_hashes_equal"].description
    assert "4 tensors equal, as they were read from the file: in the model" in said
    assert "by the slow path" in found["artifact_loads"].description


class Case(NamedTuple):
    """One thing that is wrong, and what is said of it by the one check that fails."""

    check: str
    reload: ReloadResult
    said: str


OTHER = TensorReport(sha256="0" * 64, finite=True)
NOT_FINITE = load(1).tensors["scale"].model_copy(update={"finite": False})

CASES = {
    "another token": Case(
        "token_ids_equal",
        # Nearly as likely, so that the log-probabilities agree.
        with_answers(with_position(1, 1, TokenScore(token=3, top={9: -0.25, 3: -2.0}))),
        "1 of 2 answers differ; to 'Lo' the source says ' here', the artifact ' here'",
    ),
    "a shorter answer": Case(
        "token_ids_equal",
        with_answers(
            lambda given: given.model_copy(
                update={
                    "outputs": (
                        given.outputs[0].model_copy(
                            update={"positions": given.outputs[0].positions[:1], "text": " t"}
                        ),
                        given.outputs[1],
                    )
                }
            )
        ),
        "to 'Hi' the source says ' there', the artifact ' t'",
    ),
    "other log-probabilities": Case(
        "logprobs_close",
        with_answers(with_position(0, 1, TokenScore(token=9, top={9: -0.35, 3: -2.0}))),
        "largest difference 0.1, tolerance 0.05 for bfloat16",
    ),
    "no tokens in common": Case(
        "logprobs_close",
        with_answers(with_position(0, 1, TokenScore(token=9, top={4: -0.25, 5: -2.0}))),
        "none of their best tokens in common",
    ),
    "a log-probability that is no number": Case(
        "logprobs_close",
        with_answers(with_position(0, 0, TokenScore(token=7, top={7: math.nan, 8: -1.5}))),
        "largest difference 1e+30",
    ),
    "another hash": Case(
        "tensor_hashes_equal",
        with_load(1, tensors=tensors(1, weight=OTHER)),
        "1 differ: rank 1 lm_head.weight",
    ),
    "a tensor that the file lacks": Case(
        "tensors_complete",
        with_load(0, missing=("model.norm.weight",)),
        "rank 0 lacks model.norm.weight",
    ),
    "a tensor that the model lacks": Case(
        "tensors_complete",
        with_load(1, unexpected=("old.bias",)),
        "rank 1 has no place for old.bias",
    ),
    "a tensor that the manifest does not list": Case(
        "tensors_complete",
        with_load(0, tensors=tensors(0, extra=OTHER)),
        "rank 0 loaded extra, which the manifest does not list",
    ),
    "a rank too many": Case(
        "tensors_complete",
        RELOAD.model_copy(
            update={"loads": (*RELOAD.loads, load(1).model_copy(update={"rank": 2}))}
        ),
        "ranks [0, 1, 2] reported, the manifest has 2",
    ),
    "a weight that is no number": Case(
        "values_finite",
        with_load(1, tensors=tensors(1, scale=NOT_FINITE)),
        "1 tensors hold NaN or infinity: rank 1 scale",
    ),
    "log-probabilities that are not finite": Case(
        "values_finite",
        with_answers(lambda given: given.model_copy(update={"logprobs_finite": False})),
        "weights are finite, log-probabilities are not",
    ),
    "too high a perplexity": Case(
        "perplexity_sane",
        with_answers(lambda given: given.model_copy(update={"perplexity": 100.1})),
        "100.1, at most 100 (the profile's bound for a first build)",
    ),
    "a perplexity that is not finite": Case(
        "perplexity_sane",
        with_answers(lambda given: given.model_copy(update={"perplexity": 1e300})),
        "it is not finite",
    ),
    "a perplexity that is no number": Case(
        "perplexity_sane",
        with_answers(lambda given: given.model_copy(update={"perplexity": math.nan})),
        "it is not finite",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])
def test_a_check_fails_for_its_own_reason_alone(case: Case) -> None:
    """A person reads one red check and knows where to look; the others stay green."""
    found = checked(case.reload)
    assert {case.check} == failing(found)
    assert case.said in found[case.check].description


@pytest.mark.parametrize(
    ("reload", "said"),
    [
        (RELOAD.model_copy(update={"loads": (load(0),)}), "rank 1 did not report"),
        (with_load(1, tensors=tensors(1, weight=None)), "rank 1 lm_head.weight"),
        (
            with_load(1, tensors=tensors(1, weight=None), on_meta=("lm_head.weight",)),
            "rank 1 lm_head.weight",
        ),
    ],
    ids=["missing-rank", "not-loaded", "on-meta"],
)
def test_what_is_absent_is_neither_complete_nor_equal(reload: ReloadResult, said: str) -> None:
    """A tensor that nobody hashed must not count as equal, whoever forgot it."""
    found = checked(reload)
    assert {"tensor_hashes_equal", "tensors_complete"} == failing(found)
    assert said in found["tensor_hashes_equal"].description
    assert found["tensors_complete"].description.startswith("1 problems: ")


def test_an_artifact_that_does_not_load_fails_every_check() -> None:
    """Nothing was compared, so nothing may look as if it had been."""
    reload = ReloadResult(
        answers=None, loads=(), device_name="CPU", vllm_version="0.31.0", error="ValueError: hash"
    )
    found = checked(reload, adapters=(adapter("pirate"),), encryption=ENCRYPTED)
    assert set(compare.CHECKS) == failing(found)
    assert "vLLM did not load it: ValueError: hash" == found["artifact_loads"].description
    assert "not compared: the artifact did not load" == found["token_ids_equal"].description


def test_ranks_that_loaded_before_a_failure_count_for_what_they_are() -> None:
    """The engine failed after the load: the hashes were compared, the answers never given."""
    reload = RELOAD.model_copy(update={"answers": None, "error": "RuntimeError: no kernel"})
    assert {
        "artifact_loads",
        "token_ids_equal",
        "logprobs_close",
        "values_finite",
        "perplexity_sane",
    } == failing(checked(reload))


@pytest.mark.parametrize(
    ("dtype", "difference", "passes"),
    [
        ("float32", 0.9e-4, True),
        ("float32", 1.1e-4, False),
        ("float16", 0.9e-2, True),
        ("float16", 1.1e-2, False),
        ("bfloat16", 4.9e-2, True),
        ("bfloat16", 5.1e-2, False),
        ("float8_e4m3fn", 0.0, False),
    ],
)
def test_the_tolerance_is_that_of_the_dtype(dtype: str, difference: float, passes: bool) -> None:
    """What rounding explains in bfloat16 is a wrong weight in float32; an unknown type has none."""
    top = {9: -0.25 - difference, 3: -2.0}
    reload = with_answers(with_position(0, 1, TokenScore(token=9, top=top)))
    found = checked(reload, dtype=dtype)
    assert (set() if passes else {"logprobs_close"}) == failing(found)


def test_a_token_that_only_one_side_lists_is_left_out() -> None:
    """Ranks four and five may swap with the sixth; those in common decide."""
    top = {9: -0.25, 4: -2.01}
    assert set() == failing(
        checked(with_answers(with_position(0, 1, TokenScore(token=9, top=top))))
    )


def test_what_follows_the_first_other_token_is_not_compared() -> None:
    """From there on both are right about different sentences."""
    change = with_position(0, 0, TokenScore(token=8, top={7: -0.5, 8: -1.5}))
    later = with_position(0, 1, TokenScore(token=1, top={1: -0.1, 2: -9.0}))
    found = checked(with_answers(lambda given: later(change(given))))
    assert {"token_ids_equal"} == failing(found)


def test_answers_to_other_prompts_are_not_compared() -> None:
    """The profile's prompts changed between the two: neither equal nor close, and said so."""
    fewer = SOURCE.answers.model_copy(update={"outputs": SOURCE.answers.outputs[:1]})
    found = checked(source=SOURCE.model_copy(update={"answers": fewer}))
    assert {"token_ids_equal", "logprobs_close"} == failing(found)
    assert "not compared: the prompts are not the same" == found["token_ids_equal"].description


def test_answers_without_a_token_are_no_proof() -> None:
    """Two empty answers are equal and mean nothing."""
    outputs = tuple(one.model_copy(update={"positions": ()}) for one in answers().outputs)
    empty = answers().model_copy(update={"outputs": outputs})
    found = checked(
        RELOAD.model_copy(update={"answers": empty}),
        source=SOURCE.model_copy(update={"answers": empty}),
    )
    assert {"logprobs_close"} == failing(found)


@pytest.mark.parametrize(
    ("perplexity", "published", "passes"),
    [
        (99.0, None, True),
        (21.9, 20.0, True),
        (22.1, 20.0, False),
        # The profile's bound is for the first build only.
        (150.0, 140.0, True),
    ],
)
def test_a_later_build_is_held_against_the_published_one(
    perplexity: float, published: float | None, passes: bool
) -> None:
    """A broken retraining passes any absolute bound, and shows beside what is served now."""
    found = checked(
        with_answers(lambda given: given.model_copy(update={"perplexity": perplexity})),
        published_perplexity=published,
    )
    assert (set() if passes else {"perplexity_sane"}) == failing(found)
    if published is not None:
        assert "10% above the published build's" in found["perplexity_sane"].description


def test_many_problems_are_counted_and_some_named() -> None:
    """Thousands of tensors must not fill the page."""
    found = checked(with_load(0, missing=tuple(f"layer.{number}" for number in range(40))))
    said = found["tensors_complete"].description
    assert said.startswith("40 problems: rank 0 lacks layer.0, ")
    assert said.endswith(" and 35 more")


def test_one_reason_fails_every_check() -> None:
    """What the asset emits where nothing could be compared."""
    found = compare.failed("the worker was killed")
    assert [*compare.CHECKS] == [outcome.name for outcome in found]
    assert {(False, "the worker was killed")} == {(o.passed, o.description) for o in found}


def test_prompts_are_named_by_their_content() -> None:
    """References are shared by this name: other prompts, or the same cut elsewhere, differ."""
    names = {
        compare.prompts_digest(prompts)
        for prompts in (("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"), ("ab", "c", ""))
    }
    assert 5 == len(names)
    assert compare.prompts_digest(("ab", "c")) == compare.prompts_digest(("ab", "c"))
    assert all(len(name) == 12 for name in names)


# Adapters

ENCRYPTED = EncryptionEntry(key_id="0" * 16)


def adapter(name: str) -> AdapterEntry:
    return AdapterEntry(
        name=name,
        repo=f"tiny/{name}",
        snapshot=MANIFEST.snapshot,
        rank=8,
        file="adapter_model.tensors",
        config="adapter_config.json",
        tensors=(),
    )


def adapted(
    source: dict[str, Answers], reload: dict[str, Answers], base: Answers | None = None
) -> dict[str, CheckOutcome]:
    """The checks of an artifact with adapters `pirate` and `poet`."""
    return checked(
        RELOAD.model_copy(update={"adapters": reload, "answers": base or answers()}),
        source=SOURCE.model_copy(update={"adapters": source}),
        adapters=(adapter("pirate"), adapter("poet")),
    )


def leaning(change: float) -> Answers:
    """The same tokens, one log-probability other by so much."""
    return with_position(0, 0, TokenScore(token=7, top={7: -0.5 + change, 8: -1.5}))(answers())


def saying(token: int) -> Answers:
    """Another token at the first position."""
    return with_position(0, 0, TokenScore(token=token, top={token: -0.25, 7: -0.75}))(answers())


BOTH = {"pirate": saying(11), "poet": leaning(0.25)}


def test_adapters_that_answer_as_their_sources_pass() -> None:
    """One says another word, the other has only other log-probabilities: both change something."""
    found = adapted(BOTH, BOTH)
    assert set() == failing(found)
    assert "with each of 2 adapters" in found["adapters_equal"].description
    assert {"adapter": "pirate", "prompt": "Hi", "answer": " there"} in found[
        "adapters_equal"
    ].metadata["adapter_answers"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("got", "says"),
    [
        ({**BOTH, "pirate": saying(12)}, "pirate: 1 of 2 answers differ; to 'Hi' the source says"),
        ({**BOTH, "poet": leaning(0.4)}, "poet: largest difference 0.15, tolerance 0.05"),
        ({"pirate": saying(11)}, "poet: the artifact was not asked with it"),
        ({"pirate": BOTH["poet"], "poet": BOTH["pirate"]}, "poet: 1 of 2 answers differ"),
    ],
    ids=["other tokens", "other log-probabilities", "not asked", "exchanged"],
)
def test_an_adapter_that_answers_otherwise_is_named(got: dict[str, Answers], says: str) -> None:
    """An adapter loaded wrongly answers as somebody: only its own source shows it."""
    found = adapted(BOTH, got)
    assert not found["adapters_equal"].passed
    assert says in found["adapters_equal"].description


def test_an_adapter_whose_source_was_not_asked_is_not_passed() -> None:
    """A reference made before the profile had it says nothing about it."""
    found = adapted({"pirate": BOTH["pirate"]}, BOTH)
    assert "poet: the source was not asked with it" == found["adapters_equal"].description


def test_an_adapter_that_changes_nothing_is_reported() -> None:
    """An untrained one, or one whose modules nobody applied, equals its source all the same."""
    idle = {**BOTH, "poet": answers()}
    found = adapted(idle, idle)
    assert {"adapters_change_answers"} == failing(found)
    assert found["adapters_change_answers"].description.startswith("poet: the answers are the same")


def test_what_two_runs_of_the_base_differ_by_is_no_change() -> None:
    """On a device whose sums vary, an idle adapter differs from the base by as much."""
    idle = {**BOTH, "poet": leaning(0.015)}
    assert set() == failing(adapted(idle, idle))
    noisy = adapted(idle, idle, base=leaning(-0.01))
    # 0.025 from the base as it was reloaded, which is 0.01 from its source.
    assert set() == failing(noisy)
    noisy = adapted(idle, idle, base=leaning(0.01))
    assert {"adapters_change_answers"} == failing(noisy)


def test_log_probabilities_of_an_adapter_that_are_no_numbers_are_found() -> None:
    """The base's own are."""
    broken = {**BOTH, "poet": leaning(0.25).model_copy(update={"logprobs_finite": False})}
    found = adapted(broken, broken)
    assert {"values_finite"} == failing(found)
    assert "log-probabilities with poet are not" in found["values_finite"].description


def test_without_adapters_and_encryption_their_checks_say_so() -> None:
    """A check that never says anything would let a failure downstream."""
    found = checked()
    for name in ("adapters_equal", "adapters_change_answers", "encryption_holds"):
        assert found[name].passed
        assert found[name].description.startswith("not applicable: ")


# Encryption


def refusals(**changed: Refusal | None) -> ReloadResult:
    """Every attempt as it should end, but for some."""
    file = MANIFEST.shards[0].file
    tried = {
        name: Refusal(attempt=name, refused=True, message=f"/x/{file} is damaged")
        for name in compare.ATTEMPTS
    }
    kept = [one for one in {**tried, **changed}.values() if one is not None]
    return RELOAD.model_copy(update={"refusals": tuple(kept)})


def test_an_encrypted_artifact_that_refuses_every_attempt_passes() -> None:
    """And the evidence has each attempt with what was said."""
    found = checked(refusals(), encryption=ENCRYPTED)
    assert set() == failing(found)
    assert len(compare.ATTEMPTS) == len(found["encryption_holds"].metadata["refusals"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tag": Refusal(attempt="tag", refused=False, message="")}, "tag: it loaded"),
        ({"tensor": None}, "tensor was not tried"),
        (
            {"header": Refusal(attempt="header", refused=True, message="struct.error")},
            "header: refused, but the error does not name model-rank-000.tensors",
        ),
    ],
    ids=["loaded", "not tried", "unclear"],
)
def test_one_attempt_is_enough_to_fail(changed: dict[str, Any], says: str) -> None:
    """Loaded, left out, or refused by an error from which nobody learns which file it is."""
    found = checked(refusals(**changed), encryption=ENCRYPTED)
    assert {"encryption_holds"} == failing(found)
    assert says in found["encryption_holds"].description


def test_adapters_are_part_of_what_is_asked() -> None:
    """Evidence and references with other adapters, or another commit of one, are not these."""
    prompts = ("Hi", "Lo")
    plain = compare.prompts_digest(prompts)
    assert plain == compare.prompts_digest(prompts, ())
    one = compare.prompts_digest(prompts, [("pirate", "a" * 40)])
    named = {
        plain,
        one,
        compare.prompts_digest((*prompts, "pirate", "a" * 40)),
        compare.prompts_digest(prompts, [("pirate", "b" * 40)]),
        compare.prompts_digest(prompts, [("poet", "a" * 40)]),
        compare.prompts_digest(prompts, [("pirate", "a" * 40), ("poet", "b" * 40)]),
    }
    assert 6 == len(named)
    assert compare.prompts_digest(prompts, [("poet", "b"), ("pirate", "a")]) == (
        compare.prompts_digest(prompts, [("pirate", "a"), ("poet", "b")])
    )
