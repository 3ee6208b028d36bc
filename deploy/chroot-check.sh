#!/usr/bin/env bash
# What the images do, as far as it goes without a container engine: the build stage's packages installed into a Debian made
# by debootstrap, then the packages that the distroless base holds unpacked into an empty root, and the binary run in it
# read-only, as user 65532, until a cluster of it answers. Needs root, debootstrap and Debian's archive.
#
#   deploy/chroot-check.sh BINARY MODEL.gguf [FOLDER of NVIDIA's libraries]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

fail() { echo "chroot-check: $*" >&2; exit 1; }
say() { echo "== $*" >&2; }

[ $# -ge 2 ] || fail "usage: chroot-check.sh BINARY MODEL.gguf [LIBRARIES]"
[ "$(id -u)" = 0 ] || fail "only root can make a chroot"
command -v debootstrap >/dev/null || fail "debootstrap is missing"
binary=$(realpath "$1") model=$(realpath "$2") libraries=${3:+$(realpath "$3")}

work=$(mktemp -d)
pids=()
cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; done
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT

say "build stage: Debian, and the packages that Dockerfile.cpu installs"
mirror=$(awk '$1 ~ /^URIs:/ { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' \
    /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null || true)
debootstrap --variant=minbase bookworm "$work/build" "${mirror:-http://deb.debian.org/debian}" >"$work/log" 2>&1 ||
    { tail -5 "$work/log" >&2; fail "debootstrap failed"; }
cp /etc/resolv.conf "$work/build/etc/resolv.conf"
[ ! -d /etc/apt/apt.conf.d ] || cp /etc/apt/apt.conf.d/* "$work/build/etc/apt/apt.conf.d/" 2>/dev/null || true
step=$(sed -n '/^RUN apt-get update/,/[^\\]$/p' "$here/Dockerfile.cpu" | sed 's/^RUN //; s/\\$//' | tr '\n' ' ')
chroot "$work/build" /bin/sh -ec "$step" >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; fail "a step of the build stage failed: $step"; }
chroot "$work/build" protoc --version >&2
[ -f "$work/build/usr/include/google/protobuf/descriptor.proto" ] || fail "protoc's own files are missing"

say "last stage: what the distroless base holds, and the binary"
mkdir -p "$work/debs" "$work/image"
chroot "$work/build" /bin/sh -ec "apt-get update && cd /tmp && apt-get download \
    base-files ca-certificates libc6 libgcc-s1 libgomp1 libssl3 libstdc++6 netbase tzdata" >"$work/log" 2>&1 ||
    { tail -5 "$work/log" >&2; fail "cannot fetch the base's packages"; }
for package in "$work"/build/tmp/*.deb; do dpkg-deb --extract "$package" "$work/image"; done
mkdir -p "$work/image"/{models,tmp,proc,dev}
install -D -m 755 "$binary" "$work/image/usr/local/bin/lockstep"
cp "$model" "$work/image/models/model.gguf"
if [ -n "$libraries" ]; then
    mkdir -p "$work/image/usr/local/lib/nvidia"
    find "$libraries" -path '*/lib/*' -name '*.so*' ! -name '*.alt.so*' -exec cp --no-dereference {} "$work/image/usr/local/lib/nvidia/" \;
    for library in "$work"/image/usr/local/lib/nvidia/*.so*; do
        listed=$(chroot "$work/image" /lib64/ld-linux-x86-64.so.2 --list "/usr/local/lib/nvidia/$(basename "$library")")
        ! grep "not found" <<<"$listed" || fail "$(basename "$library") lacks what it needs"
    done
fi
[ ! -e "$work/image/bin/sh" ] || fail "the base holds a shell"

# A root that cannot be written but for /tmp, and a user without rights: as the chart runs it.
inside() {
    exec unshare --mount --propagation private /bin/sh -ec '
        root=$1; shift
        mount --bind "$root" "$root" && mount -o remount,bind,ro "$root"
        mount -t tmpfs tmpfs "$root/tmp" && mount -t proc proc "$root/proc" && mount --bind /dev "$root/dev"
        exec env -i PATH=/usr/local/bin LD_LIBRARY_PATH=/usr/local/lib/nvidia HOME=/tmp \
            /usr/sbin/chroot --userspec=65532:65532 --groups= "$root" "$@"' sh "$work/image" "$@"
}
net=127.$((RANDOM % 250 + 1)).$((RANDOM % 250 + 1))
(inside lockstep --version) >&2
(inside lockstep coordinator --grpc-listen=$net.1:7070 --http-listen=$net.1:7080 --model=/models/model.gguf) >"$work/coordinator" 2>&1 &
pids+=($!)
(inside lockstep worker --coordinator=$net.1:7070 --device=cpu) >"$work/worker" 2>&1 &
pids+=($!)
for _ in $(seq 60); do
    answer=$( (inside lockstep generate --server=$net.1:7070 --temperature=0 --max-tokens=8 "The capital of France is") 2>/dev/null) && break
    sleep 1
done
[ -n "${answer:-}" ] || { cat "$work/coordinator" "$work/worker" >&2; fail "the cluster does not answer"; }
echo "$answer"
say "the image's contents run: $(du -sh --exclude=models --exclude=nvidia "$work/image" | cut -f1) without model and NVIDIA's libraries"
