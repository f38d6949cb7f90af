"""vLLM loader for tensorized models on CPU and CUDA."""

from __future__ import annotations

import errno
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import tenacity
import torch
from tensorizer import TensorDeserializer
from tensorizer._NumpyTensor import _NumpyTensor
from tensorizer.serialization import (
    OPAQUE_DTYPE_SEP,
    CryptographyError,
    HashMismatchError,
    HashType,
)
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.model_loader import tensorizer as vllm_tensorizer
from vllm.model_executor.model_loader.tensorizer import TensorizerArgs, TensorizerConfig
from vllm.model_executor.model_loader.tensorizer_loader import TensorizerLoader
from vllm.model_executor.model_loader.utils import (
    get_model_cls,
    initialize_model,
    process_weights_after_loading,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from tensorize_assets.core import serving
from tensorize_assets.core.errors import ManifestError, StoreError, StoreUnavailableError
from tensorize_assets.core.tasks import RankLoad, TensorReport
from tensorize_assets.vllm_plugin import quantized_layers, report, streams

logger = init_logger(f"vllm.{__name__}")

_MARKER = ".vllm_tensorized_marker"

# What vLLM takes for a template of ranks' files.
_RANK = re.compile(r"%0(\d)d")

# How often a file is looked for, and how often it is begun when its stream breaks for good, and
# how long is waited between.
_BEGINNINGS = 3
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 10.0


class TensorizedModelLoader(TensorizerLoader):
    """Loads what `TensorSerializer.write_module` wrote of a vLLM model.

    Every tensor is put into the parameter that vLLM constructed, so that parameter subclasses
    and their attributes stay (post-load steps of quantized layers assert them) and tied weights
    stay tied. No `dtype` is passed on: what was stored is what is loaded. Then the post-load
    step runs, as after any other load in vLLM.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        served = serving.current()
        if served is not None and not self.tensorizer_config.encryption_keyfile:
            # Not among vLLM's arguments: it logs them, and the process list shows them.
            self.tensorizer_config.encryption_keyfile = served.keyfile

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Raises ValueError for a file that is damaged, or whose tensors are not the model's, or
        for a file of a key that holds none; HashMismatchError for a tensor that is not what was
        written; and CryptographyError for an encrypted file that does not open with this key.
        """
        try:
            return self._load_model(vllm_config, model_config, prefix)
        except Exception as error:
            # Of a rank that is a process of its own, vLLM tells its parent only that it failed.
            if report.reporting():
                report.write_failure(get_tensor_model_parallel_rank(), error)
            raise

    def _load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> torch.nn.Module:
        self._verify_config(model_config, vllm_config.parallel_config)
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            rank = get_tensor_model_parallel_rank()
            # Not by %: a URL has other percent signs.
            self.tensorizer_config.tensorizer_uri = _RANK.sub(
                lambda width: f"{rank:0{width[1]}d}", self._uri()
            )
        # Before the model takes its memory: a file that is not there, or is refused, shows here.
        file = self._find()
        device = torch.device(_device())
        if quantized_layers.needs_names(vllm_config.quant_config):
            fused = getattr(get_model_cls(model_config), "packed_modules_mapping", None)
            quantized_layers.tell(vllm_config.quant_config, self._names(file), fused or {})
        with set_default_torch_dtype(model_config.dtype):
            # On the real device: plain tensor attributes, which the file does not hold, are
            # computed here. Parameters are allocated but untouched until theirs is read.
            with device:
                model = initialize_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            self._fill(model, file)
            with torch.no_grad():
                process_weights_after_loading(model, model_config, device)
        return model.eval()

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill a constructed model from the file; raises as `load_model` does."""
        self._fill(model, self._find())

    def _find(self) -> streams.TensorFile:
        return _beginnings(partial(_log_again, "looking for the file"))(self._look)

    def _look(self) -> streams.TensorFile:
        return streams.find(self._uri(), arguments_of(self.tensorizer_config).stream_kwargs)

    def _names(self, file: streams.TensorFile) -> frozenset[str]:
        def look() -> frozenset[str]:
            arguments = arguments_of(self.tensorizer_config).deserialization_kwargs
            with (
                file_errors(file.uri),
                file.glance() as stream,
                streams.Deserializer(
                    stream, device="cpu", lazy_load=True, **{**arguments, "num_readers": 1}
                ) as deserializer,
            ):
                return frozenset(str(path.normalize_()) for path in deserializer._metadata)

        return _beginnings(partial(_log_again, "reading the file's index"))(look)

    def _fill(self, model: torch.nn.Module, file: streams.TensorFile) -> None:
        """Read the file into the model, from its beginning again when the stream breaks.

        What a broken attempt has put into the model is put there again by the next; after the
        last, the model is never used.
        """
        reading = _Reading(file)

        def read() -> None:
            if reading.restarts:
                reading.again(self._look())
            self._read(model, reading)

        def again(state: tenacity.RetryCallState) -> None:
            reading.restarts += 1
            _log_again("reading from the beginning", state)

        _beginnings(again)(read)
        model.requires_grad_(False)
        resize = getattr(vllm_tensorizer, "_resize_lora_embeddings", None)
        if resize is not None:
            resize(model)

    def _read(self, model: torch.nn.Module, reading: _Reading) -> None:
        arguments = arguments_of(self.tensorizer_config)
        file = reading.file
        with (
            file_errors(file.uri),
            file.deserializer(_device(), arguments.deserialization_kwargs) as deserializer,
            torch.no_grad(),
        ):
            require_whole(file, deserializer)
            _require_served(deserializer, file.uri)
            if _MARKER not in deserializer and not self.tensorizer_config.vllm_tensorized:
                _load_plain(model, deserializer, reading)
                return
            sink = _Sink(model, tuple(deserializer.keys()))
            if _device() == "cpu" and not deserializer._encrypted:
                _fill_in_place(sink, deserializer)
            deserializer.load_into_module(
                sink,  # type: ignore[arg-type]
                lambda name: name not in sink.filled,
            )
            seconds = time.perf_counter() - reading.start
            size = deserializer.total_tensor_bytes
            header_hashes = {
                path.normalize_(): entry.header_hashes[HashType.SHA256]
                for path, entry in deserializer._metadata.items()
                if entry.header_hashes and HashType.SHA256 in entry.header_hashes
            }
        logger.info("Loaded %d bytes in %.2f s (%.0f MB/s)", size, seconds, size / seconds / 1e6)
        missing = sorted(sink.slots.keys() - sink.filled - sink.unfit)
        if report.reporting():
            _report(sink, header_hashes, seconds, size, reading, missing)
        if missing or sink.unexpected:
            differences = filter(
                None, (_names("missing", missing), _names("unexpected", sink.unexpected))
            )
            raise ValueError(
                f"{file.uri} is not a file of this model at this tensor_parallel_size and "
                f"dtype: {'; '.join(differences)}"
            )

    def _uri(self) -> str:
        # vLLM's TensorizerConfig sets it, from tensorizer_dir where it was not given.
        return str(self.tensorizer_config.tensorizer_uri)


@dataclass
class _Reading:
    """How a file is being read, over all its beginnings."""

    file: streams.TensorFile
    start: float = field(default_factory=time.perf_counter)
    memory: int = field(default_factory=report.host_memory)
    restarts: int = 0
    earlier_retries: int = 0

    def again(self, file: streams.TensorFile) -> None:
        """Go on with the file as it was found anew."""
        if file.version != self.file.version:
            raise StoreError(
                f"{file.uri} was replaced while it was read; read it again. Files of a build "
                "never change: who wrote it?"
            )
        self.earlier_retries = self.retries
        self.file = file

    @property
    def retries(self) -> int:
        return self.earlier_retries + self.file.retries


def _fill_in_place(sink: _Sink, deserializer: streams.Deserializer) -> None:
    """Read what fits into the memory that the model's tensors have; tensorizer reads the rest.

    Of weights that are tied one is read, unless somebody wants to know what the file holds.
    """
    rooms: dict[Any, memoryview] = {}
    taken: dict[int, Any] = {}
    for key, entry in deserializer._metadata.items():
        name = str(key.normalize_())
        tensor = sink.slots[name].tensor if name in sink.slots else None
        if tensor is None or not _fits(tensor, entry):
            continue
        if taken.setdefault(tensor.data_ptr(), key) is key:
            rooms[key] = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        elif deserializer._verify_hash or report.checking():
            continue
        sink.filled.add(name)
    deserializer.read_into(rooms)


def _fits(tensor: torch.Tensor, entry: Any) -> bool:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    form = _NumpyTensor.from_tensor(tensor)
    dtype = form.numpy_dtype + (f"{OPAQUE_DTYPE_SEP}{form.torch_dtype}" if form.is_opaque else "")
    own = (dtype, tuple(tensor.shape), tensor.nbytes)
    # Without data: a tensor that was on no device when it was written.
    return bool(entry.data_length) and own == (entry.dtype, tuple(entry.shape), entry.data_length)


def _load_of(reading: _Reading, seconds: float, size: int, **more: Any) -> RankLoad:
    """How this rank was loaded; `more` is what only the one path or the other knows."""
    return RankLoad(
        rank=get_tensor_model_parallel_rank(),
        device="cpu" if current_platform.is_cpu() else "cuda",
        device_name=report.device_name(),
        seconds=seconds,
        bytes=size,
        host_memory_before=reading.memory,
        host_memory_after=report.host_memory(),
        source=reading.file.source,
        part_retries=reading.retries,
        restarts=reading.restarts,
        **more,
    )


def _report(
    sink: _Sink,
    header_hashes: dict[str, Any],
    seconds: float,
    size: int,
    reading: _Reading,
    missing: list[str],
) -> None:
    # First: hashing takes memory of its own.
    load = _load_of(reading, seconds, size, missing=missing, unexpected=sink.unexpected)
    tensors = {name: slot.tensor for name, slot in sink.slots.items() if name in sink.filled}
    there = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    found = {
        "on_meta": tuple(sorted(tensors.keys() - there)),
        "tensors": report.tensor_reports(there, header_hashes) if report.checking() else {},
    }
    report.write(load.model_copy(update=found))


def _load_plain(
    model: torch.nn.Module, deserializer: TensorDeserializer, reading: _Reading
) -> None:
    """Load a file with a Hugging Face model's own names, by vLLM's slow path.

    Raises RuntimeError where vLLM finds no place for a tensor, or is left without one.
    """
    uri = reading.file.uri
    logger.warning(
        "%s has no vLLM marker: its tensors go through the CPU and load_weights (the slow path)",
        uri,
    )
    # vLLM's loaders copy from it, piece by piece; a device has no room for both.
    deserializer._device = torch.device("cpu")
    tensors: dict[str, TensorReport] = {}
    handed_over = False

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal handed_over
        # Past tensorizer's cache, which would hold the whole model.
        with closing(deserializer._bulk_load_uncached(list(deserializer._metadata))) as loaded:
            for data in loaded:
                name, tensor = str(data.header.name.normalize_()), data.parameter
                if report.checking():
                    hashes = deserializer._metadata[data.header.name].header_hashes or {}
                    tensors.update(
                        report.tensor_reports({name: tensor}, {name: hashes[HashType.SHA256]})
                    )
                handed_over = True
                yield name, tensor
                handed_over = False

    try:
        filled = model.load_weights(read())  # type: ignore[operator]
    except (AttributeError, AssertionError, KeyError, RuntimeError, ValueError) as error:
        if not handed_over:
            raise  # of the file, and not of what vLLM does with a tensor
        raise RuntimeError(
            f"{uri} is not a file of this model: load_weights of {type(model).__name__} says "
            f"{type(error).__name__}: {error}"
        ) from error
    seconds = time.perf_counter() - reading.start
    # Models of which vLLM knows what was loaded say so; others are believed, as by vLLM.
    own = {name for name, _ in model.named_parameters()} if filled is not None else set()
    missing = sorted(own - (filled or set()))
    if report.reporting():
        size = deserializer.total_tensor_bytes
        load = _load_of(reading, seconds, size, tensors=tensors, missing=missing, path="slow")
        report.write(load)
    if missing:
        raise RuntimeError(f"{uri} is not a file of this model: {_names('missing', missing)}")


@dataclass
class _Slot:
    """One parameter or buffer of the constructed model."""

    module: torch.nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.attribute)


@dataclass
class _Sink:
    """Stands in for the model while tensorizer loads: takes what it registers, keeps our objects.

    `TensorDeserializer.load_into_module` asks its module for `named_modules()` and calls
    `register_parameter` and `register_buffer` on them; nothing else.
    """

    model: torch.nn.Module
    stored: tuple[str, ...]
    slots: dict[str, _Slot] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path, module in self.model.named_modules():
            for attribute in (*module._parameters, *module._buffers):
                if getattr(module, attribute) is not None:
                    self.slots[f"{path}.{attribute}"] = _Slot(module, attribute)

    def named_modules(self) -> Iterator[tuple[str, _Intake]]:
        # Every path of the file, so that one the model lacks is named rather than a KeyError.
        for path in dict.fromkeys(name.rpartition(".")[0] for name in self.stored):
            yield path, _Intake(self, path)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if name == _MARKER:
            return
        slot = self.slots.get(name)
        if slot is None:
            self.unexpected.append(name)
            return
        if slot.tensor.shape != tensor.shape or slot.tensor.dtype != tensor.dtype:
            self.unfit.add(name)
            self.unexpected.append(
                f"{name} {tuple(tensor.shape)} {tensor.dtype}, and the model's is "
                f"{tuple(slot.tensor.shape)} {slot.tensor.dtype}"
            )
            return
        slot.tensor.data = tensor.detach()
        self.filled.add(name)


@dataclass
class _Intake:
    """One module of the sink."""

    sink: _Sink
    path: str

    def register_parameter(self, name: str, tensor: torch.Tensor) -> None:
        self.sink.put(f"{self.path}.{name}", tensor)

    def register_buffer(self, name: str, tensor: torch.Tensor) -> None:
        self.sink.put(f"{self.path}.{name}", tensor)


def arguments_of(config: TensorizerConfig) -> TensorizerArgs:
    """tensorizer's arguments, its key read from its file.

    Raises:
        ValueError: the file of the key cannot be read, or holds none.
    """
    try:
        return config._construct_tensorizer_args()
    except (OSError, ValueError) as error:
        keyfile = config.encryption_keyfile
        if not keyfile:
            raise
        unopened = f"{config.tensorizer_uri} was not opened"
        if isinstance(error, OSError):
            raise ValueError(
                f"{unopened}: the file of its key, {keyfile}, cannot be read ({error.strerror}); "
                "`tensorize keys unseal` writes it"
            ) from error
        raise ValueError(
            f"{unopened}: {keyfile} does not hold a key of 32 bytes; write it with `tensorize keys "
            "unseal`, and nothing behind it"
        ) from error


# What tensorizer says of keys, and what we say.
_KEYS = {
    "Tensor is encrypted, but decryption was not requested": "is encrypted, and no key was given; "
    "name the file of its key as encryption_keyfile (`tensorize keys unseal` writes it)",
    "Tensor decryption was requested": "is not encrypted, and a key was given; leave out "
    "encryption_keyfile, or take the encrypted build",
    "Tensor decryption failed": "does not open with this key; it is the key of another build, or "
    "the file is damaged: `tensorize verify` compares a directory with its manifest",
}


@contextmanager
def file_errors(uri: str) -> Iterator[None]:
    """Name the file: tensorizer fails on a damaged one with whatever its parser stumbles over."""
    try:
        yield
    except HashMismatchError as error:
        raise HashMismatchError(f"{uri} is damaged: {error}") from error
    except CryptographyError as error:
        said = [ours for theirs, ours in _KEYS.items() if str(error).startswith(theirs)]
        damaged = f"is damaged ({error}); `tensorize verify` compares a directory with its manifest"
        raise CryptographyError(f"{uri} {said[0] if said else damaged}") from error
    except (
        struct.error,
        ValueError,
        IndexError,
        KeyError,
        AssertionError,
        OverflowError,
        # Of a header that claims to be larger than the machine.
        MemoryError,
        TypeError,
        # Of a tensor whose encryption cannot be: what tensorizer then looks at was never made.
        NameError,
        OSError,
    ) as error:
        # Of a disk, or of a file that leads to where none ends.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # tensorizer's assertions say nothing.
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ValueError(
            f"{uri} is damaged, cut short or no tensorizer file ({said}); `tensorize verify` "
            "compares a directory with its manifest"
        ) from error


def require_whole(file: streams.TensorFile, deserializer: TensorDeserializer) -> None:
    """Where a file ends too early, tensorizer leaves the rest of its buffers as they were."""
    entries = sorted(deserializer._metadata.values(), key=lambda entry: entry.offset)
    end = max(entry.data_offset + entry.data_length for entry in entries)
    if file.size < end:
        raise ValueError(f"it has {file.size:,} bytes, and its tensors end at byte {end:,}")
    if deserializer._tensors_begin > entries[0].offset:
        raise ValueError("its index reaches into its tensors")
    for entry, following in pairwise(entries):
        # Else a small file would hold any number of large ones.
        if entry.data_offset + entry.data_length > following.offset:
            raise ValueError(f"its tensor {following.name.normalize_()!r} lies in another one")


def _require_served(deserializer: streams.Deserializer, uri: str) -> None:
    """Hold a file's tensors against the manifest of what is served, now and as they are read.

    Raises ManifestError, as does reading, for tensors that are not those that were reloaded.
    """
    served = serving.current()
    if served is None:
        return
    shard = serving.manifest_of(served).shards[get_tensor_model_parallel_rank()]
    published = streams.Published(
        f"{uri} is not the file that build {served.build_id} was published with; restore it, or "
        "roll back: who wrote it?",
        {tensor.name: tensor.sha256 for tensor in shard.tensors},
    )
    stored = {str(path.normalize_()) for path in deserializer._metadata} - {_MARKER}
    if others := sorted(stored ^ published.sha256.keys()):
        raise ManifestError(f"{published.refusal} ({_names('other', others)})")
    deserializer.published = published


def _beginnings(before_sleep: Callable[[tenacity.RetryCallState], None]) -> tenacity.Retrying:
    """Tries again what fails for a reason that may pass by itself."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailableError),
        stop=tenacity.stop_after_attempt(_BEGINNINGS),
        # Ranks of one engine shall not come back all at once.
        wait=tenacity.wait_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        + tenacity.wait_random(0, _FIRST_WAIT_S),
        before_sleep=before_sleep,
        reraise=True,
    )


def _log_again(what: str, state: tenacity.RetryCallState) -> None:
    # The error names the file, and shows no query of its URL.
    logger.warning(
        "rank %d: %s again in %.1f s, try %d of %d: %s",
        get_tensor_model_parallel_rank(),
        what,
        state.upcoming_sleep,
        state.attempt_number + 1,
        _BEGINNINGS,
        state.outcome.exception() if state.outcome else "",
    )


def _device() -> str:
    if current_platform.is_cpu():
        return "cpu"
    return f"{current_platform.device_type}:{torch.accelerator.current_device_index()}"


def _names(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {kind} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
