#!/bin/bash
# Run systemd units for real, in a container with its own root: nothing of this machine is visible
# inside except the folders bound below, read-only.
#
#   run_units.sh ROOTFS UNITS_DIR DRIVER OUT_DIR [NSPAWN OPTIONS...]      (as root)
#
# ROOTFS     made once by: debootstrap --variant=minbase \
#              --include=systemd,systemd-sysv,python3-minimal,libpython3-stdlib,nginx-light bookworm ROOTFS
# UNITS_DIR  *.service files; copied to /etc/systemd/system of a throw-away copy of ROOTFS
# DRIVER     a script, run by a oneshot unit once the container is up; its output goes to OUT_DIR/driver.log,
#            and it may write more to /out. The container is powered off when it ends.
#
# Needs systemd-container. Never boot systemd by hand with unshare on a shared machine instead:
# sysinit.target runs systemd-tmpfiles, and that empties /tmp.
set -eu
ROOTFS=$(readlink -f "$1"); UNITS=$(readlink -f "$2"); DRIVER=$(readlink -f "$3")
mkdir -p "$4"; OUT=$(readlink -f "$4"); shift 4
COPY=$(mktemp -d); trap 'rm -rf --one-file-system "$COPY"' EXIT
cp -a --reflink=auto "$ROOTFS/." "$COPY/"
cp "$UNITS"/*.service "$COPY/etc/systemd/system/"
install -m 755 "$DRIVER" "$COPY/usr/local/bin/driver"
mkdir -p "$COPY/out" "$COPY/etc/systemd/system/multi-user.target.wants"
cat > "$COPY/etc/systemd/system/driver.service" <<U
[Service]
Type=oneshot
ExecStart=/usr/local/bin/driver
ExecStopPost=/bin/systemctl poweroff --force
StandardOutput=file:/out/driver.log
StandardError=inherit
U
ln -s ../driver.service "$COPY/etc/systemd/system/multi-user.target.wants/driver.service"
timeout -k 5 "${LIMIT_S:-120}" systemd-nspawn -q -D "$COPY" --bind="$OUT:/out" --register=no --keep-unit \
  --private-network --console=pipe "$@" --boot systemd.unit=multi-user.target < /dev/null > "$OUT/nspawn.log" 2>&1 || true
cat "$OUT/driver.log"
