#!/usr/bin/env bash
# One training on two nodes, here both on this machine, on its CPU: examples/two_nodes.sh [FOLDER]
#
# On a cluster every node runs the same command, `node` below, with the first node's name in place of localhost, as many
# processes as it has GPUs, and FOLDER on a file system that all of them see. The nodes find each other at HOST:PORT,
# agree on who is who, share every batch, and the main process keeps the folder and prints. Whatever ends the training,
# the same command on both goes on with it.
set -euo pipefail

folder=${1:-runs/two_nodes}
port=${PORT:-29511}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=

node() {
    exec "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes 2 --nproc-per-node 1 \
        --rdzv-backend c10d --rdzv-endpoint "localhost:$port" --rdzv-id namm --local-addr localhost \
        -m namm train map periodic --out "$folder" \
        --data.size 16 --data.n-train 256 --data.n-val 32 --data.n-test 32 \
        --map.train.budget "40 steps" --map.train.batch-size 16
}

(node) &
second=$!
trap 'kill "$second" 2>/dev/null || true' EXIT
(node)
wait "$second"
echo "two nodes trained one map; it is in $folder/map"
