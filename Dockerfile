# The environment of the GPU tests: Python 3.12, torch 2.11 for CUDA 13.0, and the other versions of constraints.txt.
#   docker build -t memsaver .
#   docker run --gpus all --shm-size=16g --rm memsaver memsaver doctor
FROM ubuntu:24.04
# Triton compiles kernels with gcc and Python's headers; g++ compiles the hook into torch's CPU allocator; KubeRay probes by wget.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ make python3-dev python3-venv wget && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/memsaver/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python3 -m venv /opt/memsaver
COPY pyproject.toml setup.py constraints.txt README.md LICENSE /clone/
COPY memsaver /clone/memsaver
COPY kvcache /clone/kvcache
COPY rollout /clone/rollout
COPY trainer_bridge /clone/trainer_bridge
COPY recipes /clone/recipes
RUN pip install --no-cache-dir -c /clone/constraints.txt '/clone/[all]'
RUN memsaver doctor
WORKDIR /work
