#!/usr/bin/env bash
# A Slurm cluster of one node on this machine, for tests: no systemd, no cgroups, no database, no settings outside FOLDER.
#   slurm_node.sh start FOLDER    munged, slurmctld and slurmd as this user; returns when the node is idle
#   slurm_node.sh stop FOLDER     ends them
# Clients find it by SLURM_CONF=FOLDER/slurm.conf. FOLDER's path must be short: it holds a socket.
# Debian's packages: munge slurmctld slurmd slurm-client
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
command=$1
folder=$(realpath "$2")
export SLURM_CONF="$folder/slurm.conf"

stop() {
    for daemon in slurmd slurmctld munged; do
        [ -s "$folder/$daemon.pid" ] || continue
        pid=$(cat "$folder/$daemon.pid")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$pid" 2>/dev/null || true
    done
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

start() {
    local missing=()
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        echo "not installed: ${missing[*]}; on Debian: apt-get install munge slurmctld slurmd slurm-client" >&2
        exit 1
    fi
    local user host
    user=$(id -un)
    host=$(hostname -s)
    chmod 755 "$folder"  # munged refuses a socket that others cannot reach
    mkdir -p "$folder/state" "$folder/spool"
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 400 "$folder/munge.key"
    cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
$(slurmd -C | head -n 1) NodeAddr=127.0.0.1 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    trap 'stop; tail -n 5 "$folder"/*.log >&2' ERR
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
    slurmctld
    slurmd
    for _ in $(seq 300); do
        case $(sinfo --noheader --format=%T 2>/dev/null || true) in idle) return ;; esac
        sleep 0.1
    done
    echo "the node is not idle after 30 s:" >&2
    sinfo >&2
    false
}

case $command in
start) start ;;
stop) stop ;;
*) echo "usage: $0 start|stop FOLDER" >&2; exit 2 ;;
esac
