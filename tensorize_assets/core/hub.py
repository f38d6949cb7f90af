"""A model's files at one commit: found on the Hub, downloaded once, every byte checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from pydantic import JsonValue

from tensorize_assets.core import hub_contents, hub_download, hub_files, hub_verify
from tensorize_assets.core.errors import HubError
from tensorize_assets.core.hub_access import (
    LIBRARY,
    HubAccess,
    endpoint_of,
    hub_errors,
    not_a_hub,
    snapshot_dir,
    token_of,
)
from tensorize_assets.core.hub_config import read_config
from tensorize_assets.core.hub_download import Progress
from tensorize_assets.core.hub_files import HubFile, RevisionListing, Snapshot, WeightsFormat
from tensorize_assets.core.printable import printable

_RESOLVE_TIMEOUT_S = 30.0

_Choose = Callable[
    [HubAccess, str, str, Sequence[HubFile]], tuple[tuple[HubFile, ...], WeightsFormat]
]


def resolve(
    access: HubAccess, model: str, revision: str, timeout_s: float = _RESOLVE_TIMEOUT_S
) -> RevisionListing:
    """Return the commit that `revision` (branch, tag or commit) is now, and its files to load.

    One request. Chosen are configuration, tokenizer and other small text files, and the weights at
    the top level, where vLLM looks for them: safetensors or, without any, pytorch_model*.bin.

    Raises HubError for a missing, renamed, private or gated repo, a missing revision, no weights,
    file names that leave the folder or that not every disk tells apart, too many files, and
    configurations that are too large to be one; HubUnavailableError for what may pass, also when
    nothing came for `timeout_s` seconds.
    """
    return _resolve(access, model, revision, hub_files.choose, timeout_s)


def resolve_adapter(
    access: HubAccess, repo: str, revision: str, timeout_s: float = _RESOLVE_TIMEOUT_S
) -> RevisionListing:
    """As `resolve`, of a LoRA adapter's repo.

    Chosen are adapter_model.safetensors or, without it, adapter_model.bin, with
    adapter_config.json. An adapter's tokenizer is the base model's, and left out.
    """
    return _resolve(access, repo, revision, hub_files.choose_adapter, timeout_s)


def download(
    access: HubAccess, model: str, listing: RevisionListing, progress: Progress | None = None
) -> tuple[Snapshot, Path]:
    """Bring the files of `listing` into the cache, check each, and return them and their folder.

    Files already there are not downloaded again, those already checked and unchanged since (size
    and time) not hashed again. Concurrent calls share one download. A cut connection is taken up
    where it broke; after a killed run, files that were complete stay. `progress` is called about
    once a second, from this thread, also while another run downloads.

    Raises HubError for too little free disk (before anything is downloaded), a gated repo, and
    content that differs from what the Hub declares: that copy is removed from the cache, so that
    the next call downloads it again. Raises HubUnavailableError for network trouble, and a commit
    that is gone.
    """
    if model != listing.model:
        raise HubError(f"the listing is of {listing.model}, not of {model}: resolve {model} first")
    folder = snapshot_dir(access, model, listing.commit)
    missing = [file for file in listing.files if not (folder / file.path).exists()]
    if missing:
        with hub_errors(access, model, listing.revision):
            hub_download.check_disk(access, listing, missing)
        hub_download.fetch_files(access, listing, missing, progress)
    if progress is not None:
        progress(listing.size, listing.size)
    with hub_errors(access, model, listing.revision):
        files = hub_verify.verify_files(access, listing, folder)
        hub_verify.check_index(listing, folder)
    snapshot = Snapshot(
        model=model,
        revision=listing.revision,
        commit=listing.commit,
        files=files,
        weights_format=listing.weights_format,
    )
    return snapshot, folder


def check_contents(access: HubAccess, listing: RevisionListing, folder: Path) -> None:
    """Look whether the files of a download are what their names say, before anything reads them.

    Raises HubError, naming each file that is not: a Git LFS pointer, safetensors whose header lies,
    a pickle that takes more memory than its file has bytes, or one where a text belongs.
    """
    problems = [
        f"{file.path} {problem}"
        for file in listing.files
        if (problem := hub_contents.problem_of(folder / file.path))
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise HubError(
            f"{listing.model}@{listing.commit} on {endpoint_of(access)} cannot be used: "
            f"{'; '.join(problems[:5])}{more}. Choose another revision or repo, or have its owner "
            "upload the files again"
        )


def local_path(access: HubAccess, snapshot: Snapshot) -> Path | None:
    """Return the snapshot's folder if every file is there with its size; no network, no hashing."""
    folder = snapshot_dir(access, snapshot.model, snapshot.commit)
    for file in snapshot.files:
        try:
            if (folder / file.path).stat().st_size != file.size:
                return None
        except OSError:
            return None
    return folder


def ensure_local(access: HubAccess, snapshot: Snapshot, *, adapter: bool = False) -> Path:
    """Return the folder of a snapshot that was verified before, downloaded again if it is gone.

    `adapter`: it is one of `resolve_adapter`.

    Raises HubError when the Hub's files are not those of the snapshot any more, and what `resolve`
    and `download` raise.
    """
    folder = local_path(access, snapshot)
    if folder is not None:
        return folder
    find = resolve_adapter if adapter else resolve
    listing = find(access, snapshot.model, snapshot.commit)
    again, folder = download(access, snapshot.model, listing)
    if again.files != snapshot.files:
        raise HubError(
            f"{snapshot.model}@{snapshot.commit} has other files on {endpoint_of(access)} than "
            "when it was resolved; materialize hf_snapshot again"
        )
    return folder


def fetch_config(access: HubAccess, listing: RevisionListing) -> dict[str, JsonValue]:
    """Return config.json of a listing: a small file to judge by before the large ones come.

    Raises HubError when there is none, and what `download` raises.
    """
    files = tuple(file for file in listing.files if file.path == "config.json")
    if not files:
        raise HubError(
            f"{listing.model}@{listing.commit} has no config.json: the repo is not in the layout "
            "of transformers, and vLLM could not load it"
        )
    _, folder = download(access, listing.model, listing.model_copy(update={"files": files}))
    return read_config(folder)


def _resolve(
    access: HubAccess, model: str, revision: str, choose: _Choose, timeout_s: float
) -> RevisionListing:
    with hub_errors(access, model, revision):
        info = _model_info(access, model, revision, timeout_s)
        if info.id != model:
            raise HubError(
                f"{model} on {endpoint_of(access)} was renamed to {printable(str(info.id))}: "
                "use the new name in the catalog"
            )
        files = [hub_files.declared(access, model, sibling) for sibling in info.siblings or ()]
        chosen, weights_format = choose(access, model, revision, files)
        hub_files.check_names(access, model, revision, chosen)
        return RevisionListing(
            model=model,
            revision=revision,
            commit=info.sha or "",
            files=chosen,
            weights_format=weights_format,
        )


def _model_info(access: HubAccess, model: str, revision: str, timeout_s: float) -> Any:
    api = HfApi(endpoint=access.endpoint, token=token_of(access), library_name=LIBRARY)
    try:
        return api.model_info(model, revision=revision, files_metadata=True, timeout=timeout_s)
    except (KeyError, TypeError, AttributeError) as error:
        raise not_a_hub(access, error) from None
