"""Run the task `shard` on snapshots it must build or refuse; what came of each goes to CASES.

    python shard_cases.py MODELS OUT CASES

MODELS is what tiny_models.py writes. One process for all: importing vLLM takes 10 s.
"""

import json
import os
import pickle
import shutil
import signal
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from building import request
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.tasks import ShardRequest
from tensorize_assets.worker import preflight, shard
from tensorize_assets.worker.session import Progress

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def attempt(asked: ShardRequest, progress: Progress | None = None) -> dict[str, Any]:
    """What the task answers or raises, and what it leaves in its root and its scratch."""
    root, scratch = Path(asked.root), Path(asked.scratch_dir)
    try:
        result = shard.run(asked, progress or Progress.silent())
        answer: dict[str, Any] = {"result": result.model_dump(mode="json")}
    except TensorizeAssetsError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001 - a test reads which it was
        answer = {"unforeseen": f"{type(error).__name__}: {error}"}
    left = [name for name in files(root) if not name.startswith(".scratch")]
    return answer | {"root": left, "scratch": files(scratch) if scratch.is_dir() else []}


class KilledAt(Progress):
    """Kills its own process the moment the work gets to a stage of a rank."""

    def __init__(self, stage: str, rank: int) -> None:
        super().__init__(lambda _message, _level: None)
        self.at = (stage, rank)

    def update(self, stage: str, rank: int | None = None, *_: object, **__: object) -> None:
        if (stage, rank) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(asked: ShardRequest, stage: str, rank: int) -> dict[str, Any]:
    """Run the task in a process that is killed at a stage; how it ended and what it left."""
    child = os.fork()
    if not child:
        attempt(asked, KilledAt(stage, rank))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = files(Path(asked.root))
    return {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "root": [name for name in found if not name.startswith(".scratch")],
        "scratch": [name for name in found if name.startswith(".scratch")],
    }


def config_only(folder: Path, config: Any, **changes: object) -> Path:
    """A snapshot without weights: what is refused before they are read needs none."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a snapshot with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_bin(source: Path, folder: Path, weights: object) -> Path:
    """A copy of a snapshot whose weights are in torch's own format, a pickle."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


class Attack:
    """Unpickled by anything that lets a pickle call what it likes, it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.target),)


def main(models: Path, out: Path, cases: Path) -> None:
    snapshots = out / "snapshots"
    snapshots.mkdir(parents=True)
    llama = models / "llama"
    found: dict[str, Any] = {}

    def case(name: str, snapshot: Path, **changes: object) -> None:
        found[name] = attempt(request(snapshot, out / name, name, **changes))

    # First of all: a fork waits for ever for threads that only the process it came from has, and
    # torch starts some with its first work.
    again = {}
    for stage, rank in (("loading", 0), ("storing", 0), ("storing", 1)):
        name = f"killed {stage} {rank}"
        again[name] = request(llama, out / name, "llama", tensor_parallel_size=2)
        found[name] = killed(again[name], stage, rank)
    for name, asked in again.items():
        found[name]["again"] = attempt(asked)

    case("plain", llama)
    case("one thread", llama, serialization_kwargs={"limit_cpu_concurrency": 1})
    case("float32", llama, dtype="float32")
    case("auto", llama, dtype="auto")

    weights = load_file(llama / "model.safetensors")
    case("bin", with_bin(llama, snapshots / "bin", weights))
    attack = with_bin(llama, snapshots / "attack", weights | {"x": Attack(out / "attacked")})
    case("attack", attack)
    found["attack"]["attacked"] = (out / "attacked").exists()
    # The attack is one: plain unpickling runs it.
    pickle.loads(pickle.dumps(Attack(out / "attacked")))  # noqa: S301
    found["attack"]["works"] = (out / "attacked").exists()

    config = MambaConfig(
        vocab_size=500, hidden_size=64, state_size=4, num_hidden_layers=2, time_step_rank=4
    )
    torch.manual_seed(0)
    mamba = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mamba.save_pretrained(snapshots / "mamba")
    mamba.get_parameter("backbone.layers.1.mixer.A_log").data += torch.randn(128, 4) / 100
    mamba.save_pretrained(snapshots / "lossy")
    case("lossless", snapshots / "mamba")
    case("lossy", snapshots / "lossy")

    small = LlamaConfig(**SMALL)
    unknown = {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    case("unknown", config_only(snapshots / "unknown", small, **unknown))
    case("no config", snapshots)
    case("heads", llama, tensor_parallel_size=3)
    deep = LlamaConfig(**SMALL | {"num_hidden_layers": 400})
    case("deep", config_only(snapshots / "deep", deep))

    def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.__delitem__(f"model.layers.1.{name}.weight")

    def break_one(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:100].contiguous()

    for name in ("mlp.down_proj", "self_attn.k_proj", "input_layernorm"):
        case(f"no {name}", changed(llama, snapshots / name, drop(name)))
    case("nan", changed(llama, snapshots / "nan", break_one))
    case("narrow norm", changed(llama, snapshots / "narrow", narrow))
    cut = snapshots / "cut"
    shutil.copytree(llama, cut)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    case("cut", cut)

    usage = namedtuple("usage", "total used free")
    with patch.object(preflight.shutil, "disk_usage", lambda _: usage(10**6, 0, 10**6)):
        case("scratch", llama, tensor_parallel_size=2)

    asked = request(llama, out / "held", "held")
    with scratch_folder(Path(asked.scratch_dir), asked.directory):
        found["held"] = attempt(asked)
    found["released"] = attempt(asked)

    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
