"""The end of the interpreter waits for threads, and not for those that may never end."""

import subprocess
import sys

# From Python 3.12 on, no thread can be started once the main thread has ended.
PROGRAM = """
import sys, threading, time
from commhooks.comm.threads import abandon_thread, start_thread

is_late = sys.version_info < (3, 12)
has_started, has_told = threading.Event(), threading.Event()

def wait_for_the_end():
    join(threading.main_thread())  # returns when the interpreter ends

def tell_and_start():
    if is_late:
        wait_for_the_end()
        time.sleep(0.2)  # when the interpreter waits for the first
    start_thread("second", tell_second)
    has_started.set()
    wait_for_the_end()
    print("first", flush=True)
    has_told.set()

def tell_second():
    has_told.wait()
    time.sleep(0.2)  # an interpreter that does not wait is gone by then
    print("second", flush=True)

def tell_and_join(thread, *args):
    if thread is endless:
        print("endless")
    join(thread, *args)

join, threading.Thread.join = threading.Thread.join, tell_and_join
endless = start_thread("endless", threading.Event().wait)
abandon_thread(endless)
start_thread("first", tell_and_start)
if not is_late:
    has_started.wait()
"""

SLOW_START = """
import threading, time
from commhooks.comm.threads import start_thread

def bootstrap(thread):
    if thread.name == "second":
        starting.release()
        threading.main_thread().join()  # returns when the interpreter ends
        time.sleep(0.1)
    bootstrap_now(thread)

def start_many():
    threads = [
        threading.Thread(target=start_thread, args=("second", tell), daemon=True)
        for _ in range(20)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

def tell():
    time.sleep(0.2)
    print("2", end=" ", flush=True)

starting = threading.Semaphore(0)
bootstrap_now, threading.Thread._bootstrap = threading.Thread._bootstrap, bootstrap
start_thread("first", start_many)
for _ in range(20):
    starting.acquire()
"""


def run(program: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert not ended.stderr
    return ended.stdout


def test_the_interpreter_waits_for_threads_and_for_those_that_they_start() -> None:
    assert run(PROGRAM).split() == ["first", "second"]


def test_the_interpreter_waits_for_threads_that_are_being_started() -> None:
    """As when a peer is lost at the end. Such threads cannot be joined yet."""
    assert run(SLOW_START).count("2") == 20
