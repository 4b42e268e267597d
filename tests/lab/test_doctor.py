"""What the doctor reports on machines with problems."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.links import needs_links

from commhooks.cluster.links import shaped_link
from commhooks.kernels import loader
from commhooks.lab import doctor
from commhooks.lab.doctor import Finding, Health
from reducer.extension import REMEDY, Extension


def find(part: str) -> Finding:
    """Check one part only."""
    return Finding(part, *doctor._checks()[part]())


def test_python_and_torch_are_supported_here() -> None:
    assert find("Python").health is Health.FINE
    assert find("torch") == Finding("torch", Health.FINE, torch.__version__)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0"])
def test_an_unsupported_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    finding = find("torch")
    assert finding.health is Health.BROKEN
    assert finding.found == f"{version}; supported: 2.11 to 2.15"
    assert "reinstall commhooks" in finding.remedy


def test_no_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert find("backends").health is Health.BROKEN


@pytest.mark.parametrize(
    ("found", "packages", "health", "remedy"),
    [
        (None, [], Health.ABSENT, "pip install 'commhooks[cuda12]'"),
        (12, ["cupy"], Health.FINE, ""),
        (
            13,
            ["cupy-cuda12x", "cupy-cuda13x"],
            Health.BROKEN,
            "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install 'commhooks[cuda12]'",
        ),
        (None, ["cupy-cuda12x"], Health.BROKEN, "pip uninstall cupy-cuda12x, then"),
    ],
)
def test_cupy_against_a_torch_for_cuda_12(
    monkeypatch: pytest.MonkeyPatch,
    found: int | None,
    packages: list[str],
    health: Health,
    remedy: str,
) -> None:
    def nvrtc() -> Any:
        if found is None:
            raise ImportError("libnvrtc.so.12: cannot open shared object file")
        return SimpleNamespace(getVersion=lambda: (found, 0))

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(loader, "nvrtc", nvrtc)
    monkeypatch.setattr(loader, "packages_distributions", lambda: {"cupy": packages})
    monkeypatch.setattr(doctor, "find_spec", lambda _: packages or None)
    monkeypatch.setattr(doctor, "import_module", lambda _: SimpleNamespace(__version__="14.0"))
    loader._check_cupy.cache_clear()
    finding = find("CuPy")
    loader._check_cupy.cache_clear()
    assert finding.health is health
    assert finding.remedy.startswith(remedy)
    assert "cannot open" not in finding.remedy


def test_a_torch_for_the_cpu_needs_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find("CuPy") == Finding("CuPy", Health.ABSENT, "torch is built for CPU, so not needed")


@pytest.mark.parametrize(
    ("named", "health", "says"),
    [
        ("lo", Health.ABSENT, "lo (127.0.0.1), by GLOO_SOCKET_IFNAME=lo: ranks on other hosts"),
        ("lo,lo", Health.ABSENT, "lo (127.0.0.1), lo (127.0.0.1), by GLOO_SOCKET_IFNAME=lo,lo"),
        ("nowhere0", Health.BROKEN, "Gloo cannot use GLOO_SOCKET_IFNAME=nowhere0"),
    ],
)
def test_the_interface_that_gloo_takes(
    monkeypatch: pytest.MonkeyPatch, named: str, health: Health, says: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    finding = find("Gloo network")
    assert finding.health is health
    assert says in finding.found


def show_network() -> None:
    print(find("Gloo network"))


@needs_links
@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("link0", ["Health.FINE", "link0 (10.213.0.1", "by GLOO_SOCKET_IFNAME=link0"]),
        pytest.param(
            "link0,lo",
            ["Health.ABSENT", "link0 (10.213.0.1", "lo (127.0.0.1)", "reaches the others: link0"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_interfaces_of_a_host(named: str, words: list[str]) -> None:
    """In a network namespace, whose interfaces are known."""
    program = "from lab.test_doctor import show_network; show_network()"
    with shaped_link(1, 1e9) as link:
        text = subprocess.check_output(
            [*link.prefixes[0], sys.executable, "-c", program],
            env=os.environ | {"GLOO_SOCKET_IFNAME": named, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parents[1],
            text=True,
        )
    for word in words:
        assert word in text


def test_several_interfaces_and_none_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    addresses = {
        "lo": [(socket.AF_INET, "127.0.0.1")],
        "eth0": [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "fe80::1%eth0")],
        "ib0": [(socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")],
    }
    known = {
        name: [SimpleNamespace(family=family, address=address) for family, address in each]
        for name, each in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(speed=10_000)})
    monkeypatch.setattr(doctor, "_gloo_addresses", lambda: ["192.0.2.1"])
    finding = find("Gloo network")
    assert finding.health is Health.FINE
    assert finding.found.startswith("eth0 (192.0.2.1, 10 Gbit/s), by the host name")
    assert "ib0 (198.51.100.1)" in finding.remedy


def test_a_check_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(doctor, "_checks", lambda: {"one": fail, "two": lambda: (Health.FINE, "")})
    one, two = doctor.diagnose()
    assert (one.health, two.health) == (Health.BROKEN, Health.FINE)
    assert "PermissionError: not yours" in one.found


def test_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    for part in ("C++ compiler", "nvcc", "shaped links"):
        assert find(part).health is Health.ABSENT


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env LANG=C c++")
    assert find("C++ compiler").health is Health.FINE


def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert find("C++ compiler").health is Health.BROKEN


@needs_links
def test_links_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("shaped links").health is Health.FINE

    def refuse(command: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 2, "", "Operation not permitted")

    monkeypatch.setattr("commhooks.cluster.links.subprocess.run", refuse)
    finding = find("shaped links")
    assert finding.health is Health.ABSENT
    assert "Operation not permitted" in finding.found


@pytest.mark.parametrize("extension", ["reducer._C", "commhooks._C"])
def test_an_extension_that_loads_but_was_compiled_against_another_torch(
    monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    versions = {"torch": "2.10.9", "cuda": None}
    monkeypatch.setattr(Extension, "built_with", lambda self: versions)
    finding = find(extension)
    assert finding.health is Health.BROKEN
    assert f"compiled against torch 2.10.9, and this is {torch.__version__}" in finding.found
    assert finding.remedy == REMEDY


@pytest.mark.parametrize("extension", ["reducer._C", "commhooks._C"])
def test_an_extension_for_cuda(monkeypatch: pytest.MonkeyPatch, extension: str) -> None:
    versions = {"torch": torch.__version__, "cuda": "13.0"}
    monkeypatch.setattr(Extension, "built_with", lambda self: versions)
    finding = find(extension)
    assert finding.health is Health.FINE
    assert finding.found == f"compiled against torch {torch.__version__}, for CUDA 13.0"


def test_memory_that_ranks_of_a_host_share(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reducer._C")
    assert find("host memory").health is Health.FINE

    def refuse(*_: object) -> None:
        raise RuntimeError("pidfd_open: Operation not permitted")

    monkeypatch.setattr("reducer.native.HostGroup.connect", refuse)
    finding = find("host memory")
    assert finding.health is Health.ABSENT
    assert "pidfd_open" in finding.found
    assert "over the network" in finding.found


def test_memory_that_a_limit_leaves_no_room_for() -> None:
    pytest.importorskip("reducer._C")
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, hard))
    try:
        finding = find("host memory")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert finding.health is Health.ABSENT
    assert "ulimit -f" in finding.found
