"""Build every model below MODELS at every TP with the worker's own task, into OUT, and
write the results to OUT/results.json (vLLM logs to stdout).

    python virtual_matrix.py MODELS OUT TP…
"""

import json
import sys
from pathlib import Path

from building import request

from tensorize_assets.worker import shard
from tensorize_assets.worker.session import Progress


def main(models: Path, out: Path, sizes: list[int]) -> None:
    results = {}
    for model in sorted(models.iterdir()):
        for size in sizes:
            asked = request(model, out, f"{model.name}/tp{size}", tensor_parallel_size=size)
            result = shard.run(asked, Progress.silent())
            results[f"{model.name}-{size}"] = result.model_dump(mode="json")
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
