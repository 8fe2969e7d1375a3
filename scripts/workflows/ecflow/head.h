# Tell the server that the job begins. If a command fails (set -e) or a signal comes, the trap tells it that the job failed.
set -e
export ECF_PORT=%ECF_PORT% ECF_HOST=%ECF_HOST% ECF_NAME=%ECF_NAME% ECF_PASS=%ECF_PASS% ECF_TRYNO=%ECF_TRYNO% ECF_RID=$$
ecflow_client --init=$$
trap 'code=$?; trap 0; ecflow_client --abort="status $code"; exit 0' 0 1 2 15
