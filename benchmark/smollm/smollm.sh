#!/usr/bin/env bash
# Model and tasks, training, measuring, tables and picture. What is there already is kept.
#     bash benchmark/smollm/smollm.sh [--quick] [--trl trl1/bin/python]
set -euo pipefail
cd "$(dirname "$0")/../.."
python benchmark/smollm/prepare.py
python benchmark/smollm/smollm.py "$@"
