#!/usr/bin/env bash
# Run the server in the foreground: run.sh VENV PORT [SGLang's own flags]. It is up when GET /ready answers 200 (about a
# minute on two cores, 2 GB of memory).
set -euo pipefail
venv=$1 port=$2
shift 2
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec "$venv/bin/python" -m sglang.launch_server \
  --model-path "$venv/models/seed-0" --served-model-name tiny \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph \
  --mem-fraction-static 0.1 --max-total-tokens 8192 --max-running-requests 8 --skip-server-warmup --sleep-on-idle \
  --host 127.0.0.1 --port "$port" "$@"
