"""The real entry point of a worker, with stand-in tasks that take no vLLM."""

import sys

from tensorize_assets.core.tasks import (
    AdaptersRequest,
    EncryptRequest,
    ReferenceRequest,
    ReloadRequest,
    ShardRequest,
)
from tensorize_assets.worker.__main__ import Task, main

if __name__ == "__main__":
    sys.exit(
        main(
            {
                "shard": Task(ShardRequest, "stand_in.tasks:shard"),
                "adapters": Task(AdaptersRequest, "stand_in.tasks:adapters"),
                "encrypt": Task(EncryptRequest, "stand_in.tasks:encrypt"),
                "reference": Task(ReferenceRequest, "stand_in.tasks:reference"),
                "reload": Task(ReloadRequest, "stand_in.tasks:reload"),
            }
        )
    )
