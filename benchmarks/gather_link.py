"""Two processes, each with a network of its own, and one slow cable between them.

    rank 0 [namespace] 10.77.0.1 --- veth pair, tc tbf on both ends --- 10.77.0.2 [namespace] rank 1

A namespace has no name: `unshare --net` makes it for the process, and it goes when the process ends, with its end of
the cable and the limit on that. Nothing is left behind, however the processes or their parent end.
This needs root, `unshare`, `nsenter`, `ip` and `tc`; `NoLink` says what is missing.
"""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
TOOLS = ("unshare", "nsenter", "ip", "tc")
CABLE = "qtg0"  # the name of both ends; each namespace has one
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HEADERS = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with timestamps, in front of every packet
# After a pause, collectives continue at full speed: no slow start, no probing for a bandwidth that is known.
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
MTU = 9000  # large frames, so that the cable costs the cores little
WIRE = (MTU + 14) / (MTU + 14 - HEADERS)  # bytes on the cable for each byte handed to TCP, in full packets


class NoLink(Exception):  # noqa: N818 - a reason, not a failure
    """Why there can be no namespaces here, in one line."""


class Ranks:
    """Two rank processes that take turns in answering JSON lines; they end with the block.

    Args:
        log: folder for what the processes say.
        linked: each rank in a namespace, joined by a cable; else both on this machine's loopback.

    Raises:
        NoLink: no namespaces, cable or limit here.
    """

    def __init__(self, log: Path, environment: dict[str, str], *, linked: bool) -> None:
        self._linked = linked
        self._logs = [log / f"rank{rank}.txt" for rank in range(2)]
        if linked and (missing := [tool for tool in TOOLS if shutil.which(tool) is None]):
            raise NoLink(f"not installed: {', '.join(missing)}")
        if linked and (refused := _said(["unshare", "--net", "true"])):
            raise NoLink(f"network namespaces are not permitted ({refused})")
        command = [*(["unshare", "--net"] if linked else []), sys.executable, "-m", "benchmarks.gather_rank"]
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(2):
            with self._logs[rank].open("w") as stderr:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        cwd=ROOT,
                        env=environment,
                    )
                )
        try:
            self._answers()  # both have started, each in its namespace
            if linked:
                self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes, rank by rank."""
        return [process.pid for process in self._processes]

    def ask(self, **job: Any) -> list[Any]:
        """Both ranks do a job at the same time; their answers."""
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job, "rank": rank}) + "\n")
            process.stdin.flush()
        return self._answers()

    def limit(self, mbit_s: float | None) -> None:
        """Limit what each end of the cable sends to `mbit_s`; None: no limit.

        The burst is a millisecond's bytes: with less, busy cores would not reach the limit; more would be a large part
        of a message. The queue is so long that nothing is lost.
        """
        for pid in self.pids if self._linked else ():
            if mbit_s is None:
                self._inside(pid, "tc", "qdisc", "replace", "dev", CABLE, "root", "pfifo", "limit", "10000")
                continue
            burst = max(1 << 15, int(mbit_s * 1e6 / 8 / 1000))
            limit = ["tbf", "rate", f"{mbit_s:g}mbit", "burst", str(burst), "limit", str(1 << 26)]
            self._inside(pid, "tc", "qdisc", "replace", "dev", CABLE, "root", *limit)

    def close(self) -> None:
        """End both processes, and with them their namespaces."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # a waiting rank then ends
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                said = self._logs[rank].read_text()[-3000:]
                raise RuntimeError(f"rank {rank} ended; the last of what it said:\n{said}")
            answers.append(json.loads(line))
        return answers

    def _join(self) -> None:
        first, second = self.pids
        ends = ([CABLE, "mtu", str(MTU), "netns", str(pid)] for pid in (first, second))
        if refused := _said(["ip", "link", "add", *next(ends), "type", "veth", "peer", *next(ends)]):
            raise NoLink(f"no veth pair ({refused})")
        for pid, address in zip(self.pids, ADDRESSES, strict=True):
            self._inside(pid, "ip", "addr", "add", f"{address}/24", "dev", CABLE)
            for name, value in TCP.items():
                self._inside(pid, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
            for device in ("lo", CABLE):
                self._inside(pid, "ip", "link", "set", device, "up")
        self.limit(1000)
        self.limit(None)

    @staticmethod
    def _inside(pid: int, *command: str) -> None:
        if refused := _said(["nsenter", "--target", str(pid), "--net", *command]):
            raise NoLink(f"{' '.join(command[:4])}: {refused}")


def _said(command: list[str]) -> str:
    """What a command complained about, in one line; empty if it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit status {done.returncode}"


def received() -> int:
    """Bytes that TCP has delivered so far from the cable of this process's namespace.

    The kernel counts packets with their headers, which are taken off: 66 bytes each where none is lost.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == CABLE:
            count, packets = (int(figure) for figure in figures.split()[:2])
            return count - HEADERS * packets
    return 0


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
