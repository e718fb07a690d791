# The rest of job.sh. The lines before it define $folder (the launch's folder), $reached (a file with the run's progress when it was
# stopped), $requeues (whether this job requeues itself) and nodes() (srun, which runs `node.sh` on every node).
if [ ! -r "$folder/node.sh" ]; then
  echo "$folder cannot be read on $(hostname): set ROLLCALL_LAUNCHES to a folder that all nodes share" >&2
  exit 1
fi
rm -f "$folder/status" "$reached"
export SLURM_EXPORT_ENV=ALL  # the tasks get the variables that the lines above set
limit_is_near=
trap 'limit_is_near=yes; kill -USR1 "$tasks" 2>/dev/null' USR1  # Slurm sends it before the time limit
trap : TERM  # scancel signals the tasks too; wait for them
nodes &
tasks=$!
wait "$tasks"
while kill -0 "$tasks" 2>/dev/null; do wait "$tasks"; done  # a signal interrupts `wait`
wait "$tasks"
status=$?
if [ "$status" = 75 ] && [ -n "$limit_is_near" ] && [ -n "$requeues" ]; then
  at=$(cat "$reached" 2>/dev/null) || at="its preparation"
  if [ "$at" = "$(cat "$folder/requeued" 2>/dev/null)" ]; then
    echo "the run was stopped at $at twice, without progress in between, so job $SLURM_JOB_ID does not requeue itself; give it more" \
      "time (launch.slurm.time), or see above what takes so long, and launch it again" >&2
  else
    printf "%s\n" "$at" > "$folder/requeued"
    echo "the run was stopped before the time limit, at $at; job $SLURM_JOB_ID requeues itself"
    scontrol requeue "$SLURM_JOB_ID" && exit 75
  fi
fi
echo "$status" > "$folder/status"
exit "$status"
