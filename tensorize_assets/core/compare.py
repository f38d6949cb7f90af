"""The reload's checks: pure comparisons of what the worker brought back. Each always answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.evidence import CheckOutcome
from tensorize_assets.core.manifest import Manifest
from tensorize_assets.core.tasks import (
    Answers,
    Output,
    ReferenceResult,
    ReloadResult,
    TokenScore,
)

# Largest difference of a log-probability (natural logarithm) at one position that rounding in the
# type explains; on one device and one TP the two loads usually agree to the bit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# Stands for a difference that is infinite or no number, which the evidence's JSON cannot hold.
_FAR = 1e30
# And for that of two positions that list no token in common.
_APART = 2 * _FAR
# What a worker sends for a perplexity that is not finite.
_NO_PERPLEXITY = 1e300
_SHOWN = 5


ATTEMPTS = {
    "no key": "The shard opened without a key.",
    "wrong key": "With another key of 32 bytes.",
    "short key": "With a key of 31 bytes.",
    "header": "With its key, and one byte of the file's header flipped.",
    "metadata": "One byte of a tensor's entry in the file's index.",
    "tensor header": "One byte of the size in a tensor's own header.",
    "tensor": "One byte of a tensor's encrypted values.",
    "tag": "One byte of the tag that authenticates them.",
}
"""In which ways an encrypted artifact must not load; each is tried after the good load."""


def prompts_digest(prompts: tuple[str, ...], adapters: Iterable[tuple[str, str]] = ()) -> str:
    """Short name of what a model is asked: 12 hex digits over the prompts and, with adapters, over
    the name and commit of each.
    """
    whole = hashlib.sha256()

    def add(text: str) -> None:
        whole.update(len(text.encode()).to_bytes(8, "big") + text.encode())

    for prompt in prompts:
        add(prompt)
    for name, commit in sorted(adapters):
        # No length of a prompt: these are no further prompts.
        whole.update(b"\xff" * 8)
        add(name)
        add(commit)
    return whole.hexdigest()[:12]


def outcomes(
    manifest: Manifest,
    profile: Profile,
    reference: ReferenceResult,
    reload: ReloadResult,
    published_perplexity: float | None,
) -> tuple[CheckOutcome, ...]:
    """Every check of `CHECKS`, in order."""
    answers = reload.answers
    return (
        _loads(reload),
        _if_answered("token_ids_equal", answers, lambda got: _tokens(reference.answers, got)),
        _if_answered(
            "logprobs_close", answers, lambda got: _logprobs(reference.answers, got, manifest.dtype)
        ),
        _hashes(manifest, reload),
        _complete(manifest, reload),
        _finite(reload),
        _if_answered(
            "perplexity_sane", answers, lambda got: _perplexity(got, profile, published_perplexity)
        ),
        _adapters_equal(manifest, reference, reload),
        _adapters_change(manifest, reference, reload),
        _encryption(manifest, reload),
    )


CHECKS = {
    "artifact_loads": "vLLM loads the artifact with load_format=tensorizer and verify_hash.",
    "token_ids_equal": "Greedy token ids of the artifact and of the source are the same.",
    "logprobs_close": "Top log-probabilities agree within the tolerance of the dtype.",
    "tensor_hashes_equal": "Every tensor of every rank, as it stands in the loaded model (of "
    "format hf: as it was read from the file), has the manifest's hash.",
    "tensors_complete": "Every tensor of the model was in the file and the other way round; none "
    "is on the meta device.",
    "values_finite": "No weight and no log-probability is NaN or infinite.",
    "perplexity_sane": "Perplexity on a bundled text is near the published build's, or below the "
    "profile's bound for a first build.",
    "adapters_equal": "With each adapter, tokens and log-probabilities are those of the source "
    "adapter on the source model.",
    "adapters_change_answers": "With each adapter the artifact answers differently than without.",
    "encryption_holds": "An encrypted artifact does not load without its key, with another or a "
    "short one, or with a flipped byte anywhere.",
}
"""What each check holds, by name."""


def as_manifest(manifest: Manifest, reload: ReloadResult) -> tuple[CheckOutcome, ...]:
    """The checks that need no source: whether what was loaded is what the manifest says."""
    return (
        _loads(reload),
        _hashes(manifest, reload),
        _complete(manifest, reload),
        _finite(reload),
    )


def failed(reason: str) -> tuple[CheckOutcome, ...]:
    """Every check as failed for one reason: nothing could be compared."""
    return tuple(_outcome(name, False, reason) for name in CHECKS)


def _outcome(name: str, passed: bool, description: str, **metadata: object) -> CheckOutcome:
    return CheckOutcome.model_validate(
        {"name": name, "passed": passed, "description": description, "metadata": metadata}
    )


def _loads(reload: ReloadResult) -> CheckOutcome:
    name = "artifact_loads"
    if reload.error is not None:
        return _outcome(name, False, f"vLLM did not load it: {reload.error[:1500]}")
    slow = any(load.path == "slow" for load in reload.loads)
    how = ", by the slow path (no vLLM marker)" if slow else ""
    return _outcome(name, True, f"loaded on {reload.device_name}{how}")


def _if_answered(
    name: str, answers: Answers | None, check: Callable[[Answers], CheckOutcome]
) -> CheckOutcome:
    if answers is None:
        return _outcome(name, False, "not compared: the artifact did not load")
    return check(answers)


def _tokens(source: Answers, got: Answers) -> CheckOutcome:
    count = len(source.outputs)
    if _prompts(source) != _prompts(got):
        return _outcome("token_ids_equal", False, "not compared: the prompts are not the same")
    different = [
        (want, have)
        for want, have in zip(source.outputs, got.outputs, strict=True)
        if _token_ids(want) != _token_ids(have)
    ]
    if different:
        want, have = different[0]
        return _outcome(
            "token_ids_equal",
            False,
            f"{len(different)} of {count} answers differ; to {want.prompt!r} the source says "
            f"{want.text!r}, the artifact {have.text!r}",
            prompts=count,
            different=len(different),
        )
    return _outcome(
        "token_ids_equal",
        True,
        f"{count} answers equal",
        prompts=count,
        different=0,
        answers=[{"prompt": have.prompt, "answer": have.text} for have in got.outputs],
    )


def _logprobs(source: Answers, got: Answers, dtype: str) -> CheckOutcome:
    """Compare the log-probabilities of the tokens that both sides list among their best.

    One that only one side lists is at most as far off as its neighbours in rank. After the first
    token that differs the two say different things: positions are compared up to and with it.
    """
    tolerance = TOLERANCE.get(dtype)
    if tolerance is None:
        return _outcome("logprobs_close", False, f"no tolerance is stated for dtype {dtype}")
    if _prompts(source) != _prompts(got):
        return _outcome("logprobs_close", False, "not compared: the prompts are not the same")
    worst = _largest_difference(source, got)
    if worst is None:
        return _outcome("logprobs_close", False, "not compared: the answers are empty")
    if worst == _APART:
        return _outcome(
            "logprobs_close",
            False,
            "at one position source and artifact have none of their best tokens in common",
            tolerance=tolerance,
        )
    return _outcome(
        "logprobs_close",
        worst <= tolerance,
        f"largest difference {worst:.2g}, tolerance {tolerance:g} for {dtype}",
        largest_difference=worst,
        tolerance=tolerance,
    )


def _largest_difference(source: Answers, got: Answers) -> float | None:
    """Of any log-probability, up to the first token that differs; None where there is none."""
    gaps: list[float] = []
    for want, have in zip(source.outputs, got.outputs, strict=True):
        for one, other in _common_positions(want, have):
            shared = one.top.keys() & other.top.keys()
            gaps += [_gap(one.top[token], other.top[token]) for token in shared] or [_APART]
    return max(gaps, default=None)


def _gap(one: float, other: float) -> float:
    gap = abs(one - other)
    # NaN is neither larger nor smaller than anything: max() would lose it.
    return gap if gap < _FAR else _FAR


def _prompts(answers: Answers) -> list[str]:
    return [output.prompt for output in answers.outputs]


def _token_ids(output: Output) -> list[int]:
    return [position.token for position in output.positions]


def _common_positions(want: Output, have: Output) -> Iterator[tuple[TokenScore, TokenScore]]:
    for one, other in zip(want.positions, have.positions, strict=False):
        yield one, other
        if one.token != other.token:
            return


def _hashes(manifest: Manifest, reload: ReloadResult) -> CheckOutcome:
    loads = {load.rank: load for load in reload.loads}
    wrong: list[str] = []
    count = 0
    for shard in manifest.shards:
        load = loads.get(shard.rank)
        if load is None:
            wrong.append(f"rank {shard.rank} did not report")
            continue
        for tensor in shard.tensors:
            count += 1
            found = load.tensors.get(tensor.name)
            if found is None or found.sha256 != tensor.sha256:
                wrong.append(f"rank {shard.rank} {tensor.name}")
    if wrong:
        return _outcome(
            "tensor_hashes_equal", False, f"{len(wrong)} differ: {_some(wrong)}", tensors=count
        )
    compared = f"{count} tensors equal"
    if manifest.tensor_format == "hf":
        compared += ", as they were read from the file: in the model they have other names"
    return _outcome("tensor_hashes_equal", True, compared, tensors=count)


def _complete(manifest: Manifest, reload: ReloadResult) -> CheckOutcome:
    problems: list[str] = []
    ranks = sorted(load.rank for load in reload.loads)
    if ranks != [shard.rank for shard in manifest.shards]:
        problems.append(f"ranks {ranks} reported, the manifest has {len(manifest.shards)}")
    for load in reload.loads:
        where = f"rank {load.rank}"
        problems += [f"{where} lacks {name}" for name in load.missing]
        problems += [f"{where} has no place for {name}" for name in load.unexpected]
        problems += [f"{where} left {name} on meta" for name in load.on_meta]
        if load.rank < len(manifest.shards):
            names = {tensor.name for tensor in manifest.shards[load.rank].tensors}
            problems += [
                f"{where} loaded {name}, which the manifest does not list"
                for name in sorted(load.tensors.keys() - names)
            ]
            told = load.tensors.keys() | {*load.missing, *load.on_meta}
            problems += [
                f"{where} did not load {name}, which the manifest lists"
                for name in sorted(names - told)
            ]
    count = sum(len(load.tensors) for load in reload.loads)
    if problems:
        return _outcome(
            "tensors_complete", False, f"{len(problems)} problems: {_some(problems)}", tensors=count
        )
    return _outcome("tensors_complete", True, f"{count} tensors, none missing", tensors=count)


def _finite(reload: ReloadResult) -> CheckOutcome:
    wrong = [
        f"rank {load.rank} {name}"
        for load in reload.loads
        for name, tensor in load.tensors.items()
        if not tensor.finite
    ]
    if wrong:
        return _outcome(
            "values_finite", False, f"{len(wrong)} tensors hold NaN or infinity: {_some(wrong)}"
        )
    if not reload.loads or reload.answers is None:
        return _outcome("values_finite", False, "not compared: the artifact did not load")
    asked = {"": reload.answers, **{f" with {name}": one for name, one in reload.adapters.items()}}
    for how, answers in asked.items():
        if not answers.logprobs_finite:
            return _outcome(
                "values_finite", False, f"weights are finite, log-probabilities{how} are not"
            )
    return _outcome("values_finite", True, "all weights and log-probabilities are finite")


def perplexity(answers: Answers | None) -> float | None:
    """The perplexity of the bundled text; None when it is not finite, or there are no answers."""
    if answers is None or not answers.perplexity < _NO_PERPLEXITY:
        return None
    return answers.perplexity


def _perplexity(got: Answers, profile: Profile, published_perplexity: float | None) -> CheckOutcome:
    if published_perplexity is None:
        bound = profile.max_perplexity
        why = "the profile's bound for a first build"
    else:
        bound = published_perplexity * (1 + profile.perplexity_tolerance)
        why = f"{profile.perplexity_tolerance:.0%} above the published build's"
    found = perplexity(got)
    if found is None:
        return _outcome("perplexity_sane", False, "it is not finite", bound=bound)
    return _outcome(
        "perplexity_sane",
        found <= bound,
        f"{found:.4g}, at most {bound:.4g} ({why})",
        perplexity=found,
        bound=bound,
    )


def _adapters_equal(
    manifest: Manifest, reference: ReferenceResult, reload: ReloadResult
) -> CheckOutcome:
    name = "adapters_equal"
    if not manifest.adapters:
        return _outcome(name, True, "not applicable: the profile has no adapters")
    if reload.answers is None:
        return _outcome(name, False, "not compared: the artifact did not load")
    problems: list[str] = []
    answers: list[dict[str, str]] = []
    for adapter in manifest.adapters:
        want, got = reference.adapters.get(adapter.name), reload.adapters.get(adapter.name)
        if want is None or got is None:
            missing = "source" if want is None else "artifact"
            problems.append(f"{adapter.name}: the {missing} was not asked with it")
            continue
        both = (_tokens(want, got), _logprobs(want, got, manifest.dtype))
        problems += [f"{adapter.name}: {one.description}" for one in both if not one.passed]
        answers += [
            {"adapter": adapter.name, "prompt": output.prompt, "answer": output.text}
            for output in got.outputs
        ]
    if problems:
        return _outcome(name, False, "; ".join(problems), adapters=len(manifest.adapters))
    return _outcome(
        name,
        True,
        f"with each of {len(manifest.adapters)} adapters the answers are its source's",
        adapters=len(manifest.adapters),
        adapter_answers=answers,
    )


def _adapters_change(
    manifest: Manifest, reference: ReferenceResult, reload: ReloadResult
) -> CheckOutcome:
    """Hold each adapter's answers against those without it, of the same engine.

    Greedy tokens of a weak adapter may be the same. Its log-probabilities then still differ by
    more than those of the artifact and its source, which are two runs of one computation.
    """
    name = "adapters_change_answers"
    if not manifest.adapters:
        return _outcome(name, True, "not applicable: the profile has no adapters")
    base = reload.answers
    if base is None:
        return _outcome(name, False, "not compared: the artifact did not load")
    if _prompts(reference.answers) != _prompts(base):
        return _outcome(name, False, "not compared: the prompts are not the same")
    noise = 2 * (_largest_difference(reference.answers, base) or 0.0)
    idle: list[str] = []
    differences: dict[str, float] = {}
    for adapter in manifest.adapters:
        got = reload.adapters.get(adapter.name)
        if got is None or _prompts(got) != _prompts(base):
            return _outcome(name, False, f"not compared: {adapter.name} was not asked the same")
        differences[adapter.name] = _largest_difference(base, got) or 0.0
        same_tokens = list(map(_token_ids, base.outputs)) == list(map(_token_ids, got.outputs))
        if same_tokens and differences[adapter.name] <= noise:
            idle.append(adapter.name)
    found = {"noise": noise, "largest_differences": [differences]}
    if idle:
        return _outcome(
            name,
            False,
            f"{', '.join(idle)}: the answers are the same with it and without; it is untrained, or "
            "has no module of this model",
            **found,
        )
    return _outcome(name, True, f"each of {len(manifest.adapters)} adapters changes them", **found)


def _encryption(manifest: Manifest, reload: ReloadResult) -> CheckOutcome:
    name = "encryption_holds"
    if manifest.encryption is None:
        return _outcome(name, True, "not applicable: the artifact is not encrypted")
    if reload.answers is None:
        return _outcome(name, False, "not tried: the artifact did not load")
    tried = {refusal.attempt: refusal for refusal in reload.refusals}
    shard = manifest.shards[0].file
    problems = [f"{attempt} was not tried" for attempt in ATTEMPTS if attempt not in tried]
    problems += [f"{one.attempt}: it loaded" for one in tried.values() if not one.refused]
    problems += [
        f"{one.attempt}: refused, but the error does not name {shard}: {one.message[:200]!r}"
        for one in tried.values()
        if one.refused and shard not in one.message
    ]
    if problems:
        return _outcome(name, False, "; ".join(problems))
    return _outcome(
        name,
        True,
        f"{len(tried)} ways to load it wrongly were refused",
        refusals=[{"attempt": one.attempt, "message": one.message} for one in tried.values()],
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
