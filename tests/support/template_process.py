"""The template process: ``python -m support.template_process CONTROL``.

The argument is the file descriptor of a socket on which requests to fork arrive. See
:mod:`support.forking`.
"""

import ctypes
import gc
import importlib
import os
import pickle
import random
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch

from commhooks.cluster import worker
from support.forking import INT


def _serve(control: socket.socket) -> None:
    """Fork a process for each request until the parent ends."""
    gc.collect()
    gc.freeze()  # collections leave the pages that children share alone
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the PID and the file for the exit code
    while True:
        ready = select.select([control.fileno(), *children], [], [])[0]
        for pidfd in children.keys() & ready:
            pid, status = children.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(BrokenPipeError):
                os.write(status, INT.pack(code))
            os.close(status)
            os.close(pidfd)
        if control.fileno() not in ready:
            continue
        header, files, _, _ = socket.recv_fds(control, INT.size, 6)
        if not header:
            return
        environment, host = pickle.loads(_receive(control, INT.unpack(header)[0]))
        pid = os.fork()
        if pid == 0:
            try:
                for pidfd, (_, status) in children.items():
                    os.close(pidfd)
                    os.close(status)
                control.close()
                _become_rank(files, environment, host)
            finally:
                os._exit(1)
        for file in files[:-1]:
            os.close(file)
        children[os.pidfd_open(pid)] = pid, files[-1]


def _become_rank(files: list[int], environment: dict[str, str], host: str) -> None:
    connection, stacks, *streams, status = files
    os.setsid()
    os.write(status, INT.pack(os.getpid()))
    os.close(status)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if host:  # a network namespace
        with Path("/run/netns", host).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {host}")
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    random.seed()
    worker.serve(connection, stacks)


def _receive(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += control.recv(size - len(data))
    return data


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # see worker.serve
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
