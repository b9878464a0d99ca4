# One image for CPUs and for NVIDIA GPUs: torch's wheels bring the libraries of CUDA, and the host its driver.
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) --tag kvbench .
#   docker run --rm --gpus all kvbench method=heatkv budget=0.04
FROM python:3.11-slim
# Triton compiles a launcher in C on the first use of a GPU.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --user-group kvbench && mkdir /kvbench && chown kvbench:kvbench /kvbench
USER kvbench
WORKDIR /kvbench
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
# What follows to the last RUN installs as the Makefile does.
COPY --chown=kvbench:kvbench requirements.lock ./
RUN python3 -m venv .venv \
 && .venv/bin/python -m pip install --quiet --disable-pip-version-check uv \
 && .venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes -r requirements.lock \
 || .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
COPY --chown=kvbench:kvbench . .
RUN .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
ENV PATH=/kvbench/.venv/bin:$PATH OMP_NUM_THREADS=1
# The demo: a build that ends can generate and score. It also leaves compiled modules.
RUN python run.py method=heatkv budget=0.04 && rm -rf runs && mkdir runs
ARG COMMIT=""
ENV KVBENCH_COMMIT=$COMMIT
ENTRYPOINT ["kvbench"]
CMD ["method=heatkv", "budget=0.04"]
