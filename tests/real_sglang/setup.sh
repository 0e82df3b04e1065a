#!/usr/bin/env bash
# Install SGLang 0.5.23 for a CPU, and two tiny models, into a separate virtual environment:
#
#   setup.sh VENV [PYTHON]
#
# It needs about 3 GB and some minutes, and nothing but the package index. It does nothing when VENV already holds what
# these files ask for. No file of SGLang is changed: a stub stands in for the one vLLM kernel it imports (stubs/), and
# torchvision's registration of CUDA operators is emptied.
set -euo pipefail
venv=$1
python=${2:-python3.11}
here=$(cd "$(dirname "$0")" && pwd)

wanted=$(cat "$here"/{setup.sh,requirements.txt,make_tiny_model.py} "$here"/stubs/vllm/*.py | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
rm -f "$venv/.installed"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install --quiet uv
# torch comes first and by pip: uv would resolve it to a CUDA build of several GB. The rest by uv: pip's resolver takes
# minutes to walk back through these versions.
"$venv/bin/pip" install --quiet torch==2.13.0
uv() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
uv --no-deps sglang==0.5.23 torchvision==0.28.0
uv --requirement "$here/requirements.txt" torch==2.13.0

packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: > "$packages/torchvision/_meta_registrations.py"
rm -rf "$packages/vllm"
cp -r "$here/stubs/vllm" "$packages/vllm"

export HF_HUB_OFFLINE=1
for seed in 0 1; do
  "$venv/bin/python" "$here/make_tiny_model.py" "$venv/models/seed-$seed" "$seed"
done
printf '%s\n' "$wanted" > "$venv/.installed"
