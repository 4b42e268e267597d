"""The end of the interpreter waits for threads, and not for those that may never end."""

import subprocess
import sys

# From Python 3.12 on, no thread can be started once the main thread has ended.
PROGRAM = """
import sys, threading, time
from commhooks.comm.threads import abandon_thread, start_thread

def tell(text):
    time.sleep(0.2)
    print(text, flush=True)

def tell_and_start():
    tell("first")
    start_thread("second", tell, "second")

def tell_and_join(thread, *args):
    if thread is endless:
        print("endless")
    join(thread, *args)

start_thread("first", tell_and_start)
endless = start_thread("endless", threading.Event().wait)
abandon_thread(endless)
join, threading.Thread.join = threading.Thread.join, tell_and_join
if sys.version_info >= (3, 12):
    time.sleep(0.3)  # until the first has started the second, which goes on
"""

SLOW_START = """
import threading, time
from commhooks.comm.threads import start_thread

def bootstrap(thread):
    if thread.name == "second":
        time.sleep(0.6)  # while the interpreter ends
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

bootstrap_now, threading.Thread._bootstrap = threading.Thread._bootstrap, bootstrap
start_thread("first", start_many)
time.sleep(0.3)
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
