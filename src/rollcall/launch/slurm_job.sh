# The rest of job.sh. Before it come $folder (the launch's), $reached (a file that says how far a run has come when it is
# stopped), $requeues (whether this job requeues itself) and nodes() (srun, for `node.sh` on every node).
if [ ! -r "$folder/node.sh" ]; then
  echo "$folder cannot be read on $(hostname): set ROLLCALL_LAUNCHES to a folder that all nodes share" >&2
  exit 1
fi
rm -f "$folder/status" "$reached"
export SLURM_EXPORT_ENV=ALL  # what the lines above have set is for the tasks too
limit_is_near=
trap 'limit_is_near=yes; kill -USR1 "$tasks" 2>/dev/null' USR1  # Slurm, before the time limit
trap : TERM  # scancel signals the tasks too; wait for them
nodes &
tasks=$!
wait "$tasks"
while kill -0 "$tasks" 2>/dev/null; do wait "$tasks"; done  # a signal ends a wait
wait "$tasks"
status=$?
if [ "$status" = 75 ] && [ -n "$limit_is_near" ] && [ -n "$requeues" ]; then
  at=$(cat "$reached" 2>/dev/null) || at="its preparation"
  if [ "$at" = "$(cat "$folder/requeued" 2>/dev/null)" ]; then
    echo "the run was stopped at $at twice, without progress in between: job $SLURM_JOB_ID does not requeue itself; give it more" \
      "time (launch.slurm.time), or look above for what takes so long, and launch it again" >&2
  else
    printf "%s\n" "$at" > "$folder/requeued"
    echo "the run was stopped before the time limit, at $at; job $SLURM_JOB_ID requeues itself"
    scontrol requeue "$SLURM_JOB_ID" && exit 75
  fi
fi
echo "$status" > "$folder/status"
exit "$status"
