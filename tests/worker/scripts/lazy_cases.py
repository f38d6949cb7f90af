"""Hold LazyTensor to what PyTorch does with the values; what was read goes to CASES.

    python lazy_cases.py OUT CASES

The file of random tensors is read through a RemoteFile, as from a store.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tensorize_assets.core.block_hashes import BLOCK_BYTES, hashes_of
from tensorize_assets.core.errors import StoreError
from tensorize_assets.worker import lazy_tensors, remote_weights
from tensorize_assets.worker.lazy_tensors import LazyTensor
from tensorize_assets.worker.remote_weights import Counter, RemoteFile, tensors_of


class FileRanges:
    """A file on a disk in the place of an object in a store."""

    version = "1"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = str(path)
        self.size = path.stat().st_size
        self.requests = 0
        self._lock = threading.Lock()

    def read_into(self, start: int, buffer: memoryview, stopped: Any) -> None:
        with self._lock:
            self.requests += 1
        with self.path.open("rb") as file:
            file.seek(start)
            assert file.readinto(buffer) == len(buffer)


def main(out: Path, cases: Path) -> None:
    torch.manual_seed(0)
    out.mkdir()
    # A little more than a block a row, so that columns are not worth a request each.
    plain = {
        "matrix": torch.randn(64, 4096),
        "half": torch.randn(512, 1024).to(torch.bfloat16),
        "experts": torch.randn(4, 1024, 512),
        "packed": torch.randint(-(2**31), 2**31 - 1, (256, 256), dtype=torch.int32),
        "scalar": torch.tensor(3.5),
        "norm": torch.randn(512),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
        "fp8": torch.randn(64, 64).to(torch.float8_e4m3fn),
    }
    save_file(plain, out / "model.safetensors")
    hashes = hashes_of([(out / "model.safetensors").read_bytes()])
    found: dict[str, Any] = {}
    pool = ThreadPoolExecutor(remote_weights.AT_ONCE)

    def opened(cache: Path | None = None) -> tuple[dict[str, Any], Counter, FileRanges]:
        ranges, counter = FileRanges(out / "model.safetensors"), Counter()
        file = RemoteFile(ranges, hashes, counter, pool)
        return dict(tensors_of(file, cache)), counter, ranges

    tensors, counter, ranges = opened()
    found["names"] = sorted(tensors) == sorted(plain)
    found["open"] = {"bytes": counter.bytes, "requests": ranges.requests}

    # What vLLM's loaders do with a tensor, and more

    views = {
        "rows": lambda one: one.narrow(0, 16, 16),
        "columns": lambda one: one.narrow(1, 128, 64),
        "slice": lambda one: one[8:24, 3:9],
        "row": lambda one: one[5],
        "last column": lambda one: one[:, -1],
        "every other": lambda one: one[::2],
        "turned": lambda one: one.t(),
        "turned rows": lambda one: one.t().narrow(0, 32, 32),
        "turned columns": lambda one: one.t().narrow(1, 8, 8),
        "chunk": lambda one: one.chunk(4, dim=0)[2],
        "split": lambda one: one.split([16, 48], dim=0)[1] if one.size(0) == 64 else one,
        "view": lambda one: one.view(8, -1, one.size(1))[3],
        "reshape": lambda one: one.reshape(-1),
        "permute": lambda one: one.view(8, -1, one.size(1)).permute(2, 0, 1),
        "unsqueeze": lambda one: one.unsqueeze(0),
        "expand": lambda one: one[:1].expand(3, -1),
        "data": lambda one: one.data[4:8],
        "detach": lambda one: one.detach(),
    }
    values = {
        "float": lambda one: one.float(),
        "sum": lambda one: one.double().sum(),
        "contiguous": lambda one: one.t().contiguous(),
        "clone": lambda one: one.clone(),
        "plus": lambda one: one + 1,
        "cat": lambda one: torch.cat([one, one]),
        "stack": lambda one: torch.stack([one[0], one[1]]),
        "to": lambda one: one.to(torch.float64),
        "equal": lambda one: torch.tensor(torch.equal(one, one)),
        "index": lambda one: one[torch.tensor([1, 3])],
        "item": lambda one: torch.tensor(one[1, 1].item()),
    }
    wrong: list[str] = []
    for threshold in (2048, 1 << 20):
        lazy_tensors._SHORTEST_RUN_BYTES = threshold
        for span in (4096, 64 << 20):
            lazy_tensors._SPAN_BYTES = span
            for tensor in ("matrix", "half", "packed"):
                for name, view in views.items():
                    lazy, real = view(tensors[tensor]), view(plain[tensor])
                    into = torch.empty(real.shape, dtype=real.dtype)
                    into.copy_(lazy)
                    strided = torch.empty((*real.shape, 2), dtype=real.dtype)[..., 0]
                    strided.copy_(lazy)
                    kept = isinstance(lazy, LazyTensor) and lazy.stride() == real.stride()
                    if not (
                        kept
                        and torch.equal(into, real)
                        and torch.equal(strided, real)
                        and torch.equal(lazy.read(), real)
                    ):
                        wrong.append(f"{tensor} {name} {threshold} {span}")
                for name, value in values.items():
                    if not torch.equal(value(tensors[tensor]), value(plain[tensor])):
                        wrong.append(f"{tensor} {name} {threshold} {span}")
            for tensor, real in plain.items():
                into = torch.zeros(real.shape, dtype=real.dtype)
                into.copy_(tensors[tensor])
                whole = into.view(torch.uint8) if real.dtype.itemsize == 1 else into
                other = real.view(torch.uint8) if real.dtype.itemsize == 1 else real
                if not torch.equal(whole, other):
                    wrong.append(tensor)
            experts = tensors["experts"]
            if not torch.equal(experts[2].narrow(0, 256, 256).read(), plain["experts"][2, 256:512]):
                wrong.append("expert")
            if not torch.equal(experts.narrow(1, 256, 256).read(), plain["experts"][:, 256:512]):
                wrong.append("experts")
    # What changes a tensor in place changes it for every view, before and after

    for tensor in ("matrix", "half", "packed"):
        lazy, real = opened()[0][tensor], plain[tensor].clone()
        early = [one[:, 8:16] for one in (lazy, real)]
        for one in (lazy, real):
            one[4:8].zero_()
            one.t()[2].mul_(2)
            assert one.add_(1) is one
        into = torch.empty(real.shape, dtype=real.dtype)
        into.copy_(lazy)
        late = torch.equal(lazy[2:6].read(), real[2:6])
        if not (late and torch.equal(into, real) and torch.equal(early[0].read(), early[1])):
            wrong.append(f"{tensor} in place")
    # Bytes seen as another type, whole and then cut, as loaders of packed scales do
    for tensor, dtype in (("half", torch.int16), ("fp8", torch.uint8), ("matrix", torch.int16)):
        seen, real = tensors[tensor].view(dtype), plain[tensor].view(dtype)
        if not (torch.equal(seen + 0, real) and torch.equal(seen[:, 3:9] + 0, real[:, 3:9])):
            wrong.append(f"{tensor} as {dtype}")
        cut = tensors[tensor][:, 4:12].contiguous().view(dtype)
        if not torch.equal(cut, plain[tensor][:, 4:12].contiguous().view(dtype)):
            wrong.append(f"{tensor} cut, as {dtype}")
    found["wrong"] = wrong

    # How much of the file is read for each rank's part, in bytes

    for name, take in {
        "rows": lambda one, rank: one.narrow(0, rank * 16, 16),
        "columns": lambda one, rank: one.narrow(1, rank * 1024, 1024),
    }.items():
        for cache in (None, out / "cache"):
            read = 0
            for rank in range(4):
                tensors, counter, _ = opened(cache)
                before = counter.bytes
                into = torch.empty(take(plain["matrix"], rank).shape)
                into.copy_(take(tensors["matrix"], rank))
                read += counter.bytes - before
            found[f"{name}{' cached' if cache else ''}"] = read
    found["size"] = plain["matrix"].nbytes
    found["cache"] = sorted(path.suffix for path in (out / "cache").iterdir())

    # A file that is not the one that was verified

    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    tensors, _, _ = opened()
    said: dict[str, str] = {}
    for name, lazy in tensors.items():
        try:
            lazy.clone()
        except StoreError as error:
            said[name] = str(error)
    found["changed"] = said
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    remote_weights._SMALL_BYTES = 4096
    main(Path(sys.argv[1]), Path(sys.argv[2]))
