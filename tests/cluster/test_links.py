"""Shaped links: hosts that reach each other at the rate, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.links import needs_links
from support.processes import wait_until

from commhooks.cluster.links import LinkError, burst_bytes, shaped_link


def names(*command: str) -> set[str]:
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listing.splitlines() if line.strip()}


def made_by(pid: int) -> set[str]:
    """Namespaces and interfaces of a process."""
    all_names = names("ip", "netns", "list") | names("ip", "-brief", "link")
    return {name for name in all_names if re.match(rf"ch{pid}[a-z]", name)}


@needs_links
def test_hosts_reach_each_other_and_only_each_other() -> None:
    with shaped_link(3, 1e9) as link:
        assert len(link.prefixes) == 3
        ports = "import socket, sys\n"
        listen = ports + (
            "server = socket.create_server(('10.213.0.1', 5000)); print('up', flush=True)\n"
            "server.accept()[0].sendall(b'hello')"
        )
        ask = ports + "print(socket.create_connection(('10.213.0.1', 5000), 10).recv(5).decode())"
        server = subprocess.Popen(
            [*link.prefixes[0], sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        with server:
            assert server.stdout.readline() == "up\n"
            client = [*link.prefixes[2], sys.executable, "-c", ask]
            assert subprocess.check_output(client, text=True) == "hello\n"
        routes = subprocess.check_output([*link.prefixes[1], "ip", "route"], text=True)
        assert "default" not in routes
    assert not made_by(os.getpid())


@needs_links
@pytest.mark.parametrize(("rate", "size"), [(100e6, 2_000_000), (20e6, 100_000)])
def test_a_link_is_not_faster_than_its_rate(rate: float, size: int) -> None:
    """Nor after a pause: each step of a training begins with one."""
    assert burst_bytes(rate) < 0.1 * size
    with shaped_link(2, rate) as link:
        drain = (
            "import socket\n"
            f"server = socket.create_server(({link.address!r}, 5000)); print('up', flush=True)\n"
            "client = server.accept()[0]; client.sendall(client.recv(%d, socket.MSG_WAITALL)[:1])"
        )
        send = (
            "import socket, time\n"
            f"server = socket.create_connection(({link.address!r}, 5000), 60)\n"
            f"begin = time.monotonic(); server.sendall(bytes({size})); assert server.recv(1)\n"
            "print(time.monotonic() - begin)"
        )
        with subprocess.Popen(
            [*link.prefixes[0], sys.executable, "-c", drain % size],
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            seconds = subprocess.check_output([*link.prefixes[1], sys.executable, "-c", send])
    assert float(seconds) >= 0.85 * 8 * size / rate


@needs_links
def test_ranks_of_a_host_share_its_link() -> None:
    with shaped_link(4, 100e6, ranks_per_host=2) as link:
        assert link.prefixes[0] == link.prefixes[1] != link.prefixes[2] == link.prefixes[3]
        assert len(made_by(os.getpid())) == 5  # two hosts, two interfaces, a bridge


def test_hosts_have_equal_numbers_of_ranks() -> None:
    with pytest.raises(LinkError, match="expected 2 ranks on each host, found 3 in all"):
        shaped_link(3, 100e6, ranks_per_host=2).__enter__()


@needs_links
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_link()
    assert not made_by(os.getpid())


def interrupt_a_link() -> None:
    with shaped_link(2, 1e9):
        assert len(made_by(os.getpid())) == 5  # two hosts, two interfaces, a bridge
        raise KeyboardInterrupt


@needs_links
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path, number: int) -> None:
    script = tmp_path / "victim.py"
    script.write_text(
        "import signal, time\nfrom commhooks.cluster.links import shaped_link\n"
        # Processes that a shell runs in the background ignore SIGINT, and so do their children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with shaped_link(2, 1e9):\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "up\n"
        assert made_by(victim.pid)
        victim.send_signal(number)
        victim.wait()
    wait_until(lambda: not made_by(victim.pid))


@needs_links
def test_two_links_at_once() -> None:
    with shaped_link(2, 1e9) as one, shaped_link(2, 1e8) as other:
        assert not set(one.prefixes) & set(other.prefixes)


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match="need root"), shaped_link(2, 1e9):
        pass


def test_without_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LinkError, match="iproute2"), shaped_link(2, 1e9):
        pass


@needs_links
def test_what_iproute2_says_is_reported() -> None:
    with pytest.raises(LinkError, match=r"`tc .*` failed: "), shaped_link(2, 1e-3):
        pass
    assert not made_by(os.getpid())


@pytest.mark.parametrize("world_size", [0, 251])
def test_number_of_hosts(world_size: int) -> None:
    with pytest.raises(LinkError, match="1 to 250"), shaped_link(world_size, 1e9):
        pass
