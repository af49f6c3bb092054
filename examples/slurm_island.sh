#!/bin/bash
#SBATCH --job-name=island
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue --open-mode=append
# A learner on all nodes of a job, life after life: sbatch slurm_island.sh run.toml NAME

# Ten minutes before the time limit (--signal) the learner is asked to leave.
trap 'leaving=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
srun diloco learner --config "$1" --learner "$2" --coordinator auto &
step=$!
# A signal ends `wait` before the step ends.
while wait "$step"; status=$?; kill -0 "$step" 2>/dev/null; do :; done

case "$status" in
    0) [ -n "$leaving" ] || exit 0 ;;                  # the run has ended
    2 | 65 | 72 | 73 | 76 | 77) exit "$status" ;;      # what no restart mends
    1 | 126 | 127) [ "$SECONDS" -ge 300 ] || exit "$status" ;;  # an error at once comes again
esac
scontrol requeue "$SLURM_JOB_ID"
