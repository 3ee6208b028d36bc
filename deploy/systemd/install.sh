#!/usr/bin/env bash
# Installs the binary, its user, folders, settings and systemd units on this machine; run as root. What is there already
# but for binary and units is kept. DESTDIR installs below another root and starts nothing.
#
#   deploy/systemd/install.sh BINARY coordinator|worker...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=${DESTDIR:-}

fail() { echo "install: $*" >&2; exit 1; }

[ $# -ge 2 ] || fail "usage: install.sh BINARY coordinator|worker..."
binary=$1
shift
[ -x "$binary" ] || fail "$binary is no program: cargo build --release --workspace"
for role in "$@"; do
    [ -f "$here/lockstep-$role.service" ] || fail "$role is neither coordinator nor worker"
done
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "only root can install"

install -D -m 755 "$binary" "$root/usr/local/bin/lockstep"
install -d -m 755 "$root/etc/lockstep" "$root/var/lib/lockstep" "$root/var/lib/lockstep/models"
[ -f "$root/etc/lockstep/lockstep.toml" ] || install -m 644 "$here/lockstep.toml" "$root/etc/lockstep/lockstep.toml"
for role in "$@"; do
    install -D -m 644 "$here/lockstep-$role.service" "$root/etc/systemd/system/lockstep-$role.service"
done
[ -z "$root" ] || exit 0

getent passwd lockstep >/dev/null ||
    useradd --system --user-group --home-dir /var/lib/lockstep --no-create-home --shell /usr/sbin/nologin lockstep
# The devices of GPUs that are reached through Vulkan belong to these, where there are any.
for group in render video; do
    ! getent group "$group" >/dev/null || usermod --append --groups "$group" lockstep
done
systemctl daemon-reload
units=("${@/#/lockstep-}")
systemctl enable "${units[@]}"
systemctl restart "${units[@]}"
systemctl --no-pager --lines=0 status "${units[@]}"
