"""The end of the interpreter waits for threads, and not for those that may never end."""

import subprocess
import sys

PROGRAM = """
import threading, time
from commhooks.comm.threads import leave_thread, start_thread

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
leave_thread(endless)
join, threading.Thread.join = threading.Thread.join, tell_and_join
"""


def test_the_interpreter_waits_for_threads_and_for_those_that_they_start() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["first", "second"]
