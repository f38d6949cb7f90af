"""What a rank reads its tensors from: a file, an object in S3, or an http(s) URL.

tensorizer reads the latter two through `curl` on a signed URL: without a retry, and with the
signature in the process list. Here they are read by `core.ranged`, in this process.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import numpy
from tensorizer import TensorDeserializer, serialization
from tensorizer._linear_partition import partition
from tensorizer.serialization import (
    OPAQUE_DTYPE_SEP,
    HashType,
    _MetadataDeserializer,
    _TensorHeaderDeserializer,
)

from tensorize_assets.core import s3
from tensorize_assets.core.errors import ManifestError, StoreError, StoreUnavailableError
from tensorize_assets.core.http_source import HttpSource
from tensorize_assets.core.ranged import RangedReader, RangeSource, S3Source
from tensorize_assets.core.tasks import LoadSource
from tensorize_assets.core.tensorizer_limits import DTYPE, MAX_HEADER_BYTES

# A second reader hashes while the first receives; more only help hosts of many cores.
_READERS = 2
# In flight and held at once, by all readers together: 64 MiB.
_PART_BYTES = 8 << 20
_PARTS = 8

# Of somebody who reads little: not more than is asked for, and a bit.
_GLANCE_BYTES = 1 << 20

# The index that tensorizer writes has 256 KiB.
_MAX_INDEX_BYTES = 1 << 20
# Of all tensors of a file that have a shape and no data, since they were on no device: tensorizer
# makes them of zeros.
_MAX_ABSENT_BYTES = 64 << 20

# Of a signed URL, in seconds: longer than any load, and no more than a role's session.
_SIGNED_FOR_S = 3600


@dataclass
class TensorFile:
    """A tensorizer file where it lies: on disk if `ranges` is None.

    Objects are pinned to the version that was found.
    """

    uri: str
    source: LoadSource
    size: int
    ranges: RangeSource | None
    _readers: list[RangedReader] = field(default_factory=list)

    @property
    def version(self) -> str:
        """Differs between two objects of one name; empty on disk."""
        return "" if self.ranges is None else self.ranges.version

    @property
    def retries(self) -> int:
        """How many requests had to be made again, of all readers so far."""
        return sum(reader.retries for reader in self._readers)

    def deserializer(self, device: str, arguments: Mapping[str, Any]) -> Deserializer:
        """Open the file with `arguments` of TensorDeserializer; closing it closes the file.

        Raises what TensorDeserializer does, and StoreError.
        """
        if self.ranges is None:
            # As many readers as tensorizer takes by itself, 8: from the page cache 1, 2, 4 and 8
            # took the same.
            return Deserializer(open(self.uri, "rb"), device=device, lazy_load=True, **arguments)
        readers = arguments.get("num_readers") or _READERS
        ahead = max(1, _PARTS // readers - 1)

        def reopen(begin: int, end: int) -> RangedReader:
            reader = RangedReader(
                cast("RangeSource", self.ranges), begin, end, part_bytes=_PART_BYTES, ahead=ahead
            )
            self._readers.append(reader)
            return reader

        stream = cast("BinaryIO", reopen(0, self.size))
        return Deserializer(
            stream,
            reopen,
            device=device,
            lazy_load=True,
            **{**arguments, "num_readers": readers},
        )

    def glance(self) -> BinaryIO:
        """The file as a stream that hardly reads ahead."""
        if self.ranges is None:
            return open(self.uri, "rb")
        reader = RangedReader(self.ranges, 0, self.size, part_bytes=_GLANCE_BYTES, ahead=1)
        return cast("BinaryIO", reader)


class Published(NamedTuple):
    """The SHA-256 of each tensor of a file, by the manifest; and what is said of another file."""

    refusal: str
    sha256: Mapping[str, str]


class _Index(_MetadataDeserializer):
    """A file's index, of no more bytes than one may have."""

    @classmethod
    def from_io(cls, reader: Any, count: int) -> tuple[Any, Any, bytes]:
        length = reader.read(cls._total_len_segment.size)
        (size,) = cls._total_len_segment.unpack(length)
        if size > _MAX_INDEX_BYTES:
            raise ValueError(f"its index would have {size:,} bytes")
        encoded = reader.read(size)
        return (*cls.from_buffer(encoded, count), length + encoded)


class _Header(_TensorHeaderDeserializer):
    """A tensor's header, of no more bytes than one may have."""

    @classmethod
    def from_io(
        cls, reader: Any, zero_hashes: bool = True, check_crypt_info: bool = False
    ) -> _Header | None:
        length = reader.read(cls.header_len_segment.size)
        (size,) = cls.header_len_segment.unpack(length)
        if size == 0:
            return None
        if not len(length) <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"the header of a tensor would have {size:,} bytes")
        buffer = bytearray(size)
        buffer[: len(length)] = length
        reader.readinto(memoryview(buffer)[len(length) :])
        found = cls(buffer, zero_hashes=zero_hashes, check_crypt_info=check_crypt_info)
        # Past a tensor that the index does not name, tensorizer goes by it: back, again and again.
        if found.data_length < 0:
            raise ValueError(f"a tensor would have {found.data_length:,} bytes")
        return found


# tensorizer has no other place to put them, and looks for them there.
serialization._MetadataDeserializer = _Index  # type: ignore[misc]
serialization._TensorHeaderDeserializer = _Header  # type: ignore[misc]


class Deserializer(TensorDeserializer):
    """Reads with several threads where tensorizer would not know how to open the file again.

    What a file says of itself makes it take no memory before it was held against what can be.

    Every tensor's own header is held against the index of the file. tensorizer believes the
    header: with one flipped bit in the size there it hands out a tensor of zeros, which neither
    its hash nor, in an encrypted file, its tag says anything about.

    So is its hash against `published`, where that is set: the hashes in a file come with it,
    whoever wrote it.
    """

    published: Published | None = None

    def __init__(
        self,
        stream: BinaryIO,
        reopen: Callable[[int, int], RangedReader] | None = None,
        **arguments: Any,
    ) -> None:
        self._reopen_stream = reopen
        super().__init__(stream, **arguments)
        try:
            _require_possible(self._metadata.values())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        # tensorizer's threads and generators keep it, and with it every tensor it has handed out,
        # until Python collects cycles: also those that the post-load step replaces.
        self._cache = OrderedDict()

    def _reopen_func(self) -> Callable[..., Any] | None:
        return self._reopen_stream or super()._reopen_func()

    def read_into(self, rooms: Mapping[Any, memoryview]) -> None:
        """Read tensors of a plaintext file to where they shall stand, on the CPU.

        tensorizer reads each into new memory, from its threads' own arenas, which keep what the
        post-load step frees: 673 MB at the peak for SmolLM2-135M, against 498 (bench/load.py).
        `rooms` are by key of the index, of the tensors' own sizes.

        Raises as tensorizer's reading does.
        """
        if not rooms:
            return
        entries = sorted((self._metadata[key] for key in rooms), key=lambda entry: entry.offset)
        sizes = [entry.data_length for entry in entries]
        halt = threading.Event()
        # Not `_reader_pool`: nothing may write into the rooms once this has returned.
        with ThreadPoolExecutor(self._num_readers) as pool:
            reads = [
                pool.submit(self._read_run, entries[run], rooms, number == 0, halt)
                for number, run in enumerate(partition(sizes, self._num_readers))
            ]
            try:
                for read in as_completed(reads):
                    read.result()
            except BaseException:
                halt.set()
                raise

    def _read_run(
        self,
        entries: Sequence[Any],
        rooms: Mapping[Any, memoryview],
        first: bool,
        halt: threading.Event,
    ) -> None:
        begin, end = entries[0].offset, entries[-1].data_offset + entries[-1].data_length
        if first:
            stream: Any = self._file
            stream.seek(begin)
            if isinstance(stream, RangedReader):
                stream.expect_until(end)
        else:
            stream = cast("Callable[..., Any]", self._reopen)(begin=begin, end=end)
        try:
            for entry in entries:
                if halt.is_set():
                    return
                stream.seek(entry.offset - begin, io.SEEK_CUR)
                begin = entry.data_offset + entry.data_length
                self._read_one(stream, entry, rooms[entry.name])
        finally:
            if not first:
                stream.close()

    def _read_one(self, stream: Any, entry: Any, room: memoryview) -> None:
        header = _Header.from_io(stream)
        if header is None or header.name != entry.name:
            raise ValueError(f"its index leads to no tensor {entry.name.normalize_()!r}")
        self._require_same(header, entry)
        entry.hashes = header.hashes
        entry.header_hashes = header.compute_hashes()
        if stream.readinto(room) != len(room):
            raise ValueError(f"it ends within tensor {entry.name.normalize_()!r}")
        if self._verify_hash:
            self._verify_hashes(entry.name, header.hashes, entry.header_hashes, room)

    def _bulk_load_uncached(
        self, keys: Sequence[Any], verify_hash: bool | None = None
    ) -> Generator[Any, None, None]:
        awaited = set(keys)
        with closing(super()._bulk_load_uncached(keys, verify_hash)) as loaded:
            for data in loaded:
                name = data.header.name
                if name not in awaited:
                    raise ValueError(f"it has tensor {name.normalize_()!r} twice")
                awaited.remove(name)
                self._require_same(data.header, self._metadata[name])
                yield data

    def _require_same(self, header: Any, entry: Any) -> None:
        name = str(entry.name.normalize_())
        own = (
            header.tensor_type,
            header.dtype,
            header.shape,
            header.data_length,
            len(header.buffer),
        )
        listed = (
            entry.type,
            entry.dtype,
            entry.shape,
            entry.data_length,
            entry.data_offset - entry.offset,
        )
        if own != listed:
            raise ValueError(f"its index and the header of tensor {name!r} disagree")
        wanted = self.published and self.published.sha256.get(name)
        if self.published and wanted:
            stored = [one.hash.hex() for one in header.hashes if one.type == HashType.SHA256]
            if stored != [wanted]:
                raise ManifestError(f"{self.published.refusal} (tensor {name!r} is another)")


def _require_possible(entries: Iterable[Any]) -> None:
    """Raise ValueError for an index with an entry that is of no tensor."""
    absent = 0
    for entry in entries:
        name, header = entry.name.normalize_(), entry.data_offset - entry.offset
        if not 0 < header <= MAX_HEADER_BYTES:
            raise ValueError(f"the header of tensor {name!r} would have {header:,} bytes")
        numpy_name, *opaque = entry.dtype.split(OPAQUE_DTYPE_SEP)
        if len(opaque) > 1 or not DTYPE.fullmatch(numpy_name):
            raise ValueError(f"tensor {name!r} is of no type: {entry.dtype[:80]!r}")
        size = math.prod(entry.shape) * numpy.dtype(numpy_name).itemsize
        absent += 0 if entry.data_length else size
        if entry.data_length not in (0, size) or absent > _MAX_ABSENT_BYTES:
            raise ValueError(
                f"tensor {name!r} of shape {entry.shape} would have {size:,} bytes, and has "
                f"{entry.data_length:,}"
            )


def find(uri: str, given: Mapping[str, Any]) -> TensorFile:
    """Look where `uri` leads.

    How S3 is reached stands in the file that TENSORIZE_ASSETS_S3_ACCESS names, else in the
    environment as `core.s3.resolve` reads it. `given` is what the user set for tensorizer's own
    streams; its keys and endpoint go first.

    Raises:
        FileNotFoundError: a path that leads nowhere.
        StoreError: a file or an object that cannot be read.
        StoreUnavailableError: the object store, or the way to it, is in trouble.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return _on_disk(uri)
    if scheme == "s3":
        return _in_s3(uri, _access(given))
    if scheme in ("http", "https"):
        ranges = HttpSource(uri, ca_bundle=ca_bundle(s3.S3Settings()))
        return TensorFile(ranges.uri, "public_url", ranges.size, ranges)
    raise StoreError(f"{scheme}:// is not read; give a path, s3:// or http(s)://")


def object_in_s3(uri: str, access: s3.S3Access) -> S3Source:
    """Look at an object through S3's own API.

    Raises:
        StoreError: it cannot be read.
        StoreUnavailableError: the object store, or the way to it, is in trouble.
    """
    bucket, key = s3.split_uri(uri)
    explain = partial(s3.explained, "get", uri, access)
    return S3Source(access.client_for(bucket), bucket, key, uri, explain)


def _on_disk(path: str) -> TensorFile:
    try:
        with open(path, "rb") as file:
            return TensorFile(path, "disk", os.fstat(file.fileno()).st_size, None)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot read {path}: {error.strerror}; let this user read it, or see to the disk"
        ) from error


def _in_s3(uri: str, access: s3.S3Access) -> TensorFile:
    if access.settings.reload_url == "presigned":
        signed = _presigned(uri, access)
        return TensorFile(uri, "presigned_url", signed.size, signed)
    ranges = object_in_s3(uri, access)
    return TensorFile(uri, "s3", ranges.size, ranges)


def _presigned(uri: str, access: s3.S3Access) -> HttpSource:
    bucket, key = s3.split_uri(uri)
    access = _in_its_region(bucket, uri, access)

    def sign() -> str:
        with s3.explained("get", uri, access):
            return access.client_for(bucket).generate_presigned_url(
                "get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=_SIGNED_FOR_S
            )

    try:
        return HttpSource(sign, ca_bundle=ca_bundle(access.settings))
    except StoreUnavailableError:
        raise
    except StoreError:
        # S3's own answer, where there is one, says more than the status of a signed URL.
        object_in_s3(uri, access)
        raise


def _in_its_region(bucket: str, uri: str, access: s3.S3Access) -> s3.S3Access:
    """Have URLs signed for the region that the bucket is in, where S3 names it.

    The API's client follows S3 to another region by itself; a signed URL cannot be followed.
    """
    client = access.client_for(bucket)
    with s3.explained("get", uri, access):
        try:
            answer = client.head_bucket(Bucket=bucket)
        except client.exceptions.ClientError as error:
            # A refusal names it too.
            answer = error.response
    region = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if not region or region == client.meta.region_name:
        return access
    there = access.settings.model_copy(update={"region": region})
    return s3.S3Access(there, access.credentials)


def _access(given: Mapping[str, Any]) -> s3.S3Access:
    key, secret = given.get("s3_access_key_id"), given.get("s3_secret_access_key")
    if not key or not secret:
        return s3.from_environment()
    endpoint = given.get("s3_endpoint")
    if endpoint and "://" not in endpoint:
        endpoint = f"{'http' if given.get('force_http') else 'https'}://{endpoint}"
    return s3.resolve(
        s3.S3Settings(endpoint_url=endpoint),
        s3.S3Credentials(access_key_id=key, secret_access_key=secret),
    )


def ca_bundle(settings: s3.S3Settings) -> str | None:
    """The file of certificates to trust instead of the system's; None for the system's."""
    named = settings.ca_bundle
    if not named and os.environ.get(s3.ACCESS_VARIABLE):
        named = s3.from_environment().settings.ca_bundle
    named = named or os.environ.get("AWS_CA_BUNDLE")
    # As boto3's client is given it.
    return os.path.expanduser(named) if named else None
