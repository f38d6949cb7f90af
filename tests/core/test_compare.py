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
from tensorize_assets.core.tasks import (
    Answers,
    Output,
    RankLoad,
    ReferenceResult,
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
    found = checked(reload)
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
