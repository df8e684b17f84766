"""Stands in for ssh: `ssh_shim.py HOSTS [options] HOST -- COMMAND` runs the command in a host's network namespace.

It understands what Stoker says: options, which it ignores, and -L HERE:PORT:THERE:PORT. When it is killed, the
command's input ends, as behind ssh. It ends with 255 when the host is down.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading

# Runs in the namespace: what comes on standard input, a socket, goes to an address, and back.
RELAY = """
import socket, sys, threading
far = socket.create_connection((sys.argv[1], int(sys.argv[2])))
near = socket.socket(fileno=0)
def pump(one, other):
    try:
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass
thread = threading.Thread(target=pump, args=(far, near))
thread.start()
pump(near, far)
thread.join()
"""


def forward(listening, enter, address, port):
    while True:
        near, _ = listening.accept()
        relay = [*enter, sys.executable, "-I", "-S", "-c", RELAY, address, port]
        subprocess.Popen(relay, stdin=near, stderr=subprocess.DEVNULL)
        near.close()


def feed(stdin):
    try:
        while data := os.read(0, 65536):
            stdin.write(data)
            stdin.flush()
        stdin.close()
    except OSError:
        pass


def main():
    with open(sys.argv[1]) as file:
        hosts = json.load(file)
    words, forwards, at = sys.argv[2:], [], 0
    while words[at].startswith("-"):
        if words[at] == "-L":
            forwards.append(words[at + 1])
        at += 2
    name, command = words[at], words[-1]
    host = hosts.get(name)
    if host is None or host["down"]:
        said = host["down"] if host else f"Could not resolve hostname {name}: Name or service not known"
        print(f"ssh: {said}", file=sys.stderr)
        sys.exit(255)
    spaces = [f"--{kind}=/proc/{host['pid']}/ns/{name}" for kind, name in (("net", "net"), ("mount", "mnt"))]
    user = [f"--user=/proc/{host['pid']}/ns/user", "--preserve-credentials"] if host["user"] else []
    enter = ["nsenter", *user, *spaces]
    for each in forwards:
        here, here_port, there, there_port = each.split(":")
        listening = socket.create_server((here, int(here_port)))
        threading.Thread(target=forward, args=(listening, enter, there, there_port), daemon=True).start()
    login = {**os.environ, **host["env"], "STOKER_TEST_HOST": name}
    command = f"cd {shlex.quote(host['home'])} && {command}"  # entering a mount namespace leads to its root
    process = subprocess.Popen([*enter, "sh", "-c", command], env=login, stdin=subprocess.PIPE)
    threading.Thread(target=feed, args=(process.stdin,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(255))
    status = process.wait()
    os._exit(status if status >= 0 else 255)


if __name__ == "__main__":
    main()
