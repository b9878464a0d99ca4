#!/bin/sh
# Install Debian's Slurm, which the tests of its launcher start by themselves; for root.
set -e
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o Acquire::http::Timeout=20 update
apt-get -qy --no-install-recommends install slurmctld slurmd slurm-client
