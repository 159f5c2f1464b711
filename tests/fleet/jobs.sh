# Jobs for slurm.sh, run as alice; tests/suite/fleet/slurm.rs reads their output.
cd /home/alice
ended() { for i in $(seq 300); do squeue -h | grep -q . || return 0; sleep 0.1; done; echo "the jobs do not end"; exit 1; }

cat > job.sh << 'END'
#!/bin/sh
echo "$CUDA_INJECTION64_PATH $NVTX_INJECTION64_PATH $GPUMEM_JOB"
export CUDA_INJECTION64_PATH=/tools/other.so
srun -O -n 2 sh -c 'echo "$CUDA_INJECTION64_PATH $GPUMEM_JOB $GPUMEM_NEXT_INJECTION64_PATH"; exec /opt/fake/bin/trainer --steps 50 --step-ms 2' > tasks
END
folder=${GPUMEM_SIM##*/}
sbatch -Q -o batch.out -J "a'; touch /tmp/$folder/slurm/pwned; \$(touch /tmp/$folder/slurm/pwned) \"" job.sh
ended
echo "== batch"
cat batch.out
echo "== tasks"
cat tasks
echo "== report"
cat /var/spool/gpumem/1.node0.txt
echo "== copy"
cat gpumem-1-node0.txt
echo "== owners"
stat -c '%U %a' /var/spool/gpumem/1.node0.txt gpumem-1-node0.txt

echo theirs > precious
ln -s /home/alice/precious gpumem-2-node0.txt
srun -Q /opt/fake/bin/trainer --steps 5 > trainer.out
ended
echo "== link"
cat precious

GPUMEM_DISABLE=1 srun -Q sh -c '/opt/fake/bin/trainer --steps 5 > trainer.out; echo "${CUDA_INJECTION64_PATH:-none}"' > off
ended
srun -Q true
ended
echo "== off"
cat off
echo "== reports"
ls /var/spool/gpumem
echo "== node"
sinfo -h -o %T
