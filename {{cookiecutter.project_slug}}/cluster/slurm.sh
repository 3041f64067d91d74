#!/bin/bash
# What a job of `python train.py launcher=slurm` does. Edit it for your site.
#
#   sbatch [options] cluster/slurm.sh <run folder>…
#
# It starts in the project's root. A job array takes one run folder a task.
set -u

runs=("$@")
run=${runs[${SLURM_ARRAY_TASK_ID:-0}]}
# In an array, SLURM_JOB_ID can mean all of it; <array>_<task> is this task alone.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
exec >>"$run/slurm.log" 2>&1
touch "$run/.started"

# Your site: modules, an environment, variables.
#   module load cuda
#   source .venv/bin/activate
#   export NCCL_SOCKET_IFNAME=ib0

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# The launcher passes its own Python on. In a container: python=(apptainer exec --nv my.sif python)
python=("${PYTHON:-python}")

# SLURM warns this script before the time limit (sbatch --signal). The ranks are then told to save
# and end. `scancel --signal` does that: SIGTERM to srun itself would kill them at once.
warned=
trap 'warned=1; scancel --signal=TERM "$job"' USR1
# scancel, requeue and preemption reach the ranks without us; stay until they have saved.
trap : TERM

srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${python[@]}" train.py \
    --config-path "$run" --config-name config resume=auto launcher._target_=null &
step=$!
wait "$step"
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ends a wait early
wait "$step"
status=$?

# Back into the queue where the time limit was the reason, and only there: who cancels a job wants it
# ended, and preempted jobs are requeued by SLURM itself.
if [[ $warned && $status == 143 ]]; then
    if [[ $run/checkpoints/last.ckpt -nt $run/.started ]]; then
        scontrol requeue "$job"
    else
        echo "Not requeued: nothing was saved before the time limit. A longer launcher.time helps."
    fi
fi
exit "$status"
