#!/bin/sh
# Starts a real Slurm with one node: its packages are mounted over this machine's files, nothing is installed (over.sh).
# Its daemons end with the commands.
#
#   slurm.sh PACKAGES FOLDER SCRIPTS OURS FAKE COMMANDS    PACKAGES: unpacked; FOLDER: readable by every user, holds sim.env and generated files;
#                                                         SCRIPTS: config/slurm; COMMANDS: a shell script, run as alice (uid 1500)
set -e
if [ "$1" != inside ]; then
  exec "${0%/*}/over.sh" "$1" "$2" "$0" inside "$@"
fi
folder=$3 scripts=$4 ours=$5 fake=$6 commands=$7
cd /
mkdir -p run/gpumemd opt/ours opt/fake etc/slurm/gpumem var/spool/slurmctld var/spool/slurmd home/alice
mount --bind "$ours" opt/ours
mount --bind "$fake" opt/fake

hostname node0
ip link add veth0 type veth peer name veth1
ip addr add 10.99.0.1/24 dev veth0
ip link set veth0 up
ip link set veth1 up
echo '10.99.0.1 node0' >> etc/hosts
echo 'alice:x:1500:1500::/home/alice:/bin/sh' >> etc/passwd
echo 'alice:x:1500:' >> etc/group
chown 1500:1500 home/alice
cp "$scripts"/*.sh "$scripts"/gpumem.conf etc/slurm/gpumem/
printf 'GPUMEM_LIBRARY=/opt/ours/libgpumem.so\nGPUMEM_PATH=/opt/ours\n' \
  >> etc/slurm/gpumem/gpumem.conf
cat > etc/slurm/slurm.conf << END
ClusterName=test
SlurmctldHost=node0(10.99.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=2
Prolog=/etc/slurm/gpumem/prolog.sh
Epilog=/etc/slurm/gpumem/epilog.sh
TaskProlog=/etc/slurm/gpumem/task-prolog.sh
NodeName=node0 NodeAddr=10.99.0.1 CPUs=8
PartitionName=all Nodes=node0 Default=YES OverSubscribe=YES
END
sed -i 's/ CPUs=8/ CPUs='"$(nproc)"' RealMemory=500/' etc/slurm/slurm.conf

cat > run/inside << END
set -e
. $folder/sim.env
/opt/ours/gpumemd --config $folder/daemon.toml 2> $folder/gpumemd.log &
/usr/sbin/slurmctld-wlm -D > $folder/slurmctld.out 2>&1 &
/usr/sbin/slurmd-wlm -D -N node0 -d /usr/sbin/slurmstepd-wlm > $folder/slurmd.out 2>&1 &
for i in \$(seq 300); do sinfo -h -o %T 2> /dev/null | grep -qx idle && break; sleep 0.1; done
setpriv --reuid 1500 --regid 1500 --clear-groups env HOME=/home/alice USER=alice sh -e $commands
END
exec sh /run/inside
