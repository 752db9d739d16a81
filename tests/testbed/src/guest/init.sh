#!/usr/bin/busybox sh
# First process of a test machine: drivers, NICs, then the agent that runs the host's commands. The
# kernel's command line names the machine: machine=0 or machine=1.
set -e
trap '/usr/bin/busybox poweroff -f' EXIT

/usr/bin/busybox --install -s /usr/bin
export PATH=/usr/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs -o mode=1777 shm /dev/shm
hostname "machine$machine"

while read -r module; do insmod "/modules/$module"; done < /modules/order

ip link set lo up
for path in /sys/class/net/eth*; do
    eth=${path##*/}
    nic=${eth#eth}
    ip link set "$eth" up mtu 4200
    ip address add "10.0.$nic.$((machine + 1))/24" dev "$eth"
    rdma link add "rxe$nic" type rxe netdev "$eth"
done

ulimit -l unlimited
testbed agent /dev/vport0p1
