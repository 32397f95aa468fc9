#!/usr/bin/env bash
# Installs the GPU stack into a virtual environment: install_gpu_stack.sh VENV. Used by Dockerfile and apptainer.def.
# Needs an image with the CUDA 13 toolkit (nvcc also at run time: HybridEP compiles its kernels on first use), cuDNN
# headers, Python 3.12, git and a C++ compiler.
set -euo pipefail
venv=$1

# The set that was run together on an H200; change them together, and run `make test-gpu`.
TORCH=2.11.0 VLLM=0.24.0 RAY=2.55.1 MEGATRON_CORE=0.19.2 TRANSFORMER_ENGINE=2.11.0
DEEPEP_COMMIT=${DEEPEP_COMMIT:-94a9f8f}   # branch hybrid-ep
# 9.0 is H100, H200 and GH200; 10.0 is B200 and GB200. HybridEP's own default (10.0) does not run on Hopper.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} MAX_JOBS=${MAX_JOBS:-8} NVTE_FRAMEWORK=pytorch
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

python3.12 -m venv "$venv"
pip=("$venv/bin/python" -m pip install)
"${pip[@]}" "torch==$TORCH" "vllm==$VLLM" "ray==$RAY" "megatron-core==$MEGATRON_CORE" einops psutil safetensors \
  math-verify==0.9.0 reasoning-gym==0.1.25 wandb tensorboard textual hydra-core omegaconf pydantic pyyaml rich \
  setuptools wheel ninja pybind11 packaging pytest hypothesis
# Its torch half is built here, against the torch that was just installed.
"${pip[@]}" --no-build-isolation "transformer-engine[pytorch]==$TRANSFORMER_ENGINE"

# Only HybridEP: the branch's other extension needs NVSHMEM, and nothing here uses it. HYBRID_EP_MULTINODE=1 with
# RDMA_CORE_HOME builds the transport between NVLink domains; without it EP stays within one.
build=$(mktemp -d)
git clone --quiet --branch hybrid-ep https://github.com/deepseek-ai/DeepEP.git "$build/deepep"
cd "$build/deepep"
git checkout --quiet "$DEEPEP_COMMIT"
git submodule update --quiet --init --recursive
sed -i 's/get_extension_deep_ep_cpp(),//' setup.py
echo 'from .hybrid_ep_buffer import HybridEPBuffer' > deep_ep/__init__.py
"${pip[@]}" --no-build-isolation --no-deps .
cd / && rm -rf "$build"
