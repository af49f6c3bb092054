#!/usr/bin/env python3
"""Two network namespaces joined by a slow link, without netem.

usage: slow_link.py NS_A NS_B RTT_MS MBIT LOSS [MTU]     (root)

Each namespace gets a TUN device (10.99.0.1 and 10.99.0.2); this process relays packets between the
two with half the round-trip time of delay, a rate limit per direction, a queue of one
bandwidth-delay product, and random loss. Ends on SIGTERM.
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x1, 0x1000


def open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def attach(namespace: str, device: str, address: str, mtu: int) -> int:
    fd = open_tun(device)
    subprocess.run(["ip", "netns", "add", namespace], check=False, stderr=subprocess.DEVNULL)
    ip("link", "set", device, "netns", namespace)
    ip("-n", namespace, "link", "set", device, "mtu", str(mtu), "txqueuelen", "1000", "up")
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
    ip("-n", namespace, "link", "set", "lo", "up")
    return fd


def relay(
    fds: list[int], one_way_s: float, bytes_per_s: float, loss: float, queue_bytes: int
) -> None:
    queues: list[collections.deque[tuple[float, bytes]]] = [
        collections.deque(),
        collections.deque(),
    ]
    free_at = [0.0, 0.0]
    poller = select.epoll()
    for fd in fds:
        poller.register(fd, select.EPOLLIN)
    while True:
        now, wait = time.monotonic(), 1.0
        for side, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                packet = queue.popleft()[1]
                # The far device is gone or full: a lost packet.
                with contextlib.suppress(OSError):
                    os.write(fds[1 - side], packet)
            if queue:
                wait = min(wait, queue[0][0] - now)
        for fd, _ in poller.poll(max(0.0, wait)):
            side = fds.index(fd)
            for _ in range(64):
                try:
                    packet = os.read(fd, 65535)
                except BlockingIOError:
                    break
                if loss and random.random() < loss:
                    continue
                now = time.monotonic()
                start = max(free_at[side], now)
                if (start - now) * bytes_per_s > queue_bytes:
                    continue  # tail drop
                free_at[side] = start + len(packet) / bytes_per_s
                queues[side].append((free_at[side] + one_way_s, packet))


def main() -> None:
    if len(sys.argv) < 6:
        sys.exit(__doc__)
    ns_a, ns_b = sys.argv[1:3]
    rtt_ms, mbit, loss = (float(v) for v in sys.argv[3:6])
    mtu = int(sys.argv[6]) if len(sys.argv) > 6 else 1500
    fds = [attach(ns_a, "wanA", "10.99.0.1", mtu), attach(ns_b, "wanB", "10.99.0.2", mtu)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    bytes_per_s = mbit * 1e6 / 8
    relay(fds, rtt_ms / 2000, bytes_per_s, loss, max(64 * 1024, int(bytes_per_s * rtt_ms / 1000)))


if __name__ == "__main__":
    main()
