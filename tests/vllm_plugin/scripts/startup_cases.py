"""Load a build of real_builds.py as vLLM's processes do under `tensorize serve`.

    python startup_cases.py BUILD OUT [KEYFILE]

What they print is in OUT/said, and what the rest is in OUT/case.json. One process a case: a server
says once what it has loaded.
"""

import json
import os
import sys
import threading
from pathlib import Path

from serving_files import serving

from tensorize_assets.core import layout
from tensorize_assets.core.serving import VARIABLE


def main(build: Path, out: Path, keyfile: Path | None) -> None:
    served = serving(build, str(build.parents[2]), out, keyfile)
    os.environ[VARIABLE] = str(out / "serving.json")
    said = os.open(out / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    from vllm import LLM

    ranks = 2 if build.name.startswith("two") else 1
    # At one rank vLLM looks for model.tensors in the model's folder by itself.
    name = layout.tensorizer_uri_name(ranks)
    settings = {"tensorizer_uri": f"{build}/{name}", "verify_hash": True} if ranks > 1 else {}
    failed = None
    try:
        llm = LLM(
            model=str(build),
            load_format="tensorizer",
            model_loader_extra_config=settings,
            dtype="bfloat16",
            tensor_parallel_size=ranks,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=2,
            kv_cache_memory_bytes=64 << 20,
        )
        assert llm.generate("the quick", use_tqdm=False)
    except Exception as error:  # noqa: BLE001 - that it fails is the case
        failed = str(error)
    for thread in threading.enumerate():
        if thread.name == "start-up-report":
            thread.join(60)
    from prometheus_client import generate_latest

    case = {
        "failed": failed,
        "reports": sorted(path.name for path in Path(served.reports).iterdir()),
        "hashed": any(
            json.loads(path.read_bytes())["tensors"] for path in Path(served.reports).glob("rank-*")
        ),
        "metrics": [
            line
            for line in generate_latest().decode().splitlines()
            if line.startswith("tensorize_assets_")
        ],
    }
    (out / "case.json").write_text(json.dumps(case))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
